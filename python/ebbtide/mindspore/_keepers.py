"""Storages that are emptied in place, for tensors that users name by hand.

A *keeper* looks after one storage for the engine: it empties it when its bytes are copied, and fills the same storage
again, so that every view is attached to the memory again. Reading an emptied storage ends the process, so who names
a tensor says that nothing reads it meanwhile; what can be known to be in use is kept (`Group.protect_keys`).

MindSpore makes a new object for a storage each time that one looks, so what tells storages apart is their address,
as long as they have one. A keeper is found by it while its storage is here, and has a number of its own as its key,
since memory that was freed is at once another's.

Access: the table belongs to the threads that register tensors, and is behind a lock, under which nothing of the
engine is called. The methods of a keeper are called by the engine, under its lock and with the GIL.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from typing import Any

from mindspore import Tensor

from ebbtide._native import SavedTensor
from ebbtide.errors import PhaseError
from ebbtide.mindspore._region import stays
from ebbtide.mindspore._spans import is_lent

_numbers = itertools.count(1)
_lock = threading.Lock()
_here: weakref.WeakValueDictionary[int, Keeper] = weakref.WeakValueDictionary()
_away: weakref.WeakSet[Keeper] = weakref.WeakSet()
PROBE_BYTES = 64
STEP, HEAD, PAGE = 512, 16, 4096


class Keeper:
    """Looks after the storage of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.key = next(_numbers)
        self.registered: tuple[weakref.ref[object], SavedTensor] | None = None  # by whom, and as what
        self._tensor = tensor
        self._nbytes = nbytes(tensor)
        self._address = address(tensor)

    @property
    def is_in_use(self) -> bool:
        """Whether something that was saved for backward still lies in this very memory."""
        at = address(self._tensor)
        return is_lent(at) or stays(at)

    # ---- the engine's

    def facts(self) -> tuple[int, int]:
        """The size of the storage, and the version that MindSpore counts."""
        return nbytes(self._tensor), version_of(self._tensor)

    def lend(self) -> int:
        """The address of its bytes."""
        return address(self._tensor)

    def vacate(self) -> None:
        """Its bytes are copied: it is emptied."""
        if self.is_in_use:
            raise PhaseError(
                "what was saved for backward is in this memory as well", "keep one of the two on the device"
            )
        storage = self._tensor.untyped_storage()
        storage.resize_(0)
        if _here.get(self._address) is self:
            del _here[self._address]
        if storage.data_ptr():  # nothing was freed: it is another's, and `is_foreign` has not seen it
            self._take_back(storage, int(storage.data_ptr()))
            raise PhaseError("the memory is not MindSpore's own", "name a copy of it, made with tensor.copy()")
        self._address = 0
        _away.add(self)

    def _take_back(self, storage: Any, lost: int) -> None:
        """Fills the storage with what is still at an address that it has lost."""
        content = ctypes.string_at(lost, self._nbytes)
        storage.resize_(self._nbytes)
        self._address = int(storage.data_ptr())
        ctypes.memmove(self._address, content, self._nbytes)
        _here[self._address] = self

    def allocate(self) -> int:
        """Memory for its bytes, unless it has been given some already."""
        storage = self._tensor.untyped_storage()
        if storage.nbytes() != self._nbytes:
            storage.resize_(self._nbytes)
        _away.discard(self)
        self._address = address(self._tensor)
        _here[self._address] = self
        return self._address

    def arrive(self) -> None:
        """Its bytes are there, or never left."""

    def retract(self) -> None:
        """That memory is not needed."""
        self.vacate()


def keeper_of(tensor: Tensor) -> Keeper:
    """The keeper of a tensor's storage, made if there is none."""
    with _lock:
        found = find(tensor)
        if found is None:
            found = Keeper(tensor)
            if found._address:
                _here[found._address] = found
        return found


def find(tensor: Tensor) -> Keeper | None:
    """The keeper of a tensor's storage."""
    at = address(tensor)
    if not at:
        return _probed(tensor)
    found = _here.get(at)
    # Whoever assigns to a tensor, or resizes its storage, gives it other memory; what it had may be another's now.
    if found is not None and address(found._tensor) == at:
        return found
    return _away_at(at)  # one that has its size back, but not its content


def _away_at(at: int) -> Keeper | None:
    return next((keeper for keeper in list(_away) if address(keeper._tensor) == at), None)


def _probed(tensor: Tensor) -> Keeper | None:
    """The keeper of a storage that is away: the one whose storage gets memory where this one does."""
    if 0 in tensor.shape or not _away:
        return None
    storage: Any = tensor.untyped_storage()
    storage.resize_(PROBE_BYTES)
    try:
        return _away_at(address(tensor))
    finally:
        storage.resize_(0)


def is_foreign(tensor: Tensor) -> bool:
    """Whether the memory of a storage is not MindSpore's to give up: numpy's, or what a tensor was made of.

    MindSpore doesn't tell; emptying such a storage frees nothing, and a numpy array would share it no more. On a CPU
    MindSpore cuts its memory from large blocks, in steps of 512 bytes behind the 16 with which the C library begins a
    block. What lies elsewhere, or fills a block of the C library by itself, is not its own.
    """
    at, size = address(tensor), nbytes(tensor)
    if not at or str(tensor.device).upper() != "CPU":
        return False
    if at % STEP != HEAD:
        return True
    # Within the page of `at`, so it can be read: what the C library says of the block's size, if one begins here.
    block = ctypes.c_uint64.from_address(at - 8).value & ~7
    return HEAD // 2 <= block - size <= HEAD + PAGE


def version_of(tensor: Tensor) -> int:
    """The changes in place that MindSpore has counted, which on a CPU are few of those that there were."""
    return int(tensor._version)


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's storage."""
    return int(tensor.untyped_storage().nbytes())


def address(tensor: Tensor) -> int:
    """The address of a tensor's storage; 0 for one without memory."""
    storage = tensor.untyped_storage()
    at = int(storage.data_ptr() or 0)
    return at if storage.nbytes() else 0
