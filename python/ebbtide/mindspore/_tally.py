"""Counts the bytes of saved tensors that a session has in memory: its spans, and the storages of what stays.

MindSpore's memory pool hides what the process has given up, and tells of nothing on a CPU that is exact to the byte,
so a session counts itself. Parameters and buffers are not counted; of a layer that runs, what it has saved so far isn't
either, until it ends.

Access: any thread, also finalizers, in the middle of anything: nothing but the figures is touched under the lock.
"""

from __future__ import annotations

import threading

OUTSIDE = "outside of layers"


class Tally:
    """What is in memory now, and the most there was, with the part of a step in which that was reached."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self.peak_place: str | None = None
        self.place = OUTSIDE
        self._kept: dict[int, int] = {}  # how many hold a storage
        self._lock = threading.RLock()

    def add(self, count: int) -> None:
        """So many bytes more, or fewer."""
        with self._lock:
            self.now += count
            if self.now > self.peak:
                self.peak, self.peak_place = self.now, self.place

    def keep(self, storage: int, count: int) -> Kept:
        """A storage of so many bytes stays as long as one of the results lives. It counts once."""
        with self._lock:
            holders = self._kept.get(storage, 0)
            self._kept[storage] = holders + 1
            if not holders:
                self.add(count)
        return Kept(self, storage, count)

    def let_go(self, storage: int, count: int) -> None:
        """One of those who hold it is gone."""
        with self._lock:
            self._kept[storage] -= 1
            if not self._kept[storage]:
                del self._kept[storage]
                self.add(-count)


class Kept:
    """Holds a storage in the count."""

    __slots__ = ("_count", "_storage", "_tally")

    def __init__(self, tally: Tally, storage: int, count: int) -> None:
        self._tally, self._storage, self._count = tally, storage, count

    def __del__(self) -> None:
        self._tally.let_go(self._storage, self._count)
