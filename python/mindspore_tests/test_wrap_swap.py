"""Wrappers, functions and policies for tensors (rows W1, W2, W5 and W6 of the catalogue)."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from covers import BYTES, array, cleanly, gradient, sample, step
from hand import Block, bits, chained, figures, held, moved, send, told, wire
from mindspore import Parameter, Tensor, mint, nn, ops

from ebbtide import ChangedError, SettingError
from ebbtide.mindspore import (
    AsyncSaveOnCpu,
    CheckpointPolicy,
    FuncCell,
    SwapManager,
    SwapWrapper,
    async_save_on_cpu,
    base_check_fn,
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


def twice_exp(x: Tensor) -> Tensor:
    return ops.exp(ops.exp(x * 0.1)).sum()


# ---- policies


@pytest.mark.parametrize("answer", [CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_SAVE, True, None, "swap"])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.filterwarnings("ignore:no group is current")
def test_w1_an_answer_that_makes_no_sense_is_named(answer: object, inside: bool) -> None:
    with SwapManager().group_context("g" if inside else None), pytest.raises(SettingError) as caught:
        gradient(lambda x: swap(twice_exp, x, policy_fn=lambda _: answer), sample())
    assert repr(answer) in str(caught.value)
    # The hooks are off again, and the next step is right.
    assert gradient(twice_exp, sample()) == gradient(lambda x: swap(twice_exp, x), sample())


def test_w1_the_policy_is_asked_once_about_each_tensor() -> None:
    asked: list[tuple[int, ...]] = []

    def policy(tensor: Tensor) -> object:
        asked.append(tuple(tensor.shape))
        return CheckpointPolicy.MUST_SWAP if tensor.size > 10 else CheckpointPolicy.MUST_SAVE

    def body(x: Tensor) -> Tensor:
        return ops.exp(ops.exp(x * 0.1)[0, :4]).sum()

    def run(x: Tensor) -> Tensor:
        with SwapManager().group_context("g"):
            return swap(body, x, policy_fn=policy)

    assert gradient(run, sample(), lambda: send("g")) == gradient(body, sample())
    assert sorted(asked) == [(4,), (8, 16)]
    assert moved() == (BYTES, BYTES)


def test_w1_values() -> None:
    names = ["MUST_SAVE", "PREFER_SAVE", "MUST_RECOMPUTE", "PREFER_RECOMPUTE", "MUST_SWAP"]
    assert list(CheckpointPolicy.__members__) == names


# ---- swap_wrapper


class Tied(nn.Cell):
    """Saves a parameter, an attribute, and what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Parameter(array(16), name="scale")
        self.table = array(8, 16)

    def construct(self, x: Tensor) -> Tensor:
        return (ops.exp(x * self.scale * self.table) * self.scale).sum()


def test_w2_what_is_not_eligible_is_never_asked_about() -> None:
    asked: list[Tensor] = []

    def policy(tensor: Tensor) -> CheckpointPolicy:
        asked.append(tensor)
        return CheckpointPolicy.MUST_SWAP

    cell = Tied()
    covered = swap_wrapper(cell, policy)

    def run(x: Tensor) -> Tensor:
        with SwapManager().group_context("g"):
            return covered(x)

    expected = gradient(cell, sample())
    assert gradient(run, sample()) == expected
    owned = {int(tensor.untyped_storage().data_ptr()) for tensor in (cell.scale, cell.table)}
    assert asked
    assert not owned & {int(tensor.untyped_storage().data_ptr()) for tensor in asked}


def test_w2_a_region_belongs_to_the_group_of_its_first_tensor() -> None:
    manager = SwapManager()

    def body(x: Tensor) -> Tensor:
        with manager.group_context("first"):
            x = ops.exp(x * 0.1)
        with manager.group_context("second"):
            return ops.exp(x).sum()

    def run(x: Tensor) -> Tensor:
        with manager.group_context("outer"):
            return swap(body, x)

    def end() -> None:
        assert list(manager._groups) == ["first"]
        assert manager.ensure_group("first")._native().tensors == 2
        send("first")

    assert gradient(run, sample(), end) == gradient(twice_exp, sample())
    assert moved() == (2 * BYTES, 2 * BYTES)


def test_w2_nothing_that_moves_makes_no_group() -> None:
    def run(x: Tensor) -> Tensor:
        with SwapManager().group_context("g"):
            kept = swap(twice_exp, x, policy_fn=lambda _: CheckpointPolicy.MUST_SAVE)
            return swap(lambda t: t.sum(), x) + kept

    with told() as texts:
        gradient(run, sample(), lambda: list_is_empty(SwapManager()._groups))
    assert texts == []


def list_is_empty(names: Any) -> None:
    assert list(names) == []


