"""Inputs of torch's own operator database: all of them, or a fixed choice over all operators and dtypes.

The choice does not depend on the order of the database: each input has a rank drawn from the names of its operator and
dtype and its place in the list of samples. First the lowest rank of every operator and dtype is taken, then the second
lowest, until there are enough. An operator that a later torch adds or changes leaves the choice among the others nearly
as it was.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Input:
    """One input of an operator: `index` counts the samples of its dtype."""

    op: Any
    dtype: torch.dtype
    index: int
    sample: Any

    def __str__(self) -> str:
        return f"{self.op.full_name} {short(self.dtype)} #{self.index}"


def short(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def rank(*words: object) -> int:
    """A number drawn from words, the same in every process."""
    text = "\0".join(map(str, words))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def seed_all(seed: int) -> None:
    """Seeds every generator that operators and their samples draw from.

    `torch.manual_seed` also queues a call for each accelerator, with a record of the stack, which takes a millisecond.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)


def operators() -> list[Any]:
    """The operators of the database, by name."""
    module = importlib.import_module("torch.testing._internal.common_methods_invocations")
    return sorted(module.op_db, key=lambda op: str(op.full_name))


def differentiable(op: Any) -> list[torch.dtype]:
    """The dtypes of ours that the operator declares a backward for."""
    if not op.supports_autograd:
        return []
    declared = op.supported_backward_dtypes("cpu")
    return [dtype for dtype in DTYPES if dtype in declared]


def samples(op: Any, dtype: torch.dtype) -> Iterator[Input]:
    """Every sample of an operator and dtype, the same ones in every process and whatever is drawn between them.

    `op.sample_inputs` would wrap each in a record of where it was made, which takes longer than running it.
    """
    made = iter(op.sample_inputs_func(op, CPU, dtype, True))
    for index in itertools.count():
        seed_all(rank(op.full_name, dtype, index) % 2**31)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sample = next(made, None)
        if sample is None:
            return
        yield Input(op, dtype, index, sample)


def everything() -> Iterator[Input]:
    """Every input of every operator."""
    for op in operators():
        for dtype in differentiable(op):
            yield from samples(op, dtype)


def _lowest(op: Any, dtype: torch.dtype, count: int) -> list[tuple[int, Input]]:
    ranked = [(rank(op.full_name, dtype, one.index), one) for one in samples(op, dtype)]
    return sorted(ranked, key=lambda pair: pair[0])[:count]


@functools.cache
def choose(count: int) -> tuple[Input, ...]:
    """`count` inputs over all operators and dtypes, in the order of the operators' names."""
    rounds: list[list[tuple[int, Input]]] = [[], []]
    for op in operators():
        for dtype in differentiable(op):
            for place, pair in enumerate(_lowest(op, dtype, len(rounds))):
                rounds[place].append(pair)
    ordered = [pair for one in rounds for pair in sorted(one, key=lambda pair: pair[0])]
    chosen = [one for _, one in ordered[:count]]
    return tuple(sorted(chosen, key=lambda one: (one.op.full_name, short(one.dtype), one.index)))
