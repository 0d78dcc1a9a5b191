"""Tensors that consist of other tensors: a distributed tensor and its local shard, for example.

Torch describes such a subclass by ``__tensor_flatten__``: names of attributes that hold tensors, and a context
from which ``__tensor_unflatten__`` makes the whole again. The native pack hook saves the parts.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from ebbtide._native import unpack

Whole = tuple[Any, Any, torch.Size, tuple[int, ...], dict[str, Any]]
Parts = tuple[list[tuple[str, torch.Tensor]], Whole]


def split(tensor: torch.Tensor) -> Parts | None:
    """The parts of a tensor, and what is needed to join them. ``None`` for what does not consist of tensors."""
    kind = type(tensor)
    # The ragged sizes of a nested tensor are known by the identity of its offsets: it can't be put together again.
    if tensor.is_nested or not hasattr(kind, "__tensor_flatten__") or not hasattr(kind, "__tensor_unflatten__"):
        return None
    with torch.no_grad():
        names, context = cast(Any, tensor).__tensor_flatten__()
        values = {name: getattr(tensor, name) for name in names}
    parts = [(name, value) for name, value in values.items() if isinstance(value, torch.Tensor)]
    if not parts:
        return None
    # A distributed tensor names its mesh of devices as well, for example.
    others = {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)}
    return parts, (kind, context, tensor.size(), _strides(tensor), others)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    try:
        return tuple(tensor.stride())
    except RuntimeError:  # jagged layouts have none
        return ()


def join(packed: tuple[list[tuple[str, object]], Whole]) -> torch.Tensor:
    """The tensor again, from handles of its parts."""
    handles, (kind, context, size, strides, others) = packed
    inner = others | {name: unpack(handle) for name, handle in handles}
    return cast(torch.Tensor, kind.__tensor_unflatten__(inner, context, size, strides))
