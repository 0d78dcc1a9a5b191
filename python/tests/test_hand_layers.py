"""Layers that drive their own groups (rows M4 to M6, M10 and M11 of the catalogue)."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hand_models import (
    WIDTH,
    assert_equal,
    figures,
    gradients,
    held,
    layers,
    moved,
    one_thread,
    sample,
    step,
    told,
    wire,
    wrapped,
)
from session_models import Block
from torch import nn

import ebbtide.torch
from ebbtide import PhaseError, SettingError
from ebbtide.torch import (
    ActivationWrapper,
    SwapManager,
    swap,
    swap_wrapper,
)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def manager() -> SwapManager:
    return SwapManager()


def swapped(count: int = 4) -> nn.Sequential:
    return wire(wrapped(layers(count), swap_wrapper))


def inner_of(layer: nn.Module) -> nn.Module:
    """What a wrapper wraps."""
    assert isinstance(layer, ActivationWrapper)
    return layer._inner


# ---- forward and backward


def test_m4_two_layers_are_resident_and_the_group_is_current(manager: SwapManager) -> None:
    model = swapped(5)
    seen: list[tuple[str | None, list[str]]] = []

    def look(module: nn.Module, *_: object) -> None:
        away = [group.phase for groups in manager._groups.values() for group in groups]
        seen.append((manager.get_current_group_name(), away))

    for layer in model:
        inner_of(layer).register_forward_hook(look)
    reference = step(layers(5))
    assert_equal(step(model), reference)
    names = [name for name, _ in seen]
    assert len(set(names)) == 5
    assert None not in names
    phases = [phases for _, phases in seen]
    assert phases[3] == ["away", "away", "offloading", "open"]
    assert phases[4] == ["away", "away", "away", "offloading"]
    assert manager.get_current_group_name() is None


def test_m4_the_group_ends_with_an_exception(manager: SwapManager) -> None:
    model = swapped(4)
    reference = step(layers(4))
    fail = [True]

    def break_off(*_: object) -> None:
        if fail[0]:
            raise ValueError("in the third layer")

    inner_of(model[2]).register_forward_hook(break_off)
    for _ in range(3):
        fail[0] = True
        with pytest.raises(ValueError, match="third"):
            step(model)
        assert manager.get_current_group_name() is None
        # The two layers before it have left; the failed one's group is given up.
        assert [len(groups) for groups in manager._groups.values()] == [1, 1]
        fail[0] = False
        gc.collect()
        assert manager.active_group_count() == 0
        assert_equal(step(model), reference)
    gc.collect()
    assert (manager.active_group_count(), held()) == (0, (0, 0))


def test_m4_also_after_an_interrupt(manager: SwapManager) -> None:
    model = wire(layers(4, Named))
    step(model)
    reference = step(layers(4, Named))
    interrupt = [True]

    def interrupted(*_: object) -> None:
        if interrupt[0]:
            raise KeyboardInterrupt

    model[1].get_submodule("up").register_forward_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(model)
    assert manager.get_current_group_name() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    interrupt[0] = False
    assert_equal(step(model), reference)


def test_m5_backward_prefetches_the_layer_before(manager: SwapManager) -> None:
    model = swapped(5)
    reference = step(layers(5))
    assert_equal(step(model), reference)
    assert figures()["missed_prefetches"] == 0
    assert moved()[0] == moved()[1] > 0
    assert (manager.active_group_count(), held()) == (0, (0, 0))


def test_m5_recomputation_leaves_groups_alone(manager: SwapManager) -> None:
    reference = step(layers(4))
    model = wire(layers(4))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=False)
            return y

    assert_equal(step(Whole()), reference)
    assert moved() == (0, 0)
    assert manager.get_current_group_name() is None


def test_m5_marks_end_with_a_failed_backward(manager: SwapManager) -> None:
    model = swapped(4)
    reference = step(layers(4))

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ValueError("in backward")

    for _ in range(3):
        x = sample()
        with pytest.raises(ValueError, match="in backward"):
            model[2:](Fails.apply(model[:2](x))).sum().backward()
        del x
        gc.collect()
        assert_equal(step(model), reference)
    assert (manager.active_group_count(), held()) == (0, (0, 0))


def test_m5_without_signals_everything_is_loaded_on_demand(manager: SwapManager) -> None:
    model = swapped(4)
    reference = step(layers(4))
    x = sample()
    torch.manual_seed(2)
    loss = model(x).square().mean()
    for layer in model:
        manager.unregister_forward_prefetch_hooks(layer)
    for declared in manager._layers._layers.values():
        if declared.latest is not None:
            declared.latest._begun = True  # as if the gradient's hooks never fired
    loss.backward()
    assert_equal(gradients(model, x, loss), reference)
    assert held() == (0, 0)


def test_m5_outputs_of_any_form_and_inputs_without_gradient(manager: SwapManager) -> None:
    class Dicts(Block):
        def forward(self, x: Any) -> Any:  # type: ignore[override]
            return {"x": [super().forward(x["x"][0])], "note": 3}

    plain, model = layers(4, Dicts), wire(wrapped(layers(4, Dicts), swap_wrapper))
    found = []
    for each in (plain, model):
        torch.manual_seed(3)
        each({"x": [sample().detach()]})["x"][0].square().mean().backward()
        found.append(gradients(each))
    assert_equal(*found)
    assert figures()["missed_prefetches"] == 0
    assert held() == (0, 0)


def test_m5_a_layer_output_may_be_changed_in_place(manager: SwapManager) -> None:
    def run(model: nn.Sequential) -> list[torch.Tensor]:
        x = sample()
        torch.manual_seed(2)
        hidden = x
        for layer in model:
            hidden = layer(hidden)
            hidden += 1
        hidden.square().mean().backward()
        return gradients(model, x)

    assert_equal(run(swapped(3)), run(layers(3)))


# ---- hooks


def hooks_of(module: nn.Module) -> int:
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return sum(len(kind) for kind in kinds)


def test_m6_hooks_are_hung_once_and_in_order(manager: SwapManager) -> None:
    calls: list[str] = []
    model = layers(3)

    def note(text: str) -> Any:
        return lambda *_: calls.append(f"{text} {manager.get_current_group_name() is not None}")

    model[1].register_forward_pre_hook(note("user's pre"))
    model[1].register_forward_hook(note("user's post"))
    wire(model)
    count = hooks_of(model[1])
    wire(model)
    assert hooks_of(model[1]) == count
    step(model)
    assert calls == ["user's pre True", "user's post True"]


def test_m6_backward_begins_before_the_users_hook(manager: SwapManager) -> None:
    model = wrapped(layers(3), swap_wrapper)
    phases: list[str | None] = []
    model[1].register_full_backward_pre_hook(lambda *_: phases.append(begun()))
    wire(model)
    layer = manager._layers.of(model[1])
    assert layer is not None

    def begun() -> str | None:
        return None if layer.latest is None else str(layer.latest._begun)

    reference = step(layers(3))
    assert_equal(step(model), reference)
    assert phases == ["True"]


def test_m6_unregistering(manager: SwapManager) -> None:
    model = layers(4)
    before = [hooks_of(layer) for layer in model]
    wire(model)
    assert manager.unregister_forward_prefetch_hooks(model[1]) >= 2
    assert manager.unregister_forward_prefetch_hooks(model[1]) == 0
    assert hooks_of(model[1]) == before[1]
    wire(model)
    assert hooks_of(model[1]) > before[1]
    manager.unregister_forward_prefetch_layer(model[1])
    manager.unregister_forward_prefetch_layer(model[1])
    assert hooks_of(model[1]) == before[1]
    # Its neighbours follow each other.
    with told() as texts:
        manager.set_forward_prefetch_layer(model[0], model[2])
    assert texts == []
    with pytest.raises(SettingError):
        manager.set_forward_prefetch_layer(model[0], model[3])
    manager.unregister_forward_prefetch_layer([*model, nn.Linear(2, 2)])
    assert [hooks_of(layer) for layer in model] == before
    wire(nn.Sequential(*reversed(model)))


def test_m6_a_removed_layer_gives_its_group_up(manager: SwapManager) -> None:
    model = swapped(3)
    x = sample()
    loss = model(x).sum()
    assert manager.active_group_count() == 2
    manager.unregister_forward_prefetch_layer(model[0])
    assert manager.active_group_count() == 1
    with pytest.raises(PhaseError):
        loss.backward()


def test_m6_a_dropped_model_tears_its_own_wiring_down(manager: SwapManager) -> None:
    before = len(manager._layers._layers)
    model = swapped(3)
    gone = weakref.ref(model[0])
    step(model)
    assert len(manager._layers._layers) == before + 3
    del model
    gc.collect()
    assert gone() is None
    assert manager.active_group_count() == 0
    assert len(manager._layers._layers) == before


# ---- passes


def test_m10_micro_batches(manager: SwapManager) -> None:
    def run(model: nn.Sequential, order: str) -> list[torch.Tensor]:
        model.zero_grad()
        losses = []
        torch.manual_seed(5)
        for number in range(4):
            losses.append(model(sample(number)).square().mean())
            if order == "one by one":
                losses[-1].backward()
        if order == "all, then back":
            for loss in reversed(losses):
                loss.backward()
        elif order == "first in, first out":
            for loss in losses:
                loss.backward()
        return gradients(model)

    for order in ("one by one", "all, then back", "first in, first out"):
        model = swapped(4)
        for _ in range(2):
            assert_equal(run(model, order), run(layers(4), order))
        assert (manager.active_group_count(), held()) == (0, (0, 0))


def test_m10_a_layer_that_is_used_twice(manager: SwapManager) -> None:
    def run(model: nn.Sequential) -> list[torch.Tensor]:
        x = sample()
        torch.manual_seed(5)
        model(model[0](model[1](model(x)))).square().mean().backward()
        return gradients(model, x)

    assert_equal(run(swapped(3)), run(layers(3)))
    assert (manager.active_group_count(), held()) == (0, (0, 0))


def test_m10_evaluation_between_steps(manager: SwapManager) -> None:
    model, plain = swapped(4), layers(4)
    for seed in range(3):
        model.zero_grad()
        x = sample(seed)
        torch.manual_seed(seed)
        loss = model(x).square().mean()
        with torch.no_grad():
            model(sample(9))
        model(sample(8))  # with gradients, never used
        loss.backward()
        assert_equal(gradients(model, x, loss), step(plain, seed))
    gc.collect()
    assert (manager.active_group_count(), held()) == (0, (0, 0))


def test_m10_two_models_in_two_threads(manager: SwapManager) -> None:
    errors: list[BaseException] = []

    def train() -> None:
        try:
            torch.set_num_threads(1)
            model = models.pop()
            for seed in range(4):
                x = sample(seed)
                model.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                assert_equal(gradients(model, x, loss), expected[seed])
        except BaseException as error:
            errors.append(error)

    # Random numbers are the process's: without dropout both are exact.
    models = [swapped(4).eval(), swapped(4).eval()]
    plain = layers(4).eval()
    expected = [step(plain, seed) for seed in range(4)]
    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert (manager.active_group_count(), held()) == (0, (0, 0))


def test_m11_without_declarations_the_order_is_learnt(manager: SwapManager) -> None:
    model = layers(4)
    reference = step(layers(4))

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        x = hidden = sample()
        torch.manual_seed(2)
        for number, layer in enumerate(model):
            with manager.group_context(f"layer {number}"):
                hidden = swap(layer, hidden)
            manager.launch_offload(f"layer {number}")
        for number in range(4):
            manager.wait_offload(f"layer {number}")
        loss = hidden.square().mean()
        loss.backward()
        return gradients(model, x, loss)

    missed = []
    for _ in range(3):
        before = figures()["missed_prefetches"]
        assert_equal(run(), reference)
        missed.append(figures()["missed_prefetches"] - before)
    # The last layer's comes at once, before anybody could have started it.
    assert missed[-1] <= 1


def test_memory_is_flat_over_many_steps(manager: SwapManager) -> None:
    model = swapped(3)
    for number in range(100):
        loss = model(sample()).sum()
        if number % 7 == 3:
            del loss  # a backward that never comes
            continue
        loss.backward()
    gc.collect()
    assert (manager.active_group_count(), held()) == (0, (0, 0))
    assert len(manager._groups) == 0


# ---- tensors by name need what the layers do


class Named(Block):
    """Names two tensors of its own."""

    def forward(self, x: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        hidden = ebbtide.torch.swap_tensor_wrapper(self.up(self.norm2(x)), "up")
        wide = ebbtide.torch.swap_tensor_wrapper({"gelu": nn.functional.gelu(hidden)})["gelu"]
        y: torch.Tensor = x + self.drop(self.down(wide))
        return y


def test_m4_tensors_by_name_leave_with_their_layer(manager: SwapManager) -> None:
    reference = step(layers(4, Named))
    model = wire(layers(4, Named))
    for _ in range(2):
        before = figures()
        assert_equal(step(model), reference)
        after = figures()
        assert after["tensors_out"] - before["tensors_out"] == 6
        assert after["bytes_out"] - before["bytes_out"] == 6 * 4 * 16 * 4 * WIDTH * 4
        assert after["not_freed_tensors"] == 0
    assert (manager.active_group_count(), held()) == (0, (0, 0))
