"""How fast a tier takes and gives bytes: measured with a block and an engine of its own. No framework."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from ebbtide import _native
from ebbtide.errors import CopyError, NoRoomError

BYTES = 16 << 20
ROUNDS = 3
# Gives a group a block of so many bytes; what it returns lives as long as the group.
Fill = Callable[[_native.Group, int], object]


@dataclass(frozen=True)
class Link:
    """Bytes a second out and in, and nanoseconds of one small transfer."""

    out_per_s: int
    in_per_s: int
    latency_ns: int

    def differs(self, other: Link, share: float) -> bool:
        """Whether one of the directions has changed by more than this share."""
        pairs = ((self.out_per_s, other.out_per_s), (self.in_per_s, other.in_per_s))
        return any(abs(a - b) > share * max(a, b) for a, b in pairs)


GUESS = Link(1 << 29, 1 << 29, 200_000)  # an ordinary disk


def measure(open_hub: Callable[[], _native.Hub], fill: Fill, settle: Callable[[], None]) -> Link:
    """Moves a block of 16 MiB out and in three times, and one of 4 KiB."""
    hub = open_hub()
    try:
        large = [_round(hub, fill, settle, BYTES) for _ in range(ROUNDS)]
        small = [_round(hub, fill, settle, 4096) for _ in range(ROUNDS)]
    except (NoRoomError, CopyError, MemoryError):
        return GUESS  # a tier without room for this may have room for a step, and late steps measure again
    finally:
        hub.close()
    out, back = (statistics.median(times) for times in zip(*large, strict=True))
    latency = min(min(times) for times in small)
    return Link(int(BYTES / out), int(BYTES / back), int(latency * 1e9))


def _round(hub: _native.Hub, fill: Fill, settle: Callable[[], None], count: int) -> tuple[float, float]:
    """Seconds out and in."""
    group = hub.open("link", 0)
    try:
        block = fill(group, count)
        times = []
        for start, wait in ((group.start_offload, group.wait_offload), (group.start_load, group.wait_load)):
            settle()
            began = time.perf_counter()
            start()
            wait()
            settle()
            times.append(time.perf_counter() - began)
        del block
    finally:
        group.close()
    return times[0], times[1]
