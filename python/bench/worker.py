"""One way to train, in a process of its own: a step for each line on stdin, its figures as JSON on stdout."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.utils.checkpoint import checkpoint

from bench.model import GPT, Size

WAYS = ("plain", "swap", "checkpoint")
MIB = 1 << 20


def status(key: str) -> float:
    """A line of `/proc/self/status`, in MiB."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def checkpointed(block: torch.nn.Module) -> None:
    """Makes a block run under `torch.utils.checkpoint`."""
    forward: Callable[..., torch.Tensor] = block.forward
    block.forward = lambda x: checkpoint(forward, x, use_reentrant=False)


def digest(model: torch.nn.Module) -> str:
    """The bits of all gradients."""
    bits = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        if parameter.grad is not None:
            bits.update(parameter.grad.numpy().tobytes())
    return bits.hexdigest()


def serve(way: str, size: Size, threads: int) -> None:
    """Runs a step for each line until there is none."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = GPT(size)
    session = None
    if way == "swap":
        import ebbtide.torch

        session = ebbtide.torch.session(model, policy="swap", tier="file")
    elif way == "checkpoint":
        for block in model.blocks:
            checkpointed(block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    shape = (size.batch, size.tokens)
    for line in sys.stdin:
        random = torch.Generator().manual_seed(int(line))
        tokens, targets = (torch.randint(size.vocabulary, shape, generator=random) for _ in range(2))
        started = time.perf_counter()
        with session.step() if session else nullcontext():
            loss = model(tokens, targets)
        before_backward = status("VmRSS")
        loss.backward()
        seconds = time.perf_counter() - started
        bits = digest(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        figures = {
            "way": way,
            "seconds": seconds,
            "before_backward_mib": before_backward,
            "peak_mib": status("VmHWM"),
            "loss": float(loss.detach()).hex(),
            "gradients": bits,
            "stats": session.stats() if session else None,
        }
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], Size(**json.loads(sys.argv[2])), int(os.environ.get("EBBTIDE_BENCH_THREADS", "2")))
