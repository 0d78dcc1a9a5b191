"""Memory that loaded tensors lie in is used again for the next layer's, and all of it goes in the end."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from session_models import Chain
from torch import nn

import ebbtide.torch

MIB = 1 << 20


class Scale(nn.Module):
    """Saves one tensor of 16 MiB, and tells where its gradient function finds it."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Squared.apply(x * self.weight, self.seen)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, seen: list[int]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.seen = seen  # type: ignore[attr-defined]
        return x.square() * 0.5

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        ctx.seen.append(x.data_ptr())  # type: ignore[attr-defined]
        return gradients[0] * x, None


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_of_loaded_tensors_is_used_again_and_goes_in_the_end() -> None:
    seen: list[int] = []
    model = Chain(*(Scale(seen) for _ in range(8)))
    x = torch.rand(4 * MIB)
    with ebbtide.torch.session(model, tier="file") as s:
        for _ in range(2):
            seen.clear()
            with s.step():
                loss = model(x).sum()
            loss.backward()
        del loss
        gc.collect()
        before = resident()
        seen.clear()
        with s.step():
            loss = model(x).sum()
        loss.backward()
        del loss
        gc.collect()
        swapped = seen[1:]  # the last layer is kept
        assert len(swapped) == 7
        assert len(set(swapped)) < 7, "each layer was given memory of its own"
        assert resident() - before < 8 * MIB
        assert s.stats()["bytes_held"] == 0
