"""Runs a training plain and through a session, from the same seed, and compares everything that it leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

import ebbtide.torch

from .bits import Bits, all_bits, differences, tree_bits
from .inputs import seed_all

Step = Callable[[], AbstractContextManager[object]]
Training = Callable[[Any, Step], Any]
"""Trains a model with a `with step():` around each forward; returns tensors to compare besides those of the model."""

ALL: Mapping[str, Literal["swap", "keep", "recompute"]] = {"blocks.*": "swap"}
"""Every block, the last one too."""


@dataclass
class Trained:
    """What a training left: bits by name, and what the session counted."""

    bits: dict[str, tuple[Bits | None, ...]]
    stats: dict[str, int | float] = field(default_factory=dict)

    def unlike(self, other: Trained) -> dict[str, str]:
        """What differs in `other`, by name."""
        assert self.bits.keys() == other.bits.keys()
        found = {name: differences(mine, other.bits[name]) for name, mine in self.bits.items()}
        return {name: text for name, text in found.items() if text is not None}


def left(model: nn.Module, results: Any) -> dict[str, tuple[Bits | None, ...]]:
    """The bits of all that a training leaves, by name."""
    found = {"results": tree_bits(results), "generator": all_bits([torch.get_rng_state()])}
    for name, parameter in model.named_parameters():
        found[name] = all_bits([parameter, parameter.grad])
    for name, buffer in model.named_buffers():
        found[name] = all_bits([buffer])
    return found


def plain(make: Callable[[], nn.Module], training: Training, seed: int = 3) -> Trained:
    """The training in plain torch."""
    seed_all(seed)
    model = make()
    return Trained(left(model, training(model, contextlib.nullcontext)))


def swapped(
    make: Callable[[], nn.Module], training: Training, policy: Any = ALL, *, seed: int = 3, **settings: Any
) -> Trained:
    """The training through a session."""
    seed_all(seed)
    model = make()
    with ebbtide.torch.session(model, policy, **{"tier": "file", "min_bytes": 0, **settings}) as session:
        results = training(model, session.step)
        stats = session.stats()
    return Trained(left(model, results), stats)


def check(
    make: Callable[[], nn.Module], training: Training, policy: Any = ALL, *, enough: int = 50, **settings: Any
) -> dict[str, int | float]:
    """Fails unless the training through a session is the plain one, bit for bit; returns what the session counted.

    `enough`: how many tensors have to be swapped at least, so that keeping everything does not pass.
    """
    expected, got = plain(make, training), swapped(make, training, policy, **settings)
    assert expected.unlike(got) == {}
    assert got.stats["tensors_out"] >= enough, got.stats
    assert got.stats["bytes_in"] <= got.stats["bytes_out"]
    return got.stats
