"""`Session.verify`: steps run plain against steps run through the session, on the user's own cell.

All start from the same parameters, buffers and random numbers. An `nn.Dropout` keeps the state of its random numbers
inside of its operation, so each step gets new operations with the same seeds. Everything is put back at the end, also
when something raises. What memory a plain step needs is counted in one more step, in which all layers are kept.

Access: the thread of the session, outside of steps.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ebbtide._verify import Verified, different, leaves
from ebbtide.errors import SettingError
from ebbtide.mindspore._bits import fingerprint
from ebbtide.mindspore._plan import settle
from ebbtide.mindspore._step import Step
from ebbtide.mindspore._tally import Tally

if TYPE_CHECKING:
    from ebbtide.mindspore._session import Session


@dataclass(frozen=True)
class _Run:
    """One step: the fingerprints of what came out, by name, and how long it took."""

    results: Mapping[str, bytes]
    ms: float


def verify(session: Session, cell: nn.Cell, step_fn: Callable[[], object]) -> Verified:
    """See `Session.verify`."""
    if not callable(step_fn):
        raise SettingError(
            f"verify() got a {type(step_fn).__name__}",
            "pass a function that runs what ms.value_and_grad has made, and returns the loss and the gradients",
        )
    state, kept, swapped = _State(cell), Tally(), Tally()
    try:
        first = _run(state, nullcontext(), step_fn)
        plain = _run(state, nullcontext(), step_fn)
        found = [_run(state, Step(session, kept, keeps_all=True), step_fn), _run(state, Step(session), step_fn)]
        moved = session.stats()["bytes_out"]
        last = _run(state, Step(session, swapped), step_fn)
    finally:
        state.put_back()
    found.append(last)
    wrong = [different(plain.results, run.results, _equal) for run in found]
    return Verified(
        different=next((names for names in wrong if names), ()),
        compared=len({*plain.results, *last.results}),
        repeatable=plain.results == first.results,
        plain_peak=kept.peak,
        swapped_peak=swapped.peak,
        plain_ms=plain.ms,
        swapped_ms=last.ms,
        bytes_out=int(session.stats()["bytes_out"] - moved),
    )


def _equal(one: bytes, other: bytes) -> bool:
    return one == other


class _State:
    """Parameters, buffers, random generators and dropouts, as they were."""

    def __init__(self, cell: nn.Cell) -> None:
        self.parameters = {p.name: p for p in cell.get_parameters()}
        self.trainable = list(cell.trainable_params())
        self.buffers = dict(cell.named_buffers())
        tensors = {**self.parameters, **self.buffers}
        self._saved = {name: tensor.copy() for name, tensor in tensors.items()}
        self._prints = {name: fingerprint([tensor]) for name, tensor in tensors.items()}
        self._random = [
            (ms.set_rng_state, ms.get_rng_state()),
            (random.setstate, random.getstate()),
            (np.random.set_state, np.random.get_state()),
        ]
        self._dropouts = [(each, each.dropout) for _, each in cell.cells_and_names() if _has_operation(each)]

    def begin(self) -> None:
        """As it was, with dropouts that draw from the start."""
        self._restore()
        for dropout, operation in self._dropouts:
            dropout.dropout = ops.Dropout(operation.keep_prob, operation.Seed0, operation.Seed1)

    def put_back(self) -> None:
        """As it was."""
        self._restore()
        for dropout, operation in self._dropouts:
            dropout.dropout = operation

    def _restore(self) -> None:
        for name, tensor in {**self.parameters, **self.buffers}.items():
            if fingerprint([tensor]) != self._prints[name]:
                ops.assign(tensor, self._saved[name])
        for restore, state in self._random:
            restore(state)

    def refuse_changes(self) -> None:
        """Refuses an optimizer in the step."""
        for parameter in self.trainable:
            if fingerprint([parameter]) != self._prints[parameter.name]:
                raise SettingError(f"step_fn changed the parameter {parameter.name}", "leave the optimizer out of it")

    def results(self, output: object) -> dict[str, bytes]:
        """Fingerprints of what a step left, by name."""
        found = {f"result{where}": fingerprint([tensor]) for where, tensor in leaves(output, Tensor)}
        if not found:
            raise SettingError(
                f"step_fn returned {_what(output)}, in which there is no tensor",
                "return the loss and the gradients, as what ms.value_and_grad has made returns them",
            )
        found = {self._named(output, where): bits for where, bits in found.items()}
        own = {name: p for name, p in self.parameters.items() if not p.requires_grad} | self.buffers
        return found | {f"buffer {name}": fingerprint([tensor]) for name, tensor in own.items()}

    def _named(self, output: object, where: str) -> str:
        """What people call a result: the loss and gradients by name where `(loss, gradients)` was returned."""
        if not isinstance(output, tuple) or len(output) != 2 or not isinstance(output[1], (tuple, list)):
            return where
        if len(output[1]) != len(self.trainable):
            return where
        names = {f"result[1][{at}]": f"gradient of {parameter.name}" for at, parameter in enumerate(self.trainable)}
        return {"result[0]": "loss", **names}.get(where, where)


def _has_operation(cell: Any) -> bool:
    return isinstance(cell, nn.Dropout) and isinstance(getattr(cell, "dropout", None), ops.Dropout)


def _run(state: _State, step: AbstractContextManager[Any], step_fn: Callable[[], object]) -> _Run:
    state.begin()
    settle()
    began = time.perf_counter()
    with step:
        output = step_fn()
    settle()
    seconds = time.perf_counter() - began
    state.refuse_changes()
    return _Run(state.results(output), seconds * 1000)


def _what(value: object) -> str:
    return f"a {type(value).__name__}"
