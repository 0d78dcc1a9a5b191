"""The bytes of tensors: whether two have the same, whatever they mean."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable

import mindspore as ms
from mindspore import Tensor


def fingerprint(tensors: Iterable[Tensor]) -> bytes:
    """A hash of shapes, types and bytes. Waits until they have been computed."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
        with ms._no_grad():
            dense = tensor if tensor.is_contiguous() else tensor.contiguous()
        if tensor.nbytes:
            found.update(_memory(dense))
    return found.digest()


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits, NaNs and the sign of zero included."""
    return fingerprint([one]) == fingerprint([other])


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a tensor without gaps, as long as it lives."""
    # Tensor.asnumpy() knows neither bfloat16 nor 8-bit floats.
    start = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.itemsize
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(start))
