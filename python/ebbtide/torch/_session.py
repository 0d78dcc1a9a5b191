"""Sessions: the layers of a model, swapped, recomputed or kept, step by step.

    s = ebbtide.torch.session(model, "swap")
    for x in data:
        optimizer.zero_grad()
        with s.step():
            loss = model(x).mean()
            loss.backward()
        optimizer.step()
    print(s.report())
    s.close()

Access: a session belongs to the thread that opened it. That thread makes the steps, verifies and closes; at
most one step is running at a time. `stats`, `report`, `timeline` and `repr` may be called from anywhere.
Hooks that find no step running, or run on another thread, do nothing.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch import nn

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
from ebbtide._plan import Planner, check_memory, plan_text, write_whole
from ebbtide._verify import Verified
from ebbtide.errors import PhaseError, SettingError
from ebbtide.torch import _places
from ebbtide.torch._drain import drain
from ebbtide.torch._hooks import Wiring, in_backward
from ebbtide.torch._layers import KIND
from ebbtide.torch._plan import FRAMEWORK, Watcher
from ebbtide.torch._settings import check_model
from ebbtide.torch._step import BackwardRow, Step
from ebbtide.torch._verify import verify


def session(
    model: nn.Module,
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
    timeline: bool = False,
) -> Session:
    """Opens a session: what the layers of `model` save is swapped, recomputed or kept in `with s.step():`.

    On a CPU machine this also asks the C library, once for the process, to give large freed blocks back at
    once; otherwise nobody would see the memory that is saved.

    Args:
        model: The model that is trained; not one that `torch.compile` returned (its blocks may be).
        policy: `"swap"` (the default) or `"recompute"` for every layer but the last, whose backward comes next;
            `"keep"` for none; or `{pattern: word}`, which decides exactly what it names and keeps the rest. Of
            patterns that match the same layer the last one decides. A pattern may also name modules that were no
            layers so far, which makes them layers.
        memory: Instead of a policy: the bytes that a step may use, as a number, `"1.5GiB"`, or `"40%"` of what
            plain training needs above what is always there. The first two steps are recorded with everything
            swapped, then a plan is made of what to keep, swap and recompute. `ebbtide.torch._plan` says what is
            counted.
        plan: Instead of a policy: the file of a plan, as `Session.save_plan` writes it, perhaps edited.
        tier: Where swapped activations go. `"file"`: an unnamed file in `spill_dir`; on accelerators pinned host
            memory comes first. `"host"`: host memory only. None: as `"file"`.
        layers: Patterns of the modules that are the layers, instead of the repeated blocks of the model's
            `ModuleList`s and `Sequential`s. `ebbtide._layers` has the rule, and what a pattern is.
        min_bytes: Tensors of fewer bytes stay.
        include: Patterns of layers, functions `f(tensor) -> bool` that are asked about each tensor once, or a
            list of both. What is not included is kept.
        exclude: The same for what is kept.
        spill_dir: Folder of the spill file, with room for all that backward needs; None: the system's temporary
            folder.
        host_bytes: The most bytes of host memory to use; None: what the machine can spare.
        prefetch: How many groups are loaded ahead of backward; None: 1. Not beside `memory` and `plan`.
        timeline: Whether to record what is copied when, and which layer runs, for `Session.timeline`.

    Returns:
        The open session. It belongs to this thread.

    Raises:
        SettingError: Something of this is wrong, matches nothing or can have no effect. Nothing has changed.

    Example:
        >>> s = ebbtide.torch.session(model, {"blocks.*": "swap", "blocks.0": "recompute"}, spill_dir="/mnt/nvme")
        >>> with s.step():
        ...     loss = model(x).mean()
        >>> loss.backward()
        >>> print(s.report())
    """
    check_model(model)
    check_tier(tier)
    check_numbers(min_bytes=min_bytes, host_bytes=host_bytes, prefetch=prefetch)
    check_truth("timeline", timeline)
    one_of(policy=policy, memory=memory, plan=plan)
    included, asked = split_selection(include, "include")
    excluded, refused = split_selection(exclude, "exclude")
    named = None if layers is None else layer_patterns(layers)
    budget = None if memory is None else check_memory(memory)
    text = None if plan is None else plan_text(plan)
    planned = budget is not None or text is not None
    word: _layers.Word = "keep" if planned else "swap"  # a plan decides, also on the last one
    found = _layers.plan(KIND, model, word if policy is None else policy, named, included, excluded)
    if planned:
        found = _layers.plan(KIND, model, {layer.name: "swap" for layer in found}, named, included, excluded)
        if prefetch is not None:
            hint = "leave it out: the plan says when to load"
            raise SettingError(f"prefetch={prefetch} was given beside memory= or plan=", hint)
    spill = folder(spill_dir)
    ahead = 0 if planned else 1 if prefetch is None else prefetch
    source = _stats.open_source(tier=tier, spill_dir=spill, host_bytes=host_bytes, prefetch=ahead, timeline=timeline)
    try:
        settings = Settings(min_bytes, deciding(asked, refused))
        another = functools.partial(_native.Hub, tier=tier, spill_dir=spill, host_bytes=host_bytes)
        planner = Planner(FRAMEWORK, source.hub, another, budget, text) if planned else None
        return Session(model, found, source, settings, planner)
    except BaseException:
        _stats.retire(source, close=True)
        raise


class Session:
    """An open session; made by `session()`.

    `policy` maps the layers' names to `"swap"`, `"keep"` or `"recompute"`, in order. Usable as a context that
    closes it. A session that is dropped takes its hooks off the model by itself, and so does a model that is
    dropped.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[_layers.Layer],
        source: _stats.Source,
        settings: Settings,
        planner: Planner | None = None,
    ) -> None:
        self._words: Mapping[str, _layers.Word] = MappingProxyType({layer.name: layer.word for layer in layers})
        self._planner = planner
        self._model = weakref.ref(model)
        self._model_name = type(model).__name__
        self._source = source
        self._settings = settings
        self._thread = threading.get_ident()
        self._thread_name = threading.current_thread().name
        self._running: Step | None = None
        self._steps = 0
        self._entered = False
        self._places = _places.Places(_places.Meter(next(model.parameters()).device))
        if self._places.meter.device.type == "cpu":
            _native.return_freed_memory()
        self._backward = BackwardRow(source.hub)
        self._warnings: list[str] = []
        self._told_of_checkpoint = False
        self._wiring = Wiring()
        self._finalizer = weakref.finalize(self, _drop, self._wiring, source)
        self._finalizer.atexit = False
        try:
            self._wiring.hang(weakref.ref(self), layers, planned=planner is not None)
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
        """Whether a call of this layer is to be run again in backward."""
        return self._planner.recomputes() if self._planner is not None else self.policy[name] == "recompute"

    def plan(self) -> dict[str, Any] | None:
        """The plan that steps follow; None without one, and while it is not made yet.

        `memory_bytes`, `predicted_peak_bytes`, `predicted_step_ms`, and `layers`: of each its `name`, whether it is
        to `recompute`, and the names of its storages to `swap`.
        """
        return self._planner.told() if self._planner is not None else None

    def save_plan(self, file: str | os.PathLike[str]) -> None:
        """Writes the plan, for `session(model, plan=file)` and `ebbtide plan --diff`.

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
        """A new step, for `with s.step():` around the forward of one pass.

        Backward may run inside or after it. Micro-batches take a step each.

        Raises:
            PhaseError: A step is running, this is not the session's thread, the session is closed, or its model
                is gone.
        """
        self._check_usable("step()")
        return Step(self)

    def running_step(self) -> Step | None:
        """The step that this thread is in."""
        running = self._running
        return running if running is not None and threading.get_ident() == self._thread else None

    def _begin(self, step: Step) -> tuple[int, list[torch.Tensor]]:
        """A step is entered: its number, and the tensors that never move."""
        model = self._check_usable("a step")
        self._steps += 1
        self._running = step
        if not in_backward():
            self._backward.give_up()
        self._places.mark(_places.BETWEEN)
        return self._steps, [*model.parameters(), *model.buffers()]

    def _watch(self) -> Watcher | None:
        """What follows the step that begins, if there is a plan or one is to be made."""
        model = self._model()
        return Watcher(self._planner.begin(model)) if self._planner is not None and model is not None else None

    def _end(self, step: Step, *, done: bool) -> None:
        """A step is left; one that did not get to its end is given up."""
        self._running = None
        self._places.mark(_places.OUTSIDE)
        if done:
            self._source.counted["steps"] += 1
        else:
            self._source.hub.abandon(step.number)
            drain()  # if it was backward that failed, autograd has kept what it did not get to

    def _check_usable(self, what: str) -> nn.Module:
        if not self._finalizer.alive:
            raise PhaseError(
                f"{what} of a session that is closed", "open a new one with ebbtide.torch.session(model, …)"
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
        model = self._model()
        if model is None:
            raise PhaseError(
                f"{what} of a session whose model ({self._model_name}) is gone", "open one on the new model"
            )
        return model

    def _left_alone(self, name: str, why: str) -> None:
        """A layer's call is left alone; says so once, if somebody could have meant otherwise."""
        if self._told_of_checkpoint or why != "left_to_checkpoint" or self.policy[name] == "keep" or in_backward():
            return
        self._told_of_checkpoint = True
        self._warnings.append(
            f"{name} is to be {_report.DONE[self.policy[name]]}, but runs inside of torch.utils.checkpoint and is left "
            "to it; take the checkpoint off the layer to have it the session's way"
        )

    def _take_warnings(self) -> list[str]:
        own, self._warnings = self._warnings, []
        return own + self._source.hub.take_warnings()

    # ---- what it did

    def stats(self) -> dict[str, int | float]:
        """What this session did since it was opened, by name; sizes in bytes.

        `ebbtide.torch.stats()` has the same keys for the whole process.

        * `bytes_out`, `bytes_in`, `tensors_out`: moved to the tier and back.
        * `live_bytes`: of saved tensors that are on the device now. `bytes_held`: in the tier now.
        * `missed_prefetches`: groups that were needed before anybody had started to load them.
        * `wait_ms`: time in which the training thread waited for copies.
        * `not_freed_bytes`, `not_freed_tensors`: copied but not freed: still referenced by something else.
        * `steps`: those that ended without an exception. `layer_calls`: calls of layers in steps, of which
          `left_to_checkpoint` ran inside of `torch.utils.checkpoint` or a backward, and `left_without_grad` without
          gradients. `tensors_kept`: of swapped layers, but parameters, buffers, small or excluded.
        * `active_groups`: layers, in passes, that backward has not been through. `merged_views`: saved tensors
          that share bytes with one that was saved before. `host_allocated_bytes`, `host_in_use_bytes`: host
          memory of the tiers.
        """
        return self._source.stats()

    def report(self) -> str:
        """A table for people: what moved, what was waited for, where memory was highest.

        If nothing moved it says why. What "reached" means is told in `ebbtide.torch._places`.
        """
        planned = self._planner.table() if self._planner is not None else []
        return _report.table(
            self._model_name,
            self.policy,
            self._source,
            self._settings.min_bytes,
            self._places.rows(),
            planned,
            checkpoint="torch.utils.checkpoint",
        )

    def __repr__(self) -> str:
        state = "" if self._finalizer.alive else ", closed"
        return f"<ebbtide session of {self._model_name}: {_report.counts(self.policy)}, {self._steps} steps{state}>"

    def timeline(self, file: str | os.PathLike[str]) -> int:
        """Writes what was copied when as Chrome trace JSON, which Perfetto shows; returns the number of events.

        Raises:
            SettingError: The session was opened without `timeline=True`, or the file can't be written.
        """
        if not isinstance(file, (str, os.PathLike)):
            raise SettingError(f"timeline() got a {type(file).__name__}", "pass the path of the file to write")
        return self._source.hub.write_timeline(os.fsdecode(file))

    def verify(self, step_fn: Callable[[], object]) -> Verified:
        """Runs steps plain and through this session, from the same state, and compares bits and memory.

        Two of each kind; results of all are compared, memory and time of the second ones. Parameters, buffers,
        gradients and random generators are afterwards as they were. Takes memory for copies of parameters,
        buffers and gradients.

        Args:
            step_fn: Runs forward on your data, the same each time, and returns the loss, a tensor of one element.
                Backward is run by `verify` unless `step_fn` has done so. It must not run the optimizer.

        Raises:
            SettingError: `step_fn` changed parameters or returned no loss. What `step_fn` raises comes through.

        Example:
            >>> print(s.verify(lambda: model(x).mean()))
        """
        return verify(self, self._check_usable("verify()"), step_fn)

    # ---- the end

    def close(self) -> None:
        """Takes every hook off the model and gives back what the session holds; the second time nothing.

        Close after backward: a graph whose tensors are away can't run it any more.

        Raises:
            PhaseError: A step is running.
        """
        if self._running is not None:
            raise PhaseError(f"close() inside of step {self._running.number}", "leave its `with` first")
        if self._finalizer.detach() is not None:
            self._wiring.remove()
            _stats.retire(self._source, close=True)

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


def _drop(wiring: Wiring, source: _stats.Source) -> None:
    """What a session leaves that is dropped without `close`: graphs may still wait for their backward."""
    wiring.remove()
    _stats.retire(source, close=False)
