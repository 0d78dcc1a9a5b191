"""What planning asks of PyTorch, and how a step of it is followed; `ebbtide._plan` has the plan.

**What is counted**: tensors that layers save, parameters, buffers and gradients; on an accelerator what PyTorch's
allocator has in use between steps, so that the optimizer's state is in it.

A backward without gradients of outputs is loaded when it is asked for, as without a plan.

Access: a `Watcher` belongs to one step; in backward autograd's threads call it, one at a time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide import _native
from ebbtide._plan import Framework, Planned, Recorded
from ebbtide._record import CALLED_WITH
from ebbtide.torch import _link
from ebbtide.torch._places import Meter
from ebbtide.torch._record import key_of, keys_of, returned, tensors
from ebbtide.torch._repeat import state_of


class Watcher:
    """Follows one step, told of modules and tensors."""

    def __init__(self, follower: Recorded | Planned) -> None:
        self._follower = follower
        self._task = -1
        self._inputs: list[torch.Tensor] = []
        self._state: object = None
        self._numbers: dict[int, tuple[int, StorageWeakRef]] = {}
        self._count = itertools.count()
        self.records = isinstance(follower, Recorded)

    @property
    def layer(self) -> int:
        """The number of the layer that runs, or ran last."""
        return self._follower.layer

    def enter(self, layer: nn.Module, name: str, inputs: object) -> None:
        """A layer's forward begins."""
        if self.records:
            self._inputs, self._state = list(tensors(inputs)), state_of(layer)
        self._follower.enter(name, keys_of(inputs))

    def saves(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor of the layer that runs leaves."""
        return self._follower.saves(key_of(tensor), tensor.untyped_storage().nbytes())

    def stays(self, tensor: torch.Tensor) -> None:
        """This tensor that the layer saves is not to leave."""
        self._follower.stays(key_of(tensor), tensor.untyped_storage().nbytes())

    def leave(self, layer: nn.Module, group: _native.Group | None, output: object) -> None:
        """Its forward ended."""
        self._follower.ends()
        if isinstance(self._follower, Recorded):
            self._look_at(layer, self._follower)
        self._follower.leave(group, *returned(output))

    def _look_at(self, layer: nn.Module, recorded: Recorded) -> None:
        """What running the layer again would need, or change."""
        inputs, self._inputs = self._inputs, []
        if state_of(layer) != self._state:
            recorded.cannot_again("its forward changes buffers or attributes, which a second one would change again")
        record = recorded.recorder.layers[-1]
        for tensor in inputs:
            key = key_of(tensor)
            if key in record.saved or key == record.reads:
                continue
            if tensor.requires_grad:  # the layer before may let go of it, but not if this one is to be run again
                recorded.cannot_again(CALLED_WITH)
            else:
                recorded.recorder.lent(self._number_of(tensor), tensor.untyped_storage().nbytes())

    def _number_of(self, tensor: torch.Tensor) -> int:
        """Of a storage, other than that of one that was at its address before."""
        key = key_of(tensor)
        known = self._numbers.get(key)
        if known is None or known[1].expired():
            known = self._numbers[key] = (next(self._count), StorageWeakRef(tensor.untyped_storage()))
        return known[0]

    def reaches(self, layer: int) -> None:
        """The gradient of this layer's output has come: its backward is next."""
        self._task = at_end(self._task, self._follower.over)
        self._follower.reaches(layer)


def at_end(task: int, call: Callable[[], None]) -> int:
    """Has autograd call something at the end of this backward, unless `task` is its number already."""
    now = torch._C._current_graph_task_id()
    if now != task:
        torch.autograd.Variable._execution_engine.queue_callback(call)
    return int(now)


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def static_bytes(model: nn.Module) -> int:
    """Parameters, buffers and gradients; on an accelerator all that is in use now, and gradients."""
    seen: dict[int, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        seen[key_of(tensor)] = tensor.untyped_storage().nbytes()
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    device = _device_of(model)
    if device.type == "cpu":
        return sum(seen.values()) + gradients
    came = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    return Meter(device).read()[0] + gradients - came


def _settle(model: nn.Module) -> Callable[[], None]:
    return functools.partial(_link.settle, _device_of(model))


FRAMEWORK = Framework(
    source=f"torch {torch.__version__}",
    measure=lambda open_hub, model: _link.measure(open_hub, _device_of(model)),
    static_bytes=static_bytes,
    settle=_settle,
    why_not=lambda _model, _layer: None,
    counted="saved tensors, parameters, buffers and gradients",
)
