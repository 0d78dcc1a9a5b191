"""Comparisons and counts that the tests of sessions share."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from models import Size, batch, gradients_of, made

import ebbtide.mindspore
from ebbtide.mindspore import _alone
from ebbtide.mindspore._cells import storages

Result = list[bytes]
SMALL = Size()


def bits(results: Iterable[Any]) -> Result:
    """The bytes of tensors in whatever is nested."""
    found: Result = []
    for each in results:
        if isinstance(each, (tuple, list)):
            found += bits(each)
        else:
            found.append(each.asnumpy().tobytes())
    return found


def plain(size: Size = SMALL, steps: int = 1, model: Any = None) -> list[Result]:
    """Loss and gradients of some steps without a session."""
    grad = gradients_of(made(size) if model is None else model)
    return [bits(grad(*batch(size, number))) for number in range(steps)]


def stepped(s: ebbtide.mindspore.Session, model: Any, size: Size = SMALL, number: int = 0) -> Result:
    """The same of one step through a session."""
    with s.step():
        return bits(gradients_of(model)(*batch(size, number)))


def grad_of(function: Callable[..., Any], cell: nn.Cell) -> Callable[..., Any]:
    """Loss and gradients of a function that calls a cell."""
    return ms.value_and_grad(function, None, list(cell.trainable_params()))


def array(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers."""
    return Tensor(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def assert_clean(s: ebbtide.mindspore.Session) -> None:
    """Nothing is in flight, nothing is in the tier, nothing is counted, and no hooks are active."""
    s._source.hub.collect()
    figures = s.stats()
    assert (figures["active_groups"], figures["bytes_held"], figures["live_bytes"]) == (0, 0, 0)
    assert not _alone.executor().is_saved_tensor_hook_active()


def fresh_bytes(before: list[Tensor], cell: nn.Cell) -> int:
    """The bytes of all storages of tensors that are alive and weren't before, but those of parameters.

    What was there before isn't looked at: a failed step leaves tensors that MindSpore would wait for, for ever.
    """
    known, own = {id(tensor) for tensor in before}, storages(cell)
    found: dict[int, int] = {}
    for tensor in all_tensors():
        if id(tensor) not in known:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(count for address, count in found.items() if address and address not in own)


def all_tensors() -> list[Tensor]:
    """All that are alive."""
    gc.collect()
    return [each for each in gc.get_objects() if issubclass(type(each), Tensor)]


def resident() -> int:
    """Resident bytes of the process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
