"""Where the memory is: how much is used at the turns of a step, and in which part of it the peak was reached.

On a CPU machine device memory is the resident memory of the process, and its peak is the kernel's own figure
(`ru_maxrss`, or `VmHWM` where a larger process has handed its own down), which only grows. So a part of the step
is said to have reached the peak if the figure grew while that part ran; a process that was larger before it
trained is reported as such. On an accelerator both figures are those of PyTorch's allocator. Nothing is sampled
in between, no thread runs, and nothing is reset.

A `Places` belongs to one session. Its thread marks the turns; marks of backward may come from autograd's
threads while that thread waits for backward. Anybody may read.
"""

from __future__ import annotations

import functools
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from ebbtide._report import size

_PAGE = os.sysconf("SC_PAGE_SIZE")

OUTSIDE = "outside of steps"
BETWEEN = "forward, outside of layers"
LAYERS = "forward of layers"
HEAD = "after the last layer: head and loss, forward and backward"
BACKWARD = "backward of layers, and what follows"


class Meter:
    """Reads how many bytes of a device are in use now, and how many have been at most."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._allocator: Any = None if device.type == "cpu" else _allocator(device)
        # A process that a larger one has started begins with that one's figure.
        self._inherited = device.type == "cpu" and 0 < _high_water() < _maximum() - (1 << 20)

    def read(self) -> tuple[int, int]:
        """Bytes in use now, and the most there were; 0 where that can't be told.

        The most is that since the process began, or since PyTorch's peak figures were reset.
        """
        if self.device.type == "cpu":
            return _resident(), _high_water() if self._inherited else _maximum()
        figures = self._allocator.memory_stats(self.device) if self._allocator else {}
        return int(figures.get("allocated_bytes.all.current", 0)), int(figures.get("allocated_bytes.all.peak", 0))


def _maximum() -> int:
    """The most resident bytes of this process, as the kernel tells quickly."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _high_water() -> int:
    """The same of this program alone, from a text that takes longer to make; 0 where there is none."""
    try:
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 0


def _allocator(device: torch.device) -> Any:
    """What has `memory_stats` for this kind of device: the device-generic module, or the device's own."""
    for module in (getattr(torch, "accelerator", None), torch.get_device_module(device)):
        if hasattr(module, "memory_stats"):
            return module
    return None


@functools.cache
def _statm() -> int:
    """A file descriptor that stays open: opening the file takes ten times as long as reading it."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


os.register_at_fork(after_in_child=_statm.cache_clear)  # the file is about the process that opened it


def _resident() -> int:
    try:
        return int(os.pread(_statm(), 128, 0).split()[1]) * _PAGE
    except OSError:
        return 0


class Places:
    """Which part of a step was running when memory was highest.

    `mark(place)` says that `place` begins. `peak` is the highest figure, `peak_place` the part that reached
    it, and `seen[place]` the most that was in use at the beginning or end of a part: a lower bound of what it
    needed. What comes between two layers counts as `BETWEEN`, which is known only when the second one begins; so
    does what comes between a step and a backward after it count as `HEAD`.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.peak = meter.read()[1]
        self.peak_place: str | None = None  # None: not in a part that was marked
        self.seen: dict[str, int] = {}
        self._place = OUTSIDE

    def mark(self, place: str) -> None:
        now, peak = self.meter.read()
        ended = BETWEEN if self._place == HEAD and place == LAYERS else self._place
        if ended == OUTSIDE and place == BACKWARD:
            ended = HEAD  # a backward after the step: what ran since is the loss, and the backward of the head
        if peak > self.peak:
            self.peak, self.peak_place = peak, ended
        for part in (ended, place):
            self.seen[part] = max(self.seen.get(part, 0), now)
        self._place = place

    def rows(self) -> list[tuple[str, str]]:
        """The peak and where it was, for people: what, and how much."""
        whose = "the process" if self.meter.device.type == "cpu" else str(self.meter.device)
        where = self.peak_place or "before this session's first step, or elsewhere since"
        rows = [("peak memory", f"{size(self.peak)} of {whose}, reached: {where}")]
        return rows + [
            ("  at turns of", f"{part}: up to {size(most)}") for part, most in self.seen.items() if part != OUTSIDE
        ]


class Watch:
    """Context that watches a device's memory while it is open: `start`, `peak`, `end` in bytes and `seconds`.

    On a CPU machine a thread looks every millisecond; on an accelerator PyTorch's peak figures are reset at
    the start.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.start = self.peak = self.end = 0
        self.seconds = 0.0

    def __enter__(self) -> Watch:
        if self._meter.device.type == "cpu":
            self._thread = threading.Thread(target=self._look, name="ebbtide-watch", daemon=True)
        else:
            _settle(self._meter.device, "reset_peak_memory_stats")
        self.start = self.peak = self._meter.read()[0]
        self.seconds = -time.perf_counter()
        if self._thread:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._meter.device.type != "cpu":
            _settle(self._meter.device, None)
            self.peak = max(self.peak, self._meter.read()[1])
        self.seconds += time.perf_counter()
        self._over.set()
        if self._thread:
            self._thread.join()
        self.end = self._meter.read()[0]
        self.peak = max(self.peak, self.end)

    def _look(self) -> None:
        while not self._over.wait(0.001):
            self.peak = max(self.peak, self._meter.read()[0])


def _settle(device: torch.device, then: str | None) -> None:
    """Waits for a device's queue; then calls a function of its allocator by name, if it has it."""
    module = torch.get_device_module(device)
    wait: Callable[[], None] | None = getattr(module, "synchronize", None)
    if wait is not None:
        wait()
    function = getattr(_allocator(device), then, None) if then else None
    if function is not None:
        function(device)
