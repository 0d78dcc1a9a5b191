"""Regions that are computed again (row W3 of the catalogue, case C8)."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import mindspore as ms
import pytest
from covers import BYTES, cleanly, gradient, sample, step
from hand import Block, bits, chained, figures, held, moved, send, told, wire
from mindspore import Tensor, nn, ops
from models import Size, batch, gradients_of, made

from ebbtide import ChangedError
from ebbtide.mindspore import (
    SwapManager,
    _spans,
    _wrap,
    checkpoint,
    checkpoint_wrapper,
    swap,
    swap_tensor_wrapper,
    swap_wrapper,
)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with cleanly():
        yield


class Counted(Block):
    """Says how often it runs."""

    runs = 0

    def construct(self, x: Tensor) -> Tensor:
        Counted.runs += 1
        return super().construct(x)


def covered(count: int, wrap: Callable[[nn.Cell], nn.Cell], make: type[nn.Cell] = Block) -> nn.Cell:
    model = chained(count, make)
    for number, layer in enumerate(list(model.layers)):
        model.layers[number] = wrap(layer)
    return model


def test_w3_a_checkpoint_computes_again() -> None:
    reference = step(chained(3, Counted))
    Counted.runs = 0
    assert step(covered(3, checkpoint_wrapper, Counted)) == reference
    assert Counted.runs == 6


def test_w3_without_gradients_it_is_only_called() -> None:
    Counted.runs = 0
    block = Counted()
    assert bits(checkpoint(block, sample())) == bits(block(sample()))
    assert Counted.runs == 2


@pytest.mark.parametrize("early_stop", [True, False])
def test_w3_inputs_are_swapped(early_stop: bool) -> None:
    reference = step(chained(4))
    model = wire(covered(4, lambda layer: checkpoint_wrapper(layer, swap_inputs=True, early_stop=early_stop)))
    for _ in range(2):
        before = moved()[0]
        assert step(model) == reference
        assert moved()[0] - before == 3 * BYTES
    assert figures()["missed_prefetches"] == 0
    assert held() == (0, 0)


def test_w3_inputs_in_any_nesting_and_by_keyword() -> None:
    class Pair(NamedTuple):
        one: Tensor
        two: Tensor

    def function(pair: Pair, *, rest: dict[str, list[Tensor]], scale: float) -> Tensor:
        assert isinstance(pair, Pair)
        return (ops.exp(pair.one) * pair.two * rest["x"][0] * scale).sum()

    def run(call: Callable[..., Tensor], x: Tensor) -> Tensor:
        return call(function, Pair(x * 1, x * 2), rest={"x": [x * 3]}, scale=0.5)

    expected = gradient(functools.partial(run, lambda function, *args, **kwargs: function(*args, **kwargs)), sample())
    with SwapManager().group_context("g"):
        got = gradient(
            functools.partial(run, functools.partial(checkpoint, swap_inputs=True)), sample(), lambda: send("g")
        )
    assert got == expected
    assert moved() == (3 * BYTES, 3 * BYTES)


def test_w3_an_input_without_a_gradient_stays() -> None:
    mask = sample(9)

    def run(x: Tensor) -> Tensor:
        with SwapManager().group_context("g"):
            return checkpoint(lambda x, mask: ops.exp(x * mask).sum(), x * 1, mask, swap_inputs=True)

    assert gradient(run, sample(), lambda: send("g")) == gradient(lambda x: ops.exp(x * mask).sum(), sample())
    assert moved() == (BYTES, BYTES)


def test_w3_contexts_of_the_first_run_and_of_the_recomputation() -> None:
    entered: list[str] = []

    @contextlib.contextmanager
    def note(what: str) -> Iterator[None]:
        entered.append(what)
        yield

    def contexts() -> Any:
        return note("forward"), note("again")

    block = Block()
    got = gradient(lambda x: checkpoint(block, x, context_fn=contexts).sum(), sample())
    assert got == gradient(lambda x: block(x).sum(), sample())
    assert entered == ["forward", "again"]


def test_w3_a_swap_inside_a_checkpoint_is_told_once_and_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_wrap, "_warned_in_checkpoint", False)
    block = Counted()
    expected = gradient(lambda x: block(x).sum(), sample())

    def run(inner: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return checkpoint(inner, x).sum()

    with SwapManager().group_context("g"), told() as texts:
        for inner in (swap_wrapper(block), lambda t: swap(block, swap_tensor_wrapper(t))):
            Counted.runs = 0
            assert gradient(functools.partial(run, inner), sample()) == expected
            assert Counted.runs == 2
    assert [text for text in texts if "checkpoint" in text] == texts
    assert len(texts) == 1
    assert moved() == (0, 0)


def test_w3_a_swap_inside_of_mindspores_own_recompute_is_right() -> None:
    block = Block()
    inner = swap_wrapper(block)

    def run(x: Tensor) -> Tensor:
        with SwapManager().group_context("g"):
            return ms.recompute(lambda t: ops.exp(inner(t) * 0.1).sum(), x, use_reentrant=False)

    def plain(x: Tensor) -> Tensor:
        return ops.exp(block(x) * 0.1).sum()

    assert gradient(run, sample(), lambda: send("g")) == gradient(plain, sample())


def test_w3_a_checkpoint_inside_a_swapped_region_has_its_inputs_swapped() -> None:
    reference = step(chained(3))
    model = covered(3, lambda layer: swap_wrapper(functools.partial(checkpoint, layer)))
    plain = chained(3)
    model_of = dict(zip(model.layers, plain.layers, strict=True))
    assert len(model_of) == 3
    wire(model)
    got = step(model)
    assert got[:2] == reference[:2]  # the functions have no parameters
    assert moved()[0] == 2 * BYTES


def test_w3_tuples_and_other_values_come_back_as_they_are() -> None:
    def function(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return ops.exp(x), {"two": x * 2, "note": "kept"}

    def run(call: Callable[..., Any], x: Tensor) -> Tensor:
        one, rest = call(function, x)
        assert rest["note"] == "kept"
        return (one * rest["two"]).sum()

    expected = gradient(lambda x: run(lambda function, x: function(x), x), sample())
    assert gradient(lambda x: run(checkpoint, x), sample()) == expected


# ---- what can't be computed again


def dropping(wrap: Callable[[nn.Cell], nn.Cell]) -> nn.Cell:
    model = made(Size(dropout=0.1))
    for number, block in enumerate(list(model.blocks)):
        model.blocks[number] = wrap(block)
    return model


@pytest.mark.parametrize("swap_inputs", [False, True])
def test_c8_dropout_under_a_checkpoint_is_an_error(swap_inputs: bool) -> None:
    size = Size(dropout=0.1)
    model = dropping(lambda block: checkpoint_wrapper(block, swap_inputs=swap_inputs))
    with SwapManager().group_context("g"), pytest.raises(ChangedError, match="Block again") as caught:
        gradients_of(model)(*batch(size, 0))
    assert caught.value.hint is not None
    assert "swap_wrapper" in caught.value.hint
    SwapManager().abort_group("g")
    # The next step is right: with another model, and with this one without dropout.
    model.set_train(False)
    plain = made(size)
    plain.set_train(False)
    with SwapManager().group_context("g"):
        assert losses(model, size) == losses(plain, size)


def losses(model: nn.Cell, size: Size) -> list[bytes]:
    loss, gradients = gradients_of(model)(*batch(size, 0))
    return [bits(tensor) for tensor in (loss, *gradients)]


def test_c8_dropout_under_mixed_plans_is_right_or_an_error() -> None:
    size = Size(dropout=0.1)
    reference = losses(made(size), size)
    with SwapManager().group_context("g"):
        assert losses(dropping(swap_wrapper), size) == reference
    turn = iter(range(100))

    def mixed(block: nn.Cell) -> nn.Cell:
        return swap_wrapper(block) if next(turn) % 2 else checkpoint_wrapper(block)

    with SwapManager().group_context("g"), pytest.raises(ChangedError):
        losses(dropping(mixed), size)
    SwapManager().abort_group("g")


def test_c8_a_function_that_computes_something_else_the_second_time_is_found() -> None:
    runs: list[int] = []

    def function(x: Tensor) -> Tensor:
        runs.append(1)
        return ops.exp(x * len(runs)).sum()

    with pytest.raises(ChangedError, match="function again"):
        gradient(lambda x: checkpoint(function, x), sample())

    def shapes(x: Tensor) -> list[Tensor]:
        runs.append(1)
        return [ops.exp(x), ops.exp(x)][: 1 + len(runs) % 2]

    runs.clear()
    with pytest.raises((ChangedError, RuntimeError)):
        gradient(lambda x: checkpoint(shapes, x)[0].sum(), sample())


def test_c8_random_numbers_afterwards_are_those_of_plain() -> None:
    block = Block()

    def draw(call: Callable[..., Tensor]) -> bytes:
        ms.manual_seed(5)
        gradient(lambda x: call(block, x).sum(), sample())
        return bits(ms.get_rng_state())

    assert draw(checkpoint) == draw(lambda function, x: function(x))


def test_w3_memory_is_flat_and_nothing_is_left() -> None:
    model = wire(covered(3, lambda layer: checkpoint_wrapper(layer, swap_inputs=True)))
    gc.collect()
    before = len(_spans._spans)  # steps that failed may have left some
    for _ in range(5):
        step(model)
    gc.collect()
    assert held() == (0, 0)
    assert len(_spans._spans) <= before