def test_w2_outside_of_any_group_it_stays_and_is_told_once() -> None:
    with told() as texts:
        for _ in range(2):
            assert gradient(lambda x: swap(twice_exp, x), sample()) == gradient(twice_exp, sample())
    assert len(texts) == 1
    assert "no group is current" in texts[0]
    assert moved() == (0, 0)


def test_w2_layers_are_swapped_but_for_the_last() -> None:
    reference = step(chained(4))
    model = chained(4)
    for number, layer in enumerate(list(model.layers)):
        model.layers[number] = swap_wrapper(layer)
    wire(model)
    for _ in range(2):
        before = moved()
        assert step(model) == reference
        out, back = (now - then for now, then in zip(moved(), before, strict=True))
        assert out == back > 0
    assert figures()["missed_prefetches"] == 0
    assert held() == (0, 0)


def test_w2_a_policy_that_names_a_tensor_swaps_it_in_the_last_layer_as_well() -> None:
    def out(policy: Any) -> int:
        model = chained(2)
        for number, layer in enumerate(list(model.layers)):
            model.layers[number] = swap_wrapper(layer, policy)
        wire(model)
        before = moved()[0]
        assert step(model) == step(chained(2))
        return moved()[0] - before

    assert out(lambda _: CheckpointPolicy.MUST_SWAP) == 2 * out(None) > 0


def test_w2_a_region_is_labelled_with_group_and_shape() -> None:
    def body(x: Tensor) -> Tensor:
        return ops.exp(x * 0.1).sum()

    x, changed = sample(), [array(8, 16)]

    def run(x: Tensor) -> Tensor:
        with SwapManager().group_context("layer 7"):
            return swap(lambda t: (ops.exp(t) * changed[0] * t).sum(), x * 1)

    def change() -> None:
        send("layer 7")
        SwapManager().abort_group("layer 7")

    with pytest.raises(Exception, match="layer 7"):
        gradient(run, x, change)


@pytest.mark.parametrize("answer", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP])
@pytest.mark.parametrize("inside", [True, False])
def test_w2_a_change_after_saving_is_noticed(answer: CheckpointPolicy, inside: bool) -> None:
    hidden: list[Tensor] = []

    def change() -> None:
        hidden[-1].copy_(array(8, 16, seed=5))

    def body(t: Tensor) -> Tensor:
        hidden.append(t * 2)
        y = (hidden[-1] * ops.exp(hidden[-1])).sum()
        if inside:
            change()
        return y

    def run(x: Tensor) -> Tensor:
        with SwapManager().group_context("g"):
            return swap(body, x, policy_fn=lambda _: answer)

    def between() -> None:
        if not inside:
            change()
        elif answer is CheckpointPolicy.MUST_SWAP:
            send("g")

    with pytest.raises(ChangedError):
        gradient(run, sample(), between)
    SwapManager().abort_group("g")


def test_w2_a_failed_region_leaves_nothing() -> None:
    saved: list[weakref.ref[Tensor]] = []

    def body(x: Tensor) -> Tensor:
        y = ops.exp(x)
        saved.append(weakref.ref(y))
        raise ValueError("inside")

    for _ in range(3):
        with SwapManager().group_context("g"), pytest.raises(ValueError, match="inside"):
            gradient(lambda x: swap(body, x), sample())
    gc.collect()
    assert all(ref() is None for ref in saved)
    assert SwapManager().active_group_count() == 0
    assert gradient(lambda x: swap(twice_exp, x), sample()) == gradient(twice_exp, sample())


def test_w2_without_gradients_nothing_is_saved() -> None:
    with SwapManager().group_context("g"), told() as texts:
        out = swap_wrapper(twice_exp)(sample())
    assert bits(out) == bits(twice_exp(sample()))
    assert texts == []
    assert SwapManager().active_group_count() == 0


def test_w2_keywords_and_names() -> None:
    def parameters(function: Callable[..., Any]) -> list[str]:
        return list(inspect.signature(function).parameters)

    common = ["policy_fn", "group_swap", "cpu_pool"]
    assert parameters(swap_wrapper) == ["module", *common]
    assert parameters(swap) == ["function", "args", *common, "kwargs"]
    assert parameters(async_save_on_cpu) == common
    assert parameters(AsyncSaveOnCpu) == common
    assert parameters(swap_tensor_wrapper) == ["target", "tag", "group_swap", "cpu_pool"]
    assert parameters(checkpoint_wrapper) == ["module", "checkpoint_kwargs"]
    assert parameters(checkpoint) == [
        *("function", "args", "swap_inputs", "policy_fn", "context_fn"),
        *("group_swap", "cpu_pool", "early_stop", "kwargs"),
    ]


