"""The table of all that the stages found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpu_check.settings import MODES, read, stages

Records = dict[str, dict[str, Any]]

NAMES = {
    "plain": "plain",
    "save_on_cpu": "save_on_cpu, pinned",
    "checkpoint": "checkpoint",
    "swap_fit": "swapped: what fits",
    "swap_all": "swapped: all but the last",
}


def records(out: Path) -> Records:
    """What each stage left, in order."""
    return {stage.name: read(out / f"{stage.name}.json") for stage in stages()}


def table(out: Path) -> str:
    """Aligned text."""
    found = records(out)
    revision = Path(__file__).resolve().parents[3] / "REVISION"
    lines = _machine(found["machine"], revision.read_text().strip() if revision.exists() else "")
    lines += _exact(found["exact"]) + _failures(found["failures"]) + [""] + _blocks(found) + [""]
    for what in ("missing", "wrong"):
        for name, record in found.items():
            lines += [f"{what.upper() if what == 'wrong' else what}: {name}: {text}" for text in record.get(what, [])]
    lines += [f"missing: {name}: it left nothing" for name, record in found.items() if not record]
    return "\n".join(lines)


def _machine(found: dict[str, Any], revision: str) -> list[str]:
    where = found.get("name", "no accelerator")
    toolkit = f", toolkit {found['toolkit']}" if found.get("toolkit") else ""
    software = f"torch {found.get('torch', '?')}{toolkit}, Python {found.get('python', '?')}"
    lines = [f"ebbtide {found.get('ebbtide', '(none)')} {revision}".rstrip() + f" on {where}", software]
    lines += [found["driver"]] if found.get("driver") else []
    if copies := found.get("copies"):
        rates = copies["gb_per_s"]
        what = "pinned" if copies["pinned"] else "host"
        lines.append(
            f"{what} copies of {copies['block_bytes'] >> 20} MiB, the limit: D2H {rates['d2h']:.2f} GB/s, "
            f"H2D {rates['h2d']:.2f} GB/s, both at once {rates['d2h_h2d']:.2f} GB/s each"
        )
    if layer := found.get("layer"):
        lines.append(
            f"a layer: forward {layer['forward_ms']:.2f} ms, backward {layer['backward_ms']:.2f} ms, "
            f"saves {_size(layer['saved_bytes'])}"
        )
    return lines


def _exact(found: dict[str, Any]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        (kind, way, result) for kind, ways in found.get("results", {}).items() for way, result in ways.items()
    ]
    return ["", "against plain training, bit for bit:", *_aligned(rows)] if rows else []


def _failures(found: dict[str, Any]) -> list[str]:
    if "growth_bytes" not in found:
        return []
    ended = "memory flat" if not found["wrong"] else "not as it should be"
    return ["", f"{found['steps']} steps with failures: {ended} (it grew by {found['growth_bytes'] / 2**20:.1f} MiB)"]


# ---- the blocks


def _blocks(found: Records) -> list[str]:
    titles = "way,layers,step ms,x plain,peak,x plain,out a step,D2H GB/s,H2D GB/s,missed,waited ms"
    plain, limits = found["blocks-plain"], found["machine"].get("copies", {}).get("gb_per_s", {})
    rows = [_row(NAMES[mode], found[f"blocks-{mode}"], plain, limits) for mode in MODES]
    lines = _aligned([tuple(titles.split(",")), *rows])
    notes = "GB/s: averages over a forward and a backward, and their share of the limit"
    return [*lines, notes, *_losses(found)] if any(r[2] != "-" for r in rows) else []


def _row(name: str, record: dict[str, Any], plain: dict[str, Any], limits: dict[str, float]) -> tuple[str, ...]:
    if "step_ms" not in record:
        return (name, *["-"] * 10)
    moved, phases = record.get("per_step", {}), record.get("phases", {})
    return (
        name,
        str(len(record["swapped"])) if "swapped" in record else "-",
        f"{record['step_ms']:.1f}",
        _ratio(record.get("step_ms"), plain.get("step_ms")),
        _size(record.get("peak_bytes")),
        _ratio(record.get("peak_bytes"), plain.get("peak_bytes")),
        _size(moved.get("bytes_out")),
        _rate(phases.get("out_gb_per_s"), limits.get("d2h")),
        _rate(phases.get("in_gb_per_s"), limits.get("h2d")),
        f"{moved['missed_prefetches']:.1f}" if moved else "-",
        f"{moved['wait_ms']:.1f}" if moved else "-",
    )


def _size(count: float | None) -> str:
    if count is None:
        return "-"
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _ratio(one: float | None, other: float | None) -> str:
    return f"{one / other:.2f}" if one and other else "-"


def _rate(rate: float | None, limit: float | None) -> str:
    if not rate:
        return "-"
    return f"{rate:.2f} ({rate / limit:.0%})" if limit else f"{rate:.2f}"


def _losses(found: Records) -> list[str]:
    """Which ways had another loss than plain in their first step: forward is the same in all of them."""
    plain = (found["blocks-plain"].get("losses") or [None])[0]
    others = {mode: (found[f"blocks-{mode}"].get("losses") or [plain])[0] for mode in MODES}
    different = [NAMES[mode] for mode, loss in others.items() if plain and loss != plain]
    return [f"another loss than plain in the first step: {', '.join(different)}"] if different else []


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns as wide as they need to be; the first two left, the others right where all rows have figures."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text_only = len(rows[0]) <= 3
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column == 0 or text_only else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
