"""The hubs of the process, and what they count.

A hub is one engine of the native module: a tier and its limits. Every hub of the front end is made here by
`open_source`, so that `stats()`, `synchronize()` and `reset()` reach all of them. A *source* is a hub with
the front end's own counters; what counts for a source that was closed stays in the totals of the process.

Access: the registry is under one lock and may be used by any thread, also from finalizers, in the middle of
anything; so nothing but the registry's own dicts is touched under it, and it is reentrant. Counters of a source
are written by the thread that runs its steps, and read by anybody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ebbtide import _native
from ebbtide.errors import PhaseError

Settings = tuple[object, ...]
Figures = dict[str, int | float]

# What the engine counts.
ENGINE = (
    "bytes_out",
    "bytes_in",
    "tensors_out",
    "live_bytes",
    "missed_prefetches",
    "wait_ms",
    "not_freed_bytes",
    "not_freed_tensors",
    "active_groups",
    "merged_views",
    "bytes_held",
    "host_allocated_bytes",
    "host_in_use_bytes",
)
# What the front end counts itself. Steps that ended without an exception; calls of layers in steps, and how
# many of these were left alone and why; tensors of swapped layers that stayed.
COUNTED = ("steps", "layer_calls", "left_to_checkpoint", "left_without_grad", "tensors_kept")
# Keys that say how it is now; all others are totals and grow.
NOW = frozenset({"live_bytes", "active_groups", "bytes_held", "host_allocated_bytes", "host_in_use_bytes"})


class Source:
    """A hub, and what the front end counts besides."""

    def __init__(self, hub: _native.Hub) -> None:
        self.hub = hub
        self.counted: dict[str, int] = dict.fromkeys(COUNTED, 0)
        self.tell: Callable[[], Figures] = dict  # what a front end counts that the engine can't

    def stats(self) -> Figures:
        return {**self.hub.stats(), **self.counted, **self.tell()}


_lock = threading.RLock()
_sources: dict[int, Source] = {}
_shared: dict[Settings, Source] = {}
_past: Figures = {}  # totals of sources that are closed
_zero: Figures = {}  # totals at the last reset
_at_reset: list[Callable[[], None]] = []
_at_open: list[Callable[[], None]] = []


def open_source(
    *,
    tier: str | None = None,
    spill_dir: str | None = None,
    host_bytes: int | None = None,
    prefetch: int = 1,
    timeline: bool = False,
) -> Source:
    """A new hub, counted in the figures of the process until `retire` and after it. Raises `SettingError`."""
    hub = _native.Hub(tier=tier, spill_dir=spill_dir, host_bytes=host_bytes, prefetch=prefetch, timeline=timeline)
    source = Source(hub)
    for function in _at_open:
        function()
    with _lock:
        _sources[id(source)] = source
    return source


def shared_source(*, tier: str | None = None, spill_dir: str | None = None, host_bytes: int | None = None) -> Source:
    """The hub for these settings that everything without a session shares; made at the first call."""
    key: Settings = (tier, spill_dir, host_bytes)
    with _lock:
        if key not in _shared:
            _shared[key] = open_source(tier=tier, spill_dir=spill_dir, host_bytes=host_bytes)
        return _shared[key]


def retire(source: Source, *, close: bool) -> None:
    """Takes a source out of the registry, once; its totals stay.

    Args:
        source: What `open_source` made.
        close: Whether what is still in flight is given up. If not, the hub lives on as long as a graph needs
            tensors that it moved.
    """
    try:
        figures = source.stats()
    except PhaseError:  # in a finalizer that runs in the middle of the engine's own work
        figures = {}
    with _lock:
        if _sources.pop(id(source), None) is not None:
            _add(_past, {key: value for key, value in figures.items() if key not in NOW})
    if close:
        source.hub.close()


def at_open(function: Callable[[], None]) -> Callable[[], None]:
    """Registers what is called whenever a hub is made; usable as a decorator."""
    _at_open.append(function)
    return function


def at_reset(function: Callable[[], None]) -> Callable[[], None]:
    """Registers what `reset()` calls as well, for modules that keep state; usable as a decorator."""
    _at_reset.append(function)
    return function


def _live() -> list[Source]:
    with _lock:
        return list(_sources.values())


def _add(totals: Figures, more: Figures) -> None:
    for key, value in more.items():
        totals[key] = totals.get(key, 0) + value


def _totals() -> Figures:
    totals: Figures = dict.fromkeys(ENGINE + COUNTED, 0)
    with _lock:
        _add(totals, _past)
        sources = list(_sources.values())
    for source in sources:
        _add(totals, source.stats())
    return totals


def stats() -> Figures:
    """What moved in this process since it began or since `reset()`, by sessions and by hand.

    The keys are those of `Session.stats()`. Any thread may ask at any time.
    """
    totals = _totals()
    return {key: value - (0 if key in NOW else _zero.get(key, 0)) for key, value in totals.items()}


def synchronize() -> None:
    """Waits until every copy in flight has ended, out and in. Other threads run meanwhile."""
    for source in _live():
        source.hub.synchronize()


def shrink() -> int:
    """Gives back the host memory that no copy is in, of all sessions and of what is done by hand.

    It happens by itself, too: a buffer that eight passes in a row had no use for is given back. A
    `PinnedMemoryPool` has a `shrink` of its own.

    Returns:
        Bytes that were given back.
    """
    return sum(source.hub.shrink() for source in _live())


def reset() -> None:
    """Gives up what is in flight everywhere, as a failed step does, and counts from zero.

    Host memory is given back. A graph whose tensors are away can't run its backward any more (`PhaseError`).
    Sessions stay open: their next step works. What `offload` and the functions by hand shared is closed, and made
    anew when it is used again.
    """
    for function in _at_reset:
        function()
    with _lock:
        shared = list(_shared.values())
        _shared.clear()
    for source in shared:
        retire(source, close=True)
    for source in _live():
        source.hub.abandon()
        source.hub.shrink()
    totals = _totals()
    with _lock:
        _zero.clear()
        _zero.update(totals)
