"""Groups by name and chains of layers (rows M1 to M3 and M7 to M9 of the catalogue)."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Iterator

import pytest
import torch
from hand_models import (
    assert_equal,
    double_exp,
    figures,
    gradients,
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

from ebbtide import PhaseError, SettingError
from ebbtide.torch import (
    ActivationWrapper,
    CheckpointPolicy,
    Region,
    SwapManager,
    SwapTensor,
    async_save_on_cpu,
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


# ---- groups by name


def test_m1_there_is_one_manager() -> None:
    assert SwapManager() is SwapManager()


def test_m1_the_current_group_is_nested_and_restored(manager: SwapManager) -> None:
    assert manager.get_current_group_name() is None
    with manager.group_context("outer"):
        with pytest.raises(ValueError, match="inside"), manager.group_context("inner"):
            assert manager.get_current_group_name() == "inner"
            raise ValueError("inside")
        assert manager.get_current_group_name() == "outer"
        manager.set_current_group_name("other")
        assert manager.get_current_group_name() == "other"
    assert manager.get_current_group_name() is None
    manager.set_current_group_name("plain")
    assert manager.get_current_group_name() == "plain"
    with pytest.raises(SettingError):
        manager.set_current_group_name(3)  # type: ignore[arg-type]


def test_m1_threads_start_without_and_tasks_have_their_own(manager: SwapManager) -> None:
    seen: list[str | None] = []
    manager.set_current_group_name("main")
    thread = threading.Thread(target=lambda: seen.append(manager.get_current_group_name()))
    thread.start()
    thread.join()
    assert seen == [None]

    async def task(name: str) -> str | None:
        with manager.group_context(name):
            await asyncio.sleep(0)
            return manager.get_current_group_name()

    async def both() -> list[str | None]:
        return list(await asyncio.gather(task("one"), task("two")))

    assert asyncio.run(both()) == ["one", "two"]
    assert manager.get_current_group_name() == "main"


@pytest.mark.parametrize("call", ["launch_offload", "wait_offload", "launch_load", "wait_load"])
def test_m2_an_unknown_name_is_an_error_that_names_it(manager: SwapManager, call: str) -> None:
    with pytest.raises(SettingError, match="nobody"):
        getattr(manager, call)("nobody")
    with pytest.raises(SettingError, match="nobody"):
        manager.add_storage("nobody", Region())
    with pytest.raises(SettingError, match="nobody"):
        manager.protect_alias_tensors("nobody", [])


def test_m2_cleaning_up_is_quiet(manager: SwapManager) -> None:
    with told() as texts:
        manager.release_group_storage("nobody")
        manager.abort_group("nobody")
        assert not manager.is_last_group("nobody")
        assert not manager.is_last_group()
    assert texts == []


def test_m2_a_schedule_drives_groups_by_name_alone(manager: SwapManager) -> None:
    torch.manual_seed(0)
    stages = layers(2)
    reference = step(stages)
    stages.zero_grad()
    x = sample()
    torch.manual_seed(2)
    with manager.group_context("stage 0"):
        hidden = swap(stages[0], x)
    assert manager.active_group_count() == 1
    manager.launch_offload("stage 0")
    with manager.group_context("stage 1"):
        loss = swap(stages[1], hidden).square().mean()
    manager.wait_offload("stage 0")
    send("stage 1")
    for name in ("stage 1", "stage 0"):
        manager.launch_load(name, None)
        manager.wait_load(name)
    loss.backward()
    assert_equal(gradients(stages, x, loss), reference)
    assert figures()["missed_prefetches"] == 0
    assert held()[0] == 0


def test_m2_records_that_stayed_are_dropped(manager: SwapManager) -> None:
    x = sample()
    manager.ensure_group("g")
    region = Region()
    region[0].append(SwapTensor(torch.ones(3), "op"))
    manager.add_storage("g", region)
    with manager.group_context("g"):
        y = swap(lambda t: t.exp().sum(), x)
    manager.release_group_storage("g")
    assert (manager.active_group_count(), len(region)) == (0, 0)
    y.backward()  # what never left can be read
    assert torch.equal(x.grad, x.exp())  # type: ignore[arg-type]


def test_m9_groups_are_counted(manager: SwapManager) -> None:
    assert manager.active_group_count() == 0
    manager.ensure_group("a")
    manager.ensure_group("b")
    manager.ensure_group("b")
    assert manager.active_group_count() == 2
    manager.abort_group("a")
    assert manager.active_group_count() == 1


def test_m7_abort_leaves_nothing_and_the_next_step_works(manager: SwapManager) -> None:
    x = sample()
    with manager.group_context("g"):
        y = swap(lambda t: t.exp().sum(), x)
    region = Region()
    region[0].append(SwapTensor(torch.randn(1000), "op"))
    tensor = region[0][0]
    expected = tensor.get_val().clone()
    manager.add_storage("g", region)
    manager.launch_offload("g")
    manager.abort_group("g")
    assert (manager.active_group_count(), held()) == (0, (0, 0))
    assert torch.equal(tensor.get_val(), expected)
    with pytest.raises(PhaseError):
        with manager.group_context("h"):
            z = swap(lambda t: (t.exp() * 2).exp().sum(), x)
        send("h")
        manager.abort_group("h")
        z.backward()
    del y, z
    model = swapped()
    assert_equal(step(model), step(layers(4)))
    assert held() == (0, 0)


def test_m9_a_schedule_goes_on_with_a_group_of_which_nothing_is_left(manager: SwapManager) -> None:
    for _ in range(3):
        with manager.group_context("dropped"):
            y = swap(double_exp, sample())
        manager.launch_offload("dropped")
        del y
        gc.collect()
        assert manager.active_group_count() == 0
        manager.wait_offload("dropped")
        assert manager.active_group_count() == 0
        manager.launch_load("dropped")
        manager.wait_load("dropped")
    assert (manager._groups, held()) == ({}, (0, 0))


def test_m8_swapping_outside_of_any_group_keeps_and_is_told_once(manager: SwapManager) -> None:
    x = sample()
    with told() as texts:
        for _ in range(2):
            swap(lambda t: t.exp().sum(), x).backward()
            with async_save_on_cpu(lambda _: CheckpointPolicy.MUST_SWAP):
                x.exp().sum().backward()
        manager.warn_missing_group_once()
    assert len(texts) == 1
    assert "group" in texts[0]
    assert moved() == (0, 0)


# ---- chains


def test_m3_any_order_of_pairs_and_the_last_mark(manager: SwapManager) -> None:
    a, b, c, d = (Block() for _ in range(4))
    manager.set_forward_prefetch_layer(b, c)
    names = {}
    for name, layer in (("b", b), ("c", c)):
        found = manager._layers.of(layer)
        assert found is not None
        names[name] = found.group_name
    assert manager.is_last_group(names["c"])
    assert not manager.is_last_group(names["b"])
    manager.set_forward_prefetch_layer(a, b)
    manager.set_forward_prefetch_layer(c, d)
    manager.set_forward_prefetch_layer(b, c)
    assert not manager.is_last_group(names["c"])
    with manager.group_context(names["b"]):
        assert not manager.is_last_group()
    assert len({layer.group_name for layer in manager._layers._layers.values()}) >= 4


def test_m3_contradictions_name_three_layers_and_change_nothing(manager: SwapManager) -> None:
    a, b, c = nn.Linear(2, 2), nn.Conv1d(2, 2, 1), nn.ReLU()
    manager.set_forward_prefetch_layer(a, b)
    with pytest.raises(SettingError, match=r"Linear.*Conv1d.*ReLU"):
        manager.set_forward_prefetch_layer(a, c)
    with pytest.raises(SettingError, match=r"circle"):
        manager.set_forward_prefetch_layer(b, a)
    assert manager._layers.of(c) is None
    with told() as texts:
        manager.set_forward_prefetch_layer(c, c)
    assert len(texts) == 1
    assert "ReLU" in texts[0]
    assert manager._layers.of(c) is None
    with pytest.raises(SettingError):
        manager.set_forward_prefetch_layer(a, "b")  # type: ignore[arg-type]


def test_c25_a_forked_child_starts_afresh(manager: SwapManager) -> None:
    x = sample()
    with manager.group_context("parent"):
        y = swap(lambda t: t.exp().sum(), x)
    send("parent")
    torch.set_num_threads(1)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert manager.active_group_count() == 0
            assert manager.get_current_group_name() is None
            z = sample(5)
            with manager.group_context("child"):
                loss = swap(lambda t: t.exp().sum(), z)
            send("child")
            manager.launch_load("child")
            manager.wait_load("child")
            assert moved()[0] == moved()[1] > 0
            # PyTorch refuses a backward in a child once its threads for devices have run.
            if not torch.accelerator.is_available():
                loss.backward()
                assert torch.equal(z.grad, z.exp())  # type: ignore[arg-type]
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    y.backward()
    assert torch.equal(x.grad, x.exp())  # type: ignore[arg-type]
