"""What the tests of the functions by hand share."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

import ebbtide.mindspore
from ebbtide import EbbtideWarning, _defaults
from ebbtide.mindspore import SwapManager
from ebbtide.mindspore._cells import surround
from ebbtide.mindspore._region import Region

WIDTH = 16


class Block(nn.Cell):
    """A perceptron that is added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Dense(WIDTH, 2 * WIDTH), nn.Dense(2 * WIDTH, WIDTH)

    def construct(self, x: Tensor) -> Tensor:
        return x + self.down(ops.gelu(self.up(x)))


class Chained(nn.Cell):
    """Layers that run one after the other."""

    def __init__(self, layers: list[nn.Cell]) -> None:
        super().__init__()
        self.layers = nn.CellList(layers)

    def construct(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def fresh() -> None:
    """No group, no counts."""
    manager = SwapManager()
    manager.set_current_group_name(None)
    ebbtide.mindspore.reset()
    gc.collect()
    assert manager.active_group_count() == 0


def figures() -> dict[str, int | float]:
    """Counts of the hub that serves everything by hand."""
    hub = _defaults.hub()
    hub.collect()
    return hub.stats()


def moved() -> tuple[int, int]:
    """Bytes out and in so far."""
    now = figures()
    return int(now["bytes_out"]), int(now["bytes_in"])


def held() -> tuple[int, int]:
    """Bytes in tiers, and groups, now."""
    now = figures()
    return int(now["bytes_held"]), int(now["active_groups"])


def nbytes(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


def random(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers in memory of MindSpore's own."""
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return own(Tensor(values))


def own(tensor: Tensor) -> Tensor:
    """The same numbers in memory of MindSpore's own."""
    return tensor.copy()


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.asnumpy().tobytes())


@contextmanager
def told() -> Iterator[list[str]]:
    """The warnings of ebbtide meanwhile, as texts."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
        texts += [str(one.message) for one in caught if issubclass(one.category, EbbtideWarning)]


def chained(count: int = 4, make: Callable[[], nn.Cell] = Block) -> Chained:
    """The same layers each time."""
    ms.set_seed(1)
    model = Chained([make() for _ in range(count)])
    numbers = np.random.default_rng(1)
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(numbers.normal(size=parameter.shape).astype(np.float32) * 0.3))
    return model.set_train()


def wire(model: Chained) -> Chained:
    """Declares the order of the layers."""
    wire_all(list(model.layers))
    return model


def wire_all(layers: list[nn.Cell]) -> None:
    for first, second in itertools.pairwise(layers):
        SwapManager().set_forward_prefetch_layer(first, second)


def swapped(model: Chained, *, named: bool = False) -> Chained:
    """What each layer saves goes to the group that is current."""
    for layer in model.layers:
        surround(layer, lambda inner, args, kwargs: saving(lambda: inner(*args, **kwargs), named=named))
    return model


def saving(code: Callable[[], Any], *, named: bool = False) -> Any:
    """Runs code; what it saves goes to the group that is current."""
    manager = SwapManager()
    region = Region(lambda: manager._group_to_pack(named=named), "saved")
    with region:
        output = code()
    region.close()
    return output


def sample(seed: int = 2) -> Tensor:
    return random(8, WIDTH, seed=seed)


def step(model: nn.Cell, seed: int = 2, run: Callable[[Tensor], Tensor] | None = None) -> list[bytes]:
    """Bits of the loss, and of the gradients of the input and of all parameters."""
    grad = ms.value_and_grad(run or (lambda x: mint.mean(mint.square(model(x)))), 0, list(model.trainable_params()))
    loss, (of_input, of_parameters) = grad(sample(seed))
    return [bits(tensor) for tensor in (loss, of_input, *of_parameters)]


def send(name: str) -> None:
    """A group leaves."""
    manager = SwapManager()
    manager.launch_offload(name)
    manager.wait_offload(name)
