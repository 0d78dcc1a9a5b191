"""Checkpoints and policies for operations (row W3 of the catalogue)."""

from __future__ import annotations

import collections
import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from hand_models import (
    assert_equal,
    double_exp,
    figures,
    held,
    layers,
    moved,
    one_thread,
    sample,
    send,
    step,
    told,
    wire,
    wrapped,
)
from session_models import Block
from torch import nn

from ebbtide import ChangedError, PhaseError
from ebbtide.torch import (
    CheckpointPolicy,
    SwapManager,
    _wrap,
    checkpoint,
    checkpoint_wrapper,
    create_selective_checkpoint_contexts,
    swap,
    swap_tensor_wrapper,
    swap_wrapper,
)

ATEN = torch.ops.aten
Torchs = torch.utils.checkpoint.CheckpointPolicy


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with one_thread():
        yield


def test_w3_a_checkpoint_computes_again() -> None:
    runs = []

    class Counted(Block):
        def forward(self, x: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
            runs.append(1)
            return super().forward(x)

    reference = step(layers(3, Counted))
    runs.clear()
    assert_equal(step(wrapped(layers(3, Counted), checkpoint_wrapper)), reference)
    assert len(runs) == 6


@pytest.mark.parametrize("early_stop", [True, False])
def test_w3_inputs_are_swapped(early_stop: bool) -> None:
    reference = step(layers(4))
    model = wire(wrapped(layers(4), lambda layer: checkpoint_wrapper(layer, swap_inputs=True, early_stop=early_stop)))
    for _ in range(2):
        before = moved()[0]
        assert_equal(step(model), reference)
        assert moved()[0] - before == 3 * 4 * 16 * 32 * 4
    assert figures()["missed_prefetches"] == 0
    assert held() == (0, 0)


def test_w3_inputs_in_any_nesting_and_by_keyword() -> None:
    class Pair(NamedTuple):
        one: torch.Tensor
        two: torch.Tensor

    def function(pair: Pair, *, rest: dict[str, list[torch.Tensor]], scale: float) -> torch.Tensor:
        assert isinstance(pair, Pair)
        return (pair.one.exp() * pair.two * rest["x"][0] * scale).sum()

    def run(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        xs = [sample(seed) for seed in range(3)]
        hidden = [x * 1 for x in xs]
        y = call(function, Pair(hidden[0], hidden[1]), rest={"x": [hidden[2]]}, scale=0.5)
        del hidden
        if call is not plain:
            send("g")
        y.backward()
        return [y.detach(), *(x.grad for x in xs if x.grad is not None)]

    def plain(function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        return function(*args, **kwargs)

    expected = run(plain)
    with SwapManager().group_context("g"):
        got = run(functools.partial(checkpoint, swap_inputs=True))
    assert_equal(got, expected)
    assert moved() == (3 * 8192, 3 * 8192)
    assert figures()["not_freed_tensors"] == 0


def policy_of(table: Mapping[Any, object], otherwise: object = CheckpointPolicy.PREFER_RECOMPUTE) -> Any:
    return lambda context, operation, *args, **kwargs: table.get(operation, otherwise)


MIXED = {
    ATEN.addmm.default: CheckpointPolicy.MUST_SWAP,
    ATEN.gelu.default: CheckpointPolicy.MUST_SAVE,
    ATEN.native_layer_norm.default: Torchs.PREFER_SAVE,
}


@pytest.mark.parametrize("swap_inputs", [False, True])
def test_w3_a_policy_for_operations(swap_inputs: bool) -> None:
    reference = step(layers(4))
    model = wire(
        wrapped(
            layers(4),
            lambda layer: checkpoint_wrapper(layer, policy_fn=policy_of(MIXED), swap_inputs=swap_inputs),
        )
    )
    for _ in range(2):
        assert_equal(step(model), reference)
    assert moved()[0] > 0
    assert held() == (0, 0)


def test_w3_each_operation_is_saved_swapped_or_computed_again() -> None:
    runs: collections.Counter[str] = collections.Counter()

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            runs[str(func)] += 1
            return func(*args, **(kwargs or {}))

    table = {ATEN.exp.default: CheckpointPolicy.MUST_SAVE, ATEN.sin.default: CheckpointPolicy.MUST_SWAP}
    x = sample()
    with SwapManager().group_context("g"), Counting():  # type: ignore[no-untyped-call]
        y = checkpoint(lambda t: t.exp().sin().cos().sum(), x, policy_fn=policy_of(table))
        send("g")
        assert moved()[0] == x.numel() * 4
        y.backward()
    expected = torch.autograd.grad(x.exp().sin().cos().sum(), x)[0]
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
    forward = {"aten.exp.default": 1, "aten.sin.default": 1}
    assert runs["aten.exp.default"] == forward["aten.exp.default"]
    # Once in forward, once as the derivative of cos.
    assert runs["aten.sin.default"] == 2
    assert moved() == (x.numel() * 4,) * 2


def test_w3_a_second_backward_is_a_clear_error() -> None:
    x = sample()
    y = checkpoint(double_exp, x, policy_fn=[ATEN.exp.default])
    y.backward(retain_graph=True)
    with pytest.raises(PhaseError, match="second backward"):
        y.backward()
    z = checkpoint(double_exp, x)
    z.backward(retain_graph=True)
    z.backward()


def test_w3_a_saved_output_that_was_modified() -> None:
    def function(t: torch.Tensor) -> torch.Tensor:
        u = t * 2
        v = u.exp()
        u.add_(1)
        return (v * u).sum()

    x = sample()
    y = checkpoint(function, x, policy_fn=[ATEN.mul.Tensor])
    with pytest.raises(ChangedError, match="modified in place"):
        y.backward()
    expected = torch.autograd.grad(function(x), x)[0]
    for saved, allow in (([ATEN.exp.default], False), ([ATEN.mul.Tensor], True)):
        contexts = functools.partial(create_selective_checkpoint_contexts, saved, allow)
        checkpoint(function, x, context_fn=contexts).backward()
        assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
        x.grad = None


def test_w3_contexts_serve_pytorchs_own_checkpoint() -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, policy_of(MIXED))
    reference = step(layers(2))

    class Through(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)
            return y

    with SwapManager().group_context("g"):
        assert_equal(step(wrapped(layers(2), Through)), reference)


TURN = iter(range(1 << 30))
DROPOUTS = [
    policy_of({ATEN.native_dropout.default: CheckpointPolicy.MUST_SAVE}),
    policy_of({ATEN.bernoulli_.float: CheckpointPolicy.MUST_SAVE}),
    policy_of({ATEN.bernoulli.default: CheckpointPolicy.MUST_SWAP}),
    lambda context, operation, *args, **kwargs: "dropout" in str(operation) and next(TURN) % 2 == 0,
    lambda context, operation, *args, **kwargs: next(TURN) % 3 == 0,
    lambda context, operation, *args, **kwargs: True,
]


@pytest.mark.parametrize("policy", [None, *DROPOUTS])
def test_c8_recomputation_draws_the_same_numbers(policy: Any) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for p in (0.1, 0.5, 0.3):
            x = nn.functional.dropout(x, p).sin() * torch.rand_like(x)
            x = x + torch.bernoulli(x.detach().abs().clamp(max=1))
        return x.square().sum()

    def run(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        x = sample()
        torch.manual_seed(11)
        y = call(function, x * 1)
        torch.rand(7)
        y.backward()
        return [y.detach(), x.grad, torch.rand(3)]  # type: ignore[list-item]

    with SwapManager().group_context("g"):
        got = run(functools.partial(checkpoint, policy_fn=policy))
    assert_equal(got, run(lambda function, x: function(x)))


def test_c8_a_generator_of_the_users_own() -> None:
    def run(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)

        def function(x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = x * torch.empty_like(x).bernoulli_(0.5, generator=generator)
            return x.exp().sum()

        x = sample()
        y = call(function, x)
        y.backward()
        return [x.grad, torch.rand(3, generator=generator)]  # type: ignore[list-item]

    got = run(functools.partial(checkpoint, policy_fn=policy_of({})))
    assert_equal(got, run(lambda function, x: function(x)))


def test_w3_a_swap_inside_a_checkpoint_is_never_silently_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_wrap, "_warned_in_checkpoint", False)
    runs = []

    class Counted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return double_exp(x)

    module, x = swap_wrapper(Counted()), sample()
    expected = torch.autograd.grad(double_exp(x), x)[0]
    with SwapManager().group_context("g"), told() as texts:
        for reentrant in (False, True):
            runs.clear()
            y = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=reentrant)
            y.backward()
            assert len(runs) == 2
            assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
            x.grad = None
        runs.clear()
        checkpoint(lambda t: swap(Counted(), swap_tensor_wrapper(t)), x).backward()
        assert len(runs) == 2
    assert len(texts) == 1
    assert "checkpoint" in texts[0]


def test_w3_a_checkpoint_inside_a_swapped_region() -> None:
    reference = step(layers(3))
    model = wire(wrapped(wrapped(layers(3), checkpoint_wrapper), lambda m: swap_wrapper(lambda x: m(x))))
    names = [parameter for layer in model for parameter in layer.parameters()]
    assert names == []
    found = step(model)
    assert_equal(found[-2:], reference[-2:])


def test_memory_is_flat_and_nothing_refers_to_graphs() -> None:
    import weakref

    class Watched(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(double_exp, x * 1, swap_inputs=True, policy_fn=policy_of(MIXED))

    module, graphs = swap_wrapper(Watched()), []
    with SwapManager().group_context("flat"):
        for _ in range(5):
            y = module(sample())
            graphs.append(weakref.ref(y))
            del y
    gc.collect()
    assert all(graph() is None for graph in graphs)
    SwapManager().abort_group("flat")
    assert held() == (0, 0)
