"""What the tests of wrappers and checkpoints share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mindspore as ms
import numpy as np
from hand import WIDTH, bits, fresh
from mindspore import Tensor, mint, nn
from mindspore.graph.api import _pynative_executor


def array(*shape: int, seed: int = 0) -> Tensor:
    return Tensor(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def sample(seed: int = 2) -> Tensor:
    return array(8, WIDTH, seed=seed)


BYTES = 8 * WIDTH * 4  # of a sample


@contextmanager
def cleanly() -> Iterator[None]:
    """No group and no counts, before and after; MindSpore is not left in the middle of a forward that failed."""
    fresh()
    yield
    fresh()
    _pynative_executor.clear_res()


def nothing() -> None:
    pass


def gradient(function: Callable[[Tensor], Tensor], x: Tensor, between: Callable[[], object] = nothing) -> list[bytes]:
    """Bits of a function's result and gradient; `between` runs at the end of forward."""

    def forward(x: Tensor) -> Tensor:
        y = function(x)
        between()
        return y

    return [bits(tensor) for tensor in ms.value_and_grad(forward, 0)(x)]


def step(model: nn.Cell, seed: int = 2, run: Callable[[Tensor], Tensor] | None = None) -> list[bytes]:
    """Bits of the loss, and of the gradients of the input and of all parameters."""
    grad = ms.value_and_grad(run or (lambda x: mint.mean(mint.square(model(x)))), 0, list(model.trainable_params()))
    loss, (of_input, of_parameters) = grad(sample(seed))
    return [bits(tensor) for tensor in (loss, of_input, *of_parameters)]
