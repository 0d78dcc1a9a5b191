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

import itertools
import threading
import weakref
from typing import Any

from mindspore import Tensor

from ebbtide.errors import PhaseError
from ebbtide.mindspore._spans import is_lent

_numbers = itertools.count(1)
_lock = threading.Lock()
_here: weakref.WeakValueDictionary[int, Keeper] = weakref.WeakValueDictionary()
_away: weakref.WeakSet[Keeper] = weakref.WeakSet()
PROBE_BYTES = 64


class Keeper:
    """Looks after the storage of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.key = next(_numbers)
        self._tensor = tensor
        self._nbytes = nbytes(tensor)
        self._address = address(tensor)

    @property
    def is_lent(self) -> bool:
        """Whether what was saved for backward is copied from this very memory."""
        return is_lent(self._address)

    # ---- the engine's

    def facts(self) -> tuple[int, int]:
        """The size of the storage, and the version that MindSpore counts."""
        return nbytes(self._tensor), int(self._tensor._version)

    def lend(self) -> int:
        """The address of its bytes."""
        return address(self._tensor)

    def vacate(self) -> None:
        """Its bytes are copied: it is emptied."""
        if self.is_lent:
            raise PhaseError(
                "what was saved for backward is in this memory as well", "keep one of the two on the device"
            )
        _here.pop(self._address, None)
        self._tensor.untyped_storage().resize_(0)
        self._address = 0
        _away.add(self)

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
    return _here.get(at) if at else _probed(tensor)


def _probed(tensor: Tensor) -> Keeper | None:
    """The keeper of a storage that is away: the one whose storage gets memory where this one does."""
    if 0 in tensor.shape or not _away:
        return None
    storage: Any = tensor.untyped_storage()
    storage.resize_(PROBE_BYTES)
    try:
        at = address(tensor)
        return next((keeper for keeper in list(_away) if address(keeper._tensor) == at), None)
    finally:
        storage.resize_(0)


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's storage."""
    return int(tensor.untyped_storage().nbytes())


def address(tensor: Tensor) -> int:
    """The address of a tensor's storage; 0 for one without memory."""
    storage = tensor.untyped_storage()
    return int(storage.data_ptr() or 0) if storage.nbytes() else 0
