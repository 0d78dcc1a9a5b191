"""Measures the figures of the PyTorch front end and prints them as JSON.

python -m bench [--steps N] [--only training|hooks|packed|failures|planner]
"""

from __future__ import annotations

import argparse
import json
import operator
import platform
import sys
from collections.abc import Callable
from typing import Any

import torch

from bench import failures, hooks, packed, planner, training
from bench.model import Size

# What was asked for: figure, its path in the JSON, and the bound.
ASKED: list[tuple[str, tuple[str, str], str, float]] = [
    ("peak RSS over plain's", ("training", "peak_to_plain"), "<=", 0.62),
    ("peak RSS over checkpointing's", ("training", "peak_to_checkpoint"), "<=", 0.9),
    ("step time over plain's", ("training", "seconds_to_plain"), "<=", 1.15),
    ("step time over checkpointing's", ("training", "seconds_to_checkpoint"), "<", 1.0),
    ("pack and unpack over identity hooks, µs", ("hooks", "over_identity_us"), "<=", 3.0),
    ("10,000 tensors of 4 KiB, µs a tensor", ("packed", "engine_us"), "<=", 2.0),
    ("the same, times faster than in Python", ("packed", "times_faster"), ">=", 10.0),
    ("the same: growth of memory, MiB", ("failures", "rss_mib_growth"), "<=", 8.0),
    ("budgets: step over the better pure plan's", ("planner", "worst_to_better_pure"), "<=", 1.05),
]


# What makes every figure worthless if it isn't so.
RIGHT: list[tuple[str, tuple[str, str], object]] = [
    ("losses and gradients are those of plain", ("training", "identical"), True),
    ("all small tensors came back", ("packed", "identical"), True),
    ("all small tensors moved", ("packed", "moved"), True),
    ("good steps between failures are right", ("failures", "wrong"), 0),
    ("every seventh step failed", ("failures", "failed"), 28),
    ("no budget was exceeded", ("planner", "over"), 0),
    ("losses and gradients under budgets", ("planner", "identical"), True),
    ("no group is left", ("failures", "active_groups"), 0),
    ("no bytes are left in the tier", ("failures", "bytes_held"), 0),
]
SENSES: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, "<": operator.lt, ">=": operator.ge}


def wrong(figures: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    return [what for what, (part, key), must in RIGHT if part in figures and figures[part][key] != must]


def parts(steps: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """What can be measured, by name."""
    return {
        "hooks": hooks.run,
        "packed": packed.run,
        "training": lambda: training.run(steps, Size()),
        "failures": failures.run,
        "planner": lambda: planner.run(Size()),
    }


def table(figures: dict[str, Any]) -> str:
    """What was asked for against what was measured, for people."""
    lines = []
    for name, (part, key), sense, bound in ASKED:
        if part in figures:
            value = figures[part][key]
            met = SENSES[sense](value, bound)
            lines.append(f"{name:<45} {value:>9.3f}  asked {sense} {bound:<5} {'' if met else 'MISSED'}")
    return "\n".join(lines)


def main() -> None:
    """JSON to stdout, the table to stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each way to train")
    parser.add_argument("--only", choices=list(parts(1)), help="measure this part alone")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    for name, run in parts(arguments.steps).items():
        if arguments.only in (None, name):
            print(f"{name} …", file=sys.stderr, flush=True)
            figures[name] = run()
    print(json.dumps(figures, indent=2))
    print(table(figures), file=sys.stderr)
    if found := wrong(figures):
        sys.exit("not so: " + "; ".join(found))


if __name__ == "__main__":
    main()
