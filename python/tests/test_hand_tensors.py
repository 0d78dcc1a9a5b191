"""One swappable tensor (rows T of the catalogue)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hand_models import figures, fresh, held, moved, nbytes, told

import ebbtide.torch
from ebbtide import ChangedError, EbbtideError, NoRoomError, PhaseError
from ebbtide.torch import Region, SwapGroup, SwapManager, SwapTensor, swap


@pytest.fixture(autouse=True, params=["file", "host"])
def tier(request: pytest.FixtureRequest) -> Iterator[str]:
    fresh()
    ebbtide.torch.configure(tier=request.param)
    yield request.param
    fresh()
    ebbtide.torch.configure()


def out(tensor: SwapTensor) -> None:
    tensor.async_offload()
    tensor.wait_offload()


def back(tensor: SwapTensor) -> None:
    tensor.async_load()
    tensor.wait_load()


def grouped(*values: Any, **settings: Any) -> tuple[SwapGroup, list[SwapTensor]]:
    """A group with these values; the caller must not hold them, for them to leave."""
    region = Region()
    region[0].extend(SwapTensor(value, f"value {n}", **settings) for n, value in enumerate(values))
    group = SwapGroup("group")
    group.add(region)
    return group, region[0]


ODD: list[Any] = [3, None, "text", [1], torch.eye(3).to_sparse(), torch.empty(3, device="meta")]


@pytest.mark.parametrize("value", ODD, ids=["int", "none", "text", "list", "sparse", "meta"])
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
    tensor = SwapTensor(torch.ones(100), "op")
    seen = [tensor.state]
    for call in (tensor.async_offload, tensor.wait_offload, tensor.async_load, tensor.wait_load):
        call()
        seen.append(tensor.state)
    assert seen == ["device", "d2h", "host", "h2d", "device"]


def test_t2_what_is_remembered() -> None:
    whole = torch.zeros(10)
    whole.add_(1)
    plain, part = SwapTensor(whole, "op"), SwapTensor(whole[2:4], "op")
    assert plain.funcname is part.funcname
    assert (plain._bytes, plain._version, plain.is_slice) == (40, 1, False)
    assert (part._bytes, part.is_slice) == (40, True)
    assert not plain.group_swap
    assert SwapTensor(whole, "op", True).group_swap
    assert plain.get_val() is whole


def test_t3_reading_is_refused_where_the_value_is_not() -> None:
    tensor = SwapTensor(torch.ones(100), "gelu")
    tensor.async_offload()
    for state, then in (("d2h", tensor.wait_offload), ("host", tensor.async_load), ("h2d", tensor.wait_load)):
        with pytest.raises(PhaseError, match=f"`gelu` was read in state {state}"):
            tensor.get_val()
        then()
    assert torch.equal(tensor.get_val(), torch.ones(100))


def test_t3_backward_never_meets_an_absent_value() -> None:
    x = torch.randn(100, requires_grad=True)
    manager = SwapManager()
    with manager.group_context("g"):
        y = swap(lambda t: t.exp().sin().sum(), x)
    manager.launch_offload("g")
    manager.wait_offload("g")
    before = figures()["missed_prefetches"]
    y.backward()
    expected = torch.autograd.grad(x.exp().sin().sum(), x)[0]
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
    assert figures()["missed_prefetches"] == before + 1


def test_t4_an_offload_starts_from_the_device_only() -> None:
    tensor = SwapTensor(torch.ones(100), "op")
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
    base = torch.ones(100)
    good, bad = SwapTensor(torch.ones(50), "good"), SwapTensor(base, "bad")
    region = Region()
    region[0].extend([good, bad])
    base.untyped_storage().resize_(800)
    base.add_(1)  # the size is compared first
    with pytest.raises(ChangedError, match=r"bad.*400.*800"):
        region.launch_offload()
    assert (good.state, bad.state, moved()) == ("device", "device", (0, 0))
    assert held() == (0, 0)


def test_t5_a_tensor_that_was_modified_since_it_was_registered() -> None:
    base = torch.ones(100)
    group, tensors = grouped(torch.ones(50), base)
    base.add_(1)
    with pytest.raises(ChangedError, match=r"value 1.*0.*1"):
        group.launch_offload()
    assert [tensor.state for tensor in tensors] == ["device", "device"]
    assert moved() == (0, 0)
    assert torch.equal(base, torch.full((100,), 2.0))


def test_t5_a_tensor_that_is_modified_while_it_leaves() -> None:
    tensor = SwapTensor(torch.ones(100), "op")
    tensor.async_offload()
    tensor._value.add_(1)
    with pytest.raises(ChangedError):
        tensor.wait_offload()
    assert nbytes(tensor._value) == 400
    assert torch.equal(tensor._value, torch.full((100,), 2.0))


def test_t6_a_slice_moves_its_own_bytes(tier: str) -> None:
    out(whole := SwapTensor(torch.ones(1000), "whole"))
    assert moved()[0] == 4000
    out(part := SwapTensor(torch.arange(1000.0)[100:200], "part"))
    # The file tier hands memory over as it is.
    assert moved()[0] == (4400 if tier == "host" else 8000)
    assert nbytes(part._value) == 0
    back(part)
    back(whole)
    assert torch.equal(part.get_val(), torch.arange(1000.0)[100:200])


def test_t7_a_copy_that_has_no_room(tier: str) -> None:
    if tier == "file":
        return  # `test_hand_bounds.py` fills a disk
    ebbtide.torch.configure(tier="host", host_bytes=64 << 10)
    big = torch.randn(1 << 20)
    expected = big.clone()
    tensor = SwapTensor(big, "attention")
    with pytest.raises(NoRoomError, match="attention") as caught:
        tensor.async_offload()
    assert caught.value.hint
    assert (tensor.state, nbytes(big)) == ("device", 4 << 20)
    assert torch.equal(tensor.get_val(), expected)
    assert held() == (0, 0)
    small = SwapTensor(torch.ones(100), "small")
    out(small)
    back(small)
    assert torch.equal(small.get_val(), torch.ones(100))


def test_t8_a_finished_offload_frees_the_storage_and_keeps_the_object() -> None:
    tensor = SwapTensor(torch.ones(100), "op")
    key = tensor._value.untyped_storage()._cdata
    out(tensor)
    assert (tensor.state, nbytes(tensor._value)) == ("host", 0)
    assert tensor._value.untyped_storage()._cdata == key
    with told() as texts:
        tensor.wait_offload()
        assert texts == []
        back(tensor)
        assert texts == []
    with told() as texts:
        tensor.wait_offload()
    assert len(texts) == 1
    assert "state device" in texts[0]


def test_t9_a_storage_is_restored_before_the_copy_and_once() -> None:
    tensor = SwapTensor(torch.randn(100), "op")
    expected = tensor.get_val().clone()
    with told() as texts:
        tensor.resize_device_storage()
    assert len(texts) == 1
    out(tensor)
    tensor.resize_device_storage()
    assert (tensor.state, nbytes(tensor._value)) == ("host", 400)
    address = tensor._value.data_ptr()
    tensor.resize_device_storage()
    assert tensor._value.data_ptr() == address
    back(tensor)
    assert torch.equal(tensor.get_val(), expected)


def test_t10_a_load_starts_from_the_host_only_and_bumps_no_version() -> None:
    tensor = SwapTensor(torch.randn(100), "op")
    expected = tensor.get_val().clone()
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
    assert torch.equal(tensor.get_val(), expected)


def test_t10_a_load_that_fails_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = SwapTensor(torch.randn(100), "op")
    expected = tensor.get_val().clone()
    out(tensor)

    def refuse(*_: object) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", refuse)
        with pytest.raises(EbbtideError):
            tensor.async_load()
    assert tensor.state == "host"
    back(tensor)
    assert torch.equal(tensor.get_val(), expected)


def test_t11_packed_tensors_come_back_to_the_storage_they_came_from() -> None:
    bases = [torch.randn(64) for _ in range(20)]
    expected = [base.clone() for base in bases]
    region = Region()
    for number, base in enumerate(bases):
        # A second tensor of each storage, which must see the memory again.
        region[number].extend([SwapTensor(base, "whole", group_swap=True), SwapTensor(base[3:9], "part")])
    del bases, base
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
    for number, base in enumerate(expected):
        whole, part = tensors[2 * number].get_val(), tensors[2 * number + 1].get_val()
        assert torch.equal(whole, base)
        assert torch.equal(part, base[3:9])
        assert part.untyped_storage()._cdata == whole.untyped_storage()._cdata


def test_t12_a_finished_load_gives_the_host_buffer_back() -> None:
    tensor = SwapTensor(torch.randn(1000), "op")
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


def test_t13_overlapping_views_are_saved_once_and_all_come_back() -> None:
    base = torch.randn(6, 6)
    views = [base.view(-1)[:3], base.view(-1)[:5], base, base.t(), *base.chunk(3)]
    expected = [view.clone() for view in views]
    group, tensors = grouped(*views)
    del base, views
    group.launch_offload()
    group.wait_offload()
    assert [tensor.state for tensor in tensors] == ["host"] * 7
    assert moved()[0] == 144
    group.launch_load()
    group.wait_load()
    for tensor, value in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.get_val(), value)


def test_t14_what_is_used_outside_stays() -> None:
    group, (used, free) = grouped(torch.randn(100), torch.randn(100))
    view = used.get_val()[:3]
    assert group.protect_alias_tensors({"out": [view]}) == 1
    group.launch_offload()
    group.wait_offload()
    assert (used.state, free.state) == ("device", "host")
    group.launch_load()
    group.wait_load()


@pytest.mark.parametrize("away", [False, True])
def test_t14_protecting_calls_an_offload_off_or_brings_back(away: bool) -> None:
    tensor = SwapTensor(torch.randn(100), "op")
    expected = tensor.get_val().clone()
    key = tensor.get_val().untyped_storage()._cdata
    tensor.async_offload()
    if away:
        tensor.wait_offload()
    assert tensor.protect_if_aliases({key})
    assert tensor.state == "device"
    assert torch.equal(tensor.get_val(), expected)
    with told() as texts:
        tensor.wait_offload()
    assert texts == []
    assert torch.equal(tensor.get_val(), expected)


def test_t14_the_address_of_freed_memory_protects_nothing() -> None:
    tensor = SwapTensor(torch.randn(100), "op")
    address = tensor.get_val().untyped_storage().data_ptr()
    out(tensor)
    assert not tensor.protect_if_aliases({address})
    back(tensor)
    assert tensor.protect_if_aliases({tensor.get_val().untyped_storage().data_ptr()})


def test_t15_one_line_for_debugging() -> None:
    tensor = SwapTensor(torch.ones(3), "op")
    assert repr(tensor) == "SwapTensor(`op`, device, not a duplicate, with a device value)"
    out(tensor)
    assert repr(tensor) == "SwapTensor(`op`, host, not a duplicate, without a device value)"
    assert repr(SwapTensor([1], "op")) == "SwapTensor(`op`, non_tensor, list)"


DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_t16_every_type_survives(dtype: torch.dtype) -> None:
    value = torch.randint(0, 255, (4096,), dtype=torch.uint8).view(dtype)
    if dtype is torch.bool:
        value = torch.randint(0, 2, (4096,), dtype=torch.uint8).bool()
    bits = value.view(torch.uint8).clone()
    tensor = SwapTensor(value, "op")
    del value
    out(tensor)
    assert tensor.state == "host"
    back(tensor)
    assert torch.equal(tensor.get_val().view(torch.uint8), bits)


def test_t16_shapes_of_all_kinds_survive() -> None:
    base = torch.randn(24)
    kinds = {
        "transposed": base.view(4, 6).t(),
        "offset": base[5:],
        "strided": base[::3],
        "overlapping": base.as_strided((5, 4), (2, 1), 3),
        "scalar": torch.tensor(1.5),
        "conjugate": torch.randn(5, dtype=torch.complex64).conj(),
    }
    for name, value in kinds.items():
        expected = value.clone()
        group, (tensor,) = grouped(value.clone() if name in ("scalar", "conjugate") else value)
        group.launch_offload()
        group.wait_offload()
        group.launch_load()
        group.wait_load()
        assert torch.equal(tensor.get_val(), expected), name


def test_t16_a_broadcast_view_moves_what_it_has() -> None:
    tensor = SwapTensor(torch.ones(4, 1).expand(4, 1000), "op")
    out(tensor)
    assert moved()[0] == 16
    back(tensor)
    assert torch.equal(tensor.get_val(), torch.ones(4, 1000))


def test_t16_an_empty_view_of_a_storage_that_is_not() -> None:
    group, (empty, whole) = grouped(*(lambda base: (base[:0], base))(torch.ones(100)))
    group.launch_offload()
    group.wait_offload()
    group.launch_load()
    group.wait_load()
    assert empty.get_val().shape == (0,)
    assert torch.equal(whole.get_val(), torch.ones(100))


def test_t17_a_repeat_shows_the_state_of_what_it_repeats() -> None:
    base = torch.randn(100)
    group, (first, again) = grouped(base, base)
    del base
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
    base = torch.randn(100)
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
