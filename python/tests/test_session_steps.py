"""Steps of a session against plain PyTorch: the same bits, whatever the policy, the tier and the shape of training."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from session_models import (
    WIDTH,
    Block,
    Chain,
    Gpt,
    assert_clean,
    assert_same,
    bits_equal,
    gpt,
    hooked,
    loss_of,
    plain,
    result,
    stepped,
    tokens,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import ebbtide.torch
from ebbtide import EbbtideWarning

POLICIES: list[Any] = [
    "swap",
    "recompute",
    "keep",
    {"blocks.*": "swap", "blocks.1": "recompute", "blocks.2": "keep"},
]


def trained(
    model: nn.Module, step: Callable[[nn.Module, int], torch.Tensor], steps: int = 5
) -> dict[str, torch.Tensor]:
    """Losses and parameters of a training with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        losses.append(step(model, number))
        optimizer.step()
    return {"losses": torch.stack(losses), **{name: p.detach() for name, p in model.named_parameters()}}


def plain_step(model: nn.Module, number: int) -> torch.Tensor:
    loss = loss_of(model, number)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("tier", ["file", "host"])
@pytest.mark.parametrize("policy", POLICIES, ids=["swap", "recompute", "keep", "mixed"])
def test_c8_training_with_dropout_is_the_same(policy: Any, tier: str) -> None:
    model = gpt()
    expected = trained(copy.deepcopy(model), plain_step)
    with ebbtide.torch.session(model, policy, tier, min_bytes=0) as s:

        def step(model: nn.Module, number: int) -> torch.Tensor:
            with s.step():
                loss = loss_of(model, number)
                if number % 2:
                    loss.backward()
            if not number % 2:
                loss.backward()
            return loss.detach()

        assert_same(trained(model, step), expected)
        assert s.stats()["steps"] == 5
        assert_clean(s)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_m11_m12_the_order_is_learnt_and_any_depth_is_right(prefetch: int) -> None:
    model = gpt(layers=6)
    expected = plain(model)
    with ebbtide.torch.session(model, prefetch=prefetch) as s:
        missed = []
        for _ in range(4):
            assert_same(stepped(s, model), expected)
            missed.append(s.stats()["missed_prefetches"])
    in_a_step = missed[3] - missed[2]
    # The last layer is kept: the first group that is away starts to come back when its backward begins.
    assert in_a_step == (5 if prefetch == 0 else 0)


def test_m4_at_most_two_layers_are_resident() -> None:
    model = Chain(*(Block(dropout=0.0) for _ in range(8)))
    x = torch.randn(8, 64, WIDTH)
    resident: list[float] = []
    with ebbtide.torch.session(model, min_bytes=0) as s, hooked(model.layers[0], lambda *_: None):
        for layer in model.layers[:-1]:
            layer.register_forward_hook(lambda *_: resident.append(s.stats()["live_bytes"]))
        with s.step():
            out = model(x)
        one = resident[0]
        assert one > 0
        assert max(resident) <= 2.2 * one
        assert s.stats()["live_bytes"] < 0.3 * one  # the last one's offload is waited for as well
        out.sum().backward()
        assert_clean(s)


def test_tensors_saved_outside_of_layers_stay() -> None:
    model = gpt()
    with ebbtide.torch.session(model, {"blocks.0": "swap"}) as s, s.step():
        model(tokens())
        moved = s.stats()["bytes_out"]
        x = torch.randn(1000, 1000, requires_grad=True)
        (x * x).sum().backward()
        assert s.stats()["bytes_out"] == moved


# ---- several passes


def test_c12_micro_batches_in_flight_in_any_order() -> None:
    model = gpt()
    reference = copy.deepcopy(model)

    def losses(model: nn.Module, forward: Callable[[int], torch.Tensor], order: list[int]) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        made = [forward(number) for number in range(4)]
        for number in order:
            made[number].backward()
        return result(model, torch.stack([loss.detach() for loss in made]))

    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
        model.zero_grad()
        reference.zero_grad()
        with ebbtide.torch.session(model) as s:

            def forward(number: int, s: ebbtide.torch.Session = s) -> torch.Tensor:
                with s.step():
                    return loss_of(model, number)

            got = losses(model, forward, order)
            assert_clean(s)
        assert_same(got, losses(reference, lambda number: loss_of(reference, number), order))


