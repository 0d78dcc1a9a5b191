"""What a saved tensor costs: packing and unpacking, against hooks of Python that only detach."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch

from ebbtide._native import Hub, Packer, unpack

TENSORS = 2000


def detach(tensor: torch.Tensor) -> object:
    """The cheapest pack hook that makes no cycle."""
    return tensor.detach()


def same(packed: object) -> object:
    """Its unpack hook."""
    return packed


def cost(tensors: list[torch.Tensor], pack: Callable[..., object], unpack_one: Callable[..., object]) -> float:
    """Microseconds of one pack, and of one unpack and the end of both."""
    started = time.perf_counter()
    packed = [pack(tensor) for tensor in tensors]
    for one in packed:
        unpack_one(one)
    packed.clear()
    return (time.perf_counter() - started) / len(tensors) * 1e6


def swapped(hub: Hub, tensors: list[torch.Tensor], number: int) -> float:
    """The same for tensors that leave in between and come back; the copies themselves are not counted."""
    group = hub.open("layer", number)
    packer = Packer(group)
    started = time.perf_counter()
    packed = [packer(tensor) for tensor in tensors]
    seconds = time.perf_counter() - started
    group.start_offload()
    group.wait_offload()
    group.need()
    started = time.perf_counter()
    for one in packed:
        unpack(one)
    packed.clear()
    hub.collect()  # what dropped handles leave to do
    seconds += time.perf_counter() - started
    return seconds / len(tensors) * 1e6


def run(rounds: int = 15) -> dict[str, float]:
    """Medians over rounds in turns."""
    hub = Hub(tier="host")
    tensors = [torch.randn(64, 64) for _ in range(TENSORS)]
    ours, theirs = [], []
    gc.collect()
    gc.disable()  # its passes depend on how many tensors the bench holds, not on the hooks
    try:
        for number in range(rounds):
            theirs.append(cost(tensors, detach, same))
            ours.append(swapped(hub, tensors, number))
    finally:
        gc.enable()
        hub.close()
    over = statistics.median(a - b for a, b in zip(ours, theirs, strict=True))
    return {
        "tensors": TENSORS,
        "swapped_us": statistics.median(ours),
        "identity_us": statistics.median(theirs),
        "over_identity_us": over,
    }
