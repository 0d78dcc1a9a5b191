"""The device under test, by PyTorch's device-generic interfaces; what one of them lacks is None, never an error."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class Device:
    """An accelerator, or the CPU when that was asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._allocator: Any = next(
            (m for m in (getattr(torch, "accelerator", None), self._module) if hasattr(m, "memory_stats")), None
        )

    @property
    def is_cpu(self) -> bool:
        """Whether there is no accelerator under test."""
        return self.device.type == "cpu"

    def name(self) -> str:
        """As the device's own module calls it, or its type."""
        ask = getattr(self._module, "get_device_name", None)
        return str(ask(self.device)) if ask and not self.is_cpu else str(self.device)

    def properties(self) -> dict[str, Any]:
        """What PyTorch tells about it: memory, compute capability, driver, as far as it does."""
        ask = getattr(self._module, "get_device_properties", None)
        found = ask(self.device) if ask and not self.is_cpu else None
        names = ("total_memory", "major", "minor", "multi_processor_count", "driver_version", "platform_name")
        return {name: getattr(found, name) for name in names if hasattr(found, name)}

    def synchronize(self) -> None:
        """Waits for all that was queued."""
        if not self.is_cpu:
            self._module.synchronize()

    def allocated(self) -> int | None:
        """Bytes of tensors on the device now."""
        return self._figure("allocated_bytes.all.current")

    def peak(self) -> int | None:
        """The most there were since `reset_peak`."""
        return self._figure("allocated_bytes.all.peak")

    def reserved(self) -> int | None:
        """The most that PyTorch's allocator had from the device since `reset_peak`."""
        return self._figure("reserved_bytes.all.peak")

    def reset_peak(self) -> None:
        """Peaks begin anew at what is in use now."""
        reset = getattr(self._allocator, "reset_peak_memory_stats", None)
        if reset is not None and not self.is_cpu:
            reset(self.device)

    def _figure(self, name: str) -> int | None:
        if self._allocator is None or self.is_cpu:
            return None
        value = self._allocator.memory_stats(self.device).get(name)
        return None if value is None else int(value)

    def seconds(self, work: Callable[[], object]) -> float:
        """How long something takes, with all that it queues."""
        self.synchronize()
        begin = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - begin


def find(cpu: bool) -> tuple[Device | None, str]:
    """The device to test, or None and why there is none."""
    if cpu:
        return Device(torch.device("cpu")), ""
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:
        return None, f"no accelerator: torch {torch.__version__} has no torch.accelerator (2.6 or later has)"
    if not accelerator.is_available():
        return None, f"no accelerator: torch {torch.__version__} finds none (torch.accelerator.is_available() is False)"
    kind = accelerator.current_accelerator()
    return Device(torch.device(kind.type, accelerator.current_device_index())), ""


def has_ebbtide() -> str:
    """Why `ebbtide.torch` can't be used here; empty if it can."""
    try:
        import ebbtide.torch  # noqa: F401
    except Exception as error:
        return f"ebbtide: the wheel can't be used ({type(error).__name__}: {error})"
    return ""