def test_c12_one_forward_one_backward_with_accumulation() -> None:
    model = gpt()
    reference = copy.deepcopy(model)
    torch.manual_seed(1)
    with ebbtide.torch.session(model) as s:
        waiting: list[torch.Tensor] = []
        for number in range(5):
            with s.step():
                waiting.append(loss_of(model, number))
            if len(waiting) == 2:
                waiting.pop(0).backward()
        waiting.pop().backward()
        assert_clean(s)
    torch.manual_seed(1)
    last = None
    for number in range(5):
        now = loss_of(reference, number)
        if last is not None:
            last.backward()
        last = now
    assert last is not None
    last.backward()
    assert_same(result(model, torch.zeros(1)), result(reference, torch.zeros(1)))


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_c12_a_layer_called_several_times(policy: Any) -> None:
    torch.manual_seed(0)
    block = Block()
    model = Chain(block, Block(), block, block)

    def run(model: nn.Module) -> torch.Tensor:
        return model(torch.ones(2, 16, WIDTH)).square().mean()

    expected = plain(model, run)
    with ebbtide.torch.session(model, {"layers.0": policy}) as s:
        for _ in range(3):
            assert_same(stepped(s, model, run), expected)
        assert_clean(s)


def test_c11_evaluation_in_between() -> None:
    model = gpt()
    expected = plain(model)
    with ebbtide.torch.session(model) as s:
        for inside in (False, True):
            model.zero_grad()
            torch.manual_seed(1)
            with s.step():
                loss = loss_of(model)
                if inside:
                    evaluate(model)
            evaluate(model)
            loss.backward()
            assert_same(result(model, loss), expected)
            assert_clean(s)
        assert s.stats()["left_without_grad"] == 4


def evaluate(model: nn.Module) -> None:
    state = torch.get_rng_state()
    with torch.no_grad():
        loss_of(model)
    torch.set_rng_state(state)


def test_c23_other_lengths_in_every_step() -> None:
    model = gpt()
    with ebbtide.torch.session(model) as s:
        for length in (16, 5, 16, 1, 9):
            run = functools.partial(loss_of, length=length)
            expected = plain(model, run)
            assert_same(stepped(s, model, run), expected)
        assert_clean(s)


