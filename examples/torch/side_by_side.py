"""Trains twice, without and with ebbtide, each in a process of its own, and compares memory, time and losses.

Nothing in here is needed to use ebbtide; the examples show that.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Yields the loss of each step. Its first argument says whether to swap.
Train = Callable[[bool, argparse.Namespace], Iterator[float]]


def compare(train: Train, args: argparse.Namespace) -> bool:
    """Trains both ways and prints the figures; returns whether all losses were the same, bit for bit."""
    plain, swapped = _in_process(train, False, args), _in_process(train, True, args)
    print(f"loss of the first step {plain['losses'][0]:.4f}, of the last {plain['losses'][-1]:.4f}")
    _row("", "peak memory", "of which training", "a step (median)")
    for name, run in (("without ebbtide", plain), ("with ebbtide", swapped)):
        peaks = (_against(run, plain, key, "MiB", 0) for key in ("peak", "training"))
        _row(name, *peaks, _against(run, plain, "seconds", "s", 2))
    print(f"The rest, {plain['start']:.0f} MiB, is Python and PyTorch itself.")
    same: bool = plain["losses"] == swapped["losses"]
    print(f"losses of {len(plain['losses'])} steps: {'identical, bit for bit' if same else 'DIFFERENT'}")
    return same


def _against(run: dict[str, Any], plain: dict[str, Any], key: str, unit: str, digits: int) -> str:
    return f"{run[key]:.{digits}f} {unit} ({run[key] / plain[key]:.2f}x)"


def _row(*cells: str) -> None:
    print("".join(f"{cell:<24}" for cell in cells).rstrip())


def _in_process(train: Train, swap: bool, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one way. A process of its own, since the peak of a process's memory never falls."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(train, swap, args, theirs))
    process.start()
    theirs.close()
    try:
        figures: dict[str, Any] = ours.recv()
    except EOFError:
        raise SystemExit("the training failed; what it said is above") from None
    process.join()
    return figures


def _measure(train: Train, swap: bool, args: argparse.Namespace, answer: Connection) -> None:
    importlib.import_module("torch._dynamo")  # optimizers load it; its memory is not the training's
    start = _memory("VmRSS")
    losses, times = [], []
    for loss in train(swap, args):
        losses.append(loss)
        times.append(time.perf_counter())
    peak = _memory("VmHWM")
    # Without the first step, which also builds the model.
    gaps = [end - begin for begin, end in itertools.pairwise(times)]
    seconds = statistics.median(gaps) if gaps else math.nan
    answer.send({"start": start, "peak": peak, "training": peak - start, "losses": losses, "seconds": seconds})


def _memory(key: str) -> float:
    """`VmRSS`, the memory of this process now, or `VmHWM`, the most there was, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))
