"""Swapping by hand on the fake accelerator: the order of its work, copies that fail, host memory (rows T, G, P)."""

from __future__ import annotations

from collections.abc import Iterator

import fake
import pytest
import torch
from accelerator_runs import DEVICE, quiet
from hand_models import assert_equal, figures, fresh, held, layers, nbytes, wire, wrapped
from torch import nn

import ebbtide.torch
from ebbtide import CopyError, EbbtideError
from ebbtide.torch import (
    PinnedMemoryPool,
    Region,
    SwapGroup,
    SwapManager,
    SwapTensor,
    checkpoint_wrapper,
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


def test_t7_a_failed_copy_leaves_the_tensor() -> None:
    value = torch.randn(30, 40, device=DEVICE)
    expected = value.cpu()
    tensor = SwapTensor(value, "attention")
    fake.fail_next("copy")
    with pytest.raises(CopyError) as caught:
        tensor.async_offload()
    for part in ("attention [30, 40] on fake:0", "4800", "float32"):
        assert part in str(caught.value), caught.value
    assert caught.value.__cause__ is not None
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
