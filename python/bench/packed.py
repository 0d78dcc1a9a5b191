"""Offload, wait, load, wait of many small tensors in place: the engine against the machine in Python."""

from __future__ import annotations

import gc
import statistics
import time

import torch

from bench.machine import Machine
from ebbtide._native import Hub, return_freed_memory

TENSORS, FLOATS = 10_000, 1024


def engine(hub: Hub, tensors: list[torch.Tensor], number: int) -> float:
    """Microseconds a tensor. Registration is not counted, on neither side."""
    group = hub.open("many", number)
    for tensor in tensors:
        group.add(tensor, "many", pack=True, sole=False)
    started = time.perf_counter()
    group.start_offload()
    group.wait_offload()
    group.start_load()
    group.wait_load()
    return (time.perf_counter() - started) / len(tensors) * 1e6


def python(tensors: list[torch.Tensor]) -> float:
    """The same for the yardstick."""
    machine = Machine(tensors)
    started = time.perf_counter()
    machine.start_offload()
    machine.wait_offload()
    machine.start_load()
    machine.wait_load()
    return (time.perf_counter() - started) / len(tensors) * 1e6


def run(rounds: int = 9) -> dict[str, float | bool]:
    """Medians over rounds in turns; whether every value came back."""
    return_freed_memory()
    hub = Hub(tier="host")
    tensors = [torch.randn(FLOATS) for _ in range(TENSORS)]
    expected = [tensor.clone() for tensor in tensors]
    ours, theirs = [], []
    gc.collect()
    gc.disable()  # its passes depend on how many tensors the bench holds
    try:
        for number in range(rounds):
            ours.append(engine(hub, tensors, number))
            theirs.append(python(tensors))
    finally:
        gc.enable()
    moved = hub.stats()["bytes_out"] == rounds * TENSORS * FLOATS * 4
    hub.close()
    right = all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
    return {
        "tensors": TENSORS,
        "bytes": FLOATS * 4,
        "engine_us": statistics.median(ours),
        "python_us": statistics.median(theirs),
        "times_faster": statistics.median(b / a for a, b in zip(ours, theirs, strict=True)),
        "identical": right,
        "moved": moved,
    }
