"""Tensors over memory of the engine, for versions of torch without a C interface for that."""

from __future__ import annotations

import ctypes

import torch


def over(address: int, length: int, owner: object) -> torch.Tensor:
    """A tensor of `length` bytes over memory that `owner` keeps alive; no copy is made."""

    class Memory(ctypes.c_uint8 * length):  # type: ignore[misc]
        """An array that can carry its owner."""

    memory = Memory.from_address(address)
    memory.owner = owner
    return torch.frombuffer(memory, dtype=torch.uint8)