WRONG: list[Callable[[], object]] = [
    lambda: swap_wrapper(3),
    lambda: swap(3, sample()),  # type: ignore[arg-type]
    lambda: FuncCell(3),  # type: ignore[arg-type]
    lambda: swap_tensor_wrapper(sample(), cpu_pool=3),
    lambda: swap_wrapper(nn.ReLU(), policy_fn="swap"),  # type: ignore[arg-type]
    lambda: swap_wrapper(nn.ReLU(), cpu_pool=3),
    lambda: AsyncSaveOnCpu(policy_fn=True),  # type: ignore[arg-type]
    lambda: checkpoint_wrapper(nn.ReLU(), swap_input=True),
    lambda: checkpoint(nn.ReLU(), sample(), policy_fn=[]),
    lambda: checkpoint(nn.ReLU(), sample(), use_reentrant=True),
    lambda: checkpoint(3, sample()),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("call", WRONG)
def test_w2_settings_that_are_wrong(call: Callable[[], object]) -> None:
    with pytest.raises(SettingError) as caught:
        call()
    assert caught.value.hint


def test_w2_base_check() -> None:
    weight = Parameter(array(2, 2), name="weight")
    assert base_check_fn(array(3))
    assert not any(base_check_fn(value) for value in (3, None, weight, mint.empty((0,))))


# ---- functions


def test_w5_functional() -> None:
    class Functional(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layers = chained(2).layers

        def construct(self, x: Tensor) -> Tensor:
            with SwapManager().group_context("w5"):
                x = swap(self.layers[0], x)
                return checkpoint(self.layers[1], x, swap_inputs=True)

    def send_all(model: nn.Cell) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            y = model(x)
            send("w5")
            return mint.mean(mint.square(y))

        return run

    model = Functional()
    assert step(model, run=send_all(model)) == step(chained(2))
    assert moved()[0] > BYTES
    x = array(4)
    for call in (swap, checkpoint):
        assert np.array_equal(call(mint.add, x, x, alpha=2).asnumpy(), (x + x * 2).asnumpy())


def test_w5_a_context_may_be_entered_again() -> None:
    context = async_save_on_cpu()

    def run(x: Tensor) -> Tensor:
        with SwapManager().group_context("g"):
            with context:
                x = ops.exp(x * 0.1)
            with context:
                return ops.exp(x).sum()

    assert gradient(run, sample(), lambda: send("g")) == gradient(twice_exp, sample())
    assert moved() == (2 * BYTES, 2 * BYTES)


def test_w6_a_callable_becomes_a_cell_without_parameters() -> None:
    for wrap in (swap_wrapper, checkpoint_wrapper, FuncCell):
        cell = wrap(lambda x, scale=1, *, shift: x * scale + shift)
        assert isinstance(cell, nn.Cell)
        assert list(cell.get_parameters()) == []
        assert cell.parameters_dict() == {}
        assert cell(Tensor(np.ones(2, np.float32)), 3, shift=1).asnumpy().tolist() == [4, 4]
    assert isinstance(swap_wrapper(functools.partial(mint.add, alpha=2)), SwapWrapper)


def test_w6_a_method_of_a_cell_is_swapped_with_what_the_cell_owns_kept() -> None:
    cell = Tied()
    asked: list[Tensor] = []

    def policy(tensor: Tensor) -> CheckpointPolicy:
        asked.append(tensor)
        return CheckpointPolicy.MUST_SWAP

    def run(x: Tensor) -> Tensor:
        with SwapManager().group_context("g"):
            return swap(cell.construct, x, policy_fn=policy)

    assert gradient(run, sample(), lambda: send("g")) == gradient(cell, sample())
    addresses = {int(tensor.untyped_storage().data_ptr()) for tensor in asked}
    assert int(cell.table.untyped_storage().data_ptr()) not in addresses


def test_c2_masks_and_tables_that_a_layer_is_called_with_stay() -> None:
    mask = array(8, 16, seed=9)

    def body(x: Tensor, mask: Tensor) -> Tensor:
        return (ops.exp(x) * mask).sum()

    def run(x: Tensor) -> Tensor:
        with SwapManager().group_context("g"):
            return swap(body, x, mask)

    expected = gradient(lambda x: body(x, mask), sample())
    assert gradient(run, sample(), lambda: send("g")) == expected
    assert moved() == (BYTES, BYTES)  # the result of exp, not the mask


def test_c10_an_exception_after_the_region_leaves_the_next_step_right() -> None:
    block = swap_wrapper(Block())
    reference = gradient(lambda x: block(x).sum(), sample())

    def run(x: Tensor) -> Tensor:
        with SwapManager().group_context("g"):
            return block(x).sum()

    def fail() -> None:
        send("g")
        raise ValueError("after it")

    for _ in range(3):
        with pytest.raises(ValueError, match="after it"):
            gradient(run, sample(), fail)
        SwapManager().abort_group("g")
        assert held()[0] == 0
        assert gradient(run, sample(), lambda: send("g")) == reference
