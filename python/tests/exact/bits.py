"""Bits of tensors: snapshots that compare byte for byte, so that NaN payloads and -0.0 count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

COMPRESSED_ROWS = (torch.sparse_csr, torch.sparse_bsr)
COMPRESSED_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


@dataclass(frozen=True)
class Bits:
    """What a tensor was at one moment: kind, dtype, shape, strides and the bytes of its logical elements."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    data: bytes
    parts: tuple[Bits, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.dtype} {self.shape} strides {self.stride}, {len(self.data)} bytes"


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of the logical elements of a strided tensor, in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.numel() == 0:
        return b""
    # `contiguous` keeps odd strides of dimensions of size 1.
    rows = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)
    return bytes(rows.view(-1).view(torch.uint8).numpy().tobytes())


def _parts(tensor: torch.Tensor) -> tuple[str, tuple[torch.Tensor, ...]]:
    """Kind of an unusual tensor and the strided tensors it is made of."""
    if tensor.is_nested:
        return "nested", tuple(tensor.unbind())
    if tensor.layout is torch.sparse_coo:
        # The accessors without underscore refuse tensors that are not coalesced.
        return "sparse", (tensor._indices(), tensor._values())
    if tensor.layout in COMPRESSED_ROWS:
        return "sparse", (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in COMPRESSED_COLUMNS:
        return "sparse", (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    if tensor.is_quantized:
        return "quantized", (tensor.int_repr(),)
    return "dense", ()


def bits(tensor: torch.Tensor) -> Bits:
    """Snapshot of any tensor."""
    tensor = tensor.detach()
    kind, parts = _parts(tensor)
    if kind != "dense":
        shape = () if tensor.is_nested else tuple(tensor.shape)
        return Bits(kind, tensor.dtype, shape, (), b"", tuple(bits(part) for part in parts))
    if tensor.is_meta:
        return Bits("meta", tensor.dtype, tuple(tensor.shape), tensor.stride(), b"")
    return Bits("dense", tensor.dtype, tuple(tensor.shape), tensor.stride(), raw(tensor))


def all_bits(values: Iterable[torch.Tensor | None]) -> tuple[Bits | None, ...]:
    """Snapshots of many tensors; None stays None."""
    return tuple(None if value is None else bits(value) for value in values)


def tree_bits(tree: Any) -> tuple[Bits | None, ...]:
    """Snapshots of the tensors in nested lists, tuples and dicts."""
    return all_bits(leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _first_difference(one: bytes, other: bytes) -> str:
    count = sum(a != b for a, b in zip(one, other, strict=True))
    first = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    return f"{count} of {len(one)} bytes differ, the first at {first}"


def difference(expected: Bits | None, got: Bits | None) -> str | None:
    """What differs between two snapshots, in words; None if nothing does."""
    if expected == got:
        return None
    if expected is None or got is None:
        return f"expected {expected}, got {got}"
    facts = ("kind", "dtype", "shape", "stride")
    if any(getattr(expected, fact) != getattr(got, fact) for fact in facts):
        return f"expected {expected}, got {got}"
    if expected.data != got.data:
        return f"{expected}: {_first_difference(expected.data, got.data)}"
    return "parts: " + str(differences(expected.parts, got.parts))


def differences(expected: Sequence[Bits | None], got: Sequence[Bits | None]) -> str | None:
    """What differs between two lists of snapshots; None if nothing does."""
    if len(expected) != len(got):
        return f"expected {len(expected)} tensors, got {len(got)}"
    found = [
        f"tensor {i}: {text}"
        for i, (a, b) in enumerate(zip(expected, got, strict=True))
        if (text := difference(a, b)) is not None
    ]
    return "; ".join(found) if found else None


def assert_same(expected: Any, got: Any, what: str = "") -> None:
    """Fails unless two trees of tensors (or of snapshots) hold the same bits."""
    text = differences(_snapshots(expected), _snapshots(got))
    assert text is None, f"{what}: {text}" if what else text


def _snapshots(tree: Any) -> list[Bits | None]:
    leaves = tree_leaves(tree, is_leaf=lambda leaf: leaf is None or isinstance(leaf, Bits))
    return [bits(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
