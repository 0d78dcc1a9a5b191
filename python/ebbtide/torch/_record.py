"""How storages are told apart, and the tensors among what a layer takes and returns."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def key_of(tensor: torch.Tensor) -> int:
    """What a storage is known by while it is alive; 0 for none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def tensors(tree: object) -> Iterator[torch.Tensor]:
    """The tensors among a layer's inputs or outputs."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from tensors(value)


def keys_of(inputs: object) -> frozenset[int]:
    """The storages among a layer's inputs."""
    return frozenset(key_of(tensor) for tensor in tensors(inputs)) - {0}


def returned(output: object) -> tuple[int, int]:
    """The storage of a layer's first output and its bytes, if it needs a gradient; else zeros."""
    tensor = next(tensors(output), None)
    if tensor is None or not tensor.requires_grad:
        return 0, 0
    return key_of(tensor), tensor.untyped_storage().nbytes()
