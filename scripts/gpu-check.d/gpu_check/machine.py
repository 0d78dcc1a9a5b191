"""Stage `machine`: what is here, how fast pinned memory is copied, and what one layer takes and saves."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gpu_check import model
from gpu_check.device import Device, find, has_ebbtide
from gpu_check.settings import Record, Settings, Size, one_line

REPEATS = 8  # copies that are timed together


def run(record: Record, settings: Settings) -> None:
    """Writes software and hardware first, then the copies, then the layer."""
    record.put(**_software())
    if why := has_ebbtide():
        record.missing(why)
    else:
        import ebbtide

        record.put(ebbtide=ebbtide.__version__)
    device, why = find(settings.cpu)
    if device is None:
        record.missing(why)
        return
    record.put(device=str(device.device), name=device.name(), properties=device.properties())
    if device.allocated() is None and not device.is_cpu:
        record.missing("device memory: this device's PyTorch module has no memory_stats")
    _try(record, "copies", lambda: _copies(record, device, settings.size))
    _try(record, "a layer", lambda: record.put(layer=_layer(device, settings.size)))


def _try(record: Record, what: str, measure: Callable[[], object]) -> None:
    """One part that fails leaves the others."""
    try:
        measure()
    except RuntimeError as error:
        record.missing(f"{what}: {one_line(error)}")


def _software() -> dict[str, Any]:
    driver = Path("/proc/driver/nvidia/version")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "toolkit": torch.version.cuda or getattr(torch.version, "hip", None) or getattr(torch.version, "xpu", None),
        "driver": driver.read_text().splitlines()[0] if driver.exists() else None,
        "system": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
        "cpus": len(os.sched_getaffinity(0)),
        "host_available_bytes": host_available(),
    }


def host_available() -> int:
    """Bytes of host memory that may be used, by the system and by this process's group."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return min([free, *_group_limits()])


def _group_limits() -> Iterator[int]:
    base = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            yield int((base / limit).read_text()) - int((base / used).read_text())
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue


# ---- copies


def _copies(record: Record, device: Device, size: Size) -> None:
    """GB/s of copies between pinned memory and the device, alone and both at once."""
    pin = not device.is_cpu
    if not pin:
        record.missing("pinned memory: the CPU has none; copies are within host memory")

    def block(on_device: bool) -> torch.Tensor:
        if on_device:
            return torch.empty(size.copy_bytes, dtype=torch.uint8, device=device.device)
        return torch.empty(size.copy_bytes, dtype=torch.uint8, pin_memory=pin).zero_()

    ends = {"d2h": (block(False), block(True)), "h2d": (block(True), block(False))}
    streams = {way: None if device.is_cpu else torch.Stream(device=device.device) for way in ends}

    def copy(*ways: str) -> None:
        for _ in range(REPEATS):
            for way in ways:
                with _on(streams[way]):
                    ends[way][0].copy_(ends[way][1], non_blocking=pin)

    rates = {}
    for ways in (("d2h",), ("h2d",), ("d2h", "h2d")):
        copy(*ways)
        seconds = min(device.seconds(lambda ways=ways: copy(*ways)) for _ in range(3))  # type: ignore[misc]
        # At once: what each direction gets, if both take as long as the slower one.
        rates["_".join(ways)] = REPEATS * size.copy_bytes / seconds / 1e9
    record.put(copies={"block_bytes": size.copy_bytes, "pinned": pin, "gb_per_s": rates})


@contextmanager
def _on(stream: Any) -> Iterator[None]:
    """A stream is the current one; not every version of `torch.Stream` is a context."""
    if stream is None:
        yield
        return
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


# ---- a layer


def _layer(device: Device, size: Size) -> dict[str, float]:
    """Times of a block's forward and backward, and the bytes that it saves for backward."""
    shape = model.Shape(1, size.width, size.heads)
    block = model.Block(shape).to(device.device, torch.bfloat16)
    x = torch.randn(size.batch, size.tokens, size.width, device=device.device, dtype=torch.bfloat16, requires_grad=True)
    counted = _saved(block, x)
    ahead = 4  # calls in one go, so that the time is the device's and not that of launching one
    outputs: list[torch.Tensor] = []

    def forward() -> None:
        outputs.extend(block(x) for _ in range(ahead))

    def backward() -> None:
        torch.autograd.backward([y.sum() for y in outputs])
        outputs.clear()

    times = [(device.seconds(forward), device.seconds(backward)) for _ in range(4)][1:]
    fastest = {"forward_ms": min(t[0] for t in times), "backward_ms": min(t[1] for t in times)}
    return {**counted, **{name: seconds / ahead * 1000 for name, seconds in fastest.items()}}


def _saved(block: torch.nn.Module, x: torch.Tensor) -> dict[str, float]:
    """`saved_bytes`: of memory that a call keeps, less parameters; `packed_bytes`: of all tensors it saves."""
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    storages: dict[int, int] = {}
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.numel() * tensor.element_size())
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    # Its output holds everything until all was counted, so that no address comes twice.
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(x)
    del output
    return {"saved_bytes": sum(storages.values()), "packed_bytes": sum(packed)}
