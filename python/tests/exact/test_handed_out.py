"""C7 in backward: a tensor that came back shares its memory with what is handed out for it later."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
import ebbtide.torch

from .bits import assert_same


class Known(torch.autograd.Function):
    """Has computed its gradient in forward, and returns that very tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return (x * gradient).sum()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None


class Spoils(torch.autograd.Function):
    """Changes what it saved, when it has used it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        result = gradients[0] * weight, gradients[0] * x
        x.zero_()
        return result


class Slices(torch.autograd.Function):
    """Changes a tensor that nobody else has saved, which PyTorch allows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        both = torch.stack([x.detach() * 2, x.detach() * 3])
        ctx.save_for_backward(both[0], both[1])
        return x * 5

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        one, other = ctx.saved_tensors
        return one.add_(1) * other * gradients[0]


def region(tier: str | None) -> contextlib.AbstractContextManager[Any]:
    """Plain torch without a tier."""
    return contextlib.nullcontext() if tier is None else ebbtide.torch.offload(tier=tier, min_bytes=0)


def inputs() -> tuple[nn.Parameter, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(64, 64)), torch.randn(64, 64)


@pytest.mark.parametrize("tier", ["file", "host"])
@pytest.mark.parametrize("zeroed", [False, True])
def test_a_gradient_that_is_a_saved_tensor(tier: str, zeroed: bool) -> None:
    """Autograd adds to the gradients of a leaf in place, so what it keeps must not be what the span keeps."""

    def run(tier: str | None) -> list[torch.Tensor]:
        weight, x = inputs()
        with region(tier):
            loss = Known.apply(weight, x + 1)
        ebbtide.torch.synchronize()
        found = []
        for _ in range(4):
            loss.backward(retain_graph=True)
            assert weight.grad is not None
            found.append(weight.grad.clone())
            if zeroed:
                weight.grad.zero_()
        return found

    assert_same(run(None), run(tier))


def spoilt(tier: str | None, *, retained: bool) -> None:
    """Another operation needs the tensor that is spoilt, or the same one needs it again."""
    weight, x = inputs()
    with region(tier):
        saved = x + 1
        other = torch.zeros(()) if retained else saved.mul(weight).sum()
        loss = other + Spoils.apply(saved, weight).sum()
    ebbtide.torch.synchronize()
    loss.backward(retain_graph=retained)
    if retained:
        loss.backward()


@pytest.mark.parametrize("retained", [False, True])
def test_what_backward_changes_is_not_handed_out_again(retained: bool) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        spoilt(None, retained=retained)
    for tier in ("file", "host"):
        with pytest.raises(ebbtide.ChangedError, match="its version was 0 when it was saved, is 1"):
            spoilt(tier, retained=retained)


@pytest.mark.parametrize("tier", ["file", "host"])
def test_what_nobody_asks_for_again_may_be_changed(tier: str) -> None:
    def run(tier: str | None) -> torch.Tensor | None:
        weight, _ = inputs()
        with region(tier):
            loss = Slices.apply(weight).sum()
        ebbtide.torch.synchronize()
        loss.backward()
        return weight.grad

    assert_same(run(None), run(tier))
