"""Stage `failures`: steps that exceptions end leave no memory behind, and the next step is right."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from gpu_check import model
from gpu_check.device import Device, find, has_ebbtide
from gpu_check.settings import Record, Settings

STEPS = 20
SETTLED = 8  # steps after which memory must not grow: caches are full then
ALLOWED = {True: 32 << 20, False: 1 << 20}  # bytes of growth, of a CPU process or of a device


class Planned(Exception):
    """What the steps are ended by."""


def run(record: Record, settings: Settings) -> None:
    """Steps that fail in forward, in a hook, in backward and not at all, in turn."""
    device, why = find(settings.cpu)
    why = why or has_ebbtide()
    if device is None or why:
        record.missing(why)
        return
    import ebbtide.torch

    size = settings.size
    torch.set_deterministic_debug_mode("warn")
    torch.manual_seed(0)
    shape = model.Shape(size.exact_layers, size.exact_width, 4, explicit=True)
    gpt = model.build(shape, device.device)
    given = model.tokens(4, size.exact_tokens, 0, device.device)
    plain = _step(gpt, given, nullcontext())
    with ebbtide.torch.session(gpt, "swap", min_bytes=0) as session:
        _fail(record, device, session, gpt, given)
        # Backward may sum in another order on some device: then this says nothing.
        if _step(gpt, given, nullcontext()) != plain:
            record.missing("the step after failures: two plain steps differ, so a comparison proves nothing")
        elif _step(gpt, given, session.step()) != plain:
            record.wrong("the step after 20 steps with failures is not that of plain training")


def _step(gpt: model.GPT, given: torch.Tensor, around: AbstractContextManager[Any]) -> list[list[float]]:
    gpt.zero_grad()
    with around:
        loss = gpt(given)
        loss.backward()
    gradients = [p.grad.reshape(-1) for p in gpt.parameters() if p.grad is not None]
    return [tensor.double().cpu().tolist() for tensor in (loss.detach().reshape(1), *gradients)]


def _fail(record: Record, device: Device, session: Any, gpt: model.GPT, given: torch.Tensor) -> None:
    memory: list[int] = []
    gc.collect()
    gc.freeze()  # PyTorch's own modules have millions of objects, and nothing of this stage is among them
    for number in range(STEPS):
        _failing_step(session, gpt, given, number)
        gpt.zero_grad()
        gc.collect()
        device.synchronize()
        memory.append(_memory(device))
        record.put(steps=number + 1, memory_bytes=memory)
    gc.unfreeze()
    growth = max(memory[SETTLED:]) - memory[SETTLED - 1]
    record.put(growth_bytes=growth)
    if growth > ALLOWED[device.is_cpu]:
        record.wrong(f"memory grew by {growth / 2**20:.1f} MiB over the last {STEPS - SETTLED} steps with failures")
    stats = session.stats()
    left = {name: stats[name] for name in ("active_groups", "bytes_held") if stats[name]}
    if left:
        record.wrong(f"steps with failures left something behind: {left}")


def _failing_step(session: Any, gpt: model.GPT, given: torch.Tensor, number: int) -> None:
    middle: Any = gpt.blocks[len(gpt.blocks) // 2]
    plans: list[Callable[[], Any] | None] = [
        None,
        lambda: middle.up.register_forward_pre_hook(_raise),  # in the midst of the layer's forward
        lambda: middle.register_forward_hook(_raise),  # when it has ended
        lambda: middle.up.weight.register_hook(_raise),  # in its backward
    ]
    plan = plans[number % len(plans)]
    handle = plan() if plan else None
    try:
        with session.step():
            gpt(given).backward()
    except Planned:
        pass
    finally:
        if handle:
            handle.remove()


def _raise(*given: object) -> None:
    raise Planned


def _memory(device: Device) -> int:
    """Bytes in use: of the device, or of the process on a CPU and where the device doesn't tell."""
    allocated = device.allocated()
    if allocated is not None:
        return allocated
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
