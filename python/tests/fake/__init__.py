"""A fake accelerator for PyTorch, on which the order of copies and kernels is checked without a GPU.

`load()` registers the device `fake` (with two indices) for the whole process. From then on PyTorch's
device-generic interfaces work on it: `torch.accelerator`, `torch.Stream`, `torch.Event`, pinned memory,
`non_blocking` copies, `record_stream`, `storage.resize_`, autograd.

How it works
------------
* Streams are threads. Work is queued on the current stream and runs there, in order, with the CPU's
  kernels, so all bits are those of the CPU. Streams are late by times that a seed draws, so that a
  missing wait gives wrong values, not only a report.
* Device memory comes from an allocator that follows streams, as CUDA's does: what is freed is scribbled
  over when its stream gets there, and may be handed out again at once for later work of that stream.
* Pinned memory is rounded up to a power of two and handed out again at once, unless a copy that PyTorch
  itself queued still uses it.

What is checked
---------------
Every kernel, copy, allocation and free names the bytes that it reads and writes. Vector clocks say what
is ordered: work on one stream, what an event orders, what the host has waited for. Two accesses of one
byte, one of them a write, that nothing orders are a report, made when the later one is queued and thus on
every run, however the threads fall. A tensor's bytes are those from its first to its last element.

The host's own accesses of pinned memory are invisible here; a program tells of them by `host_read` and
`host_write`. All threads of the host count as one: their calls are ordered as they are made.

Who may touch what
------------------
Host threads queue work and never touch the device's bytes. A stream's thread touches the bytes of the
job that it runs, and no tensor, allocator or clock. The clocks, the history of the bytes and the
allocators are behind one lock, which nobody holds while waiting.
"""

from __future__ import annotations

import atexit
from typing import Any, cast

import torch

from . import build as _build

__all__ = [
    "clear_reports",
    "copy_bytes",
    "fail_next",
    "host_read",
    "host_write",
    "load",
    "reports",
    "reset_peaks",
    "set_capacity",
    "set_delay",
    "set_host_events",
    "set_seed",
    "stats",
    "trace",
    "traced",
]

_loaded = False


def load() -> None:
    """Builds the library if needed and registers the device. Later calls do nothing."""
    global _loaded
    if _loaded:
        return
    library = _build.build()
    torch.utils.rename_privateuse1_backend("fake")
    torch.ops.load_library(str(library))
    from . import device

    torch._register_device_module("fake", device)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    # Threads of streams must not run kernels while the process is taken down.
    atexit.register(_finish)
    _loaded = True


def _finish() -> None:
    from . import device

    if device._is_in_bad_fork():
        return
    for kind in ("sync", "event", "wait"):
        fail_next(kind, 0)
    for index in range(device.device_count()):
        try:
            torch.accelerator.synchronize(index)
        except RuntimeError:
            # An error of work that nobody waited for.
            continue


def _ops() -> Any:
    return torch.ops.fake_accelerator


def reports() -> list[str]:
    """What was found since the last `clear_reports`, in the order in which it was queued."""
    return cast(list[str], _ops().reports())


def clear_reports() -> None:
    _ops().clear_reports()


def trace(on: bool) -> None:
    """Begins or ends noting every call; what was noted before is dropped."""
    _ops().trace(on)


def traced() -> list[str]:
    """The calls since `trace(True)`, with the numbers that reports use."""
    return cast(list[str], _ops().traced())


def set_seed(seed: int) -> None:
    """Chooses how late streams are from now on."""
    _ops().set_seed(seed)


def set_delay(max_us: int) -> None:
    """The longest common delay of a job, in microseconds; few are eight times as late. 0: none at all."""
    _ops().set_delay(max_us)


def set_capacity(byte_count: int | None, device: int = 0) -> None:
    """How many bytes a device has; `None` for no limit."""
    _ops().set_capacity(device, 0 if byte_count is None else byte_count)


def set_host_events(on: bool) -> None:
    """Whether pinned memory that is freed waits for the copies that PyTorch queued, as it does by default.

    Without, pinned memory behaves like memory that a program pinned itself.
    """
    _ops().set_host_events(on)


def fail_next(kind: str, nth: int = 1) -> None:
    """Makes the nth call of a kind fail, counted from the next one; 0 takes it back.

    Kinds are `alloc` (as out of memory), `pin`, `copy`, `kernel`, `stream` (a new one), `event` (its
    recording), `wait` (of a stream for an event), `sync` (of the host). A call that fails has no effect.
    """
    if kind not in ("alloc", "pin", "copy", "kernel", "stream", "event", "wait", "sync"):
        raise ValueError(f"no call is of the kind {kind!r}")
    _ops().fail_next(kind, nth)


def host_read(tensor: torch.Tensor) -> None:
    """The host reads a tensor in pinned memory now."""
    _host(tensor, False)


def host_write(tensor: torch.Tensor) -> None:
    """The host writes a tensor in pinned memory now."""
    _host(tensor, True)


def _host(tensor: torch.Tensor, writes: bool) -> None:
    if tensor.device.type != "cpu":
        raise ValueError("the host reads and writes its own memory only")
    if tensor.numel() > 0:
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        _ops().host_access(tensor.data_ptr(), (last + 1) * tensor.element_size(), writes)


def copy_bytes(to: int, source: int, byte_count: int) -> None:
    """Queues a copy between two addresses on the current stream, as a program does that has only pointers.

    Each may be in device memory or in pinned memory, which has to stay until the copy is complete.
    """
    _ops().copy_bytes(to, source, byte_count)


def stats(device: int = 0) -> dict[str, int]:
    """Figures of a device and of pinned memory.

    `allocated`, `peak`, `blocks`, `allocations`, `out_of_memory`: device memory. `pinned`, `pinned_peak`
    (rounded up), `pinned_requested`, `pinned_blocks`: pinned memory. `copies_out`, `copies_in`,
    `copies_within`, `bytes_out`, `bytes_in`, `bytes_within`: copies between tensors since the start.
    """
    return dict(_ops().stats(device))


def reset_peaks() -> None:
    """Peaks begin anew at what is in use now, for all devices and pinned memory."""
    _ops().reset_peaks()