class Routed(nn.Module):
    """A layer that uses another part of itself in each step, and none in some."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        for part in self.parts[: self.turn % 4]:
            x = torch.relu(part(x))
        return x


def test_c23_layers_that_save_another_number_of_tensors_each_step() -> None:
    torch.manual_seed(0)
    model = Chain(*(Routed() for _ in range(4)))
    reference = copy.deepcopy(model)
    x = torch.randn(64, 8, requires_grad=True)
    with ebbtide.torch.session(model, min_bytes=0) as s:
        for _ in range(6):
            with s.step():
                loss = model(x).sum()
            got = torch.autograd.grad(loss, [x, *model.parameters()], allow_unused=True)
            want = torch.autograd.grad(reference(x).sum(), [x, *reference.parameters()], allow_unused=True)
            assert all((a is None and b is None) or bits_equal(a, b) for a, b in zip(got, want, strict=True))
        assert_clean(s)


# ---- graphs


def test_a_graph_that_is_retained_runs_twice() -> None:
    model = gpt(dropout=0.0)
    reference = copy.deepcopy(model)
    with ebbtide.torch.session(model) as s:
        with s.step():
            loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()
        assert_clean(s)
    twice = loss_of(reference)
    twice.backward(retain_graph=True)
    twice.backward()
    assert_same(result(model, loss), result(reference, twice))


def test_gradients_of_gradients() -> None:
    torch.manual_seed(0)
    model = Chain(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    x = torch.randn(64, 8, requires_grad=True)

    def second(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *model.parameters()], allow_unused=True)

    want = second(model(x))
    with ebbtide.torch.session(model, min_bytes=0) as s:
        with s.step():
            y = model(x)
            inside = second(y)
        with s.step():
            y = model(x)
        outside = second(y)
        del y
        assert s.stats()["bytes_out"] > 0
    for got in (inside, outside):
        assert all((a is None and b is None) or bits_equal(a, b) for a, b in zip(got, want, strict=True))


def test_c9_branches_that_backward_never_visits_do_not_pile_up() -> None:
    torch.manual_seed(0)
    model = Chain(*(Block(dropout=0.0) for _ in range(3)))
    side = Chain(*(Block(dropout=0.0) for _ in range(2)))
    both = nn.ModuleList([model, side])
    x = torch.randn(2, 16, WIDTH)
    with ebbtide.torch.session(both, {"*.layers.*": "swap"}) as s:
        held = []
        for _ in range(20):
            with s.step():
                out = model(x)
                side(x)
            out.sum().backward()
            s._source.hub.collect()
            held.append((s.stats()["bytes_held"], s.stats()["active_groups"]))
        assert held == [(0, 0)] * 20


def test_c9_a_frozen_tower() -> None:
    model = gpt(layers=5)
    for parameter in [*model.embed.parameters(), *model.blocks[:3].parameters()]:
        parameter.requires_grad_(False)
    expected = plain(model)
    with ebbtide.torch.session(model, {"blocks.*": "swap"}, min_bytes=0) as s:
        assert_same(stepped(s, model), expected)
        assert_clean(s)


def test_c2_a_table_that_all_layers_share_stays_right() -> None:
    model = gpt(layers=6, table=True)
    expected = plain(model)
    assert model.table is not None
    table = model.table.clone()
    with ebbtide.torch.session(model, min_bytes=0) as s:
        for _ in range(3):
            assert_same(stepped(s, model), expected)
            assert bits_equal(model.table, table)
        assert_clean(s)


def test_weights_that_are_tied() -> None:
    model = gpt()
    model.head.weight = model.embed.weight
    model.get_submodule("blocks.2.up").weight = model.get_submodule("blocks.0.up").weight
    expected = plain(model)
    with ebbtide.torch.session(model, {"blocks.*": "swap"}, min_bytes=0) as s:
        assert_same(stepped(s, model), expected)


def test_autocast() -> None:
    model = gpt()

    def run(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model).float()

    expected = plain(model, run)
    for policy in ("swap", "recompute"):
        with ebbtide.torch.session(model, policy, min_bytes=0) as s:
            assert_same(stepped(s, model, run), expected)


class Outputs(nn.Module):
    """A layer with keywords in, and a dict with a tuple out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, debug: bool = False) -> dict[str, Any]:
        y = self.drop(self.inner(x) * scale).sigmoid()
        return {"pair": (y, y * 2), "debug": debug}


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Outputs() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.detach().mean() + torch.ones(8, requires_grad=True)
        for layer in self.layers:
            found = layer(x, scale=scale, debug=True)
            assert found["debug"] is True
            x = found["pair"][0] + found["pair"][1]
        return x.sum()


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_keywords_in_and_nested_outputs(policy: Any) -> None:
    torch.manual_seed(0)
    model = Keywords()

    def run(model: nn.Module) -> torch.Tensor:
        return model(torch.ones(16, 8))

    expected = plain(model, run)
    with ebbtide.torch.session(model, policy, min_bytes=0) as s:
        for _ in range(2):
            assert_same(stepped(s, model, run), expected)
        assert_clean(s)


# ---- checkpoints of PyTorch


