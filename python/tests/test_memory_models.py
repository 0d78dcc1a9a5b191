"""Row M12, cases C12, C17 and C23: budgets for models whose layers are not alike, or not alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from managed import managed
from torch import Tensor, nn

import ebbtide.torch
from ebbtide.torch import _plan

STEPS = 6


class Mlp(nn.Module):
    """A block that others are made of."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Normed(Mlp):
    """Has running statistics, which every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class Drawing(Mlp):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(x.shape, generator=self.generator)


class Counting(Mlp):
    """Counts its calls, and computes with that."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class Rolling(Mlp):
    """Draws from Python's generator."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


class Dropping(Mlp):
    """Draws from torch's generator, which is put back."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.2)


class Stack(nn.Module):
    """Layers one after the other."""

    def __init__(self, layer: Callable[[], nn.Module], count: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Adding(Mlp):
    """Is called with tensors that its backward does not need."""

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return super().forward(x) + sum(more)


class Added(Stack):
    """Each layer gets new tensors besides."""

    def __init__(self) -> None:
        super().__init__(Adding)
        self.make = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.make(x), self.make(x) * 2)
        return x


class Shared(Stack):
    """Every layer is called twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Frozen(Stack):
    """The first two train nothing, the last one's result is not used."""

    def __init__(self) -> None:
        super().__init__(Mlp)
        for layer in self.layers[:2]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x)
        self.layers[-1](x)
        return x


class Halfway(Stack):
    """One in the middle runs without gradients."""

    def __init__(self) -> None:
        super().__init__(Mlp)

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            if at == 2:
                with torch.no_grad():
                    layer(x)
            x = layer(x)
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: Stack(Normed),
    "own generator": lambda: Stack(Drawing),
    "counts": lambda: Stack(Counting),
    "python's generator": lambda: Stack(Rolling),
    "dropout": lambda: Stack(Dropping),
    "other inputs": Added,
    "called twice": lambda: Shared(Mlp),
    "frozen": Frozen,
    "no grad": Halfway,
}


def rows(step: int, kind: str = "same") -> int:
    return {"same": 64, "longer": 64 if step < 4 else 256, "in turns": 64 + 64 * (step % 2)}[kind]


def train(model: nn.Module, kind: str, step_of: Callable[[], Any] | None) -> list[list[Tensor]]:
    """Gradients and buffers of each step."""
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        random.seed(step)
        x = torch.randn(rows(step, kind), 32)
        if step_of is None:
            loss = model(x).square().mean()
        else:
            with step_of():
                loss = model(x).square().mean()
        loss.backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        found[-1] += [buffer.clone() for buffer in model.buffers()]
        model.zero_grad(set_to_none=True)
    return found


def least(model: nn.Module, kind: str = "same") -> tuple[int, int]:
    """The least budget and what keeping everything takes, of the largest step."""
    model = copy.deepcopy(model)
    with ebbtide.torch.session(model, memory="100%", min_bytes=0) as s:
        train(model, kind, s.step)
        train(model, kind, s.step)
        assert s._planner is not None and s._planner.trace is not None
        _, low, high, _ = s._planner.trace.range()
    return low, high


def check(model: nn.Module, budget: int, kind: str = "same", **settings: Any) -> ebbtide.torch.Session:
    """Trains inside a budget: the bits of plain training, never over."""
    expected = train(copy.deepcopy(model), kind, None)
    s = ebbtide.torch.session(model, memory=budget, **{"min_bytes": 0, **settings})
    with managed(s, model) as meter:
        found = train(model, kind, s.step)
    for at, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert len(one) == len(other)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), f"step {at}"
    over = meter.peak + _plan.static_bytes(model) - budget
    assert over <= 0, f"{over} bytes over {budget}"
    return s


@pytest.mark.parametrize("part", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("name", MODELS)
def test_m12_budgets_hold_and_bits_are_those_of_plain(name: str, part: float) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    low, high = least(model)
    with check(model, int(low + part * (high - low))) as s:
        assert s.plan() is not None, s.report()


@pytest.mark.parametrize("kind", ["longer", "in turns"])
def test_c23_longer_steps_stay_inside_the_budget(kind: str) -> None:
    torch.manual_seed(0)
    model = Stack(Mlp)
    low, high = least(model, kind)
    with check(model, low + (high - low) // 3, kind):
        pass


def test_what_is_left_out_counts() -> None:
    torch.manual_seed(0)
    model = Stack(Mlp)
    _, high = least(model)
    with check(model, high, exclude=lambda tensor: tensor.shape[-1] == 128) as s:
        plan = s.plan()
        assert plan is not None
        assert plan["predicted_peak_bytes"] > high * 0.7
    another = copy.deepcopy(model)
    with check(another, high, min_bytes=10_000) as s:
        assert s.plan() is not None


def test_plans_that_alternate_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide._plan.LATE", 1000)  # a busy machine makes steps late, which is another reason
    torch.manual_seed(0)
    model = Stack(Mlp)
    with ebbtide.torch.session(model, memory="60%", min_bytes=0) as s:
        train(model, "in turns", s.step)
        assert s._planner is not None
        recordings = s._planner._recordings
        before = s._planner.trace
        train(model, "in turns", s.step)
        assert (s._planner._recordings, s._planner.trace) == (recordings, before)
