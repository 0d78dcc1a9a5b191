"""Training inside a budget: the first steps are recorded, then a plan is made and followed.

| steps | what is done with the layers |
| --- | --- |
| the first two, and the next when a layer saves more than the trace says | all swapped, one at a time, and recorded |
| all others | what the plan says, through its byte gates |

A plan decides layer by layer (recompute) and storage by storage (swap). Its gates count bytes and never time: before
a layer's forward or backward runs, enough of what is leaving must have left; a group comes home when the plan's
trigger is reached and only if it fits. So a wrong estimate costs time. What the gates don't foresee (a step in another
order) is loaded when it is asked for, as without a plan.

**What is counted**: tensors that layers save, and what the front end says is always there. Not counted are the
temporary tensors inside of operations and what is outside of layers.

Storages are told apart by their *keys*, as in `_record`. No framework: a `Framework` stands for it.

Access: a `Planner` belongs to the thread of its session. A `Planned` belongs to one step; in backward autograd's
threads call it, one at a time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ebbtide import _layers, _native
from ebbtide._checks import MOST
from ebbtide._link import Link
from ebbtide._record import Recorder
from ebbtide._report import size
from ebbtide.errors import PhaseError, SettingError

RECORDED = 2  # steps that are recorded before there is a plan; the times of the first are those of a cold machine
DRIFT = 0.18  # a link that has changed by this share is planned for anew
LATE = 3  # steps in a row that take so much longer than predicted before the link is measured again
OpenHub = Callable[[], _native.Hub]


class Follower(Protocol):
    """Follows one step."""

    layer: int  # the number of the one that runs, or ran last

    def enter(self, name: str, keys: frozenset[int]) -> None:
        """A layer begins, called with these storages."""

    def ends(self) -> None:
        """It has run; `saves` may still be asked."""

    def saves(self, key: int, count: int) -> bool:
        """Whether a storage of so many bytes that it saved leaves."""

    def stays(self, key: int, count: int) -> None:
        """A storage of so many bytes is there and never moves: left out by the user, or an input of no layer's."""

    def cannot_again(self, why: str) -> None:
        """The layer that runs, or ran last, can't be run a second time."""

    def leave(self, group: _native.Group | None, key: int, count: int) -> None:
        """It is left, with what leaves of it, and returns this storage, if that needs a gradient."""

    def reaches(self, layer: int) -> None:
        """The backward of this layer begins."""

    def over(self) -> None:
        """The whole backward has ended."""


@dataclass(frozen=True)
class Framework:
    """What planning asks of a framework; a model is what a session was opened on."""

    source: str  # its name and version
    measure: Callable[[OpenHub, Any], Link]
    static_bytes: Callable[[Any], int]  # of a model, always on the device
    settle: Callable[[Any], Callable[[], None]]  # what waits until the device has done what was queued
    why_not: Callable[[Any, str], str | None]  # why a layer of a model can't be run a second time
    counted: str  # what is, for people


class Recorded:
    """A step that is recorded: everything leaves, and has left before the next layer begins."""

    def __init__(self, hub: _native.Hub, settle: Callable[[], None]) -> None:
        self.recorder = Recorder(lambda: float(hub.stats()["wait_ms"]), settle)
        self.layer = -1

    def enter(self, name: str, keys: frozenset[int]) -> None:
        """See `Follower`."""
        self.layer += 1
        self.recorder.enter(name, keys)

    def ends(self) -> None:
        """See `Follower`."""
        self.recorder.ends()

    def saves(self, key: int, count: int) -> bool:
        """See `Follower`."""
        self.recorder.saves(key, count)
        return True

    def stays(self, key: int, count: int) -> None:
        """See `Follower`."""
        self.recorder.stays(key, count)

    def cannot_again(self, why: str) -> None:
        """See `Follower`."""
        self.recorder.cannot_again(why)

    def leave(self, group: _native.Group | None, key: int, count: int) -> None:
        """See `Follower`."""
        self.recorder.leave(key, count)
        if group is not None:
            group.start_offload()
            group.wait_offload()

    def reaches(self, layer: int) -> None:
        """See `Follower`."""
        self.recorder.reaches(layer)

    def over(self) -> None:
        """See `Follower`."""
        self.recorder.over()


