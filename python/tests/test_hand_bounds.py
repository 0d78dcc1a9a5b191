"""Bad input, and what is bounded: disks, folders, host memory (cases C14, C16 and C21)."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_models import double_exp, figures, fresh, held, nbytes, one_thread, send, told
from torch import nn

import ebbtide.torch
from ebbtide import CopyError, SettingError
from ebbtide.torch import PinnedMemoryPool, Region, SwapGroup, SwapManager, SwapTensor, _defaults, swap

HUGE = 1 << 70


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with one_thread():
        yield
        fresh()
        ebbtide.torch.configure()


# ---- bad input

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("an unknown tier", {"tier": "disk"}, "disk"),
    ("a tier that is no text", {"tier": 3}, "tier=3"),
    ("tiers", {"tier": ["file"]}, "is a list"),
    ("a folder that is not there", {"spill_dir": "/nowhere/at/all"}, "/nowhere/at/all"),
    ("a folder that is no path", {"spill_dir": 3}, "path of a folder"),
    ("negative", {"host_bytes": -5}, "host_bytes=-5 is negative"),
    ("bytes as text", {"host_bytes": "1 GiB"}, "whole number"),
    ("bytes that nobody has", {"host_bytes": HUGE}, "is larger than"),
    ("a truth as a number", {"host_bytes": True}, "whole number"),
]


@pytest.mark.parametrize("front", [ebbtide.torch.configure, ebbtide.torch.offload])
@pytest.mark.parametrize(("settings", "text"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_settings(front: Callable[..., object], settings: dict[str, Any], text: str) -> None:
    before = _defaults.source()
    with pytest.raises(SettingError) as caught:
        front(**settings)
    assert text in str(caught.value)
    assert caught.value.hint
    assert _defaults.source() is before


CALLS: list[Callable[[SwapManager], object]] = [
    lambda _: PinnedMemoryPool(HUGE),
    lambda _: PinnedMemoryPool(100).acquire(HUGE),
    lambda _: ebbtide.torch.offload(name=3),  # type: ignore[arg-type]
    lambda _: ebbtide.torch.offload(name=""),
    lambda _: SwapGroup(3),  # type: ignore[arg-type]
    lambda _: SwapGroup(""),
    lambda _: SwapGroup("g").add(5),  # type: ignore[arg-type]
    lambda manager: manager.ensure_group(3),  # type: ignore[arg-type]
    lambda manager: manager.launch_offload([]),  # type: ignore[arg-type]
    lambda manager: manager.set_forward_prefetch_layer(3, 4),  # type: ignore[arg-type]
    lambda manager: manager.unregister_forward_prefetch_layer(3),  # type: ignore[arg-type]
    lambda manager: manager.unregister_forward_prefetch_layer([nn.ReLU(), 3]),  # type: ignore[list-item]
    lambda manager: manager.unregister_forward_prefetch_hooks(3),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("call", CALLS)
def test_bad_input_is_an_error_of_the_package(call: Callable[[SwapManager], object]) -> None:
    with pytest.raises(SettingError) as caught:
        call(SwapManager())
    assert caught.value.hint
    assert SwapManager().active_group_count() == 0


@pytest.mark.parametrize("tier", ["file", "host"])
def test_a_copy_stream_that_makes_no_sense(tier: str) -> None:
    ebbtide.torch.configure(tier=tier)
    for stream in ("seven", torch.device("cpu")):
        group, (tensor,) = grouped(100)
        with pytest.raises(SettingError, match="stream") as caught:
            group.launch_offload(stream)
        assert caught.value.hint
        assert tensor.state == "device"
        group, (tensor,) = grouped(100)
        group.launch_offload()
        group.wait_offload()
        with pytest.raises(SettingError, match="stream"):
            group.launch_load(stream)
        assert tensor.state == "host"
        group.launch_load()
        group.wait_load()
        assert tensor.state == "device"


def grouped(*counts: int) -> tuple[SwapGroup, list[SwapTensor]]:
    """A group of float tensors with so many elements."""
    region = Region()
    region[0].extend(SwapTensor(torch.randn(count), f"value {n}") for n, count in enumerate(counts))
    group = SwapGroup("layer 3")
    group.add(region)
    return group, list(region.iter_swap_tensors())


# ---- disks and folders


@contextmanager
def full_disk(byte_count: int) -> Iterator[None]:
    """No file may become larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (byte_count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_c21_t7_a_full_disk_leaves_the_tensor(tmp_path: Path) -> None:
    ebbtide.torch.configure(tier="file", spill_dir=tmp_path)
    tensor = SwapTensor(torch.randn(1 << 20), "attention")
    expected = tensor.get_val().clone()
    with full_disk(1 << 20), pytest.raises(CopyError, match=r"attention \[1048576\] on cpu \(4194304 bytes") as caught:
        tensor.async_offload()
        tensor.wait_offload()
    assert "ulimit -f" in (caught.value.hint or "")
    assert caught.value.__cause__ is not None
    assert (tensor.state, nbytes(tensor._value)) == ("device", 4 << 20)
    assert torch.equal(tensor.get_val(), expected)
    assert held() == (0, 0)
    tensor.async_offload()  # can be tried again
    tensor.wait_offload()
    assert (tensor.state, nbytes(tensor._value)) == ("host", 0)
    tensor.async_load()
    tensor.wait_load()
    assert torch.equal(tensor.get_val(), expected)
    assert list(tmp_path.iterdir()) == []


def test_c21_g4_a_full_disk_leaves_what_was_not_copied(tmp_path: Path) -> None:
    ebbtide.torch.configure(tier="file", spill_dir=tmp_path)
    group, tensors = grouped(100, 1 << 20, 100)
    expected = [tensor.get_val().clone() for tensor in tensors]
    with full_disk(1 << 20), pytest.raises(CopyError, match=r"value 1 \[1048576\].*group layer 3"):
        group.launch_offload()
        group.wait_offload()
    assert tensors[1].state == "device"
    assert torch.equal(tensors[1].get_val(), expected[1])
    group.launch_load()
    group.wait_load()
    assert [tensor.state for tensor in tensors] == ["device"] * 3
    assert all(torch.equal(tensor.get_val(), value) for tensor, value in zip(tensors, expected, strict=True))
    assert held() == (0, 0)
    group, tensors = grouped(100, 1 << 20, 100)
    group.launch_offload()
    group.wait_offload()
    assert [tensor.state for tensor in tensors] == ["host"] * 3
    group.launch_load()
    group.wait_load()
    assert held() == (0, 0)


def is_tmpfs(folder: str) -> bool:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return any(mount[1] == folder and mount[2] == "tmpfs" for mount in mounts)


def test_c21_a_spill_folder_in_ram_is_told() -> None:
    if not is_tmpfs("/dev/shm"):
        pytest.skip("/dev/shm is no tmpfs here")
    with told() as texts:
        ebbtide.torch.configure(tier="file", spill_dir="/dev/shm")
        group, _ = grouped(100)
        group.launch_offload()
        group.wait_offload()
        group.launch_load()
        group.wait_load()
    assert len(texts) == 1
    assert "/dev/shm" in texts[0]
    assert "RAM" in texts[0]
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    with told() as texts, ebbtide.torch.session(model, spill_dir="/dev/shm") as s:
        for _ in range(2):
            with s.step():
                model(torch.randn(100, 64)).sum().backward()
    assert len(texts) == 1
    assert "/dev/shm" in texts[0]


def test_c21_a_folder_that_is_read_only() -> None:
    """In a child that is nobody, since the superuser may write everywhere."""
    folder = tempfile.mkdtemp()
    os.chmod(folder, 0o555)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if os.geteuid() == 0:
                os.setresuid(65534, 65534, 65534)
            for front in (ebbtide.torch.configure, ebbtide.torch.offload):
                with pytest.raises(SettingError, match=folder) as caught:
                    front(tier="file", spill_dir=folder)
                assert caught.value.hint
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    os.rmdir(folder)


# ---- host memory


def trained(rows: int) -> None:
    x = torch.randn(rows, 256, requires_grad=True)
    with SwapManager().group_context("sequence"):
        y = swap(double_exp, x)
    send("sequence")
    y.backward()


def test_c14_host_memory_is_given_back_after_a_long_sequence() -> None:
    ebbtide.torch.configure(tier="host")
    trained(20_000)
    long = figures()["host_allocated_bytes"]
    assert long >= 2 * 20_000 * 256 * 4
    for _ in range(12):
        trained(100)
    assert figures()["host_allocated_bytes"] < long / 20


def test_c14_host_memory_is_given_back_on_request() -> None:
    ebbtide.torch.configure(tier="host")
    trained(20_000)
    long = figures()["host_allocated_bytes"]
    assert ebbtide.torch.shrink() >= long > 0
    assert figures()["host_allocated_bytes"] == 0
    assert ebbtide.torch.shrink() == 0
    trained(100)
    pool = PinnedMemoryPool(1 << 20)
    kept, free = pool.acquire(1000), pool.acquire(2000)
    pool.release(free)
    del free
    total = pool.total_allocated
    given = pool.shrink()
    assert given >= 2000
    assert pool.total_allocated == total - given >= 1000
    pool.release(kept)


def test_c16_ten_thousand_small_tensors_at_a_useful_share_of_one_large_copy() -> None:
    ebbtide.torch.configure(tier="host")
    hub = _defaults.hub()
    small, large = [torch.randn(1024) for _ in range(10_000)], [torch.randn(10_000 * 1024)]
    expected = [value.clone() for value in (small[0], small[-1], large[0])]

    def seconds(values: list[torch.Tensor], number: int) -> float:
        group = hub.open("many", number)
        for value in values:
            group.add(value, "t", pack=True, sole=False)
        began = time.perf_counter()
        group.start_offload()
        group.wait_offload()
        assert not any(nbytes(value) for value in values)
        group.start_load()
        group.wait_load()
        return time.perf_counter() - began

    times = [(seconds(small, 2 * number), seconds(large, 2 * number + 1)) for number in range(5)]
    # Measured: 0.3 of the bandwidth of one copy; copied one by one 0.05 at most. Half way, for busy machines.
    share = min(one for _, one in times) / min(many for many, _ in times)
    assert share >= 0.1, times
    assert all(torch.equal(*pair) for pair in zip((small[0], small[-1], large[0]), expected, strict=True))
