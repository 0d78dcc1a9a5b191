"""What the tests of the functions by hand share."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from session_models import Block, bits_equal
from torch import nn

import ebbtide.torch
from ebbtide import EbbtideWarning
from ebbtide.torch import SwapManager, _defaults

WIDTH = 32


def fresh() -> None:
    """No group, no hooks, no counts."""
    manager = SwapManager()
    manager.set_current_group_name(None)
    ebbtide.torch.reset()
    gc.collect()
    assert manager.active_group_count() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@contextmanager
def one_thread() -> Iterator[None]:
    """A fresh start and end; sums have one order on all threads meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    fresh()
    yield
    fresh()
    torch.set_num_threads(threads)


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


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


@contextmanager
def told() -> Iterator[list[str]]:
    """The warnings of ebbtide meanwhile, as texts."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
        texts += [str(one.message) for one in caught if issubclass(one.category, EbbtideWarning)]


def layers(count: int = 4, make: Callable[[], nn.Module] = Block) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(make() for _ in range(count)))


def wrapped(model: nn.Sequential, wrap: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(wrap(layer) for layer in model))


def wire(model: nn.Sequential) -> nn.Sequential:
    """Declares the order of the layers."""
    for first, second in zip(model, list(model)[1:], strict=False):
        SwapManager().set_forward_prefetch_layer(first, second)
    return model


def sample(seed: int = 2) -> torch.Tensor:
    return torch.randn(4, 16, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def step(model: nn.Module, seed: int = 2, x: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Loss, and gradients of the input and of all parameters."""
    model.zero_grad()
    x = sample(seed) if x is None else x
    torch.manual_seed(seed)
    loss = model(x).square().mean()
    loss.backward()
    return gradients(model, x, loss)


def send(name: str) -> None:
    """A group leaves."""
    manager = SwapManager()
    manager.launch_offload(name)
    manager.wait_offload(name)


def double_exp(x: torch.Tensor) -> torch.Tensor:
    return (x.exp() * 2).exp().sum()


def gradients(model: nn.Module, *others: Any) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    found += [other.grad if other.is_leaf else other.detach() for other in others]
    return [tensor.clone() for tensor in found if tensor is not None]


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    assert all(bits_equal(*pair) for pair in zip(one, other, strict=True))
