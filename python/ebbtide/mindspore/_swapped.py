"""One tensor of MindSpore that is swapped in place, by name. See `ebbtide._swapped`.

Access contract: that of `ebbtide._swapped`. To register a tensor waits until what makes it has run.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

from mindspore import Tensor

from ebbtide._native import Group, SavedTensor
from ebbtide._swapped import DEVICE, HOST, Place, Swapped, Trip
from ebbtide.errors import SettingError
from ebbtide.mindspore._keepers import Keeper, address, is_foreign, keeper_of, nbytes, version_of


def movable(value: object) -> Tensor | None:
    """The tensor whose storage would move for a value: none for what is no tensor, or has no memory yet."""
    if not isinstance(value, Tensor):
        return None
    try:
        value.untyped_storage().data_ptr()
    except (RuntimeError, ValueError, TypeError):
        return None
    return value


def base_check_fn(tensor: object) -> bool:
    """Whether a saved tensor may be swapped: it has memory, and is no parameter.

    Example:
        >>> base_check_fn(mint.ones((3,))), base_check_fn(nn.Dense(2, 2).weight)
        (True, False)
    """
    own = movable(tensor)
    return own is not None and own.param_info is None and 0 not in own.shape and nbytes(own) > 0


class SwapTensor(Swapped):
    """A value that is swapped if it is a tensor, and passed through if it isn't.

    Registered are the tensor, its label, the size of its storage and its version: an offload of a tensor
    that was resized or modified in place since then is an error. By itself it moves alone; within a
    `Region` or a `SwapGroup` it moves with the others. Calls in a wrong state warn and do nothing.

    Of changes in place only those are found that MindSpore counts (`tensor._version`), which are few: no
    assignment to elements, and no copy into a tensor that was looked at before.

    Its storage is emptied while it is away. MindSpore can't tell who else uses it, and to read an emptied
    storage ends the process: name only what nothing reads meanwhile, and read it with `get_val`.

    Args:
        val: A tensor of any shape and type, or anything else.
        funcname: Label in messages: the operation that saved it.
        group_swap: Taken for scripts that say it; copies go by their own way on every device there is.
        cpu_pool: None: copies go through the engine's own host memory.

    Raises:
        SettingError: `cpu_pool` is something.

    Example:
        >>> saved = SwapTensor(mint.randn((1024, 1024)), "gelu")
        >>> saved.async_offload(); saved.wait_offload(); saved.state
        'host'
        >>> saved.async_load(); saved.wait_load(); saved.get_val().shape
        (1024, 1024)
    """

    def __init__(self, val: Any, funcname: str, group_swap: bool = False, cpu_pool: object | None = None) -> None:
        if cpu_pool is not None:
            raise SettingError(
                f"cpu_pool={cpu_pool!r} can't be used with MindSpore", "leave it out: the engine has host memory"
            )
        own = movable(val)
        self._keeper: Keeper | None = None if own is None else keeper_of(own)
        super().__init__(val, funcname, group_swap, None)

    @staticmethod
    def _movable(value: object) -> Tensor | None:
        return movable(value)

    @property
    def state(self) -> str:
        """`device`, `d2h` (offload under way), `host`, `h2d` (load under way) or `non_tensor`."""
        state = super().state
        # Another registration may have taken its storage away.
        gone = state == DEVICE and self._own_bytes() > 0 and self._nbytes() == 0
        return HOST if gone else state

    def _kept_by(self) -> Keeper:
        assert self._keeper is not None  # it is a tensor
        return self._keeper

    def _place(self) -> Place:
        return Place(nbytes(self._value), self._kept_by().key, version_of(self._value))

    def _nbytes(self) -> int:
        return nbytes(self._value)

    def _address(self) -> int:
        return address(self._value)

    def _resize(self) -> None:
        self._value.untyped_storage().resize_(self._bytes)

    def _own_bytes(self) -> int:
        return int(self._value.nbytes)

    def _identity(self) -> tuple[Hashable, ...]:
        own = self._value
        return (self._key, int(own.storage_offset()), tuple(own.shape), tuple(own.stride()), str(own.dtype))

    def _register(self, trip: Trip, *, sole: bool) -> SavedTensor:
        own, keeper, group = self._value, self._kept_by(), trip.open()
        known = keeper.registered
        if known is not None and known[0]() is trip and not self._duplicate:
            return known[1]  # another view of the same storage, which moves as a whole
        saved = group.look_after(keeper, f"{self.funcname} {list(own.shape)}", self._key)
        keeper.registered = (weakref.ref(trip), saved)
        if own.param_info is not None or keeper.is_in_use or is_foreign(own):
            group.protect_keys([self._key])
        return saved

    def _arrived(self) -> None:
        super()._arrived()
        self._kept_by().registered = None

    def _keep_in(self, group: Group) -> None:
        group.protect_keys([self._key])

    def _is_used_unseen(self) -> bool:
        """Whether something that was saved for backward still lies in this memory."""
        return self._kept_by().is_in_use
