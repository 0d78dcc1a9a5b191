"""Layers that drive their groups (rows M4 to M6 and M10 to M12 of the catalogue)."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import mindspore as ms
import pytest
from hand import (
    WIDTH,
    Block,
    Chained,
    bits,
    chained,
    figures,
    fresh,
    held,
    moved,
    sample,
    saving,
    step,
    swapped,
    told,
    wire,
    wire_all,
)
from mindspore import Tensor, mint, nn, ops
from models import Size, batch, gradients_of
from models import made as gpt

from ebbtide import PhaseError, SettingError
from ebbtide.mindspore import Region, SwapManager, SwapTensor, _spans
from ebbtide.mindspore._cells import surround


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    fresh()
    yield
    fresh()


@pytest.fixture
def manager() -> SwapManager:
    return SwapManager()


def made(count: int = 4) -> Chained:
    return wire(swapped(chained(count)))


# ---- forward and backward


def test_m4_two_layers_are_resident_and_the_group_is_current(manager: SwapManager) -> None:
    model = made(5)
    seen: list[tuple[str | None, list[str]]] = []

    def look(*_: object) -> None:
        away = [group.phase for groups in manager._groups.values() for group in groups]
        seen.append((manager.get_current_group_name(), away))

    for layer in model.layers:
        layer.down.register_forward_hook(look)
    assert step(model) == step(chained(5))
    names = [name for name, _ in seen[:5]]
    assert len(set(names)) == 5
    assert None not in names
    phases = [phases for _, phases in seen]
    assert phases[3] == ["away", "away", "offloading", "open"]
    assert phases[4][:4] == ["away", "away", "away", "offloading"]
    assert manager.get_current_group_name() is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_m4_c10_the_group_ends_with_an_exception(manager: SwapManager, error: type[BaseException]) -> None:
    model, reference = made(4), step(chained(4))
    fail = [True]

    def break_off(*_: object) -> None:
        if fail[0]:
            raise error("in the third layer")

    model.layers[2].down.register_forward_hook(break_off)
    for _ in range(3):
        fail[0] = True
        with pytest.raises(error, match="third"):
            step(model)
        assert manager.get_current_group_name() is None
        fail[0] = False
        assert step(model) == reference
    assert (manager.active_group_count(), held()) == (0, (0, 0))


def test_m7_c10_failed_passes_leave_nothing(manager: SwapManager) -> None:
    model, reference = made(4), step(chained(4))
    where = [0]

    def refuse(gradient: Tensor) -> Tensor:
        if where[0] == 2:
            raise ValueError("in backward")
        return gradient

    def run(x: Tensor) -> Tensor:
        y = model(x)
        y.register_hook(refuse)
        if where[0] == 1:
            raise ValueError("after the layers")
        return mint.mean(mint.square(y))

    for number in range(12):
        where[0] = number % 4
        if where[0] in (1, 2):
            with pytest.raises(ValueError, match=r"layers|backward"):
                step(model, run=run)
        else:
            assert step(model, run=run) == reference
            assert (manager.active_group_count(), held()) == (0, (0, 0))
            assert not [span for span in _spans._spans if span.is_here]


def test_m5_backward_prefetches_the_layer_before(manager: SwapManager) -> None:
    model = made(5)
    assert step(model) == step(chained(5))
    assert figures()["missed_prefetches"] == 0
    assert moved()[0] == moved()[1] > 0
    assert (manager.active_group_count(), held()) == (0, (0, 0))


@pytest.mark.parametrize("reentrant", [False, True])
def test_m5_recomputation_leaves_groups_alone(manager: SwapManager, reentrant: bool) -> None:
    model = wire(chained(4))
    run = lambda x: mint.mean(mint.square(ms.recompute(model, x, use_reentrant=reentrant)))  # noqa: E731
    assert step(model, run=run) == step(chained(4))
    assert moved() == (0, 0)
    assert manager.get_current_group_name() is None


def test_m5_marks_end_with_a_failed_backward(manager: SwapManager) -> None:
    model, reference = made(4), step(chained(4))
    fail = [True]

    def refuse(gradient: Tensor) -> Tensor:
        if fail[0]:
            raise ValueError("in backward")
        return gradient

    def run(x: Tensor) -> Tensor:
        layers = list(model.layers)
        hidden = layers[1](layers[0](x))
        hidden.register_hook(refuse)
        return mint.mean(mint.square(layers[3](layers[2](hidden))))

    for _ in range(3):
        fail[0] = True
        with pytest.raises(ValueError, match="in backward"):
            step(model, run=run)
        fail[0] = False
        assert step(model, run=run) == reference
    assert (manager.active_group_count(), held()) == (0, (0, 0))


def test_m5_without_signals_everything_is_loaded_on_demand(manager: SwapManager, monkeypatch: Any) -> None:
    monkeypatch.setattr(type(manager._layers), "watch_gradients", lambda *_: None)
    assert step(made(4)) == step(chained(4))
    assert held() == (0, 0)


class Dicts(Block):
    """Trees in and out."""

    def construct(self, x: Any) -> Any:
        return {"x": [super().construct(x["x"][0])], "note": 3}


def test_m5_outputs_of_any_form(manager: SwapManager) -> None:
    def steps(model: Chained) -> list[bytes]:
        return step(model, run=lambda x: mint.mean(mint.square(model({"x": [x]})["x"][0])))

    assert steps(wire(swapped(chained(4, Dicts)))) == steps(chained(4, Dicts))
    assert figures()["missed_prefetches"] == 0
    assert held() == (0, 0)


# ---- hooks


def hooks_of(cell: nn.Cell) -> int:
    return len(cell._forward_hook) + len(cell._forward_pre_hook)


def test_m6_hooks_are_hung_once_and_in_order(manager: SwapManager) -> None:
    calls: list[str] = []
    model = chained(3)

    def note(text: str) -> Any:
        return lambda *_: calls.append(f"{text} {manager.get_current_group_name() is not None}")

    middle = model.layers[1]
    middle.register_forward_pre_hook(note("user's pre"))
    middle.register_forward_hook(note("user's post"))
    wire(model)
    count = hooks_of(middle)
    wire(model)
    assert hooks_of(middle) == count
    step(model)
    assert calls == ["user's pre True", "user's post True"]


def test_m6_unregistering(manager: SwapManager) -> None:
    model = chained(4)
    layers = list(model.layers)
    wire(model)
    assert manager.unregister_forward_prefetch_hooks(layers[1]) >= 2
    assert manager.unregister_forward_prefetch_hooks(layers[1]) == 0
    assert hooks_of(layers[1]) == 0
    wire(model)
    assert hooks_of(layers[1]) == 2
    manager.unregister_forward_prefetch_layer(layers[1])
    manager.unregister_forward_prefetch_layer(layers[1])
    assert hooks_of(layers[1]) == 0
    with told() as texts:  # its neighbours follow each other
        manager.set_forward_prefetch_layer(layers[0], layers[2])
    assert texts == []
    with pytest.raises(SettingError):
        manager.set_forward_prefetch_layer(layers[0], layers[3])
    manager.unregister_forward_prefetch_layer([*layers, nn.Dense(2, 2)])
    assert [hooks_of(layer) for layer in layers] == [0] * 4
    with pytest.raises(SettingError, match="no layer"):
        manager.unregister_forward_prefetch_layer("x")


def test_m6_a_removed_layer_gives_its_group_up(manager: SwapManager) -> None:
    model = made(3)

    def run(x: Tensor) -> Tensor:
        y = mint.sum(model(x))
        assert manager.active_group_count() == 2
        manager.unregister_forward_prefetch_layer(model.layers[0])
        assert manager.active_group_count() == 1
        return y

    with pytest.raises(PhaseError):
        step(model, run=run)


def test_m6_a_dropped_model_tears_its_own_wiring_down(manager: SwapManager) -> None:
    manager.active_group_count()
    before = len(manager._layers._layers)
    model = made(3)
    gone = weakref.ref(model.layers[0])
    step(model)
    assert len(manager._layers._layers) == before + 3
    del model
    gc.collect()
    assert gone() is None
    assert manager.active_group_count() == 0
    assert len(manager._layers._layers) == before


def test_m6_hooks_are_inert_in_a_copy(manager: SwapManager) -> None:
    twin = copy.deepcopy(wire(chained(3)))
    assert step(twin) == step(chained(3))
    assert manager.active_group_count() == 0


# ---- passes


def test_m10_c12_micro_batches(manager: SwapManager) -> None:
    model, plain = made(4), chained(4)
    for seed in range(4):
        assert step(model, seed) == step(plain, seed)

    def both(model: Chained) -> list[bytes]:
        return step(model, run=lambda x: mint.sum(model(x)) + mint.sum(model(mint.exp(x))))

    for _ in range(2):
        assert both(model) == both(plain)
    assert (manager.active_group_count(), held()) == (0, (0, 0))


def test_m10_c12_a_layer_that_is_used_twice(manager: SwapManager) -> None:
    def run(model: Chained) -> list[bytes]:
        one, two = model.layers[0], model.layers[1]
        return step(model, run=lambda x: mint.mean(mint.square(model(one(two(model(x)))))))

    assert run(made(3)) == run(chained(3))
    assert (manager.active_group_count(), held()) == (0, (0, 0))


def test_m10_c11_evaluation_within_and_between_steps(manager: SwapManager) -> None:
    model, plain = made(4), chained(4)

    def run(x: Tensor) -> Tensor:
        loss = mint.mean(mint.square(model(x)))
        with ms._no_grad():
            model(sample(9))
        return loss

    for seed in range(3):
        assert bits(model(sample(7))) == bits(plain(sample(7)))
        assert step(model, seed, run=run) == step(plain, seed)
    gc.collect()
    assert (manager.active_group_count(), held()) == (0, (0, 0))


def test_m10_c24_two_models_that_take_turns(manager: SwapManager) -> None:
    # MindSpore itself ends the process where two threads take gradients at a time.
    models, plain = [made(4), made(4)], chained(4)
    for seed in range(4):
        expected = step(plain, seed)
        assert [step(model, seed) for model in models] == [expected, expected]
    assert (manager.active_group_count(), held()) == (0, (0, 0))


def test_m11_without_declarations_everything_is_right(manager: SwapManager) -> None:
    model, reference = chained(4), step(chained(4))

    def run(x: Tensor) -> Tensor:
        for number, layer in enumerate(model.layers):
            with manager.group_context(f"layer {number}"):
                x = saving(partial(layer, x))
            manager.launch_offload(f"layer {number}")
        for number in range(4):
            manager.wait_offload(f"layer {number}")
        return mint.mean(mint.square(x))

    missed = []
    for _ in range(3):
        before = figures()["missed_prefetches"]
        assert step(model, run=run) == reference
        missed.append(figures()["missed_prefetches"] - before)
    # The last layer's is asked for at once, before anybody could have started it.
    assert missed[1:] == [1, 1]


def test_m12_right_where_some_layers_drive_nothing(manager: SwapManager) -> None:
    model, reference = made(4), step(chained(4))
    for layer in list(model.layers)[::2]:
        manager.unregister_forward_prefetch_hooks(layer)
    with told():
        assert step(model) == reference


def test_m4_c2_a_gpt_whose_mask_all_layers_save(manager: SwapManager) -> None:
    size = Size()
    plain, model = gpt(size), gpt(size)
    for block in model.blocks:
        surround(block, lambda inner, args, kwargs: saving(lambda: inner(*args, **kwargs)))
    wire_all(list(model.blocks))
    with_swap, without = gradients_of(model), gradients_of(plain)
    for number in range(3):
        (loss, gradients), (expected, exact) = with_swap(*batch(size, number)), without(*batch(size, number))
        assert bits(loss) == bits(expected)
        assert [bits(gradient) for gradient in gradients] == [bits(gradient) for gradient in exact]
    assert moved()[0] == moved()[1] > 0
    assert figures()["missed_prefetches"] == 0
    assert (manager.active_group_count(), held()) == (0, (0, 0))


def test_m4_tensors_by_name_leave_with_their_layer_and_come_back_before_its_backward(manager: SwapManager) -> None:
    model = wire(chained(4))
    named: list[SwapTensor] = []
    away: list[str] = []

    class Naming(Block):
        """Names what its backward reads."""

        def construct(self, x: Tensor) -> Tensor:
            hidden = ops.gelu(self.up(x))
            group = manager.get_current_group_name()
            if group is not None and not manager.is_last_group():
                region = Region()
                region["up"].append(SwapTensor(hidden, "up"))
                named.extend(region["up"])
                manager.ensure_group(group).add(region)
            return x + self.down(hidden)

    for layer in model.layers:
        layer.__class__ = Naming
    model.layers[3].down.register_forward_hook(lambda *_: away.extend(tensor.state for tensor in named))
    assert step(model) == step(chained(4))
    assert away == ["host", "host", "d2h"]
    assert moved()[0] == moved()[1] == 3 * 8 * 2 * WIDTH * 4
    assert {tensor.state for tensor in named} == {"device"}
    assert (manager.active_group_count(), held()) == (0, (0, 0))
