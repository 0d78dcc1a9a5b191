"""Groups by name and chains of layers (rows M1 to M3 and M7 to M9 of the catalogue)."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import mindspore as ms
import pytest
from hand import Block, bits, chained, fresh, held, moved, random, saving, send, step, swapped, told, wire
from mindspore import Tensor, mint, nn

from ebbtide import PhaseError, SettingError
from ebbtide.mindspore import Region, SwapManager, SwapTensor


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    fresh()
    yield
    fresh()


@pytest.fixture
def manager() -> SwapManager:
    return SwapManager()


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
    reference = step(chained(2))
    model = chained(2)
    first, second = model.layers
    loaded: list[str] = []

    def load(name: str) -> object:
        def hook(gradient: Tensor) -> Tensor:
            manager.launch_load(name)
            manager.wait_load(name)
            loaded.append(name)
            return gradient

        return hook

    def run(x: Tensor) -> Tensor:
        with manager.group_context("stage 0"):
            hidden = saving(lambda: first(x))
        hidden.register_hook(load("stage 0"))
        assert manager.active_group_count() == 1
        manager.launch_offload("stage 0")
        with manager.group_context("stage 1"):
            output = saving(lambda: second(hidden))
        output.register_hook(load("stage 1"))
        manager.wait_offload("stage 0")
        send("stage 1")
        return mint.mean(mint.square(output))

    assert step(model, run=run) == reference
    assert loaded == ["stage 1", "stage 0"]
    assert moved()[0] == moved()[1] > 0
    gc.collect()
    assert held()[0] == 0


def test_m2_what_is_no_stream_is_refused(manager: SwapManager) -> None:
    manager.ensure_group("g")
    region = Region()
    region[0].append(SwapTensor(random(1000), "op"))
    manager.add_storage("g", region)
    with pytest.raises(SettingError, match="stream"):
        manager.launch_offload("g", object())


def test_m2_records_that_stayed_are_dropped(manager: SwapManager) -> None:
    manager.ensure_group("g")
    region = Region()
    region[0].append(SwapTensor(random(3), "op"))
    manager.add_storage("g", region)

    def run(x: Tensor) -> Tensor:
        with manager.group_context("g"):
            y = saving(lambda: mint.sum(mint.exp(x)))
        manager.release_group_storage("g")
        assert (manager.active_group_count(), len(region)) == (0, 0)
        return y

    x = random(4)
    assert bits(ms.grad(run)(x)) == bits(mint.exp(x))  # what never left can be read


def test_m7_abort_leaves_nothing_and_the_next_step_works(manager: SwapManager) -> None:
    region = Region()
    tensor = SwapTensor(random(1000), "op")
    region[0].append(tensor)
    expected = bits(tensor.get_val())
    manager.ensure_group("g")
    manager.add_storage("g", region)
    send("g")
    assert tensor.state == "host"
    manager.abort_group("g")
    assert (manager.active_group_count(), held()) == (0, (0, 0))
    assert bits(tensor.get_val()) == expected

    def run(x: Tensor) -> Tensor:
        with manager.group_context("h"):
            z = saving(lambda: mint.sum(mint.exp(mint.exp(x) * 2)))
        send("h")
        manager.abort_group("h")
        return z

    with pytest.raises(PhaseError, match="given up"):
        ms.grad(run)(random(16))
    assert step(wire(swapped(chained(4)))) == step(chained(4))
    assert held() == (0, 0)


def test_m8_swapping_outside_of_any_group_keeps_and_is_told_once(manager: SwapManager) -> None:
    with told() as texts:
        for named in (False, True):
            ms.grad(lambda x, named=named: saving(lambda: mint.sum(mint.exp(x)), named=named))(random(3))
        manager.warn_missing_group_once()
    assert len(texts) == 1
    assert "group" in texts[0]
    assert moved() == (0, 0)


def test_m9_groups_are_counted(manager: SwapManager) -> None:
    assert manager.active_group_count() == 0
    manager.ensure_group("a")
    manager.ensure_group("b")
    manager.ensure_group("b")
    assert manager.active_group_count() == 2
    manager.abort_group("a")
    assert manager.active_group_count() == 1


def test_m9_a_schedule_goes_on_with_a_group_of_which_nothing_is_left(manager: SwapManager) -> None:
    for _ in range(3):
        with manager.group_context("dropped"):
            y = saving(lambda: mint.sum(mint.exp(mint.exp(random(16)))))
        manager.ensure_group("dropped")
        manager.launch_offload("dropped")
        del y
        manager.wait_offload("dropped")
        manager.launch_load("dropped")
        manager.wait_load("dropped")
    assert (manager._groups, held()) == ({}, (0, 0))


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


def test_m3_contradictions_name_three_layers_and_change_nothing(manager: SwapManager) -> None:
    a, b, c = nn.Dense(2, 2), nn.LayerNorm((2,)), nn.ReLU()
    manager.set_forward_prefetch_layer(a, b)
    with pytest.raises(SettingError, match=r"Dense.*LayerNorm.*ReLU"):
        manager.set_forward_prefetch_layer(a, c)
    with pytest.raises(SettingError, match=r"circle"):
        manager.set_forward_prefetch_layer(b, a)
    assert manager._layers.of(c) is None
    with told() as texts:
        manager.set_forward_prefetch_layer(c, c)
    assert len(texts) == 1
    assert "ReLU" in texts[0]
    assert manager._layers.of(c) is None
    with pytest.raises(SettingError, match="pass the cells"):
        manager.set_forward_prefetch_layer(a, "b")
