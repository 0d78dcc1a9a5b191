"""Stage `exact`: a GPT trained plain and with ebbtide gives the same losses, gradients and parameters, bit for bit."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

# Before CUDA begins: without it cuBLAS may sum in another order each time.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

from gpu_check import model
from gpu_check.device import Device, find, has_ebbtide
from gpu_check.settings import Record, Settings, Size, one_line

KINDS = ("f32, attention in single operations", "bf16 autocast, fused attention")
WAYS = ("swap all", "swap every other, two ahead", "host tier only", "swap and recompute", "offload by hand")

Training = dict[str, str]


def run(record: Record, settings: Settings) -> None:
    """Every way against plain, for every kind that is deterministic here."""
    device, why = find(settings.cpu)
    if device is None:
        record.missing(why)
        return
    record.put(results={})
    torch.set_deterministic_debug_mode("warn")
    for kind in KINDS:
        plain = _plain(record, device, settings.size, kind)
        if plain is None:
            continue
        if why := has_ebbtide():
            record.missing(why)
            return
        for way in WAYS:
            if settings.time_left() < 5:
                record.missing(f"{kind}, {way}: no time was left")
                continue
            _put(record, kind, way, _compared(record, device, settings.size, kind, way, plain))


def _put(record: Record, kind: str, way: str, result: str) -> None:
    results = {k: dict(v) for k, v in record.values["results"].items()}
    results.setdefault(kind, {})[way] = result
    record.put(results=results)


def _plain(record: Record, device: Device, size: Size, kind: str) -> Training | None:
    """What plain training gives; None if two of them differ, since a comparison would prove nothing."""
    try:
        first, second = (train(device, size, kind, None) for _ in range(2))
    except RuntimeError as error:
        record.missing(f"{kind}: plain training fails ({one_line(error)})")
        return None
    if first != second:
        record.missing(f"{kind}: two plain trainings differ, so a comparison proves nothing")
        return None
    return first


def _compared(record: Record, device: Device, size: Size, kind: str, way: str, plain: Training) -> str:
    try:
        found = train(device, size, kind, way)
    except Exception as error:  # whatever it is: plain training has just done without
        record.wrong(f"{kind}, {way}: {one_line(error)}")
        return "failed"
    different = [name for name in plain if plain[name] != found.get(name)]
    if different:
        record.wrong(f"{kind}, {way}: {len(different)} of {len(plain)} differ, the first is {different[0]}")
        return "different"
    return f"identical ({len(plain)} losses, gradients and parameters)"


def train(device: Device, size: Size, kind: str, way: str | None) -> Training:
    """Some steps with dropout and AdamW; the bits of everything that came out, by name."""
    torch.manual_seed(0)
    fused = kind == KINDS[1]
    shape = model.Shape(size.exact_layers, size.exact_width, 4, dropout=0.1, explicit=not fused)
    gpt = model.build(shape, device.device)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3)
    found: Training = {}
    with _stepping(gpt, way) as step:
        for number in range(size.exact_steps):
            given = model.tokens(4, size.exact_tokens, number, device.device)
            with step(), torch.autocast(device.device.type, torch.bfloat16, enabled=fused):
                loss = gpt(given)
            loss.backward()
            found[f"loss of step {number}"] = _bits(loss)
            for name, parameter in gpt.named_parameters():
                found[f"gradient of {name} in step {number}"] = _bits(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
    return found | {f"parameter {name} at the end": _bits(p) for name, p in gpt.named_parameters()}


def _bits(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "none"
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(plain.numpy().tobytes(), digest_size=12).hexdigest()


@contextmanager
def _stepping(gpt: model.GPT, way: str | None) -> Iterator[Any]:
    """What is put around the forward of each step."""
    if way is None:
        yield nullcontext
        return
    if way == "offload by hand":
        with _by_hand(gpt):
            yield nullcontext
        return
    import ebbtide.torch

    with ebbtide.torch.session(gpt, **_session(way, len(gpt.blocks))) as session:
        yield session.step
        if not session.stats()["bytes_out"]:
            raise RuntimeError("nothing was moved")


def _session(way: str, layers: int) -> Mapping[str, Any]:
    names = [f"blocks.{index}" for index in range(layers - 1)]
    every_other = dict.fromkeys(names[::2], "swap")
    return {
        "swap all": {"policy": "swap", "min_bytes": 0},
        "swap every other, two ahead": {"policy": every_other, "min_bytes": 0, "prefetch": 2},
        "host tier only": {"policy": "swap", "min_bytes": 0, "tier": "host"},
        "swap and recompute": {"policy": every_other | dict.fromkeys(names[1::2], "recompute"), "min_bytes": 0},
    }[way]


@contextmanager
def _by_hand(gpt: model.GPT) -> Iterator[None]:
    """Each block but the last within an `offload` of its own."""
    import ebbtide.torch

    contexts: list[AbstractContextManager[Any]] = []

    def enter(module: Any, given: object, index: int) -> None:
        contexts.append(ebbtide.torch.offload(min_bytes=0, name=f"block {index}"))
        contexts[-1].__enter__()

    def leave(module: Any, given: object, output: object) -> None:
        contexts.pop().__exit__(None, None, None)

    hooks = []
    for index, block in enumerate(list(gpt.blocks)[:-1]):
        hooks.append(block.register_forward_pre_hook(lambda m, x, index=index: enter(m, x, index)))
        hooks.append(block.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        ebbtide.torch.reset()
