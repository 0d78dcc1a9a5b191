"""`Session.verify`: steps run plain against steps run through the session, on the user's own model.

All start from the same parameters, buffers and random numbers, with no gradients. Everything is put back at
the end, also when something raises. Access: the thread of the session, outside of steps.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ebbtide import _native
from ebbtide._verify import Verified, different, leaves
from ebbtide.errors import SettingError
from ebbtide.torch._places import Meter, Watch

if TYPE_CHECKING:
    from ebbtide.torch._session import Session


@dataclass(frozen=True)
class _Run:
    """One step: what came out, by name, and what it took."""

    results: Mapping[str, torch.Tensor]
    peak: int
    ms: float


def verify(session: Session, model: nn.Module, step_fn: Callable[[], object]) -> Verified:
    """See `Session.verify`."""
    if not callable(step_fn):
        raise SettingError(
            f"verify() got a {type(step_fn).__name__}",
            "pass a function that runs forward and returns the loss",
        )
    state = _State(model)
    try:
        first = _run(state, nullcontext(), step_fn)
        plain = _run(state, nullcontext(), step_fn)
        repeatable = not _different(plain.results, first.results)
        del first  # it holds a copy of all gradients
        found = _different(plain.results, _run(state, session.step(), step_fn).results)
        moved = session.stats()["bytes_out"]
        swapped = _run(state, session.step(), step_fn)
    finally:
        state.put_back()
    return Verified(
        different=found or _different(plain.results, swapped.results),
        compared=len({*plain.results, *swapped.results}),
        repeatable=repeatable,
        plain_peak=plain.peak,
        swapped_peak=swapped.peak,
        plain_ms=plain.ms,
        swapped_ms=swapped.ms,
        bytes_out=int(session.stats()["bytes_out"] - moved),
    )


class _State:
    """Parameters, buffers, gradients and random generators, as they were."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        self.device = next(iter(self.parameters.values())).device
        tensors = {**self.parameters, **self.buffers}
        self._saved = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._gradients = {name: parameter.grad for name, parameter in self.parameters.items()}
        self._random = _random_states({tensor.device for tensor in tensors.values()})

    def begin(self) -> None:
        """As it was, without gradients."""
        with torch.no_grad():
            for name, tensor in {**self.parameters, **self.buffers}.items():
                if not _same(tensor, self._saved[name]):
                    tensor.copy_(self._saved[name])
        for parameter in self.parameters.values():
            parameter.grad = None
        for restore, state in self._random:
            restore(state)

    def put_back(self) -> None:
        self.begin()
        for name, parameter in self.parameters.items():
            parameter.grad = self._gradients[name]

    def refuse_changes(self) -> None:
        for name, parameter in self.parameters.items():
            if not _same(parameter, self._saved[name]):
                raise SettingError(f"step_fn changed the parameter {name}", "leave the optimizer out of it")

    def results(self, loss: object) -> dict[str, torch.Tensor]:
        """What a step left, by name; the gradients and the loss themselves, buffers copied."""
        found = {f"loss{where}": tensor.detach() for where, tensor in leaves(loss, torch.Tensor)}
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                found[f"gradient of {name}"] = parameter.grad
        found.update({f"buffer {name}": tensor.detach().clone() for name, tensor in self.buffers.items()})
        return found


def _run(state: _State, step: AbstractContextManager[Any], step_fn: Callable[[], object]) -> _Run:
    state.begin()
    _native.return_freed_memory()
    watch = Watch(Meter(state.device))
    with watch:
        with step:
            loss = step_fn()
        _backward(state, loss)
    state.refuse_changes()
    return _Run(state.results(loss), watch.peak - watch.start, watch.seconds * 1000)


def _backward(state: _State, loss: object) -> None:
    """Runs backward if `step_fn` hasn't: then there are no gradients yet."""
    if any(parameter.grad is not None for parameter in state.parameters.values()):
        return
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad or loss.numel() != 1:
        raise SettingError(
            f"step_fn returned {_what(loss)} and computed no gradients",
            "return the loss, a tensor of one element that needs a gradient, or run backward in step_fn",
        )
    torch.autograd.backward(loss)


def _what(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} that needs {'a' if value.requires_grad else 'no'} gradient"
    return f"a {type(value).__name__}"


def _different(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    return different(one, other, _same)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, NaNs and the sign of zero included."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if one.layout != torch.strided or one.is_quantized:
        return bool(torch.equal(one.detach().to_dense(), other.detach().to_dense()))
    return bool(torch.equal(_bits(one), _bits(other)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _random_states(devices: set[torch.device]) -> list[tuple[Callable[[Any], object], Any]]:
    """How to restore each random generator, and its state now: PyTorch's, Python's, NumPy's if loaded."""
    states: list[tuple[Callable[[Any], object], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
    ]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states.append((numpy.random.set_state, numpy.random.get_state()))
    for device in devices:
        module = torch.get_device_module(device)
        if device.type != "cpu" and hasattr(module, "get_rng_state"):
            states.append((_setter(module, device), module.get_rng_state(device)))
    return states


def _setter(module: Any, device: torch.device) -> Callable[[Any], object]:
    return lambda state: module.set_rng_state(state, device)
