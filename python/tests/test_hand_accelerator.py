"""Swapping by hand on the fake accelerator: the order of its work, copies that fail, host memory (rows T, G, P)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import fake
import pytest
import torch
from accelerator_runs import DEVICE, quiet
from hand_models import assert_equal, figures, fresh, held, layers, nbytes, send, wire, wrapped
from torch import nn

import ebbtide.torch
from ebbtide import CopyError, EbbtideError, SettingError
from ebbtide.torch import (
    PinnedMemoryPool,
    Region,
    SwapGroup,
    SwapManager,
    SwapTensor,
    checkpoint_wrapper,
    swap,
    swap_tensor_wrapper,
    swap_wrapper,
)

fake.load()


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    access = torch.ops.fake_accelerator.host_access
    monkeypatch.setattr(torch.get_device_module("fake"), "_ebbtide_host_access", access, raising=False)
    quiet()
    fresh()
    yield
    fresh()
    assert not fake.reports(), fake.reports()[:3]
    quiet()
    torch.set_num_threads(threads)


def group_of(*values: torch.Tensor, **settings: bool) -> tuple[SwapGroup, list[SwapTensor], list[torch.Tensor]]:
    region = Region()
    expected = [value.cpu() for value in values]
    region[0].extend(SwapTensor(value, f"value {n}", **settings) for n, value in enumerate(values))
    group = SwapGroup("group")
    group.add(region)
    return group, list(region.iter_swap_tensors()), expected


def fresh_values(count: int = 3) -> list[torch.Tensor]:
    return [torch.randn(1000, device=DEVICE) for _ in range(count)]


def assert_home(tensors: list[SwapTensor], expected: list[torch.Tensor]) -> None:
    assert [tensor.state for tensor in tensors] == ["device"] * len(tensors)
    for tensor, value in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.get_val().cpu(), value)


@pytest.mark.parametrize("packed", [False, True])
def test_g3_g7_a_group_leaves_and_comes_back(packed: bool) -> None:
    for seed in range(10):
        fake.set_seed(seed)
        group, tensors, expected = group_of(*fresh_values(5), group_swap=packed)
        for tensor in tensors:
            tensor.get_val().mul_(1)  # a kernel that may be late, before the copy
            tensor._version = tensor.get_val()._version
        group.launch_offload()
        group.wait_offload()
        assert all(nbytes(tensor._value) == 0 for tensor in tensors)
        junk = torch.full((5000,), 7.0, device=DEVICE)
        group.launch_load()
        group.wait_load()
        for tensor in tensors:
            tensor.get_val().add_(0)
        assert_home(tensors, expected)
        del junk
    assert held() == (0, 0)


def test_m2_a_stream_of_the_users_own() -> None:
    stream = torch.Stream(device=DEVICE)
    group, tensors, expected = group_of(*fresh_values())
    group.launch_offload(stream)
    group.wait_offload()
    group.launch_load(stream)
    group.wait_load()
    assert_home(tensors, expected)


@pytest.mark.parametrize("pooled", [False, True])
def test_t7_a_failed_copy_leaves_the_tensor(pooled: bool) -> None:
    value = torch.randn(30, 40, device=DEVICE)
    expected = value.cpu()
    pool = PinnedMemoryPool(1 << 16) if pooled else None
    tensor = SwapTensor(value, "attention", cpu_pool=pool)
    fake.fail_next("copy")
    with pytest.raises(CopyError) as caught:
        tensor.async_offload()
    where = "explicit pool" if pool else "default pool"
    for part in ("attention [30, 40] on fake:0", "4800 bytes", "float32", "whole storage", where, "`attention`"):
        assert part in str(caught.value), caught.value
    assert "copy can't be queued" in str(caught.value.__cause__)
    assert_home([tensor], [expected])
    tensor.async_offload()
    tensor.wait_offload()
    tensor.async_load()
    tensor.wait_load()
    assert_home([tensor], [expected])
    assert figures()["host_in_use_bytes"] == 0


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_g4_a_copy_in_the_middle_fails(nth: int) -> None:
    group, tensors, expected = group_of(*fresh_values())
    fake.fail_next("copy", nth)
    with pytest.raises(CopyError, match="group"):
        group.launch_offload()
    assert_home(tensors, expected)
    group, tensors, expected = group_of(*fresh_values())
    group.launch_offload()
    group.wait_offload()
    group.launch_load()
    group.wait_load()
    assert_home(tensors, expected)
    assert figures()["host_in_use_bytes"] == 0


def copies_of(call: Callable[[], object]) -> dict[str, int]:
    """The copies that something makes."""
    torch.accelerator.synchronize(0)
    before = fake.stats()
    call()
    torch.accelerator.synchronize(0)
    after = fake.stats()
    return {name: after[name] - before[name] for name in ("copies_out", "copies_in", "copies_within")}


def test_t7_a_slice_says_so() -> None:
    base = torch.randn(30, 40, device=DEVICE)
    tensor = SwapTensor(base[3:5], "part")
    fake.fail_next("copy")
    with pytest.raises(CopyError, match=r"part \[2, 40\] on fake:0 \(4800 bytes, float32, slice"):
        tensor.async_offload()
    assert tensor.state == "device"


def test_g2_small_tensors_share_a_copy_for_each_type() -> None:
    def values() -> list[torch.Tensor]:
        small = [torch.randn(64, device=DEVICE) for _ in range(30)]
        return [*small, *(torch.ones(64, dtype=torch.int64, device=DEVICE) for _ in range(10))]

    group, tensors, expected = group_of(*values(), group_swap=True)

    def out() -> None:
        group.launch_offload()
        group.wait_offload()

    def back() -> None:
        group.launch_load()
        group.wait_load()

    assert copies_of(out) == {"copies_out": 2, "copies_in": 0, "copies_within": 40}
    assert copies_of(back) == {"copies_out": 0, "copies_in": 2, "copies_within": 40}
    assert_home(tensors, expected)
    # Without being asked for, each goes by itself.
    group, tensors, expected = group_of(*values())
    assert copies_of(out) == {"copies_out": 40, "copies_in": 0, "copies_within": 0}
    assert copies_of(back) == {"copies_out": 0, "copies_in": 40, "copies_within": 0}
    assert_home(tensors, expected)


@pytest.mark.parametrize("pooled", [False, True])
def test_g2_what_is_saved_shares_if_it_is_asked_to(pooled: bool) -> None:
    manager = SwapManager()

    def out(group_swap: bool) -> dict[str, int]:
        x = torch.randn(100, device=DEVICE, requires_grad=True)
        pool = PinnedMemoryPool(1 << 20) if pooled else None

        def body(t: torch.Tensor) -> torch.Tensor:
            for _ in range(5):
                t = t.exp().neg()
            return t.sum()

        name = f"saved {group_swap}"
        with manager.group_context(name):
            y = swap(body, x, group_swap=group_swap, cpu_pool=pool)
        found = copies_of(lambda: send(name))
        y.backward()
        return found

    assert out(True) == {"copies_out": 1, "copies_in": 0, "copies_within": 5}
    assert out(False) == {"copies_out": 5, "copies_in": 0, "copies_within": 0}


def test_c16_ten_thousand_small_tensors_are_a_few_copies() -> None:
    """A bucket holds at most 32 MiB, in pieces where the allocator of pinned memory would round it up."""
    fake.set_delay(0)
    values = list(torch.randn(10_000, 1024, device=DEVICE).unbind())
    values = [value.clone() for value in values]
    group, tensors, expected = group_of(*values, group_swap=True)
    del values
    torch.accelerator.synchronize(0)
    allocations = fake.stats()["pinned_blocks"]

    def out() -> None:
        group.launch_offload()
        group.wait_offload()

    def back() -> None:
        group.launch_load()
        group.wait_load()

    assert copies_of(out)["copies_out"] <= 8
    assert fake.stats()["pinned_blocks"] - allocations <= 8
    assert copies_of(back)["copies_in"] <= 8
    assert_home(tensors, expected)


@pytest.mark.parametrize("pooled", [False, True])
def test_g4_a_bucket_that_fails_is_named(pooled: bool) -> None:
    """Three buckets; the copies into the staging buffer of the second one come before its own."""
    region = Region()
    pool = PinnedMemoryPool(1 << 20) if pooled else None
    for dtype, count in ((torch.float32, 6), (torch.int64, 5), (torch.bfloat16, 4)):
        for number in range(count):
            value = torch.full((1000,), number, dtype=dtype, device=DEVICE)
            region[dtype].append(SwapTensor(value, "op", group_swap=True, cpu_pool=pool))
            del value
    tensors = list(region.iter_swap_tensors())
    expected = [tensor.get_val().cpu() for tensor in tensors]
    group = SwapGroup("layer 3")
    group.add(region)
    fake.fail_next("copy", 7)
    with pytest.raises(CopyError, match="bucket 1 ") as caught:
        group.launch_offload()
    where = "explicit pool" if pooled else "default pool"
    for part in ("group layer 3", "5000 elements of int64", "40000 bytes", where):
        assert part in str(caught.value), caught.value
    assert "copy can't be queued" in str(caught.value.__cause__)
    failed = tensors[6:11]
    assert [tensor.state for tensor in failed] == ["device"] * 5
    torch.accelerator.synchronize(0)
    assert_home(tensors, expected)
    assert figures()["host_in_use_bytes"] == 0


def test_streams_that_are_of_no_use() -> None:
    for stream, text in (("seven", "seven"), (torch.Stream(device="fake:1"), "a stream of fake:1, the tensors are on")):
        group, tensors, expected = group_of(*fresh_values())
        with pytest.raises(SettingError, match=text):
            group.launch_offload(stream)
        assert_home(tensors, expected)
        group, tensors, expected = group_of(*fresh_values())
        group.launch_offload()
        group.wait_offload()
        with pytest.raises(SettingError, match=text):
            group.launch_load(stream)
        assert [tensor.state for tensor in tensors] == ["host"] * 3
        group.launch_load()
        group.wait_load()
        assert_home(tensors, expected)


def test_w4_the_tag_is_in_the_message() -> None:
    x = torch.randn(100, device=DEVICE, requires_grad=True)
    manager = SwapManager()
    for first in (True, False):  # nothing is watched before the first name
        with manager.group_context("layer 3"):
            hidden = swap_tensor_wrapper(x * 2, "up projection")
            y = hidden.square().sum()
            del hidden
        if first:
            manager.abort_group("layer 3")
    fake.fail_next("copy")
    with pytest.raises(CopyError, match=r"up projection \[100\]"):
        manager.launch_offload("layer 3")
    y.backward()
    assert torch.equal(x.grad.cpu(), (x * 2 * 2 * 2).detach().cpu())  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["alloc", "copy", "event"])
def test_t10_a_load_that_fails_can_be_tried_again(kind: str) -> None:
    tensor = SwapTensor(torch.randn(1000, device=DEVICE), "op")
    expected = tensor.get_val().cpu()
    tensor.async_offload()
    tensor.wait_offload()
    fake.fail_next(kind)
    with pytest.raises(EbbtideError):
        tensor.async_load()
    assert tensor.state == "host"
    tensor.async_load()
    tensor.wait_load()
    assert_home([tensor], [expected])
    assert held() == (0, 0)


def test_t9_a_storage_is_restored_before_the_copy() -> None:
    tensor = SwapTensor(torch.randn(1000, device=DEVICE), "op")
    expected = tensor.get_val().cpu()
    tensor.async_offload()
    tensor.wait_offload()
    tensor.resize_device_storage()
    assert nbytes(tensor._value) == 4000
    tensor.async_load()
    tensor.wait_load()
    assert_home([tensor], [expected])


def test_p2_a_buffer_waits_for_its_event() -> None:
    pool = PinnedMemoryPool(8192)
    buffer = pool.acquire(8192)
    assert buffer.is_pinned()
    source = torch.ones(2048, device=DEVICE)
    buffer.view(torch.float32).copy_(source, non_blocking=True)
    event = torch.Event(device=DEVICE)
    event.record(torch.accelerator.current_stream(DEVICE.index))
    pool.release(buffer, event)
    del buffer
    again = pool.acquire(8192)  # waits
    assert torch.equal(again.view(torch.float32), torch.ones(2048))
    fake.host_read(again)
    pool.release(again)


def test_t6_copies_go_through_an_explicit_pool() -> None:
    pool = PinnedMemoryPool(1 << 20)
    tensor = SwapTensor(torch.randn(1000, device=DEVICE), "op", cpu_pool=pool)
    expected = tensor.get_val().cpu()
    for _ in range(3):
        tensor.async_offload()
        tensor.wait_offload()
        assert 4000 <= pool.total_allocated <= 8192
        tensor.async_load()
        tensor.wait_load()
        assert_home([tensor], [expected])


@pytest.mark.parametrize("wrap", [swap_wrapper, lambda layer: checkpoint_wrapper(layer, swap_inputs=True)])
def test_layers_by_hand_are_exact_and_in_order(wrap: type[nn.Module]) -> None:
    def step(model: nn.Module, seed: int) -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(seed)
        x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(seed)).to(DEVICE).requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        found = [p.grad for p in model.parameters()] + [x.grad, loss.detach()]
        return [tensor.cpu() for tensor in found if tensor is not None]

    plain, model = layers(4).to(DEVICE), wire(wrapped(layers(4).to(DEVICE), wrap))
    for seed in range(10):
        fake.set_seed(seed)
        assert_equal(step(model, seed), step(plain, seed))
        assert not fake.reports(), fake.reports()[:3]
    assert figures()["bytes_out"] > 0
    assert (SwapManager().active_group_count(), held()) == (0, (0, 0))


def test_copies_of_both_directions_run_beside_each_other_by_name() -> None:
    manager = SwapManager()
    regions = []
    for number in range(4):
        region = Region()
        region[0].append(SwapTensor(torch.full((1000,), float(number), device=DEVICE), "op"))
        regions.append((region, region[0][0]))
        manager.ensure_group(f"stage {number}")
        manager.add_storage(f"stage {number}", region)
        manager.launch_offload(f"stage {number}")
        if number:
            manager.wait_offload(f"stage {number - 1}")
            manager.launch_load(f"stage {number - 1}")
    manager.wait_offload("stage 3")
    manager.launch_load("stage 3")
    for number, (region, tensor) in enumerate(regions):
        manager.wait_load(f"stage {number}")
        assert torch.equal(tensor.get_val().cpu(), torch.full((1000,), float(number)))
        assert len(region) == 0
    assert held() == (0, 0)


def test_settings_for_the_accelerator() -> None:
    for tier in ("host", "file", None):
        ebbtide.torch.configure(tier=tier, host_bytes=1 << 20)
        group, tensors, expected = group_of(*fresh_values())
        group.launch_offload()
        group.wait_offload()
        group.launch_load()
        group.wait_load()
        assert_home(tensors, expected)
    ebbtide.torch.configure()
