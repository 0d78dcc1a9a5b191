"""Tensors of the CPU in the host tier: copies within RAM."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from session_models import bits_equal
from torch.autograd.graph import saved_tensors_hooks

from ebbtide import ChangedError
from ebbtide._native import Group, Hub, Packer, unpack

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool, torch.uint8)


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub(tier="host")
    yield hub
    hub.close()


def there_and_back(group: Group) -> None:
    group.start_offload()
    group.wait_offload()
    group.start_load()
    group.wait_load()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("count", [1, 63, 4096, 20_000, 100_000])
def test_bits_and_alignment_are_kept(hub: Hub, count: int, dtype: torch.dtype) -> None:
    """Small tensors come back into memory that they share, large ones have their own."""
    generator = torch.Generator().manual_seed(count)
    made = [torch.randint(-99, 99, (count + 5,), generator=generator).to(dtype)[n:] for n in range(5)]
    wanted = [tensor.clone() for tensor in made]
    phases = [tensor.data_ptr() % 64 for tensor in made]
    group = hub.open("layer", 0)
    packer = Packer(group)
    packed = [packer(tensor) for tensor in made]
    group.start_offload()
    del made
    group.wait_offload()
    group.start_load()
    group.wait_load()
    back = [unpack(handle) for handle in packed]
    assert [tensor.data_ptr() % 64 for tensor in back] == phases
    assert all(bits_equal(*pair) for pair in zip(back, wanted, strict=True))


def test_what_comes_back_can_be_written(hub: Hub) -> None:
    """Memory that is shared by several tensors is one tensor's each."""
    made = [torch.full((100,), float(n)) for n in range(50)]
    group = hub.open("layer", 0)
    packer = Packer(group)
    packed = [packer(tensor) for tensor in made]
    del made
    there_and_back(group)
    back = [unpack(handle) for handle in packed]
    for number, tensor in enumerate(back):
        tensor.add_(number)
    del packed
    gc.collect()
    assert [tensor.unique().tolist() for tensor in back] == [[2.0 * n] for n in range(50)]


def test_in_place_many_small_ones(hub: Hub) -> None:
    made = [torch.randn(1024) for _ in range(300)]
    wanted = [tensor.clone() for tensor in made]
    for number in range(3):
        group = hub.open("layer", number)
        for tensor in made:
            group.add(tensor, "t", pack=True, sole=False)
        group.start_offload()
        group.wait_offload()
        assert not any(tensor.untyped_storage().nbytes() for tensor in made)
        group.start_load()
        group.wait_load()
        assert all(bits_equal(*pair) for pair in zip(made, wanted, strict=True))
        assert not any(tensor._version for tensor in made)
        group.close()
    assert hub.stats()["host_in_use_bytes"] == 0


def test_what_is_changed_meanwhile_is_told(hub: Hub) -> None:
    x = torch.randn(3000, requires_grad=True)
    group = hub.open("layer", 0)
    with saved_tensors_hooks(Packer(group), unpack):
        y, z = x * 2, x * 3
        first, second = (y * y).sum(), (z * z).sum()
    group.start_offload()
    y.detach().zero_()
    group.wait_offload()
    with pytest.raises(ChangedError):
        first.backward()
    second.backward()
    assert x.grad is not None
    assert bits_equal(x.grad, (z * 2 * 3).detach())


def test_copies_do_not_hold_the_gil(hub: Hub) -> None:
    """While a large tensor is copied another thread goes on."""
    x = torch.ones(64 << 20)
    latest = [time.monotonic()]
    gaps: list[float] = []
    over = threading.Event()

    def tick() -> None:
        while not over.is_set():
            now = time.monotonic()
            gaps.append(now - latest[0])
            latest[0] = now
            time.sleep(0.0005)

    group = hub.open("layer", 0)
    group.add(x, "x", sole=False)
    thread = threading.Thread(target=tick)
    thread.start()
    try:
        started = time.monotonic()
        there_and_back(group)
        took = time.monotonic() - started
    finally:
        over.set()
        thread.join()
    # Each way takes far longer than the longest time without a tick.
    assert max(gaps) < took / 3, (max(gaps), took)