class Planned:
    """A step that follows a plan."""

    def __init__(self, plan: _native.Plan, swaps: list[Swaps], grown: Callable[[str], None]) -> None:
        self._gates = plan.gates()
        self._swaps = swaps
        self._grown = grown  # told of a layer that saves more than the trace says
        self._groups: dict[int, _native.Group] = {}
        self._leaving: list[tuple[_native.Group, int]] = []
        self.layer = -1
        self._names: dict[int, str] = {}
        self._bytes = 0  # of what leaves of this layer
        self._output = self._reads = 0
        self._follows = True  # the step is the one that was planned
        self._started = time.perf_counter()
        self.seconds = 0.0  # once backward has ended

    # ---- forward

    def enter(self, name: str, keys: frozenset[int]) -> None:
        """See `Follower`."""
        self.layer += 1
        self._names, self._bytes = {}, 0
        self._reads = self._output if self._output in keys else 0
        in_plan = self.layer < len(self._swaps) and self._swaps[self.layer].name == name
        self._follows = self._follows and in_plan and self._gates.reach("F", self.layer)
        self._make_room()

    def ends(self) -> None:
        """See `Follower`."""

    def saves(self, key: int, count: int) -> bool:
        """See `Follower`."""
        name = self._names.get(key)
        fresh = name is None
        if name is None:
            name = "in" if key == self._reads and key else f"s{len(self._names)}"
            self._names[key] = name
        leaves = not self._follows or self._swaps[self.layer].leaves(name, count, self._grows)
        if leaves and fresh:
            self._bytes += count
        return leaves

    def stays(self, key: int, count: int) -> None:
        """See `Follower`."""

    def cannot_again(self, why: str) -> None:
        """See `Follower`."""

    def _grows(self, layer: str) -> None:
        # The gates know other sizes: what is left of the step goes one layer at a time, as if it were recorded.
        self._follows = False
        self._grown(layer)

    def leave(self, group: _native.Group | None, key: int, count: int) -> None:
        """See `Follower`."""
        self._output = key
        if group is None:
            return
        self._groups[self.layer] = group
        group.start_offload()
        if not self._follows:
            self._make_room()
            group.wait_offload()
            return
        self._gates.leaving(self._bytes)
        self._leaving.append((group, self._bytes))

    # ---- the gates

    def _make_room(self) -> None:
        """Lets go of what has left, and waits until the operation that was reached fits."""
        while self._leaving:
            group, count = self._leaving[0]
            if self._follows and self._gates.may_start() and not group.offload_done():
                return
            del self._leaving[0]
            if group.phase == "offloading":
                group.wait_offload()
            self._gates.left(count)

    def _bring(self) -> None:
        """Starts the loads whose turn it is."""
        while self._follows and (layer := self._gates.next_load()) is not None:
            group = self._groups.get(layer)
            if any(leaving is group for leaving, _ in self._leaving):
                return
            self._gates.loading(layer)
            if group is not None and group.phase == "away":
                group.start_load()

    @property
    def recomputes(self) -> bool:
        """Whether the layer that runs is to be run again in backward."""
        return self._follows and self._swaps[self.layer].recompute

    # ---- backward

    def reaches(self, layer: int) -> None:
        """See `Follower`."""
        # Between running a layer again and its backward nobody asks, so both have to fit.
        for phase in ("R", "B") if self._follows and self._swaps[layer].recompute else ("B",):
            self._follows = self._follows and self._gates.reach(phase, layer)
            self._make_room()
        if self._follows:
            self._gates.loading(layer)
            group = self._groups.get(layer)
            if group is not None and group.phase == "away":
                group.start_load()
        self._bring()

    def over(self) -> None:
        """See `Follower`."""
        self.seconds = time.perf_counter() - self._started
        self._groups.clear()


