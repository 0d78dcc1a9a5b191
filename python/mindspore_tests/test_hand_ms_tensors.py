"""One swappable tensor (rows T of the catalogue)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from hand import bits, figures, fresh, held, moved, nbytes, own, random, saving, told
from mindspore import Tensor, mint

import ebbtide.mindspore
from ebbtide import ChangedError, EbbtideError, NoRoomError, PhaseError, SettingError
from ebbtide.mindspore import Region, SwapGroup, SwapManager, SwapTensor, _keepers, _swapped


@pytest.fixture(autouse=True, params=["file", "host"])
def tier(request: pytest.FixtureRequest) -> Iterator[str]:
    fresh()
    ebbtide.mindspore.configure(tier=request.param)
    yield request.param
    fresh()
    ebbtide.mindspore.configure()


def out(tensor: SwapTensor) -> None:
    tensor.async_offload()
    tensor.wait_offload()


def back(tensor: SwapTensor) -> None:
    tensor.async_load()
    tensor.wait_load()


def grouped(*values: Any, **settings: Any) -> tuple[SwapGroup, list[SwapTensor]]:
    region = Region()
    region[0].extend(SwapTensor(value, f"value {n}", **settings) for n, value in enumerate(values))
    group = SwapGroup("group")
    group.add(region)
    return group, region[0]


def round_trip(group: SwapGroup) -> None:
    for call in (group.launch_offload, group.wait_offload, group.launch_load, group.wait_load):
        call()


@pytest.mark.parametrize("value", [3, None, "text", [1], np.ones(3)], ids=["int", "none", "text", "list", "numpy"])
def test_t1_what_is_no_tensor_passes_through(value: Any) -> None:
    tensor = SwapTensor(value, "odd")
    with told() as texts:
        for call in (tensor.async_offload, tensor.wait_offload, tensor.resize_device_storage):
            call()
        for call in (tensor.async_load, tensor.async_group_load, tensor.wait_load, tensor.release_cpu_buffer):
            call()
        tensor.mark_duplicate_swap()
        assert not tensor.protect_if_aliases({0})
    assert tensor.state == "non_tensor"
    assert tensor.get_val() is value
    assert tensor.dedup_key() is None
    assert texts == []
    assert held() == (0, 0)


def test_t1_states() -> None:
    tensor = SwapTensor(random(100), "op")
    seen = [tensor.state]
    for call in (tensor.async_offload, tensor.wait_offload, tensor.async_load, tensor.wait_load):
        call()
        seen.append(tensor.state)
    assert seen == ["device", "d2h", "host", "h2d", "device"]


def test_t2_what_is_remembered() -> None:
    whole = random(10)
    whole.copy_(random(10, seed=1))
    plain, part = SwapTensor(whole, "op"), SwapTensor(whole[2:4], "op")
    assert plain.funcname is part.funcname
    assert (plain._bytes, plain._version, plain.is_slice) == (40, 1, False)
    assert (part._bytes, part.is_slice) == (40, True)
    assert not plain.group_swap
    assert SwapTensor(whole, "op", True).group_swap
    assert plain.get_val() is whole
    with pytest.raises(SettingError, match="cpu_pool"):
        SwapTensor(whole, "op", cpu_pool=1)


def test_t3_reading_is_refused_where_the_value_is_not() -> None:
    tensor = SwapTensor(random(100), "gelu")
    expected = bits(tensor.get_val())
    tensor.async_offload()
    for state, then in (("d2h", tensor.wait_offload), ("host", tensor.async_load), ("h2d", tensor.wait_load)):
        with pytest.raises(PhaseError, match=f"`gelu` was read in state {state}"):
            tensor.get_val()
        then()
    assert bits(tensor.get_val()) == expected


def test_t3_another_registration_of_what_is_away_says_so() -> None:
    base = random(100)
    first, late = SwapTensor(base, "first"), SwapTensor(base[3:], "other")
    out(first)
    later = SwapTensor(base[3:], "later")
    for tensor in (late, later):
        with pytest.raises(PhaseError, match="read in state host"):
            tensor.get_val()
    back(first)
    assert bits(late.get_val()) == bits(later.get_val()) == bits(base[3:])


def test_t3_backward_never_meets_an_absent_value() -> None:
    manager = SwapManager()

    def run(x: Tensor) -> Tensor:
        with manager.group_context("g"):
            y = saving(lambda: mint.sum(mint.sin(mint.exp(x))))
        manager.launch_offload("g")
        manager.wait_offload("g")
        return y

    x = random(100)
    before = figures()["missed_prefetches"]
    assert bits(ms.grad(run)(x)) == bits(ms.grad(lambda x: mint.sum(mint.sin(mint.exp(x))))(x))
    assert figures()["missed_prefetches"] == before + 1


def test_t4_an_offload_starts_from_the_device_only() -> None:
    tensor = SwapTensor(random(100), "op")
    out(tensor)
    before = moved()
    with told() as texts:
        tensor.async_offload()
    assert len(texts) == 1
    assert "`op`" in texts[0]
    assert "state host" in texts[0]
    assert "device" in texts[0]
    assert (tensor.state, moved()) == ("host", before)
    back(tensor)


def test_t5_a_storage_that_was_resized() -> None:
    base = random(100)
    good, bad = SwapTensor(random(50), "good"), SwapTensor(base, "bad")
    region = Region()
    region[0].extend([good, bad])
    base.untyped_storage().resize_(800)
    with pytest.raises(ChangedError, match=r"bad.*400.*800"):
        region.launch_offload()
    assert (good.state, bad.state, moved()) == ("device", "device", (0, 0))
    assert held() == (0, 0)


# MindSpore counts a copy only into a tensor at which nobody has looked, so here it is made to count.
def test_t5_a_tensor_that_was_modified_since_it_was_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    group, tensors = grouped(random(50), random(100))
    monkeypatch.setattr(_swapped, "version_of", lambda tensor: int(tensor.shape == (100,)))
    with pytest.raises(ChangedError, match=r"value 1.*0.*1"):
        group.launch_offload()
    assert [tensor.state for tensor in tensors] == ["device", "device"]
    assert moved() == (0, 0)


def test_t5_a_tensor_that_is_modified_while_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = SwapTensor(random(100), "op")
    expected = bits(tensor.get_val())
    tensor.async_offload()
    monkeypatch.setattr(_keepers, "version_of", lambda _: 1)
    with pytest.raises(ChangedError):
        tensor.wait_offload()
    assert nbytes(tensor._value) == 400
    assert bits(tensor._value) == expected


def test_t6_a_slice_moves_its_storage() -> None:
    base = random(1000)
    part = SwapTensor(base[100:200], "part")
    expected = bits(base)
    out(part)
    assert (moved()[0], nbytes(base)) == (4000, 0)
    back(part)
    assert bits(base) == expected


def test_t7_a_copy_that_has_no_room(tier: str) -> None:
    if tier == "file":
        return
    ebbtide.mindspore.configure(tier="host", host_bytes=64 << 10)
    big = random(1 << 20)
    expected = bits(big)
    tensor = SwapTensor(big, "attention")
    with pytest.raises(NoRoomError, match="attention") as caught:
        tensor.async_offload()
    assert caught.value.hint
    assert (tensor.state, nbytes(big)) == ("device", 4 << 20)
    assert bits(tensor.get_val()) == expected
    assert held() == (0, 0)
    small = SwapTensor(random(100), "small")
    out(small)
    back(small)
    assert bits(small.get_val()) == bits(random(100))


def test_t8_a_finished_offload_frees_the_storage_and_every_view_comes_back() -> None:
    base = random(100)
    views = [base[3:9], base.view((10, 10)).permute((1, 0))]
    expected = [bits(view) for view in (base, *views)]
    tensor = SwapTensor(base, "op")
    out(tensor)
    assert (tensor.state, [nbytes(view) for view in (base, *views)]) == ("host", [0, 0, 0])
    with told() as texts:
        tensor.wait_offload()
        assert texts == []
        back(tensor)
        assert texts == []
    assert [bits(view) for view in (base, *views)] == expected
    with told() as texts:
        tensor.wait_offload()
    assert len(texts) == 1
    assert "state device" in texts[0]


def test_t9_a_storage_is_restored_before_the_copy_and_once() -> None:
    tensor = SwapTensor(random(100), "op")
    expected = bits(tensor.get_val())
    with told() as texts:
        tensor.resize_device_storage()
    assert len(texts) == 1
    out(tensor)
    tensor.resize_device_storage()
    assert (tensor.state, nbytes(tensor._value)) == ("host", 400)
    address = _keepers.address(tensor._value)
    tensor.resize_device_storage()
    assert _keepers.address(tensor._value) == address
    assert _keepers.find(tensor._value[3:]) is tensor._keeper
    back(tensor)
    assert bits(tensor.get_val()) == expected


def test_t10_a_load_starts_from_the_host_only_and_bumps_no_version() -> None:
    tensor = SwapTensor(random(100), "op")
    expected = bits(tensor.get_val())
    with told() as texts:
        tensor.async_load()
    assert len(texts) == 1
    assert "state device" in texts[0]
    out(tensor)
    tensor.async_load()
    assert tensor.state == "h2d"
    with told() as texts:
        tensor.async_load()
    assert len(texts) == 1
    tensor.wait_load()
    assert tensor.get_val()._version == 0
    assert bits(tensor.get_val()) == expected


def test_t10_a_load_that_fails_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = SwapTensor(random(100), "op")
    expected = bits(tensor.get_val())
    out(tensor)

    def refuse(*_: object) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(_keepers.Keeper, "allocate", refuse)
        with pytest.raises(EbbtideError):
            tensor.async_load()
    assert tensor.state == "host"
    back(tensor)
    assert bits(tensor.get_val()) == expected


def test_t11_tensors_come_back_to_the_storage_they_came_from() -> None:
    bases = [random(64, seed=n) for n in range(20)]
    expected = [bits(base) for base in bases]
    region = Region()
    for number, base in enumerate(bases):
        region[number].extend([SwapTensor(base, "whole", group_swap=True), SwapTensor(base[3:9], "part")])
    tensors = list(region.iter_swap_tensors())
    region.launch_offload()
    region.wait_offload()
    assert {tensor.state for tensor in tensors} == {"host"}
    assert all(nbytes(tensor._value) == 0 for tensor in tensors)
    with pytest.raises(PhaseError, match=r"`whole` needs a storage of 256 bytes, its has 0"):
        tensors[0].async_group_load()
    region.resize_device_storage()
    tensors[0].async_group_load()
    region.wait_load()
    for number, value in enumerate(expected):
        whole, part = tensors[2 * number].get_val(), tensors[2 * number + 1].get_val()
        assert bits(whole) == value
        assert bits(part) == value[12:36]
        assert _keepers.address(part) == _keepers.address(whole)


def test_t12_a_finished_load_gives_the_host_buffer_back() -> None:
    tensor = SwapTensor(random(1000), "op")
    out(tensor)
    assert figures()["bytes_out"] == 4000
    assert figures()["bytes_held"] >= 4000 or figures()["host_in_use_bytes"] >= 4000
    with told() as texts:
        tensor.wait_load()
        tensor.release_cpu_buffer()
    assert len(texts) == 2
    assert all("state host" in text for text in texts)
    back(tensor)
    now = figures()
    assert (now["bytes_held"], now["host_in_use_bytes"], now["active_groups"]) == (0, 0, 0)
    with told() as texts:
        tensor.wait_load()
        tensor.release_cpu_buffer()
    assert texts == []


def test_t13_c1_overlapping_views_are_saved_once_and_all_come_back() -> None:
    base = random(6, 6)
    flat = base.view((36,))
    views = [flat[:3], flat[:5], base, base.permute((1, 0)), *mint.chunk(base, 3)]
    expected = [bits(view) for view in views]
    group, tensors = grouped(*views)
    assert not any(tensor._duplicate for tensor in tensors)
    group.launch_offload()
    group.wait_offload()
    assert [tensor.state for tensor in tensors] == ["host"] * 7
    assert moved()[0] == 144
    group.launch_load()
    group.wait_load()
    assert [bits(tensor.get_val()) for tensor in tensors] == expected


def test_t13_memory_that_was_freed_tells_nothing() -> None:
    groups = []
    for seed in range(6):  # MindSpore gives the memory of one to the next
        value = random(1000, seed=seed)
        group, (tensor,) = grouped(value)
        group.launch_offload()
        group.wait_offload()
        assert tensor.state == "host"
        groups.append((group, tensor))
        del value
    for seed, (group, tensor) in enumerate(groups):
        group.launch_load()
        group.wait_load()
        assert bits(tensor.get_val()) == bits(random(1000, seed=seed))


def test_t14_what_is_used_outside_stays() -> None:
    group, (used, free) = grouped(random(100), random(100))
    view = used.get_val()[:3]
    assert group.protect_alias_tensors({"out": [view]}) == 1
    group.launch_offload()
    group.wait_offload()
    assert (used.state, free.state) == ("device", "host")
    group.launch_load()
    group.wait_load()


def test_t14_memory_that_is_not_mindspores_stays() -> None:
    shared = np.arange(100, dtype=np.float32)
    group, (foreign, free) = grouped(Tensor.from_numpy(shared), random(100))
    group.launch_offload()
    group.wait_offload()
    assert (foreign.state, free.state) == ("device", "host")
    shared[3] = 7  # it still is the same memory
    assert foreign.get_val().asnumpy()[3] == 7
    group.launch_load()
    group.wait_load()


def test_t14_memory_that_only_turns_out_to_be_anothers_keeps_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = SwapTensor(Tensor.from_numpy(np.arange(100, dtype=np.float32)), "op")
    monkeypatch.setattr(_swapped, "is_foreign", lambda _: False)
    tensor.async_offload()
    with pytest.raises(EbbtideError, match="refused to move op"):
        tensor.wait_offload()
    assert tensor.state == "device"
    assert tensor.get_val().asnumpy().tolist() == list(range(100))


@pytest.mark.parametrize("away", [False, True])
def test_t14_protecting_calls_an_offload_off_or_brings_back(away: bool) -> None:
    tensor = SwapTensor(random(100), "op")
    expected = bits(tensor.get_val())
    view = tensor.get_val()[2:]
    group = SwapGroup("group")
    region = Region()
    region[0].append(tensor)
    group.add(region)
    group.launch_offload()
    if away:
        group.wait_offload()
        assert nbytes(view) == 0
    assert group.protect_alias_tensors(view) == 1
    assert tensor.state == "device"
    assert bits(tensor.get_val()) == expected
    with told() as texts:
        tensor.wait_offload()
    assert texts == []
    assert bits(view) == expected[8:]


def test_t14_the_address_of_freed_memory_protects_nothing() -> None:
    tensor = SwapTensor(random(100), "op")
    address = _keepers.address(tensor.get_val())
    out(tensor)
    assert not tensor.protect_if_aliases({address})
    back(tensor)
    assert tensor.protect_if_aliases({_keepers.address(tensor.get_val())})


@pytest.mark.parametrize("group", [True, False])
def test_t14_what_was_saved_from_the_same_memory_stays(group: bool) -> None:
    manager = SwapManager()
    seen: list[str] = []

    def run(x: Tensor) -> Tensor:
        hidden = mint.exp(x)
        with manager.group_context("saved"):  # without: what is saved stays
            if not group:
                manager.set_current_group_name(None)
            y = saving(lambda: mint.sum(mint.sin(hidden)))
        named = SwapTensor(hidden, "named")
        if group:
            manager.launch_offload("saved")
        with told():
            out(named)
        seen.append(named.state)
        if group:
            manager.wait_offload("saved")
        return y

    x = random(1000)
    assert bits(ms.grad(run)(x)) == bits(ms.grad(lambda x: mint.sum(mint.sin(mint.exp(x))))(x))
    assert seen == ["device"]


def test_t15_one_line_for_debugging() -> None:
    tensor = SwapTensor(random(3), "op")
    assert repr(tensor) == "SwapTensor(`op`, device, not a duplicate, with a device value)"
    out(tensor)
    assert repr(tensor) == "SwapTensor(`op`, host, not a duplicate, without a device value)"
    assert repr(SwapTensor([1], "op")) == "SwapTensor(`op`, non_tensor, list)"


TYPES = [ms.bfloat16, ms.float16, ms.float32, ms.float64, ms.int8, ms.int32, ms.int64, ms.uint8, ms.bool_, ms.complex64]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_t16_every_type_survives(dtype: Any) -> None:
    numbers = np.random.default_rng(0).integers(0, 100, 4096)
    value = own(Tensor(numbers).astype(dtype))
    expected = bits(value.astype(ms.float32))
    tensor = SwapTensor(value, "op")
    out(tensor)
    assert tensor.state == "host"
    back(tensor)
    assert tensor.get_val().dtype == dtype
    assert bits(tensor.get_val().astype(ms.float32)) == expected


def test_t16_shapes_of_all_kinds_survive() -> None:
    base = random(24)
    kinds = {
        "transposed": base.view((4, 6)).permute((1, 0)),
        "offset": base[5:],
        "strided": base[::3],
        "overlapping": mint.empty((0,)).set_(base.untyped_storage(), 3, (5, 4), (2, 1)),
        "broadcast": mint.broadcast_to(random(4, 1), (4, 1000)),
        "scalar": own(Tensor(1.5, ms.float32)),
    }
    for name, value in kinds.items():
        expected = bits(value)
        group, (tensor,) = grouped(value)
        round_trip(group)
        assert bits(tensor.get_val()) == expected, name


def test_t16_an_empty_view_of_a_storage_that_is_not() -> None:
    base = random(100)
    expected = bits(base)
    group, (empty, whole) = grouped(base[:0], base)
    round_trip(group)
    assert empty.get_val().shape == (0,)
    assert bits(whole.get_val()) == expected


def test_t17_a_repeat_shows_the_state_of_what_it_repeats() -> None:
    base = random(100)
    group, (first, again) = grouped(base, base)
    assert "duplicate" in repr(again)
    assert "not a duplicate" in repr(first)
    states = [(first.state, again.state)]
    for call in (group.launch_offload, group.wait_offload, group.launch_load):
        call()
        states.append((first.state, again.state))
    assert states == [(state, state) for state in ("device", "d2h", "host", "h2d")]
    with told() as texts:
        again.async_offload()
    assert texts == []
    group.wait_load()
    assert (first.state, again.state) == ("device", "device")


def test_t17_also_when_it_was_marked_by_hand() -> None:
    base = random(100)
    first, again = SwapTensor(base, "op"), SwapTensor(base, "op")
    again.mark_duplicate_swap(first)
    first.async_offload()
    assert again.state == "d2h"
    first.wait_offload()
    assert again.state == "host"
    with pytest.raises(PhaseError):
        again.get_val()
    back(first)
    assert again.state == "device"
