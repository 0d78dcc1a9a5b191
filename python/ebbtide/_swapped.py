"""One tensor that is swapped in place, by name.

A `SwapTensor` remembers a tensor. When it leaves, its storage is emptied; when it comes back the same
storage is filled again, so every view of it is attached to the memory again. Knows no framework: a front
end makes its `SwapTensor` of the class here, and says how a storage of its tensors is looked at and moved.

Access contract: nothing here locks. Whoever drives a tensor or a group (the training thread, the schedule
of a pipeline) does so on one thread at a time; copies run elsewhere and never touch these objects. States
are the engine's and are read from it, so they are right whoever moved the tensor. A `SwapTensor` holds
exactly one reference to its tensor: the engine counts references to prove that nobody else uses it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Container, Hashable, Iterable
from typing import Any, NamedTuple

from ebbtide import _defaults
from ebbtide._native import Group, Pool, SavedTensor
from ebbtide.errors import ChangedError, EbbtideError, PhaseError

DEVICE, D2H, HOST, H2D, NON_TENSOR = "device", "d2h", "host", "h2d", "non_tensor"


class Identity(tuple[Hashable, ...]):
    """What tells registered tensors apart, and which one it belongs to."""

    owner: weakref.ref[Swapped]


class Trip:
    """A group of the engine, opened when it is first needed, and the tensors by name that travel in it."""

    def __init__(self, name: str, number: int = 0) -> None:
        self.name = name
        self.number = number
        self.group: Group | None = None
        self._aboard: list[Swapped] = []
        self._sole = True
        self._load_failed = False

    def open(self) -> Group:
        """The engine's group."""
        if self.group is None:
            self.group = _defaults.hub().open(self.name, self.number)
        return self.group

    @property
    def phase(self) -> str:
        """open, offloading, away, loading, home or closed."""
        return "open" if self.group is None else self.group.phase

    @property
    def is_over(self) -> bool:
        """Whether nobody can ask for anything of it: all is home, or whoever could is gone."""
        if self.group is None:
            return False
        phase = self.group.phase
        return phase in ("home", "closed") or (phase != "open" and self.group.tensors == 0)

    def board(self, tensors: Iterable[Swapped], *, sole: bool) -> None:
        """Registers what can leave. With `sole` only what nothing else uses will be emptied.

        Raises:
            ChangedError: One was resized or modified since it was made. None has been registered.
        """
        self._sole = sole
        boarding = [tensor for tensor in tensors if tensor._can_board()]
        for tensor in boarding:
            tensor._check_unchanged()
        for tensor in boarding:
            tensor._saved = tensor._register(self, sole=sole)
            tensor._trip = self
            self._aboard.append(tensor)

    def depart(self, copy_stream: object | None) -> None:
        """Starts the offload of everything aboard."""
        self.open().start_offload(copy_stream)
        _defaults.pass_on_warnings(4)

    def wait_offload(self) -> None:
        """The offload is over: memory is freed."""
        group = self._started("offload")
        if self._sole:
            for tensor in self._aboard:
                if tensor._is_used_unseen():
                    tensor._keep_in(group)
        try:
            group.wait_offload()
        except EbbtideError:
            # What stayed can leave again. A `SwapGroup` has more aboard than is named, and is loaded first.
            if not self._sole and all(tensor.state == DEVICE for tensor in self._aboard):
                self.give_up()
            raise
        _defaults.pass_on_warnings(4)

    def start_load(self, copy_stream: object | None) -> None:
        """Starts to bring everything back. After a failure it may be called again, or the wait at once."""
        group = self._started("offload")
        failed, self._load_failed = self._load_failed, False
        if failed and group.phase == "loading":
            return  # whoever waits starts what could not be started
        self._load_failed = True
        group.start_load(copy_stream)
        self._load_failed = False
        _defaults.pass_on_warnings(4)

    def wait_load(self) -> None:
        """Everything is back. What travelled by name can travel again, in another group."""
        group = self._started("load")
        try:
            group.wait_load()
        finally:
            self._disembark_if_home(group)
        _defaults.pass_on_warnings(4)

    def need(self) -> None:
        """Everything is back, whatever it takes."""
        group = self.group
        if group is None:
            return
        try:
            if group.phase not in ("home", "closed"):
                group.need()
        finally:
            self._disembark_if_home(group)
        _defaults.pass_on_warnings(4)

    def give_up(self) -> None:
        """Forgets the group; copies in flight are waited for. What is away by name comes back first."""
        group, self.group = self.group, None
        if group is None:
            return
        if self._aboard and group.phase not in ("open", "home", "closed"):
            try:
                group.need()
            except EbbtideError as error:
                _defaults.warn(f"group {self.name} was given up while its tensors were away: {error}", 4)
        group.close()
        for tensor in self._aboard:
            tensor._arrived()
        self._aboard.clear()

    def _disembark_if_home(self, group: Group) -> None:
        if group.phase in ("home", "closed"):
            for tensor in self._aboard:
                tensor._arrived()
            self._aboard.clear()
            self.group = None

    def _started(self, what: str) -> Group:
        if self.group is None:
            hint = "offload, wait, load, wait: each once and in this order"
            raise PhaseError(f"group {self.name} has no {what} to wait for", hint)
        return self.group


