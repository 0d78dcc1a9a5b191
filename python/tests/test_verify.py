"""`Session.verify`: what it compares, what it puts back, what it refuses."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from session_models import Chain, assert_clean, bits_equal, gpt, loss_of
from torch import nn

import ebbtide.torch
from ebbtide import SettingError


@pytest.mark.parametrize("policy", ["swap", "recompute", "keep"])
def test_identical(policy: Any) -> None:
    model = gpt()
    with ebbtide.torch.session(model, policy) as s:
        found = s.verify(lambda: loss_of(model))
        assert found.identical
        assert found.repeatable
        assert found.different == ()
        assert found.compared == 1 + len(list(model.parameters()))
        assert (found.bytes_out > 0) == (policy == "swap")
        assert str(found).startswith("identical: ")
        assert_clean(s)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.compared = 0  # type: ignore[misc]


def test_everything_is_put_back() -> None:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.ReLU()) for _ in range(3))
    )
    x = torch.randn(32, 64)
    model(x).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    values = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator, python = torch.get_rng_state(), random.getstate()

    def step() -> torch.Tensor:
        random.random()
        return model(x).square().mean()

    with ebbtide.torch.session(model) as s:
        found = s.verify(step)
    assert found.identical
    assert found.compared == 1 + 12 + 9  # the loss, gradients, buffers of BatchNorm
    assert all(p.grad is before for p, before in zip(model.parameters(), gradients, strict=True))
    assert all(bits_equal(p.grad, v) for p, v in zip(model.parameters(), values, strict=True) if p.grad is not None)
    assert all(bits_equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert random.getstate() == python


def test_a_step_that_runs_backward_itself() -> None:
    model = gpt()

    def step() -> float:
        loss = loss_of(model)
        loss.backward()
        return loss.item()

    with ebbtide.torch.session(model) as s:
        found = s.verify(step)
    assert found.identical
    assert found.compared == len(list(model.parameters()))


class Swapped(nn.Module):
    """Something that computes otherwise when its step is swapped."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.in_a_step: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (1 if self.in_a_step() is None else 1 + 1e-6)


def test_what_differs_is_named() -> None:
    torch.manual_seed(0)
    first = Swapped()
    model = Chain(first, Swapped())
    with ebbtide.torch.session(model) as s:
        first.in_a_step = s.running_step
        found = s.verify(lambda: model(torch.ones(8, 64)).sum())
    assert not found.identical
    assert found.repeatable
    assert "loss" in found.different
    assert "gradient of layers.0.inner.weight" in found.different
    assert str(found).startswith("NOT identical: ")


def test_a_model_that_is_not_deterministic() -> None:
    torch.manual_seed(0)
    model = Chain(nn.Linear(64, 64), nn.Linear(64, 64))
    counter = iter(range(100))
    with ebbtide.torch.session(model) as s:
        found = s.verify(lambda: model(torch.full((8, 64), float(next(counter)))).sum())
    assert not found.repeatable
    assert "not deterministic" in str(found)


def test_refusals_put_everything_back() -> None:
    model = gpt()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def training() -> torch.Tensor:
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        return loss

    def failing() -> torch.Tensor:
        raise KeyError("mine")

    with ebbtide.torch.session(model) as s:
        with pytest.raises(SettingError, match=r"changed the parameter.*optimizer"):
            s.verify(training)
        with pytest.raises(SettingError, match="returned a NoneType and computed no gradients"):
            s.verify(lambda: None)
        with pytest.raises(SettingError, match=r"a tensor of shape \(4, 16, 32\)"):
            s.verify(lambda: model.embed(torch.zeros(4, 16, dtype=torch.long)))
        with pytest.raises(SettingError, match="pass a function"):
            s.verify(loss_of(model))  # type: ignore[arg-type]
        with pytest.raises(KeyError, match="mine"):
            s.verify(failing)
        assert_clean(s)
    assert all(p.grad is None for p in model.parameters())
    assert all(bits_equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_memory_is_compared() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)))
    x = torch.randn(2048, 256)
    with ebbtide.torch.session(model) as s:
        found = s.verify(lambda: model(x).square().mean())
    assert found.identical
    assert found.plain_peak > 100 << 20  # 18 MiB a layer and more
    assert found.swapped_peak < 0.75 * found.plain_peak
    assert "x)" in str(found)
