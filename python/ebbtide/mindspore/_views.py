"""How a tensor lies in its storage, and how it is made again over other memory.

A *look* at a tensor waits until MindSpore has run what was asked for before, since only then does a storage have
its address. So it is taken once a region is over, never while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import mindspore as ms
from mindspore import Tensor, mint

from ebbtide._verify import leaves


@dataclass(frozen=True)
class View:
    """A tensor without its bytes. Offsets and strides are in elements."""

    storage: int  # the address of its storage while it was looked at
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: ms.Type
    itemsize: int

    @property
    def reach(self) -> tuple[int, int]:
        """The elements of the storage from its first to behind its last; none for a tensor without elements."""
        if 0 in self.sizes:
            return self.offset, self.offset
        last = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return self.offset, self.offset + last + 1

    def over(self, base: Tensor, first: int) -> Tensor:
        """The tensor again, over one of a single dimension that starts with the storage's element `first`."""
        at = self.offset - first
        with ms._no_grad():
            start, end = self.reach
            order = _dense_order(self.sizes, self.strides)
            if order is None:
                made = mint.empty((0,), dtype=self.dtype)
                return cast(Tensor, made.set_(base.untyped_storage(), at, self.sizes, self.strides))
            part = base if (at, end - start) == (0, base.shape[0]) else base[at : at + end - start]
            dense = part.view(tuple(self.sizes[axis] for axis in order))
            if order == tuple(range(len(order))):
                return cast(Tensor, dense)
            back = tuple(order.index(axis) for axis in range(len(order)))
            return cast(Tensor, dense.permute(back))


def look(tensor: Tensor) -> View:
    """Where a tensor is and how it lies there."""
    return View(
        storage=tensor.untyped_storage().data_ptr(),
        offset=int(tensor.storage_offset()),
        sizes=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        dtype=tensor.dtype,
        itemsize=int(tensor.itemsize),
    )


def keys_of(tree: object) -> frozenset[int]:
    """The addresses of storages in dicts, lists and tuples."""
    return frozenset(int(tensor.untyped_storage().data_ptr()) for _, tensor in leaves(tree, Tensor)) - {0}


def returned(output: object) -> tuple[int, int]:
    """The storage of a layer's first output and its bytes, if it needs a gradient; else zeros."""
    tensor = next((tensor for _, tensor in leaves(output, Tensor)), None)
    if tensor is None or not tensor._requires_grad:
        return 0, 0
    storage = tensor.untyped_storage()
    return int(storage.data_ptr()), int(storage.nbytes())


def _dense_order(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """The dimensions from the slowest to the fastest, if the elements then lie without gaps; None if they don't."""
    # Of those with one element the stride says nothing; they stay where they stand.
    order = sorted(range(len(sizes)), key=lambda axis: (-strides[axis], -sizes[axis], axis))
    expected = 1
    for axis in reversed(order):
        if sizes[axis] != 1 and strides[axis] != expected:
            return None
        expected *= sizes[axis]
    ordered = tuple(range(len(sizes)))
    return ordered if _is_contiguous(sizes, strides) else tuple(order)


def _is_contiguous(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
