"""Stages `blocks-…`: step time, memory and copies of GPT blocks in bf16, one way of training each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from gpu_check import model
from gpu_check.device import Device, find, has_ebbtide
from gpu_check.machine import host_available
from gpu_check.settings import Record, Settings, one_line

WARM_UP = 2
MARGIN = 1.15  # how much longer a copy may take within a step than alone


class Cannot(Exception):
    """Why this way can't be run here; goes into the table."""


def run(record: Record, settings: Settings) -> None:
    """Trains in the way `settings.mode`."""
    device, why = find(settings.cpu)
    if device is None:
        record.missing(why)
        return
    try:
        _measure(record, settings, device)
    except Cannot as why_not:
        record.missing(str(why_not))
    except (RuntimeError, MemoryError) as error:
        record.missing(f"failed: {one_line(error)}")


def _measure(record: Record, settings: Settings, device: Device) -> None:
    size = settings.size
    torch.manual_seed(0)
    gpt = model.build(model.Shape(size.layers, size.width, size.heads), device.device, torch.bfloat16)
    optimizer = torch.optim.SGD(gpt.parameters(), lr=1e-3)
    given = model.tokens(size.batch, size.tokens, 0, device.device)
    losses: list[str] = []
    with _way(record, settings, device, gpt) as (around, stats):

        def forward() -> torch.Tensor:
            with around():
                loss: torch.Tensor = gpt(given)
            return loss

        def step() -> None:
            loss = forward()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()).hex())

        for number in range(WARM_UP):
            seconds = device.seconds(step)
            record.put(warm_up_ms=seconds * 1000, losses=losses)
            if number + 1 < WARM_UP and settings.time_left() < 3 * seconds:
                raise Cannot(f"a step takes {seconds:.1f} s here, too long for the time limit")
        _timed(record, settings, device, step, stats)
        record.put(losses=losses)
        if settings.time_left() > 2 * record.values["step_ms"] / 1000:
            record.put(phases=_phases(device, forward, stats))


def _timed(record: Record, settings: Settings, device: Device, step: Callable[[], None], stats: Any) -> None:
    """Steps one by one, each on disk as it ends; peak memory and what moved are of these alone."""
    reset_peak(device)
    before = stats()
    times: list[float] = []
    while len(times) < settings.size.steps and (not times or settings.time_left() > 3 * times[-1]):
        times.append(device.seconds(step))
        after = stats()
        record.put(
            step_ms=statistics.median(times) * 1000,
            steps_ms=[seconds * 1000 for seconds in times],
            peak_bytes=peak(device),
            reserved_bytes=device.reserved(),
            per_step={name: (after[name] - before[name]) / len(times) for name in after},
        )


def _phases(device: Device, forward: Callable[[], torch.Tensor], stats: Any) -> dict[str, float]:
    """One more step with forward and backward apart: which rate each direction reached, on average."""
    losses: list[torch.Tensor] = []
    before = stats()
    ahead = device.seconds(lambda: losses.append(forward()))
    back = device.seconds(lambda: losses[0].backward())
    moved = {name: value - before[name] for name, value in stats().items()}
    rates = {}
    if moved.get("bytes_out"):
        rates = {"out_gb_per_s": moved["bytes_out"] / ahead / 1e9, "in_gb_per_s": moved["bytes_in"] / back / 1e9}
    return {"forward_ms": ahead * 1000, "backward_ms": back * 1000, **rates}


def peak(device: Device) -> int | None:
    """The most memory since `reset_peak`: of the device, or of the process on a CPU."""
    if not device.is_cpu:
        return device.peak()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def reset_peak(device: Device) -> None:
    """As `Device.reset_peak`, and the kernel's figure for this process."""
    device.reset_peak()
    # Where that is refused it stays that of the whole process; only a CPU run looks at it.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


# ---- ways


Around = Callable[[], AbstractContextManager[Any]]
Stats = Callable[[], dict[str, float]]


@contextmanager
def _way(record: Record, settings: Settings, device: Device, gpt: model.GPT) -> Iterator[tuple[Around, Stats]]:
    """What is put around each forward, and what counts the bytes that moved."""
    mode = settings.mode
    if mode == "save_on_cpu":
        yield _save_on_cpu(settings, device), dict
    elif mode == "checkpoint":
        for block in gpt.blocks:
            _checkpoint(block)
        yield nullcontext, dict
    elif mode == "plain":
        yield nullcontext, dict
    else:
        with _session(record, settings, gpt) as session:
            yield session.step, lambda: _moved(session)


def _save_on_cpu(settings: Settings, device: Device) -> Around:
    size, layer = settings.size, settings.other("machine").get("layer", {})
    needed, free = layer.get("packed_bytes", 0) * size.layers, host_available()
    if needed > 0.8 * free:
        raise Cannot(f"host memory: {needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB there")
    return lambda: torch.autograd.graph.save_on_cpu(pin_memory=not device.is_cpu, device_type=device.device.type)


def _checkpoint(block: torch.nn.Module) -> None:
    forward: Callable[..., torch.Tensor] = block.forward
    block.forward = lambda x: checkpoint(forward, x, use_reentrant=False)


def _session(record: Record, settings: Settings, gpt: model.GPT) -> Any:
    if why := has_ebbtide():
        raise Cannot(why)
    import ebbtide.torch

    size = settings.size
    count = len(gpt.blocks)
    swapped = list(range(count - 1)) if settings.mode == "swap_all" else fitting(settings.other("machine"), count)
    record.put(swapped=swapped)
    return ebbtide.torch.session(gpt, {f"blocks.{index}": "swap" for index in swapped}, min_bytes=min(4096, size.width))


def fitting(machine: dict[str, Any], layers: int) -> list[int]:
    """Which layers to swap so that their copies hide under compute: every nth, by what the machine reached.

    The copy of a swapped layer has as long as the layers up to the next swapped one take: out during their
    forward, in during their backward. The last layer stays, since its backward comes next.
    """
    layer, copies = machine.get("layer"), machine.get("copies")
    if not layer or not copies:
        raise Cannot("the stage `machine` measured no layer or no copies, so what fits isn't known")
    rates = copies["gb_per_s"]
    out_ms = layer["saved_bytes"] / rates["d2h"] / 1e6
    in_ms = layer["saved_bytes"] / rates["h2d"] / 1e6
    spacing = MARGIN * max(out_ms / layer["forward_ms"], in_ms / layer["backward_ms"])
    return list(range(0, layers - 1, max(1, math.ceil(spacing))))


def _moved(session: Any) -> dict[str, float]:
    names = ("bytes_out", "bytes_in", "missed_prefetches", "wait_ms", "not_freed_bytes")
    stats = session.stats()
    return {name: stats[name] for name in names}
