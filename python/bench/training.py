"""Peak memory and step time of plain, swapped and checkpointed training, side by side."""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
from typing import Any

from bench.model import Size
from bench.worker import WAYS

Figures = dict[str, Any]


def start(way: str, size: Size) -> subprocess.Popen[str]:
    """A process that trains in one way."""
    arguments = [sys.executable, "-W", "ignore", "-m", "bench.worker", way, json.dumps(dataclasses.asdict(size))]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def step(worker: subprocess.Popen[str], number: int) -> Figures:
    """Has a process do one step."""
    assert worker.stdin and worker.stdout
    worker.stdin.write(f"{number}\n")
    worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError(f"a worker ended with status {worker.wait()}")
    figures: Figures = json.loads(line)
    return figures


def run(steps: int, size: Size) -> Figures:
    """Trains all ways step by step in turns. The first step of each is not timed."""
    workers = {way: start(way, size) for way in WAYS}
    rounds: list[dict[str, Figures]] = []
    try:
        for number in range(steps + 1):
            rounds.append({way: step(worker, number) for way, worker in workers.items()})
            print(".", end="", file=sys.stderr, flush=True)
    finally:
        for worker in workers.values():
            worker.communicate()
    print(file=sys.stderr)
    return summary(rounds, size)


def summary(rounds: list[dict[str, Figures]], size: Size) -> Figures:
    """Medians, and medians of ratios of steps that ran side by side."""
    timed = rounds[1:]
    last = rounds[-1]
    same = all(len({(r[way]["loss"], r[way]["gradients"]) for way in WAYS}) == 1 for r in rounds)

    def ratio(one: str, other: str) -> float:
        return statistics.median(r[one]["seconds"] / r[other]["seconds"] for r in timed)

    return {
        "size": dataclasses.asdict(size),
        "steps": len(timed),
        "identical": same,
        "ways": {
            way: {
                "seconds": statistics.median(r[way]["seconds"] for r in timed),
                "before_backward_mib": statistics.median(r[way]["before_backward_mib"] for r in timed),
                "peak_mib": last[way]["peak_mib"],
            }
            for way in WAYS
        },
        "peak_to_plain": last["swap"]["peak_mib"] / last["plain"]["peak_mib"],
        "peak_to_checkpoint": last["swap"]["peak_mib"] / last["checkpoint"]["peak_mib"],
        "seconds_to_plain": ratio("swap", "plain"),
        "seconds_to_checkpoint": ratio("swap", "checkpoint"),
        "stats": last["swap"]["stats"],
    }
