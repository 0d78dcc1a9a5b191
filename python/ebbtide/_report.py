"""Tables for people: what a session did. No framework, no state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ebbtide._stats import Source

DONE = {"swap": "swapped", "recompute": "recomputed", "keep": "kept"}
Rows = Sequence[tuple[str, str]]


def counts(policy: Mapping[str, str]) -> str:
    """`12 layers (11 swap, 1 keep)`."""
    words = Counter(policy.values())
    shown = ", ".join(f"{words[word]} {word}" for word in ("swap", "recompute", "keep") if words[word])
    return f"{len(policy)} layers ({shown})"


def table(
    model: str,
    policy: Mapping[str, str],
    source: Source,
    min_bytes: int,
    memory: Rows,
    planned: Rows = (),
    *,
    checkpoint: str,
    tells_use: bool = True,
) -> str:
    """What a session did so far.

    `memory` says where memory was highest, `planned` what a plan says. `checkpoint` is what the framework's own
    recomputation is called; `tells_use`: whether the framework tells that something else refers to a tensor.
    """
    figures = source.stats()
    rows = [
        ("layers", counts(policy)),
        *planned,
        ("steps", f"{figures['steps']}, tier {source.hub.tier}"),
        ("moved out", f"{size(figures['bytes_out'])} in {figures['tensors_out']} tensors"),
        ("moved in", f"{size(figures['bytes_in'])}; {figures['missed_prefetches']} prefetches missed"),
        ("in the tier", f"{size(figures['bytes_held'])} now"),
        ("waited", f"{figures['wait_ms']:.0f} ms"),
    ]
    if tells_use:
        held = f"{size(figures['not_freed_bytes'])} in {figures['not_freed_tensors']} tensors: still referenced"
        rows.append(("not freed", held))
    rows += memory
    if not figures["bytes_out"]:
        rows.append(("note", f"the policy moved nothing because {why_nothing(policy, figures, min_bytes, checkpoint)}"))
    if figures["left_to_checkpoint"]:
        calls = f"{figures['left_to_checkpoint']} of {figures['layer_calls']} calls of layers"
        rows.append(("note", f"{calls} ran inside of {checkpoint} or a backward and were left to it"))
    width = max(len(name) for name, _ in rows)
    return "\n".join([f"ebbtide session of {model}", *(f"  {name:<{width}}  {text}" for name, text in rows)])


def why_nothing(policy: Mapping[str, str], figures: Mapping[str, float], min_bytes: int, checkpoint: str) -> str:
    """The reason that nothing was swapped, as far as the counters tell."""
    calls = figures["layer_calls"]
    if "swap" not in policy.values():
        return "no layer is swapped"
    if not calls:
        return "no layer was called inside of a step, `with s.step():`"
    if figures["left_to_checkpoint"] == calls:
        return f"every layer ran inside of {checkpoint}: take the checkpoints off, or leave these layers to them"
    if figures["left_without_grad"] == calls:
        return "every layer ran without gradients (no_grad, evaluation, inference)"
    if figures["tensors_kept"]:
        return (
            f"all {figures['tensors_kept']:.0f} tensors that swapped layers saved are parameters, buffers, excluded, "
            f"or smaller than min_bytes={min_bytes}"
        )
    return "the swapped layers saved nothing: nothing in them needs a gradient"


def size(count: float) -> str:
    """Bytes for people: `1.2 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
