"""Tables for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ebbtide._stats import Source
from ebbtide.torch._places import Places, size

DONE = {"swap": "swapped", "recompute": "recomputed", "keep": "kept"}


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
    places: Places,
    planned: Sequence[tuple[str, str]] = (),
) -> str:
    """What a session did so far."""
    figures = source.stats()
    rows = [
        ("layers", counts(policy)),
        ("steps", f"{figures['steps']}, tier {source.hub.tier}"),
        ("moved out", f"{size(figures['bytes_out'])} in {figures['tensors_out']} tensors"),
        ("moved in", f"{size(figures['bytes_in'])}; {figures['missed_prefetches']} prefetches missed"),
        ("in the tier", f"{size(figures['bytes_held'])} now"),
        ("waited", f"{figures['wait_ms']:.0f} ms"),
        (
            "not freed",
            f"{size(figures['not_freed_bytes'])} in {figures['not_freed_tensors']} tensors: still referenced",
        ),
    ]
    rows[1:1] = planned
    rows += places.rows()
    if not figures["bytes_out"]:
        rows.append(("note", f"the policy moved nothing because {why_nothing(policy, figures, min_bytes)}"))
    if figures["left_to_checkpoint"]:
        calls = f"{figures['left_to_checkpoint']} of {figures['layer_calls']} calls of layers"
        rows.append(("note", f"{calls} ran inside of torch.utils.checkpoint or a backward and were left to it"))
    width = max(len(name) for name, _ in rows)
    return "\n".join([f"ebbtide session of {model}", *(f"  {name:<{width}}  {text}" for name, text in rows)])


def why_nothing(policy: Mapping[str, str], figures: Mapping[str, float], min_bytes: int) -> str:
    """The reason that nothing was swapped, as far as the counters tell."""
    calls = figures["layer_calls"]
    if "swap" not in policy.values():
        return "no layer is swapped"
    if not calls:
        return "no layer was called inside of a step, `with s.step():`"
    if figures["left_to_checkpoint"] == calls:
        return (
            "every layer ran inside of torch.utils.checkpoint: take the checkpoints off, or leave these layers to them"
        )
    if figures["left_without_grad"] == calls:
        return "every layer ran without gradients (torch.no_grad, or inference)"
    if figures["tensors_kept"]:
        return (
            f"all {figures['tensors_kept']:.0f} tensors that swapped layers saved are parameters, buffers, excluded, "
            f"or smaller than min_bytes={min_bytes}"
        )
    return "the swapped layers saved nothing: nothing in them needs a gradient"
