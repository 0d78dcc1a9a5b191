"""Training on the fake accelerator as a seed says, and mistakes in the order of its work, for tests."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import fake
import pytest
import torch
from session_models import Block, Gpt, gpt, tokens
from torch import nn
from torch.nn import functional

import ebbtide.torch

fake.load()

DEVICE = torch.device("fake", 0)
WORK = ("no exception", "in forward", "in a hook", "in backward")


class Planned(Exception):
    """What a step is left by when its plan says so."""


@dataclass
class StepPlan:
    """One step: its passes, and how it ends."""

    seeds: list[int]
    backward_inside: bool
    fails: str
    at_layer: int
    eval_after: bool


@dataclass
class Plan:
    """What one seed draws."""

    seed: int
    delay_us: int
    layers: int
    settings: dict[str, Any]
    side_stream: bool
    steps: list[StepPlan] = field(default_factory=list)

    @staticmethod
    def draw(seed: int) -> Plan:
        draw = random.Random(seed)
        layers = draw.choice((2, 3, 4))
        settings: dict[str, Any] = {
            "min_bytes": draw.choice((0, 0, 4096)),
            "prefetch": draw.choice((0, 1, 1, 2, 4)),
        }
        # A layer saves about 70 KiB, so that the smallest pool holds only some of its tensors.
        settings |= draw.choice(({}, {"tier": "host"}, {"host_bytes": 60 << 10}, {"host_bytes": 160 << 10}))
        plan = Plan(seed, draw.choice((0, 20, 100, 400)), layers, settings, draw.random() < 0.2)
        for _ in range(draw.choice((2, 3))):
            seeds = [draw.randrange(1000) for _ in range(draw.choice((1, 1, 2, 3)))]
            fails = draw.choice(WORK) if draw.random() < 0.3 else WORK[0]
            inside, evaluates = draw.random() < 0.5, draw.random() < 0.3
            plan.steps.append(StepPlan(seeds, inside, fails, draw.randrange(layers), evaluates))
        return plan


def quiet() -> None:
    """The device as it is at first, without reports."""
    for index in range(2):
        torch.accelerator.synchronize(index)
    fake.set_capacity(None)
    fake.set_host_events(True)
    fake.set_seed(0)
    fake.set_delay(50)
    fake.clear_reports()


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    given = tokens(seed).to(DEVICE)
    return functional.cross_entropy(model(given).flatten(0, 1), given.flatten())


def train(plan: Plan, session: ebbtide.torch.Session | None, model: Gpt) -> list[torch.Tensor]:
    """Runs a plan. All losses and, at the end, all parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    seen: list[torch.Tensor] = []
    for step in plan.steps:
        optimizer.zero_grad()
        try:
            for number, seed in enumerate(step.seeds):
                last = number == len(step.seeds) - 1
                seen.append(_pass(model, session, step, seed, step.fails if last else WORK[0]))
        except Planned:
            continue
        optimizer.step()
        if step.eval_after:
            with torch.no_grad(), _step(session):
                seen.append(loss_of(model, 7))
    seen.extend(p.detach().clone() for p in model.parameters())
    return seen


def _step(session: ebbtide.torch.Session | None) -> Any:
    return nullcontext() if session is None else session.step()


def _pass(model: Gpt, session: ebbtide.torch.Session | None, step: StepPlan, seed: int, fails: str) -> torch.Tensor:
    torch.manual_seed(seed)
    layer = model.blocks[step.at_layer]
    assert isinstance(layer, Block)
    with _failing(layer, fails):
        with _step(session):
            loss = loss_of(model, seed)
            if step.backward_inside:
                _backward(loss)
        if not step.backward_inside:
            _backward(loss)
    return loss.detach()


def _backward(loss: torch.Tensor) -> None:
    try:
        loss.backward()
    except RuntimeError as error:
        if "planned" not in str(error):
            raise
        raise Planned from error


@contextmanager
def _failing(layer: Block, fails: str) -> Iterator[None]:
    """Makes one layer fail."""

    def fail(*_: Any) -> None:
        raise Planned("planned")

    def fail_later(_module: nn.Module, _input: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    if fails == "in forward":
        handle = layer.down.register_forward_pre_hook(fail)
    elif fails == "in a hook":
        handle = layer.register_forward_hook(fail)
    elif fails == "in backward":
        handle = layer.register_forward_hook(fail_later)
    else:
        yield
        return
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def scheduled(plan: Plan) -> Iterator[None]:
    """The device works at the plan's pace, on the stream that it wants."""
    fake.set_seed(plan.seed)
    fake.set_delay(plan.delay_us)
    if not plan.side_stream:
        yield
        return
    before = torch.accelerator.current_stream(DEVICE.index)
    torch.accelerator.set_stream(torch.Stream(device=DEVICE))
    try:
        yield
    finally:
        torch.accelerator.synchronize(DEVICE.index)
        torch.accelerator.set_stream(before)


def new_model(plan: Plan) -> Gpt:
    model = gpt(plan.seed, layers=plan.layers).to(DEVICE)
    torch.accelerator.synchronize(DEVICE.index)
    return model


def swapped(plan: Plan) -> tuple[list[torch.Tensor], dict[str, int | float]]:
    """A plan in a session: what `train` returns, and the session's figures."""
    model = new_model(plan)
    with scheduled(plan), ebbtide.torch.session(model, "swap", **plan.settings) as session:
        seen = train(plan, session, model)
        # What a planned exception has left refers to itself, and autograd's threads may still hold a part.
        for _ in range(100):
            gc.collect()
            session._source.hub.collect()
            if not session.stats()["active_groups"]:
                break
            time.sleep(0.01)
        return seen, session.stats()


# ---- mistakes

MISTAKES = {
    "an offload does not wait for the kernels": ("out", "compute"),
    "a load does not wait for its memory": ("in", "compute"),
    "a use does not wait for its load": ("compute", "in"),
    "a block is dropped in flight": ("compute", "out"),
    "a host buffer is used again early": ("host", "any"),
}


def plant(patch: pytest.MonkeyPatch, mistake: str) -> None:
    """The session that is opened next makes a mistake.

    It is made in what the engine calls: an event whose wait does nothing where `MISTAKES` says which stream
    (the host, too) is to wait for which. The engine's streams are known by their order: it waits on the one for
    copies out first.
    """
    waits, marked = MISTAKES[mistake]
    roles = {torch.accelerator.current_stream(DEVICE.index).stream_id: "compute"}

    def role(stream: torch.Stream) -> str:
        names = ("compute", "out", "in")
        return roles.setdefault(stream.stream_id, names[min(len(roles), 2)])

    class Event(torch.Event):
        stream: torch.Stream

        def record(self, stream: torch.Stream | None = None) -> None:
            assert stream is not None
            self.stream = stream
            super().record(stream)

        def wait(self, stream: torch.Stream | None = None) -> None:
            assert stream is not None
            # Whoever waits first is asked first.
            waiting = role(stream)
            if (waiting, role(self.stream)) != (waits, marked):
                super().wait(stream)

        def query(self) -> bool:
            # Else the host, who may ask at the right time, would order what the mistake does not.
            return waits == "host"

        def synchronize(self) -> None:
            if waits != "host":
                super().synchronize()

    patch.setattr(torch, "Event", Event)
