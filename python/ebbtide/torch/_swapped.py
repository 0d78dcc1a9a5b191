"""One tensor of PyTorch that is swapped in place, by name. See `ebbtide._swapped`.

Access contract: that of `ebbtide._swapped`.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ebbtide._native import Group, SavedTensor
from ebbtide._swapped import Place, Swapped, Trip
from ebbtide.torch._pool import native_pool

# What sys.getrefcount counts of a value that only its SwapTensor has: that, and its own argument.
_ONLY_OURS = 2


def movable(value: object) -> torch.Tensor | None:
    """The tensor whose storage would move for a value: of a distributed tensor its local shard.

    None for everything without memory of its own on a device: values that are no tensors, sparse,
    nested, quantized and meta tensors, wrappers of functional transforms.
    """
    if not isinstance(value, torch.Tensor):
        return None
    if is_traceable_wrapper_subclass(value):
        return movable(getattr(value, "_local_tensor", None))
    dense = value.layout is torch.strided and not (value.is_nested or value.is_quantized)
    if not dense or value.device.type == "meta":
        return None
    try:
        value.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
    return value


def base_check_fn(tensor: object) -> bool:
    """Whether a saved tensor may be swapped: it has memory, and is no parameter and no view of one.

    Example:
        >>> base_check_fn(torch.ones(3)), base_check_fn(nn.Linear(2, 2).weight.t())
        (True, False)
    """
    own = movable(tensor)
    if own is None or own.untyped_storage().nbytes() == 0:
        return False
    assert isinstance(tensor, torch.Tensor)
    return not (isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter))


class SwapTensor(Swapped):
    """A value that is swapped if it is a tensor, and passed through if it isn't.

    Registered are the tensor, its label, the size of its storage and its version: an offload of a tensor
    that was resized or modified in place since then is an error. By itself it moves alone; within a
    `Region` or a `SwapGroup` it moves with the others. Calls in a wrong state warn and do nothing.

    Args:
        val: A tensor of any shape and type, or anything else.
        funcname: Label in messages: the operation that saved it.
        group_swap: Whether it may share a host buffer with other small tensors of its group.
        cpu_pool: A `PinnedMemoryPool` for its copy. None: the engine's own.

    Example:
        >>> saved = SwapTensor(torch.randn(1024, 1024), "gelu")
        >>> saved.async_offload(); saved.wait_offload(); saved.state
        'host'
        >>> saved.async_load(); saved.wait_load(); saved.get_val().shape
        torch.Size([1024, 1024])
    """

    def __init__(self, val: Any, funcname: str, group_swap: bool = False, cpu_pool: object | None = None) -> None:
        super().__init__(val, funcname, group_swap, native_pool(cpu_pool))

    @staticmethod
    def _movable(value: object) -> torch.Tensor | None:
        return movable(value)

    def _own(self) -> torch.Tensor:
        own = movable(self._value)
        assert own is not None  # it was when it was registered
        return own

    def _place(self) -> Place:
        own = self._own()
        storage = own.untyped_storage()
        return Place(storage.nbytes(), storage._cdata, own._version)

    def _nbytes(self) -> int:
        return self._own().untyped_storage().nbytes()

    def _address(self) -> int:
        return self._own().untyped_storage().data_ptr()

    def _resize(self) -> None:
        self._own().untyped_storage().resize_(self._bytes)

    def _own_bytes(self) -> int:
        own = self._own()
        return own.numel() * own.itemsize

    def _identity(self) -> tuple[Hashable, ...]:
        own = self._own()
        place = (self._key, own.storage_offset(), tuple(own.shape), own.stride())
        return (*place, own.dtype, own.device, own.is_conj(), own.is_neg())

    def _keep_in(self, group: Group) -> None:
        group.protect([self._own()])

    def _register(self, trip: Trip, *, sole: bool) -> SavedTensor:
        pooled: dict[str, Any] = {} if self._pool is None else {"pool": self._pool}
        own = self._own()
        return trip.open().add(
            own,
            f"{self.funcname} {list(own.shape)} on {own.device}",
            pack=self.group_swap,
            version=self._version,
            nbytes=self._bytes,
            sole=sole,
            # Ours: what more there are belong to users.
            references=1,
            **pooled,
        )

    def _is_used_unseen(self) -> bool:
        """Whether somebody has the distributed tensor that the shard belongs to."""
        if self._own() is self._value:
            return False
        uses = self._value._use_count() if hasattr(self._value, "_use_count") else 2
        return bool(uses > 1 or sys.getrefcount(self._value) > _ONLY_OURS)
