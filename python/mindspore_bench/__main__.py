"""Measures the figures of the MindSpore front end and prints them as JSON.

python -m mindspore_bench [--steps N]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import mindspore as ms

from mindspore_bench.worker import WAYS

Figures = dict[str, Any]


class Worker:
    """A process that trains one way."""

    def __init__(self, way: str, *words: str) -> None:
        command = [sys.executable, "-m", "mindspore_bench.worker", way, *words]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self, number: int) -> Figures:
        """Runs a step."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(number, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with status {self._process.wait()}")
        return dict(json.loads(line))

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def saved() -> Figures:
    """Bytes of saved tensors at the end of forward, plain and swapped."""
    found = {}
    for way in ("plain", "swap"):
        worker = Worker(way, "saved")
        found[way] = worker.step(0)["saved_bytes"]
        worker.close()
    return {"plain_bytes": found["plain"], "swap_bytes": found["swap"], "ratio": found["swap"] / found["plain"]}


def training(steps: int, ways: Sequence[str] = WAYS, *words: str) -> Figures:
    """All ways side by side, step by step; the first step warms up."""
    workers = {way: Worker(way, *words) for way in ways}
    rounds = [{way: worker.step(number) for way, worker in workers.items()} for number in range(steps + 1)]
    for worker in workers.values():
        worker.close()
    timed = rounds[1:]
    keys = ("loss", "gradients")
    same = all(one[way][key] == one["plain"][key] for one in rounds for way in ways for key in keys)
    return {
        "identical": same,
        "steps": len(rounds),
        "seconds": {way: statistics.median(one[way]["seconds"] for one in timed) for way in ways},
        "seconds_over": {
            way: statistics.median(one["swap"]["seconds"] / one[way]["seconds"] for one in timed)
            for way in ways
            if way != "swap"
        },
        "resident_after_forward_mib": {way: max(one[way]["after_forward_mib"] for one in rounds) for way in ways},
        "stats": rounds[-1]["swap"]["stats"],
    }


def main() -> None:
    """JSON to stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=9, help="timed steps of each way to train")
    steps = parser.parse_args().steps
    figures: Figures = {"mindspore": ms.__version__, "python": platform.python_version()}
    print("saved …", file=sys.stderr, flush=True)
    figures["saved"] = saved()
    print("training …", file=sys.stderr, flush=True)
    figures["training"] = training(steps)
    print("dropout …", file=sys.stderr, flush=True)
    # MindSpore's own recomputation can't draw the same numbers again.
    figures["dropout"] = training(steps, ("plain", "swap"), "dropout")
    print(json.dumps(figures, indent=2))
    if not (figures["training"]["identical"] and figures["dropout"]["identical"]):
        sys.exit("not so: losses and gradients are those of plain")


if __name__ == "__main__":
    main()
