"""Groups by name, and layers that drive their own: what a script, a schedule or the hooks of layers use.

Knows no framework: each front end makes a `SwapManager` of it, with groups and layers of its own.

**Names and passes.** A name stands for a layer. It may have several groups at a time: one for each pass
in flight and each use of the layer in a pass. A call by name means, of those, the newest that the call
fits: what is saved goes to the newest that is open (a new one, if that has left already), what is loaded
is the newest that is not home yet, since backward runs the other way round.

**Layers.** `set_forward_prefetch_layer(a, b)` declares that b runs right after a. Each declared layer
then makes its group current while its forward runs, sends it out afterwards and waits for the layer
before it, so that at most two layers' tensors are resident. In backward, the gradient of a layer's output
is the signal to start loading the layer before it and to wait for its own group. These signals are hints:
what is asked for and not there is loaded on demand.

Access contract: any thread may use the manager; its tables are behind one lock, under which no user code
runs and no copy is started or waited for. The current group belongs to a thread or task, and so do the calls
of layers that are under way. Hooks do nothing inside a backward, where a forward is a recomputation.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from ebbtide import _defaults, _stats
from ebbtide._chain import LayerCall, Layers, Module
from ebbtide._checks import check_group_name
from ebbtide._native import Group
from ebbtide._regions import GroupOfRegions, Region
from ebbtide.errors import EbbtideError, SettingError

if TYPE_CHECKING:
    from typing_extensions import Self

NOT_HOME = ("open", "offloading", "away", "loading")
# The thread is stored with the name: a new thread starts without a group, also where it inherits context.
Current = ContextVar[tuple[int, str] | None]


class Manager(Generic[Module]):
    """Owns all groups by name. There is one of each front end in a process: constructing it again returns it."""

    _instance: ClassVar[Any]
    _making: ClassVar[threading.Lock]
    _current: ClassVar[Current]

    _lock: threading.RLock
    _groups: dict[str, list[GroupOfRegions]]
    _layers: Layers[Module]
    _warned_missing: bool

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._instance = None
        cls._making = threading.Lock()
        cls._current = ContextVar("ebbtide_group", default=None)
        _stats.at_reset(lambda: cls()._reset())
        os.register_at_fork(after_in_child=cls._in_child)

    def __new__(cls) -> Self:
        """The manager of the process."""
        with cls._making:
            if cls._instance is None:
                made = super().__new__(cls)
                made._lock = threading.RLock()
                made._groups = {}
                made._layers = cls._make_layers()
                made._warned_missing = False
                cls._instance = made
            found: Self = cls._instance
            return found

    # -- what the framework has

    @classmethod
    def _make_layers(cls) -> Layers[Module]:
        """The table of layers."""
        raise NotImplementedError

    @staticmethod
    def _make_group(group_name: str) -> GroupOfRegions:
        """A group of this name."""
        raise NotImplementedError

    # -- what Python asks for

    def __repr__(self) -> str:
        return f"SwapManager({self.active_group_count()} groups)"

    def __deepcopy__(self, memo: object) -> Any:
        return self

    # -- groups by name

    def ensure_group(self, group_name: str) -> Any:
        """The open group of a name, made if there is none or if the one there is has left already.

        Raises:
            SettingError: The name is no text, or empty.
        """
        check_group_name(group_name)
        with self._lock:
            groups = self._pruned(group_name)
            if groups and groups[-1].phase == "open":
                return groups[-1]
            made = self._make_group(group_name)
            made._trip.number = _free_pass(groups)
            self._groups.setdefault(group_name, []).append(made)
            return made

    def add_storage(self, group_name: str, storage: Region) -> None:
        """Adds a region to a group; to a new one of this name, if those that there are have left.

        Raises:
            SettingError: The name has no group, or `storage` is no region.
        """
        self._find(group_name, ("open",))
        self.ensure_group(group_name).add(storage)

    def protect_alias_tensors(self, group_name: str, tensors: object) -> int:
        """Keeps on the device what shares a storage with one of these; returns how many tensors do.

        Args:
            group_name: A name that has a group.
            tensors: Tensors in any nesting of lists, tuples and dicts; anything else is ignored.

        Raises:
            SettingError: The name has no group.
            CopyError: One that is away can't be brought back.
        """
        self._find(group_name, ())
        groups = [group for group in self._named(group_name) if group.phase in NOT_HOME]
        return sum(group.protect_alias_tensors(tensors) for group in groups)

    def launch_offload(self, group_name: str, copy_stream: object | None = None) -> None:
        """Starts the offload of a group.

        Args:
            group_name: A name that has a group.
            copy_stream: Stream of the device to copy on. None: the engine's own.

        Raises:
            SettingError: The name has no group, or `copy_stream` is no stream of the device.
            EbbtideError: As for `SwapGroup.launch_offload`.
        """
        self._find(group_name, ("open",)).launch_offload(copy_stream)

    def wait_offload(self, group_name: str) -> None:
        """Waits for the offload of a group, and frees its memory.

        Args:
            group_name: A name that has a group.

        Raises:
            SettingError: The name has no group.
            PhaseError: No offload of it was started, or it was waited for already.
            ChangedError: A tensor was modified while it left: it stays on the device.
            CopyError: A copy failed: that tensor stays on the device.
            NoRoomError: The tier has no room for it: that tensor stays on the device.
        """
        self._find(group_name, ("offloading",)).wait_offload()

    def launch_load(self, group_name: str, copy_stream: object | None = None) -> None:
        """Starts the load of a group; finishes an offload that is under way first.

        Args:
            group_name: A name that has a group.
            copy_stream: Stream of the device to copy on. None: the engine's own.

        Raises:
            SettingError: The name has no group, or `copy_stream` is no stream of the device.
            PhaseError: The group is not away.
            NoRoomError: The device has no room for it. It can be tried again.
            CopyError: A copy could not be started. It can be tried again.
        """
        self._find(group_name, ("offloading", "away")).launch_load(copy_stream)

    def wait_load(self, group_name: str) -> None:
        """Waits for the load of a group. It is forgotten afterwards.

        Args:
            group_name: A name that has a group.

        Raises:
            SettingError: The name has no group.
            PhaseError: No load of it was started, or it was waited for already.
            CopyError: A copy failed. It can be tried again.
        """
        group = self._find(group_name, ("loading",))
        group.wait_load()
        self._forget(group)

    def release_group_storage(self, group_name: str) -> None:
        """Drops the records of a group that stayed on the device. Quiet if there is none."""
        group = self._newest(group_name, ("open",))
        if group is not None:
            self._forget(group)
            group._give_up()

    def abort_group(self, group_name: str) -> None:
        """Forgets all groups of a name. Copies in flight are waited for, everything goes back.

        A graph whose tensors are away with it can't run backward any more. Quiet if there is none.
        """
        with self._lock:
            groups = self._groups.pop(group_name, [])
        for group in reversed(groups):
            group._give_up()

    def active_group_count(self) -> int:
        """How many groups exist now."""
        self._tidy()
        with self._lock:
            # What is over stays in the tables: a schedule may go on to drive it, to no effect.
            return sum(not group._trip.is_over for groups in self._groups.values() for group in groups)

    # -- the current group

    def get_current_group_name(self) -> str | None:
        """The group that what is saved now belongs to, on this thread or in this task."""
        self._layers.purge(self)
        return self._name_now()

    def set_current_group_name(self, group_name: str | None) -> None:
        """Makes a group current, on this thread or in this task; None: none is."""
        if group_name is not None and not isinstance(group_name, str):
            raise SettingError(f"{group_name!r} is no name of a group", "pass a text, or None for none")
        self._current.set((threading.get_ident(), group_name) if group_name else None)

    def _name_now(self) -> str | None:
        current = self._current.get()
        return current[1] if current is not None and current[0] == threading.get_ident() else None

    @contextmanager
    def group_context(self, group_name: str | None) -> Iterator[None]:
        """Makes a group current for a while; then the outer one is again, also after an exception."""
        outer = self.get_current_group_name()
        self.set_current_group_name(group_name)
        end = self._layers.watching(self, group_name)
        failed = True
        try:
            yield
            failed = False
        finally:
            if end is not None:
                end(failed)
            self.set_current_group_name(outer)

    def is_last_group(self, group_name: str | None = None) -> bool:
        """Whether a group, or the current one, is that of the last layer of a chain. Quiet otherwise."""
        name = self.get_current_group_name() if group_name is None else group_name
        return name is not None and self._layers.is_last_group(name)

    def warn_missing_group_once(self) -> None:
        """Says, once in a process, that something was to be swapped outside of any group."""
        with self._lock:
            warned, self._warned_missing = self._warned_missing, True
        if not warned:
            text = "no group is current: tensors to be swapped stay on the device"
            hint = "declare layers with set_forward_prefetch_layer, or use group_context(name)"
            _defaults.warn(f"{text}; {hint}", stacklevel=4)

    # -- layers

    def set_forward_prefetch_layer(self, first_layer: Module, second_layer: Module) -> None:
        """Declares that `second_layer` runs right after `first_layer`, and lets both drive their groups.

        Pairs may be declared in any order and more than once.

        Raises:
            SettingError: One of them has another neighbour on that side already, or the chain would
                become a circle, or one is no layer. Nothing has changed.
        """
        self._tidy()
        self._layers.follow(self, first_layer, second_layer)

    def unregister_forward_prefetch_hooks(self, module: Module) -> int:
        """Takes the hooks off a layer; returns how many there were.

        Raises:
            SettingError: It is no layer.
        """
        self._layers.check_layer(module)
        return self._layers.unhook(module)

    def unregister_forward_prefetch_layer(self, module: Module | Iterable[Module]) -> None:
        """Takes a layer, or each of a list, out of its chain: hooks, group and marks go.

        Its neighbours follow each other from then on. It can be declared anew. One that is in no chain is
        skipped.

        Raises:
            SettingError: Something of this is no layer. Nothing has changed.
        """
        given: Any = module
        several = isinstance(given, Iterable) and not self._layers.is_layer(given)
        modules = list(given) if several else [given]
        for each in modules:
            self._layers.check_layer(each)
        for each in modules:
            name = self._layers.remove(each)
            if name is not None:
                self.abort_group(name)

    # -- for the wrappers

    def _group_to_pack(self, *, named: bool) -> Group | None:
        """The engine's group for what is saved now; None: it stays.

        `named`: a policy has named the tensor, which then leaves also from the last layer.
        """
        if self._layers.in_backward():
            return None
        name = self.get_current_group_name()
        if name is None:
            self.warn_missing_group_once()
            return None
        if not named and self._layers.is_last_group(name):
            return None
        group: Group = self.ensure_group(name)._native()
        return group

    # -- for the layers

    def _forward_done(self, call: LayerCall, output: object, used: Callable[[], object]) -> None:
        """A layer's forward is over: its group leaves, and the layer before it has left."""
        name, before = call.group_name, self._layers.group_before(call.layer)
        group = self._newest(name, ("open",))
        if group is not None:
            call.group = weakref.ref(group)
            group._keep_users(lambda: [output, used()])
            group.launch_offload()
        if before is not None:
            while (leaving := self._newest(before, ("offloading",))) is not None:
                leaving.wait_offload()

    def _forward_failed(self, call: LayerCall) -> None:
        """An exception left a layer's forward: what it saved is not needed any more."""
        group = self._newest(call.group_name, ("open",))
        if group is not None:
            self._forget(group)
            group._give_up()

    def _backward_begins(self, call: LayerCall) -> None:
        """A layer's backward begins: the layer before it comes back, its own group is home."""
        previous = None if call.previous is None else call.previous.open_group()
        if previous is not None and previous.phase in ("offloading", "away"):
            # A hint: what can't be started is loaded on demand, or says then why it can't be.
            with suppress(EbbtideError):
                previous.launch_load()
        group = call.open_group()
        if group is None:
            return
        self._forget(group)
        if group.phase in NOT_HOME[1:]:
            group._home()
        else:
            group._drop_records()

    def _tidy(self) -> None:
        """Tears down the wiring of layers that are gone."""
        for name in self._layers.bury():
            self.abort_group(name)

    def _reset(self) -> None:
        """`reset()`: every group is given up; layers stay declared."""
        with self._lock:
            names = list(self._groups)
            self._warned_missing = False
        self._layers.forget_names()
        for name in names:
            self.abort_group(name)

    @classmethod
    def _in_child(cls) -> None:
        """A forked child has no groups: the parent's are neither used nor given up there."""
        cls._making = threading.Lock()
        manager = cls._instance
        if manager is not None:
            manager._lock = threading.RLock()
            manager._groups = {}
            manager._layers.forked()
        cls._current.set(None)

    # -- tables

    def _named(self, group_name: str) -> list[GroupOfRegions]:
        with self._lock:
            return list(self._groups.get(group_name, ()))

    def _pruned(self, group_name: str) -> list[GroupOfRegions]:
        """The groups of a name that are not over. A new pass of it begins, so nobody drives those any more."""
        groups = self._groups.get(group_name, [])
        groups[:] = [group for group in groups if not group._trip.is_over]
        if not groups:
            self._groups.pop(group_name, None)
        return groups

    def _newest(self, group_name: str, phases: tuple[str, ...]) -> GroupOfRegions | None:
        fits = (group for group in reversed(self._named(group_name)) if group.phase in phases)
        return next(fits, None)

    def _find(self, group_name: str, phases: tuple[str, ...]) -> GroupOfRegions:
        """The newest group in such a phase; without one the newest, whose refusal says what is wrong."""
        check_group_name(group_name)
        groups = self._named(group_name)
        if not groups:
            raise SettingError(f"there is no group {group_name!r}", "make it with ensure_group first")
        return self._newest(group_name, phases) or groups[-1]

    def _forget(self, group: GroupOfRegions) -> None:
        with self._lock:
            groups = self._groups.get(group.group_name, [])
            if group in groups:
                groups.remove(group)
            if not groups:
                self._groups.pop(group.group_name, None)


def _free_pass(groups: list[GroupOfRegions]) -> int:
    """Numbers the passes in flight of a name: one more than the newest has."""
    return groups[-1]._trip.number + 1 if groups else 0
