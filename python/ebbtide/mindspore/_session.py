"""Sessions: the layers of a cell, swapped, recomputed or kept, step by step.

    s = ebbtide.mindspore.session(cell, "swap")
    grad = ms.value_and_grad(forward, None, cell.trainable_params())
    for x in data:
        with s.step():
            loss, gradients = grad(x)
        optimizer(gradients)
    print(s.report())
    s.close()

Access: a session belongs to the thread that opened it, which makes the steps; at most one is running at a time.
`stats`, `report` and `repr` may be called from anywhere.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any

from mindspore import nn

from ebbtide import _layers, _stats
from ebbtide._checks import (
    MIN_BYTES,
    Selection,
    Settings,
    check_numbers,
    check_tier,
    check_truth,
    deciding,
    folder,
    layer_patterns,
    split_selection,
)
from ebbtide.errors import PhaseError, SettingError
from ebbtide.mindspore._cells import KIND, Around, Construct, surround
from ebbtide.mindspore._step import Step


def session(
    cell: nn.Cell,
    policy: _layers.Policy | None = None,
    tier: str | None = None,
    *,
    layers: str | Sequence[str] | None = None,
    min_bytes: int = MIN_BYTES,
    include: Selection | None = None,
    exclude: Selection | None = None,
    spill_dir: str | os.PathLike[str] | None = None,
    host_bytes: int | None = None,
    prefetch: int = 1,
    checksums: bool = False,
) -> Session:
    """Opens a session: what the layers of `cell` save is swapped, recomputed or kept in `with s.step():`.

    Args:
        cell: The cell that is trained, in PyNative mode.
        policy: `"swap"` (the default) or `"recompute"` for every layer but the last, whose backward comes next;
            `"keep"` for none; or `{pattern: word}`, which decides exactly what it names and keeps the rest. Of
            patterns that match the same layer the last one decides.
        tier: Where swapped activations go. `"file"` (the default): an unnamed file in `spill_dir`. `"host"`: host
            memory, which on a CPU saves nothing and is for tests.
        layers: Patterns of the cells that are the layers, instead of the repeated blocks of `CellList`s and
            `SequentialCell`s. `ebbtide._layers` has the rule, and what a pattern is.
        min_bytes: Tensors of fewer bytes stay.
        include: Patterns of layers, functions `f(tensor) -> bool` that are asked about each tensor once, or a
            list of both. What is not included is kept.
        exclude: The same for what is kept.
        spill_dir: Folder of the spill file; None: the system's temporary folder.
        host_bytes: The most bytes of host memory to use; None: what the machine can spare.
        prefetch: How many groups are loaded ahead of backward.
        checksums: Nothing moves; what layers save is compared by its bytes when backward reads it. Finds changes in
            place that MindSpore doesn't count, such as assignments to elements.

    Returns:
        The open session. It belongs to this thread.

    Raises:
        SettingError: Something of this is wrong, matches nothing or can have no effect. Nothing has changed.
    """
    if not isinstance(cell, nn.Cell):
        raise SettingError(f"session() got a {type(cell).__name__}, not a mindspore.nn.Cell", "pass the cell itself")
    check_tier(tier)
    check_numbers(min_bytes=min_bytes, host_bytes=host_bytes, prefetch=prefetch)
    check_truth("checksums", checksums)
    included, asked = split_selection(include, "include")
    excluded, refused = split_selection(exclude, "exclude")
    named = None if layers is None else layer_patterns(layers)
    found = _layers.plan(KIND, cell, "swap" if policy is None else policy, named, included, excluded)
    spill = folder(spill_dir)
    source = _stats.open_source(tier=tier, spill_dir=spill, host_bytes=host_bytes, prefetch=prefetch)
    try:
        settings = Settings(min_bytes, deciding(asked, refused))
        return Session(cell, found, source, settings, prefetch=prefetch, checksums=checksums)
    except BaseException:
        _stats.retire(source, close=True)
        raise


class Session:
    """An open session; made by `session()`. Usable as a context that closes it."""

    def __init__(
        self,
        cell: nn.Cell,
        layers: list[_layers.Layer],
        source: _stats.Source,
        settings: Settings,
        *,
        prefetch: int,
        checksums: bool,
    ) -> None:
        self._words: Mapping[str, _layers.Word] = MappingProxyType({layer.name: layer.word for layer in layers})
        self._cell = weakref.ref(cell)
        self._cell_name = type(cell).__name__
        self._source = source
        self._settings = settings
        self._prefetch = prefetch
        self._checksums = checksums
        self._thread = threading.get_ident()
        self._running: Step | None = None
        self._steps = 0
        self._removers: list[Callable[[], None]] = []
        self._finalizer = weakref.finalize(self, _drop, self._removers, source)
        self._finalizer.atexit = False
        try:
            for layer in layers:
                self._removers.append(surround(layer.module, _around(weakref.ref(self), layer.name)))
        except BaseException:
            self.close()
            raise

    @property
    def policy(self) -> Mapping[str, _layers.Word]:
        """The layers' words, in order."""
        return self._words

    def step(self) -> Step:
        """A new step, for `with s.step():` around the call that runs forward and backward.

        Raises:
            PhaseError: A step is running, this is not the session's thread, the session is closed, or its cell is
                gone.
        """
        self._check_usable("step()")
        return Step(self)

    def running_step(self) -> Step | None:
        """The step that this thread is in."""
        running = self._running
        return running if running is not None and threading.get_ident() == self._thread else None

    def _begin(self, step: Step) -> tuple[int, nn.Cell]:
        cell = self._check_usable("a step")
        self._steps += 1
        self._running = step
        return self._steps, cell

    def _end(self, step: Step, *, done: bool) -> None:
        self._running = None
        if done:
            self._source.counted["steps"] += 1
        else:
            self._source.hub.abandon(step.number)

    def _check_usable(self, what: str) -> nn.Cell:
        if not self._finalizer.alive:
            raise PhaseError(
                f"{what} of a session that is closed", "open a new one with ebbtide.mindspore.session(cell, …)"
            )
        if threading.get_ident() != self._thread:
            raise PhaseError(
                f"{what} on another thread than the one that opened the session",
                "open a session in each thread that trains",
            )
        if self._running is not None:
            raise PhaseError(
                f"{what} inside of step {self._running.number}, which is still running",
                "leave its `with` first; micro-batches take one step each, one after the other",
            )
        cell = self._cell()
        if cell is None:
            raise PhaseError(f"{what} of a session whose cell ({self._cell_name}) is gone", "open one on the new cell")
        return cell

    def stats(self) -> dict[str, int | float]:
        """What this session did since it was opened, by name; sizes in bytes. Keys as `ebbtide.mindspore.stats()`."""
        return self._source.stats()

    def __repr__(self) -> str:
        state = "" if self._finalizer.alive else ", closed"
        return f"<ebbtide session of {self._cell_name}: {len(self._words)} layers, {self._steps} steps{state}>"

    def close(self) -> None:
        """Gives the cell back as it was, and what the session holds; the second time nothing.

        Raises:
            PhaseError: A step is running.
        """
        if self._running is not None:
            raise PhaseError(f"close() inside of step {self._running.number}", "leave its `with` first")
        if self._finalizer.detach() is not None:
            _drop(self._removers, self._source)

    def __enter__(self) -> Session:
        self._check_usable("`with`")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _around(session: weakref.ref[Session], name: str) -> Around:
    def around(inner: Construct, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = session()
        step = None if found is None else found.running_step()
        return inner(*args, **kwargs) if step is None else step.call(name, inner, args, kwargs)

    return around


def _drop(removers: list[Callable[[], None]], source: _stats.Source) -> None:
    for remove in removers:
        remove()
    removers.clear()
    _stats.retire(source, close=True)