class Swaps:
    """What a plan does with one layer: its own storages by name, and `in` for what the layer before returns."""

    def __init__(self, name: str, recompute: bool, names: frozenset[str], sizes: dict[str, int]) -> None:
        self.name = name
        self.recompute = recompute
        self._names = names
        self._sizes = sizes

    def leaves(self, name: str, count: int, grown: Callable[[str], None]) -> bool:
        """Whether a storage of so many bytes leaves. What the trace does not know, or not so large, does."""
        if self.recompute and name != "in":
            return bool(self._names - {"in"})  # an input of the model: a checkpoint keeps nothing else
        if count > self._sizes.get(name, -1):
            grown(self.name)
            return True
        return name in self._names


class Planner:
    """What a session with a budget or a plan knows of its model."""

    def __init__(
        self, framework: Framework, hub: _native.Hub, open_hub: OpenHub, memory: int | str | None, text: str | None
    ) -> None:
        self._framework = framework
        self._hub = hub
        self._open_hub = open_hub
        self._memory = memory
        self._text = text
        self._recorded: Recorded | None = None
        self._recordings = 0
        self._planned: Planned | None = None
        self._late = 0
        self._link: Link | None = None
        self._swaps: list[Swaps] = []
        self._grew: set[str] = set()
        self._most: dict[tuple[str, str], int] = {}  # bytes of storages in all recorded steps
        self._failed = 0
        self.trace: _native.Trace | None = None
        self.plan: _native.Plan | None = None

    def begin(self, model: Any) -> Recorded | Planned:
        """A step begins.

        Raises `NoRoomError` if no plan fits the budget, `SettingError` if the plan that was given does not fit
        the model.
        """
        self._look_back(model)
        if self.plan is None or self._recordings < RECORDED:
            self._recorded = Recorded(self._hub, self._framework.settle(model))
            return self._recorded
        self._planned = Planned(self.plan, self._swaps, self._grew.add)
        return self._planned

    def recomputes(self) -> bool:
        """Whether the plan has the layer that runs, which a step has entered, run a second time."""
        return self._planned is not None and self._planned.recomputes

    def words(self) -> dict[str, _layers.Word]:
        """What the plan does with each layer, in a word."""
        layers = self.plan.layers() if self.plan is not None else []
        words: dict[str, _layers.Word] = {}
        for name, again, names in layers:  # of a layer that a step calls more than once, the first call's
            words.setdefault(name.split("#")[0], "recompute" if again else "swap" if names else "keep")
        return words

    def told(self) -> dict[str, Any] | None:
        """The plan, for people; None if there is none."""
        if self.plan is None:
            return None
        layers = [{"name": name, "recompute": again, "swap": swapped} for name, again, swapped in self.plan.layers()]
        return {
            "memory_bytes": self.plan.memory_bytes,
            "predicted_peak_bytes": self.plan.predicted_peak_bytes,
            "predicted_step_ms": self.plan.predicted_step_ms,
            "layers": layers,
        }

    # ---- between steps

    def _look_back(self, model: Any) -> None:
        recorded, self._recorded = self._recorded, None
        planned, self._planned = self._planned, None
        if recorded is not None:
            if recorded.recorder.is_complete:
                self._recordings += 1
                self._failed = 0
                self._make(recorded.recorder, model)
            else:
                self._failed += 1
        elif self._grew:
            self._grew.clear()
            self._recordings = RECORDED - 1  # one more, on a machine that is warm
        elif planned is not None and planned.seconds:
            self._compare(planned, model)

    def _compare(self, planned: Planned, model: Any) -> None:
        """Measures the link again if steps have become slower than predicted."""
        assert self.plan is not None and self._link is not None
        self._late = self._late + 1 if planned.seconds * 1e3 > (1 + DRIFT) * self.plan.predicted_step_ms else 0
        if self._late < LATE:
            return
        self._late = 0
        before, self._link = self._link, self._framework.measure(self._open_hub, model)
        if before.differs(self._link, DRIFT) and self._text is None:
            self._recordings = RECORDED - 1

    def _make(self, recorder: Recorder, model: Any) -> None:
        if self._link is None:
            self._link = self._framework.measure(self._open_hub, model)
        recorder.grow(self._most)
        static = self._framework.static_bytes(model) + recorder.beside_bytes()
        recording = _native.Recording(self._framework.source, static, int(time.time()))
        link = self._link
        tier, capacity = self._hub.tier, self._hub.capacity_bytes
        recording.tier(tier, capacity, link.out_per_s, link.in_per_s, link.latency_ns)
        for number, layer in enumerate(recorder.layers):
            why_not = layer.why_not or self._framework.why_not(model, layer.name.split("#")[0])
            storages = recorder.storages(number)
            recording.layer(layer.name, layer.forward_ns, max(layer.backward_ns, 1), 0, 0, storages, why_not)
        recording.fixed(recorder.fixed_ns)
        self.trace = recording.finish()
        if self._text is not None:
            self.plan = _native.Plan.parse(self.trace, self._text)
        else:
            assert self._memory is not None
            memory = self._memory if isinstance(self._memory, int) else self.trace.budget(self._memory)
            self.plan = _native.Plan.make(self.trace, memory)
        self._swaps = _swaps(self.plan, recorder)

    def table(self) -> list[tuple[str, str]]:
        """Rows for people."""
        if self.plan is None:
            why = "recording" if self._failed < 2 else "no backward came to the first layer, so all are swapped"
            return [("plan", f"none yet: {why}")]
        layers = self.plan.layers()
        swapped = sum(bool(names) for _, _, names in layers)
        recomputed = sum(recompute for _, recompute, _ in layers)
        return [
            ("budget", f"{size(self.plan.memory_bytes)}: {self._framework.counted}"),
            ("plan", f"{swapped} of {len(layers)} layers swap, {recomputed} are recomputed"),
            ("predicted", f"{size(self.plan.predicted_peak_bytes)}, {self.plan.predicted_step_ms:.0f} ms a step"),
        ]


