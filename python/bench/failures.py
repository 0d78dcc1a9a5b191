"""Two hundred steps with an exception in every seventh: memory stays flat, and the next step is right."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

import ebbtide.torch
from bench.model import GPT, Block, Size
from bench.worker import digest, status
from ebbtide.errors import NoRoomError

SIZE = Size(layers=4, width=128, heads=4, tokens=128, batch=4)
KINDS = ("forward", "hook", "backward", "host memory")


class Planned(Exception):
    """The exception of the bench."""


def fail(*_: object) -> None:
    """Raises it, as a forward, a hook or a backward of the user would."""
    raise Planned


@contextmanager
def failing(model: GPT, kind: str) -> Iterator[None]:
    """Makes the next step fail in this way."""
    block = model.blocks[2]
    assert isinstance(block, Block)
    if kind == "forward":
        handle = block.up.register_forward_pre_hook(fail)
    elif kind == "hook":
        handle = block.register_forward_hook(fail)
    else:
        handle = block.down.register_full_backward_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def step(session: ebbtide.torch.Session, model: GPT, tokens: torch.Tensor) -> float:
    """Forward and backward."""
    model.zero_grad(set_to_none=True)
    with session.step():
        loss: torch.Tensor = model(tokens, tokens)
        loss.backward()
    return float(loss.detach())


def fails(session: ebbtide.torch.Session, model: GPT, tokens: torch.Tensor, kind: str) -> bool:
    """Runs a step that fails; whether it did, with the right exception."""
    if kind == "host memory":
        # A bound that one layer fits into and four do not.
        with ebbtide.torch.session(model, tier="host", host_bytes=3 << 20, min_bytes=0) as small:
            try:
                step(small, model, tokens)
            except NoRoomError:
                return True
            return False
    with failing(model, kind), suppress(Planned):
        step(session, model, tokens)
        return False
    return True


def run(steps: int = 200) -> dict[str, object]:
    """Resident memory after every seventh step, and whether every good step gave the same bits."""
    torch.manual_seed(0)
    model = GPT(SIZE)
    tokens = torch.randint(SIZE.vocabulary, (SIZE.batch, SIZE.tokens))
    model.zero_grad()
    model(tokens, tokens).backward()
    expected = digest(model)
    session = ebbtide.torch.session(model, tier="file", min_bytes=0)
    rss: list[float] = []
    wrong = failed = 0
    for number in range(steps):
        if number % 7 == 6:
            failed += fails(session, model, tokens, KINDS[number // 7 % len(KINDS)])
            gc.collect()
            rss.append(status("VmRSS"))
        else:
            step(session, model, tokens)
            wrong += digest(model) != expected
    stats = session.stats()
    session.close()
    warm = rss[len(rss) // 4 :]
    return {
        "steps": steps,
        "failed": failed,
        "wrong": wrong,
        "rss_mib_first_quarter": max(rss[: len(rss) // 4]),
        "rss_mib_growth": warm[-1] - warm[0],
        "active_groups": stats["active_groups"],
        "bytes_held": stats["bytes_held"],
    }
