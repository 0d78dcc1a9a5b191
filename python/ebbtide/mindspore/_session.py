"""Sessions: the layers of a cell, swapped, recomputed or kept, step by step.

    s = ebbtide.mindspore.session(cell, "swap")
    grad = ms.value_and_grad(forward, None, cell.trainable_params())
    for x in data:
        with s.step():
            loss, gradients = grad(x)
        optimizer(gradients)
    print(s.report())
    s.close()

Access: a session belongs to the thread that opened it. That thread makes the steps, verifies and closes; at most one
step is running at a time. `stats`, `report` and `repr` may be called from anywhere. What surrounds the layers does
nothing where no step is running, and on another thread.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any

from mindspore import nn

from ebbtide import _layers, _native, _report, _stats
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
    one_of,
    split_selection,
)
from ebbtide._plan import Planned, Planner, Recorded, check_memory, plan_text, write_whole
from ebbtide._verify import Verified
from ebbtide.errors import EbbtideWarning, PhaseError, SettingError
from ebbtide.mindspore import _alone
from ebbtide.mindspore._cells import KIND, Around, Construct, surround
from ebbtide.mindspore._passes import Pass, running
from ebbtide.mindspore._plan import FRAMEWORK
from ebbtide.mindspore._step import Step
from ebbtide.mindspore._tally import Tally
from ebbtide.mindspore._verify import verify

CHECKPOINT = "ms.recompute or cell.recompute()"


def session(
    cell: nn.Cell,
    policy: _layers.Policy | None = None,
    tier: str | None = None,
    *,
    memory: int | str | None = None,
    plan: str | os.PathLike[str] | None = None,
    layers: str | Sequence[str] | None = None,
    min_bytes: int = MIN_BYTES,
    include: Selection | None = None,
    exclude: Selection | None = None,
    spill_dir: str | os.PathLike[str] | None = None,
    host_bytes: int | None = None,
    prefetch: int | None = None,
    checksums: bool = False,
) -> Session:
    """Opens a session: what the layers of `cell` save is swapped, recomputed or kept in `with s.step():`.

    Args:
        cell: The cell that is trained, in PyNative mode.
        policy: `"swap"` (the default) or `"recompute"` for every layer but the last, whose backward comes next;
            `"keep"` for none; or `{pattern: word}`, which decides exactly what it names and keeps the rest. Of
            patterns that match the same layer the last one decides.
        memory: Instead of a policy: the bytes that a step may use, as a number, `"1.5GiB"`, or `"40%"` of what
            plain training needs above what is always there. The first two steps are recorded with everything
            swapped, then a plan is made of what to keep, swap and recompute. `ebbtide.mindspore._plan` says what is
            counted.
        plan: Instead of a policy: the file of a plan, as `Session.save_plan` writes it, perhaps edited.
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
        prefetch: How many groups are loaded ahead of backward; None: 1. Not beside `memory` and `plan`.
        checksums: Nothing moves; what layers save is compared by its bytes when backward reads it. Finds changes in
            place that MindSpore doesn't count, such as assignments to elements.

    Returns:
        The open session. It belongs to this thread.

    Raises:
        SettingError: Something of this is wrong, matches nothing or can have no effect; graph mode; another device
            than a CPU; a layer that `@ms.jit` compiles. Nothing has changed.
    """
    if not isinstance(cell, nn.Cell):
        raise SettingError(f"session() got a {type(cell).__name__}, not a mindspore.nn.Cell", "pass the cell itself")
    _alone.refuse_devices()
    _alone.refuse_graph_mode("session()")
    check_tier(tier)
    check_numbers(min_bytes=min_bytes, host_bytes=host_bytes, prefetch=prefetch)
    check_truth("checksums", checksums)
    one_of(policy=policy, memory=memory, plan=plan)
    one_of(memory=memory, plan=plan, checksums=checksums or None)
    included, asked = split_selection(include, "include")
    excluded, refused = split_selection(exclude, "exclude")
    named = None if layers is None else layer_patterns(layers)
    budget = None if memory is None else check_memory(memory)
    text = None if plan is None else plan_text(plan)
    planned = budget is not None or text is not None
    word: _layers.Word = "keep" if planned else "swap"  # a plan decides, also on the last one
    found = _layers.plan(KIND, cell, word if policy is None else policy, named, included, excluded)
    if planned:
        found = _layers.plan(KIND, cell, {layer.name: "swap" for layer in found}, named, included, excluded)
        if prefetch is not None:
            hint = "leave it out: the plan says when to load"
            raise SettingError(f"prefetch={prefetch} was given beside memory= or plan=", hint)
    _alone.refuse_jit(cell, [(layer.name, layer.module) for layer in found])
    _alone.refuse_recomputed([(layer.name, layer.module) for layer in found])
    spill = folder(spill_dir)
    ahead = 0 if planned else 1 if prefetch is None else prefetch
    source = _stats.open_source(tier=tier, spill_dir=spill, host_bytes=host_bytes, prefetch=ahead)
    try:
        settings = Settings(min_bytes, deciding(asked, refused))
        another = functools.partial(_native.Hub, tier=tier, spill_dir=spill, host_bytes=host_bytes)
        planner = Planner(FRAMEWORK, source.hub, another, budget, text) if planned else None
        return Session(cell, found, source, settings, planner, prefetch=ahead, checksums=checksums)
    except BaseException:
        _stats.retire(source, close=True)
        raise


class Session:
    """An open session; made by `session()`.

    `policy` maps the layers' names to `"swap"`, `"keep"` or `"recompute"`, in order. Usable as a context that
    closes it. A session that is dropped gives the cell back as it was by itself.
    """

    def __init__(
        self,
        cell: nn.Cell,
        layers: list[_layers.Layer],
        source: _stats.Source,
        settings: Settings,
        planner: Planner | None = None,
        *,
        prefetch: int,
        checksums: bool,
    ) -> None:
        self._words: Mapping[str, _layers.Word] = MappingProxyType({layer.name: layer.word for layer in layers})
        self._planner = planner
        self._cell = weakref.ref(cell)
        self._cell_name = type(cell).__name__
        self._source = source
        self._settings = settings
        self._prefetch = prefetch
        self._checksums = checksums
        self._tally = tally = Tally()
        source.tell = lambda: {"live_bytes": tally.now}
        self._thread = threading.get_ident()
        self._thread_name = threading.current_thread().name
        self._running: Step | None = None
        self._in_flight: list[Step] = []  # steps whose backward may still come
        self._pass: weakref.ref[Pass] | None = None  # the call that takes their gradients
        self._steps = 0
        self._entered = False
        self._told_of_checkpoint = False
        self._warnings: list[str] = []
        self._removers: list[Callable[[], None]] = []
        self._finalizer = weakref.finalize(self, _drop, self._removers, source)
        self._finalizer.atexit = False
        try:
            for layer in layers:
                self._removers.append(surround(layer.module, _around(weakref.ref(self), layer.name)))
        except BaseException:
            self.close()
            raise

    # ---- what is done with the layers

    @property
    def policy(self) -> Mapping[str, _layers.Word]:
        """The layers' words, in order. Under a plan those of the plan, of which `plan()` tells more."""
        words = self._planner.words() if self._planner is not None else {}
        return MappingProxyType({**self._words, **words}) if words else self._words

    def is_planned(self, name: str) -> bool:
        """Whether a plan decides on this layer."""
        return self._planner is not None and self._words[name] == "swap"

    def recomputes(self, name: str) -> bool:
        """Whether a plan has this layer run again in backward."""
        return self._planner is not None and self._planner.recomputes()

    def plan(self) -> dict[str, Any] | None:
        """The plan that steps follow; None without one, and while it is not made yet.

        `memory_bytes`, `predicted_peak_bytes`, `predicted_step_ms`, and `layers`: of each its `name`, whether it is
        to `recompute`, and the names of its storages to `swap`.
        """
        return self._planner.told() if self._planner is not None else None

    def save_plan(self, file: str | os.PathLike[str]) -> None:
        """Writes the plan, for `session(cell, plan=file)` and `ebbtide plan --diff`.

        Raises:
            PhaseError: There is none yet. SettingError: The file can't be written.
        """
        plan = self._planner.plan if self._planner is not None else None
        write_whole(file, plan and plan.json(), "plan")

    def save_trace(self, file: str | os.PathLike[str]) -> None:
        """Writes what was recorded of a step, for `ebbtide plan`.

        Raises:
            PhaseError: There is none yet. SettingError: The file can't be written.
        """
        trace = self._planner.trace if self._planner is not None else None
        write_whole(file, trace and trace.json(), "trace")

    # ---- steps

    def step(self) -> Step:
        """A new step, for `with s.step():` around the call that runs forward and backward.

        Micro-batches take a step each.

        Raises:
            PhaseError: A step is running, this is not the session's thread, the session is closed, or its cell is
                gone. SettingError: MindSpore is in graph mode.
        """
        self._check_usable("step()")
        return Step(self)

    def running_step(self) -> Step | None:
        """The step that this thread is in."""
        running = self._running
        return running if running is not None and threading.get_ident() == self._thread else None

    def _begin(self, step: Step) -> tuple[int, nn.Cell]:
        cell = self._check_usable("a step")
        step.is_whole = not (_alone.is_recorded() and _alone.within_call())
        if step.is_whole:
            _alone.recover()  # from an exception outside of any step
            self._settle()
        else:
            self._settle_after(running())
        self._steps += 1
        self._running = step
        return self._steps, cell

    def _follow(self, cell: nn.Cell) -> Recorded | Planned | None:
        """What follows the step that begins, if there is a plan or one is to be made."""
        return self._planner.begin(cell) if self._planner is not None else None

    def _end(self, step: Step, *, done: bool) -> None:
        """A step is left; one that did not get to its end is given up."""
        self._running = None
        if step.is_whole:
            _alone.recover()
        if not done:
            self._source.hub.abandon(step.number)
            return
        self._source.counted["steps"] += 1
        self._in_flight.append(step)
        if step.is_whole:
            self._settle()

    def _settle_after(self, of: Pass | None) -> None:
        """What steps around forward alone have left goes when the call is over that takes their gradients."""
        if of is None or (self._pass is not None and of is self._pass()):
            return
        self._settle()  # those of another call, which is over
        self._pass = weakref.ref(of)

    def _settle(self) -> None:
        """No backward is to come: what was saved and never asked for goes."""
        steps, self._in_flight = self._in_flight, []
        for step in steps:
            step.over()
            self._source.hub.abandon(step.number)
            step.drop()

    def _check_usable(self, what: str) -> nn.Cell:
        if not self._finalizer.alive:
            raise PhaseError(
                f"{what} of a session that is closed", "open a new one with ebbtide.mindspore.session(cell, …)"
            )
        if threading.get_ident() != self._thread:
            raise PhaseError(
                f"{what} on thread {threading.current_thread().name}: the session belongs to {self._thread_name}, "
                "which opened it",
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
        _alone.refuse_graph_mode(what)
        return cell

    def _left_alone(self, name: str, why: str) -> None:
        """A layer's call is left alone; says so once, if somebody could have meant otherwise."""
        if self._told_of_checkpoint or why != "left_to_checkpoint" or self.policy[name] == "keep":
            return
        self._told_of_checkpoint = True
        self._warnings.append(
            f"{name} is to be {_report.DONE[self.policy[name]]}, but runs inside of {CHECKPOINT} and is left "
            "to it; take the checkpoint off the layer to have it the session's way"
        )

    def _warn(self) -> None:
        own, self._warnings = self._warnings, []
        for text in own + self._source.hub.take_warnings():
            warnings.warn(text, EbbtideWarning, stacklevel=4)

    # ---- what it did

    def stats(self) -> dict[str, int | float]:
        """What this session did since it was opened, by name; sizes in bytes.

        `ebbtide.mindspore.stats()` has the same keys for the whole process.

        * `bytes_out`, `bytes_in`, `tensors_out`: moved to the tier and back.
        * `live_bytes`: of tensors that layers saved and that are in memory now: what is to leave or has come back, and
          the storages of what stays, each once. Not counted are parameters and buffers, and what the layer that runs
          has saved so far. `bytes_held`: in the tier now.
        * `missed_prefetches`: groups that were needed before anybody had started to load them.
        * `wait_ms`: time in which the training thread waited for copies.
        * `steps`: those that ended without an exception. `layer_calls`: calls of layers in steps, of which
          `left_to_checkpoint` ran inside of `ms.recompute` or a backward, and `left_without_grad` without
          gradients. `tensors_kept`: of swapped layers, but parameters, buffers, inputs without gradients, small or
          excluded.
        * `active_groups`: layers, in passes, that backward has not been through. `host_allocated_bytes`,
          `host_in_use_bytes`: host memory of the tiers.
        * `not_freed_bytes`, `not_freed_tensors`, `merged_views`: 0. MindSpore doesn't tell whether something else
          refers to a tensor.
        """
        return self._source.stats()

    def report(self) -> str:
        """A table for people: what moved, what was waited for, where the bytes of saved tensors were highest.

        If nothing moved it says why.
        """
        planned = self._planner.table() if self._planner is not None else []
        tally = self._tally
        most = f"{_report.size(tally.peak)}, reached: {tally.peak_place or 'nowhere'}"
        return _report.table(
            self._cell_name,
            self.policy,
            self._source,
            self._settings.min_bytes,
            [("saved tensors", most)],
            planned,
            checkpoint=CHECKPOINT,
            tells_use=False,
        )

    def __repr__(self) -> str:
        state = "" if self._finalizer.alive else ", closed"
        return f"<ebbtide session of {self._cell_name}: {_report.counts(self.policy)}, {self._steps} steps{state}>"

    def verify(self, step_fn: Callable[[], object]) -> Verified:
        """Runs steps plain and through this session, from the same state, and compares bits and memory.

        Two of each kind; results of all are compared, memory and time of the second ones. Parameters, buffers and
        random generators are afterwards as they were, and so are the `nn.Dropout`s of the cell. Takes memory for
        copies of parameters and buffers.

        Args:
            step_fn: Calls what `ms.value_and_grad` has made on your data, the same each time, and returns what that
                returns: the loss and the gradients. It must not run the optimizer.

        Raises:
            SettingError: `step_fn` changed parameters or returned no tensors. What `step_fn` raises comes through.

        Example:
            >>> print(s.verify(lambda: grad(x, y)))
        """
        return verify(self, self._check_usable("verify()"), step_fn)

    # ---- the end

    def close(self) -> None:
        """Gives the cell back as it was, and what the session holds; the second time nothing.

        What the session moved can't be had any more then.

        Raises:
            PhaseError: A step is running.
        """
        if self._running is not None:
            raise PhaseError(f"close() inside of step {self._running.number}", "leave its `with` first")
        if self._finalizer.detach() is not None:
            for step in self._in_flight:
                step.drop()
            self._in_flight = []
            _drop(self._removers, self._source)

    def __enter__(self) -> Session:
        self._check_usable("`with`")
        if self._entered:
            raise PhaseError(
                "this session was entered before",
                "use `with s.step():` for a step; `with s:` closes it at the end",
            )
        self._entered = True
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