class Place(NamedTuple):
    """Where a tensor was when it was registered."""

    nbytes: int  # of its storage
    key: int  # tells storages apart
    version: int


class Swapped:
    """A value that is swapped if it is a tensor, and passed through if it isn't; a front end's `SwapTensor`."""

    def __init__(self, val: Any, funcname: str, group_swap: bool, pool: Pool | None) -> None:
        self.funcname = sys.intern(str(funcname))
        self.group_swap = bool(group_swap)
        self._pool = pool
        self._value = val
        self._is_tensor = self._movable(val) is not None
        self._bytes, self._key, self._version = self._place() if self._is_tensor else Place(0, 0, 0)
        self._kept = self._duplicate = self._restored = False
        self._repeats: Swapped | None = None
        self._trip: Trip | None = None
        self._saved: SavedTensor | None = None

    # -- what the framework has

    @staticmethod
    def _movable(value: object) -> Any:
        """The tensor whose storage would move for a value; None for what has no memory of its own on a device."""
        raise NotImplementedError

    def _place(self) -> Place:
        """Where it is now."""
        raise NotImplementedError

    def _nbytes(self) -> int:
        """Bytes that its storage has now."""
        raise NotImplementedError

    def _address(self) -> int:
        """The address of its storage; 0 for one without memory."""
        raise NotImplementedError

    def _resize(self) -> None:
        """Gives its storage the size back that it had."""
        raise NotImplementedError

    def _identity(self) -> tuple[Hashable, ...]:
        """What makes two registrations the same."""
        raise NotImplementedError

    def _own_bytes(self) -> int:
        """Bytes of its elements."""
        raise NotImplementedError

    def _register(self, trip: Trip, *, sole: bool) -> SavedTensor:
        """Gives it to the group of the engine that it is to travel in."""
        raise NotImplementedError

    def _keep_in(self, group: Group) -> None:
        """Has a group keep its storage on the device."""
        raise NotImplementedError

    def _is_used_unseen(self) -> bool:
        """Whether somebody uses it of whom the engine can't know."""
        return False

    # -- what it is

    @property
    def state(self) -> str:
        """`device`, `d2h` (offload under way), `host`, `h2d` (load under way) or `non_tensor`."""
        if not self._is_tensor:
            return NON_TENSOR
        if self._saved is not None:
            state = self._saved.state
            lost = state == DEVICE and self._nbytes() < self._bytes
            return HOST if lost else state
        return DEVICE if self._repeats is None else self._repeats.state

    @property
    def is_slice(self) -> bool:
        """Whether its own bytes differ from its storage's: a view of something larger."""
        return self._is_tensor and self._own_bytes() != self._bytes

    def get_val(self) -> Any:
        """The value.

        Raises:
            PhaseError: It is away or on its way; names the state.
        """
        state = self.state
        if state in (DEVICE, NON_TENSOR):
            return self._value
        hint = "load it and wait for the load first"
        raise PhaseError(f"`{self.funcname}` was read in state {state}, not {DEVICE}", hint)

    def dedup_key(self) -> Identity | None:
        """What makes two registrations the same: storage, place in it, sizes, strides and type."""
        if not self._is_tensor:
            return None
        identity = Identity(self._identity())
        identity.owner = weakref.ref(self)
        return identity

    def mark_duplicate_swap(self, repeats: Swapped | None = None) -> None:
        """Declares it a repeat: it has no copy of its own and shows the state of what it repeats."""
        if self._is_tensor and repeats is not self:
            self._duplicate = True
            self._repeats = repeats

    def __repr__(self) -> str:
        if not self._is_tensor:
            return f"SwapTensor(`{self.funcname}`, {NON_TENSOR}, {type(self._value).__name__})"
        state = self.state
        kind = "duplicate" if self._duplicate else "not a duplicate"
        value = "with a device value" if state in (DEVICE, D2H) else "without a device value"
        return f"SwapTensor(`{self.funcname}`, {state}, {kind}, {value})"

    # -- protection

    def protect_if_aliases(self, storage_ptrs: Container[int]) -> bool:
        """Keeps it on the device, or brings it back, if its storage is one of these.

        Args:
            storage_ptrs: Addresses of storages (`tensor.untyped_storage().data_ptr()`), or what tells
                storages apart also while they are empty (in PyTorch `tensor.untyped_storage()._cdata`).

        Returns:
            Whether it is.
        """
        if not self._is_tensor:
            return False
        # Memory that was freed has no address.
        address = self._address()
        if self._key not in storage_ptrs and not (address and address in storage_ptrs):
            return False
        self._kept = True
        if self._saved is not None and self._trip is not None:
            self._keep_in(self._trip.open())
        return True

    # -- moving

    def async_offload(self) -> None:
        """Starts to copy it out. From `device` only."""
        if self._passive() or not self._expect("start an offload", DEVICE):
            return
        trip = Trip(f"`{self.funcname}`")
        try:
            trip.board([self], sole=False)
            trip.depart(None)
        except BaseException:
            trip.give_up()
            raise

    def wait_offload(self) -> None:
        """Finishes the offload: frees the device memory. From `d2h`; nothing to do in `host`."""
        if not self._passive() and self.state != HOST and self._expect("finish an offload", D2H):
            self._travel().wait_offload()

    def resize_device_storage(self) -> None:
        """Gives the storage its size back, in bytes, without content. From `host`, once."""
        if self._passive() or not self._expect("restore a storage", HOST) or self._restored:
            return
        self._resize()
        self._restored = True

    def async_load(self) -> None:
        """Starts to bring it back, into the storage it came from. From `host` only."""
        if not self._passive() and self._expect("start a load", HOST):
            self._travel().start_load(None)

    def async_group_load(self) -> None:
        """The same for one that shares a host buffer with others, whose storage was restored before.

        Raises:
            PhaseError: Its storage is still empty; names the bytes wanted and those there are.
        """
        if self._passive() or not self._expect("start a load", HOST):
            return
        actual = self._nbytes()
        if actual < self._bytes:
            text = f"`{self.funcname}` needs a storage of {self._bytes} bytes, its has {actual}"
            raise PhaseError(text, "call resize_device_storage() first")
        self._travel().start_load(None)

    def wait_load(self) -> None:
        """Finishes the load and gives the host buffer back. From `h2d`; nothing to do in `device`."""
        if self._passive() or self.state == DEVICE:
            return
        loading = self._trip is not None and self._trip.phase == "loading"
        if loading or self._expect("finish a load", H2D):
            self._travel().wait_load()

    def release_cpu_buffer(self) -> None:
        """Drops the host copy, unless it is the only one: then it warns and does nothing."""
        if not self._passive() and self.state != DEVICE:
            self._expect("drop the host copy", DEVICE)

    # -- parts

    def _passive(self) -> bool:
        """Whether there is nothing of its own to move."""
        return not self._is_tensor or self._duplicate or self._kept

    def _can_board(self) -> bool:
        """Repeats board as well: their references to the tensor are none of a stranger."""
        free = self._is_tensor and not self._kept and self._saved is None
        return free and self._bytes > 0 and self._own_bytes() > 0

    def _can_leave(self) -> bool:
        if not self._is_tensor or self._kept:
            return False
        there = self._duplicate or self._expect("start an offload", DEVICE)
        return there and self._can_board()

    def _expect(self, what: str, expected: str) -> bool:
        state = self.state
        if state != expected:
            text = f"`{self.funcname}`: can't {what} in state {state}, only in {expected}"
            _defaults.warn(text, stacklevel=3)
        return state == expected

    def _check_unchanged(self) -> None:
        size, _, version = self._place()
        hint = "don't resize or modify a saved tensor in place before backward"
        if size != self._bytes:
            text = f"`{self.funcname}` had a storage of {self._bytes} bytes when it was registered, has {size}"
            raise ChangedError(text, hint)
        if version != self._version:
            text = f"`{self.funcname}` was modified in place: its version was {self._version}, is {version}"
            raise ChangedError(text, hint)

    def _travel(self) -> Trip:
        if self._trip is None:
            raise PhaseError(f"`{self.funcname}` moves with what it repeats", "drive that one")
        return self._trip

    def _arrived(self) -> None:
        self._saved = self._trip = None
        self._restored = False