def _swaps(plan: _native.Plan, recorder: Recorder) -> list[Swaps]:
    result = []
    border = False  # the layer before returns something that is swapped
    for (name, recompute, swapped), layer in zip(plan.layers(), recorder.layers, strict=True):
        names = {*swapped} - {"out"} | ({"in"} if border else set())
        sizes = {saved.name: saved.bytes for saved in layer.saved.values()}
        result.append(Swaps(name, recompute, frozenset(names), sizes))
        border = "out" in swapped
    return result


def check_memory(memory: object) -> int | str:
    """A budget as `session(memory=…)` takes it."""
    if isinstance(memory, bool) or not isinstance(memory, (int, str)):
        raise SettingError(f"memory={memory!r} is a {type(memory).__name__}", 'it takes bytes, or "1.5GiB", or "40%"')
    if isinstance(memory, str):
        _native.check_budget(memory)
    elif not 0 < memory <= MOST:
        why = "leaves nothing" if memory <= 0 else f"is more than {MOST}"
        raise SettingError(f"memory={memory} {why}", "give the bytes that a step may use")
    return memory


def plan_text(file: object) -> str:
    """The text of a plan's file."""
    if not isinstance(file, (str, os.PathLike)):
        raise SettingError(f"plan={file!r} is a {type(file).__name__}", "plan takes the path of a file")
    try:
        text = Path(file).read_text()
    except (OSError, ValueError) as error:
        raise SettingError(f"the plan {os.fspath(file)} can't be read: {error}", "save_plan() writes one") from error
    _native.check_plan(text)
    return text


def write_whole(file: object, text: str | None, what: str) -> None:
    """Writes a file, or leaves what is there."""
    if not isinstance(file, (str, os.PathLike)):
        raise SettingError(f"a {type(file).__name__} is no file", "pass the path of the file to write")
    if text is None:
        hint = "open the session with memory= or plan=, and train two steps"
        raise PhaseError(f"there is no {what} yet", hint)
    text_of_path = os.fsdecode(file)
    path = Path(text_of_path).resolve() if text_of_path else Path()
    if path.exists() and not path.is_file():  # a device, a pipe, a folder
        _write_through(path, text)
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text)
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise SettingError(f"{path} can't be written: {error}", "name a file in a folder that is there") from error


def _write_through(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise SettingError(f"{path} can't be written: {error}", "name a file in a folder that is there") from error
