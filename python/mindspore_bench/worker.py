"""One way to train, in a process of its own: a step for each line on stdin, its figures as JSON on stdout."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from models import GPT, LARGE, batch, made

import ebbtide.mindspore

WAYS = ("plain", "swap", "recompute")


def resident_mib() -> float:
    """Memory of this process."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


class Books:
    """What saved tensors take of memory, of all that MindSpore saves in a step: storages by address.

    Handed to MindSpore as the outermost hooks, so that it sees what no session takes (the head, the embedding), and
    asked at the end of forward together with the session's own count.
    """

    def __init__(self) -> None:
        self.bytes: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        """Counts a storage once; parameters don't count."""
        if tensor.param_info is None:
            storage = tensor.untyped_storage()
            self.bytes[storage.data_ptr()] = storage.nbytes()
        return tensor.data


def recomputed(block: nn.Cell) -> None:
    """Makes a block run under `ms.recompute`."""
    inner: Callable[..., Any] = block.construct
    block.__dict__["construct"] = lambda *args: ms.recompute(inner, *args, use_reentrant=False)


def gradients(model: GPT) -> Callable[..., Any]:
    """Loss and gradients, and memory at the end of forward."""

    def forward(*data: Tensor) -> Tensor:
        loss = model(*data)
        loss.asnumpy()  # until all of forward has run
        forward.resident = resident_mib()  # type: ignore[attr-defined]
        return loss

    forward.resident = 0.0  # type: ignore[attr-defined]
    made = ms.value_and_grad(forward, None, list(model.trainable_params()))
    made.forward = forward
    return made


def saved_bytes(model: GPT, session: ebbtide.mindspore.Session | None, data: tuple[Tensor, Tensor]) -> int:
    """Bytes of saved tensors at the end of a forward that is run for this."""
    books = Books()
    live = [0]

    def forward(*tensors: Tensor) -> Tensor:
        with ms.saved_tensors_hooks(books.pack, lambda tensor: tensor):
            loss = model(*tensors)
        loss.asnumpy()
        live[0] = sum(books.bytes.values()) + (int(session.stats()["live_bytes"]) if session else 0)
        return loss

    with session.step() if session else nullcontext():
        ms.value_and_grad(forward, None, list(model.trainable_params()))(*data)
    return live[0]


class Drop(nn.Cell):
    """Dropout that follows the seed. `nn.Dropout` has a state of its own, and two plain trainings differ with it."""

    def construct(self, x: Tensor) -> Tensor:
        """Zeroes a tenth."""
        return ops.dropout(x, p=0.1, training=True)


def serve(way: str) -> None:
    """Runs a step for each line until there is none."""
    ms.set_context(deterministic="ON")  # else plain training itself does not come to the same twice
    size = LARGE
    model = made(size)
    for block in model.blocks if "dropout" in sys.argv else ():
        block.drop = Drop()
    session = ebbtide.mindspore.session(model, "swap") if way == "swap" else None
    if way == "recompute":
        for block in list(model.blocks)[:-1]:
            recomputed(block)
    grad = gradients(model)
    optimizer = nn.SGD(model.trainable_params(), 0.01)
    for line in sys.stdin:
        data = batch(size, int(line))
        if "saved" in sys.argv:
            print(json.dumps({"way": way, "saved_bytes": saved_bytes(model, session, data)}), flush=True)
            continue
        ms.set_seed(int(line))
        before = resident_mib()
        started = time.perf_counter()
        with session.step() if session else nullcontext():
            loss, found = grad(*data)
            bits = hashlib.blake2b(digest_size=8)
            arrays = [gradient.asnumpy() for gradient in found]
        seconds = time.perf_counter() - started
        for array in arrays:
            bits.update(array.tobytes())
        optimizer(found)
        figures = {
            "way": way,
            "seconds": seconds,
            "before_mib": before,
            "after_forward_mib": grad.forward.resident,  # type: ignore[attr-defined]
            "loss": float(loss.asnumpy()).hex(),
            "gradients": bits.hexdigest(),
            "stats": session.stats() if session else None,
        }
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
