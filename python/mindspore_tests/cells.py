"""Small cells that the tests of sessions share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from models import GPT, Size, made


class Dropout(nn.Cell):
    """Dropout whose numbers follow from `ms.set_seed`.

    Those of `nn.Dropout` don't: it keeps a state inside of its kernel, and two plain trainings in one process may
    differ.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def construct(self, x: Tensor) -> Tensor:
        return ops.dropout(x, self.share, self.training)


def made_with_dropout(size: Size) -> GPT:
    """The same model each time, with dropout that can be repeated."""
    model = made(size)
    for block in model.blocks:
        block.drop = Dropout(0.2)
    model.set_train()
    return model


class Chain(nn.Cell):
    """Layers one after the other, each called with what else the chain is."""

    def __init__(self, *layers: nn.Cell) -> None:
        super().__init__()
        self.layers = nn.CellList(list(layers))

    def construct(self, x: Tensor, *more: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, *more)
        return x


class Does(nn.Cell):
    """A layer that does what a function says, with a weight of its own."""

    def __init__(self, function: Callable[..., Tensor], *shape: int, seed: int = 0) -> None:
        super().__init__()
        values = np.random.default_rng(seed).normal(size=shape or (1,)).astype(np.float32)
        self.weight = Parameter(Tensor(values), name="weight")
        self.function = function

    def construct(self, x: Tensor, *more: Any) -> Tensor:
        return self.function(x, self.weight, *more)


def doing(function: Callable[..., Tensor], *shape: int, layers: int = 3) -> Chain:
    """A chain of the same function, with weights of their own."""
    return Chain(*(Does(function, *shape, seed=number) for number in range(layers)))


class Twice(nn.Cell):
    """One layer, called twice, between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.CellList([Does(mixed, 32, 32, seed=number) for number in range(3)])

    def construct(self, x: Tensor) -> Tensor:
        first, second, third = self.layers
        return third(second(second(first(x))))


def mixed(x: Tensor, weight: Tensor) -> Tensor:
    """Saves a square and what it returns."""
    return ops.tanh(mint.matmul(x, weight)) * 0.5 + x


class Unused(nn.Cell):
    """Layers of which a branch goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.CellList([Does(mixed, 32, 32, seed=number) for number in range(4)])

    def construct(self, x: Tensor) -> Tensor:
        self.layers[1](x)  # nobody asks for it
        for number in (0, 2, 3):
            x = self.layers[number](x)
        return x


class Failing(nn.Cell):
    """Goes on with what comes in; fails in forward or in backward if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.where = ""

    def construct(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise Planned("planned")
        return Through(self)(x)


class Planned(Exception):
    """What the tests raise."""


class Through(nn.Cell):
    """The identity, with a backward of its own."""

    def __init__(self, owner: Failing) -> None:
        super().__init__()
        self.__dict__["owner"] = owner

    def construct(self, x: Tensor) -> Tensor:
        return x * 1

    def bprop(self, x: Tensor, out: Tensor, gradient: Tensor) -> tuple[Tensor]:
        if self.__dict__["owner"].where == "backward":
            raise Planned("planned")
        return (gradient,)


class Jitted(nn.Cell):
    """A layer that the graph compiler runs."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(8, 8)

    @ms.jit
    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.dense(x))