class Checkpointed(Gpt):
    """Every block inside of a checkpoint."""

    reentrant = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_layers_inside_of_a_checkpoint_are_left_to_it(policy: Any, reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Checkpointed()
    model.reentrant = reentrant
    expected = plain(model)
    runs = []
    if not reentrant:
        with ebbtide.torch.session(model, policy) as s, pytest.warns(EbbtideWarning, match="blocks.0 is to be"):
            stepped_simply(s, model)
    with (
        ebbtide.torch.session(model, policy) as s,
        hooked(model.get_submodule("blocks.0.norm1"), lambda *_: runs.append(1)),
    ):
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(1)
            with warnings.catch_warnings(record=True) as said, s.step():
                loss = loss_of(model)
                loss.backward()
            told = [warning for warning in said if warning.category is EbbtideWarning]
            assert_same(result(model, loss), expected)
        figures = s.stats()
        assert len(told) == 0  # but in the first step
        assert len(runs) == 4  # the checkpoint was not switched off
        assert figures["bytes_out"] == 0
        assert figures["left_to_checkpoint"] == (8 if reentrant else 16)
        assert "torch.utils.checkpoint" in s.report()
        assert_clean(s)


class Inside(Block):
    """A block with a checkpoint inside."""

    def forward(self, x: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        return checkpoint(super().forward, x, table, use_reentrant=False)


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_a_checkpoint_inside_of_a_layer(policy: Any) -> None:
    model = gpt()
    model.blocks = nn.ModuleList(Inside() for _ in range(4))
    expected = plain(model)
    with ebbtide.torch.session(model, policy, min_bytes=0) as s:
        for _ in range(2):
            assert_same(stepped(s, model), expected)
        assert_clean(s)


def test_recomputed_layers_run_again_and_save_nothing() -> None:
    model = gpt()
    runs = []
    with hooked(model.get_submodule("blocks.0.norm1"), lambda *_: runs.append(1)):
        with ebbtide.torch.session(model, "recompute") as s:
            stepped(s, model)
            assert len(runs) == 2
            loss_of(model).backward()  # outside of a step
            assert len(runs) == 3
        loss_of(model).backward()
        assert len(runs) == 4


# ---- torch.compile


def compiled_module(module: nn.Module, **settings: Any) -> nn.Module:
    compiled: Any = torch.compile(module, backend="aot_eager", **settings)
    assert isinstance(compiled, nn.Module)
    return compiled


def test_w10_compiled_blocks_inside_of_layers() -> None:
    torch._dynamo.reset()
    model = gpt(layers=3, dropout=0.0)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = compiled_module(block)
    loss = loss_of(model)
    loss.backward()
    expected = result(model, loss)
    for policy in ("swap", "recompute"):
        with ebbtide.torch.session(model, policy, min_bytes=0) as s:
            assert list(s.policy) == ["blocks.0", "blocks.1", "blocks.2"]
            for _ in range(2):
                assert_same(stepped(s, model), expected)
            assert (s.stats()["bytes_out"] > 0) == (policy == "swap")
            assert_clean(s)


def test_w10_a_model_compiled_after_the_session_was_opened_is_right() -> None:
    torch._dynamo.reset()
    model = gpt(layers=3, dropout=0.0)
    expected = plain(model)
    with ebbtide.torch.session(model, min_bytes=0) as s:
        compiled = compiled_module(model)
        for _ in range(2):
            assert_same(stepped(s, model, lambda _: loss_of(compiled)), expected)
        assert s.stats()["bytes_out"] > 0
        assert_clean(s)
        torch._dynamo.reset()
        whole = compiled_module(model, fullgraph=True)
        with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="ebbtide"), s.step():
            loss_of(whole)
        assert_clean(s)


def test_warnings_of_the_engine_come_through(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt()
    with ebbtide.torch.session(model) as s:

        class Hub:
            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            def take_warnings(self) -> list[str]:
                return ["the spill folder is in RAM"]

        real = s._source.hub
        monkeypatch.setattr(s._source, "hub", Hub())
        with pytest.warns(EbbtideWarning, match="in RAM"):
            stepped_simply(s, model)


def stepped_simply(s: ebbtide.torch.Session, model: nn.Module) -> None:
    with s.step():
        model(tokens())
