"""One step: what the layers of a session save between `with s.step():` and its end, in one pass.

A layer's forward runs under a pair of saved-tensor hooks of its own: a `Packer` and `unpack` of the native
module. The group that the packer fills is opened at the first tensor that may move. When the forward ends the
group's offload is started, then the offload of the layer before is waited for, so at most two layers'
activations are in memory. Backward needs nothing from here: `unpack` brings a group home and starts loading the
next one.

Access: a step belongs to the thread of its session, which alone calls its methods; only `_GradientCame` is called
by autograd's threads. A step is entered once. Everything it holds is let go of at its end: graphs refer to groups,
never to steps.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ebbtide import _native
from ebbtide._checks import Predicate, Settings
from ebbtide.errors import EbbtideError, EbbtideWarning, PhaseError, SettingError
from ebbtide.torch import _places
from ebbtide.torch._hooks import left_alone
from ebbtide.torch._plan import Watcher, at_end
from ebbtide.torch._record import tensors

if TYPE_CHECKING:
    from ebbtide.torch._session import Session


class Region:
    """Where one call's saved tensors go: opens its group when the first one asks for it."""

    def __init__(self, hub: _native.Hub, name: str, number: int) -> None:
        self.hub = hub
        self._name = name
        self._number = number
        self.group: _native.Group | None = None

    def open(self) -> _native.Group:
        self.group = self.hub.open(self._name, self._number)
        return self.group


class _Call:
    """A call of a layer that is under way. Without `packer` nothing is swapped in it."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.region: Region | None = None
        self.packer: _native.Packer | None = None
        self.hooks: saved_tensors_hooks | None = None
        self.mark = 0  # of its forward in the timeline
        self.number = -1  # among the layers that a plan knows, if one is followed or recorded

    def close(self) -> None:
        """Takes the hooks off autograd's stack, once."""
        hooks, self.hooks = self.hooks, None
        if hooks is not None:
            hooks.__exit__()


class Step:
    """A step of a session; made by `Session.step()`, entered once with `with`.

    `number` counts the steps of a session from 1. Backward may run inside or after it. A step that an exception
    leaves is given up: its graph can't run backward any more, what it moved is forgotten, and the next step is as if
    it had never been.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.number = 0
        self._calls: list[_Call] = []
        self._called: dict[str, int] = {}
        self._before: _native.Group | None = None  # the layer before's, whose offload was started
        self._keep: _native.Keep | None = None
        self._watcher: Watcher | None = None  # follows or records a plan

    def __repr__(self) -> str:
        return f"<step {self.number or 'not entered yet'} of {self._session!r}>"

    def __enter__(self) -> Step:
        if self.number:
            raise PhaseError(
                f"step {self.number} was entered before", "take a new one from session.step() for each pass"
            )
        self.number, tensors = self._session._begin(self)
        try:
            self._keep = _native.Keep(tensors)
            self._watcher = self._session._watch()
        except BaseException:
            self._session._end(self, done=False)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        done = False
        try:
            left = self._unwind()
            if kind is None:
                self._settle(left)
                done = True
        finally:
            self._before = self._keep = self._watcher = None
            self._session._end(self, done=done)
        if kind is None:
            self._warn()
        elif refused := refused_by_transform(error):
            raise refused from error

    # ---- called by the hooks of layers

    def enter(self, layer: nn.Module, name: str, inputs: object) -> None:
        """A layer's forward begins."""
        self._session._places.mark(_places.LAYERS)
        call = _Call(layer)
        self._calls.append(call)
        call.mark = self._session._source.hub.mark_begin(f"forward {name}")
        counted = self._session._source.counted
        counted["layer_calls"] += 1
        why = left_alone()
        if why is not None:
            counted[why] += 1
            self._session._left_alone(name, why)
        elif self._watcher is not None and self._session.is_planned(name):
            numbered = self._numbered(name)
            self._watcher.enter(layer, numbered, inputs)
            call.number = self._watcher.layer
            self._swap(call, numbered, self._watcher)
        elif self._session.policy[name] == "swap":
            self._swap(call, self._numbered(name))
        elif self._session.policy[name] == "keep" and self._before is not None:
            # Its backward comes before that of the layer before, which comes back meanwhile.
            call.packer = _native.Packer(ahead=self._before)
            call.hooks = push_hooks(call.packer)

    def leave(self, layer: nn.Module, name: str, output: object) -> None:
        """A layer's forward ended, by return or exception."""
        if not self._calls or self._calls[-1].layer is not layer:
            return  # its pre-hook did not run inside of this step
        call = self._calls.pop()
        call.close()
        self._session._source.hub.mark_end(call.mark)
        self._session._places.mark(_places.HEAD)
        self._watch_gradient(call, name, output)
        if self._watcher is not None and call.number >= 0:
            self._watcher.leave(layer, call.region.group if call.region else None, output)
        else:
            self._offload(call)

    # ---- parts

    def _numbered(self, name: str) -> str:
        """A group's name: that of the layer, with a number from the second call in this step on."""
        count = self._called[name] = self._called.get(name, 0) + 1
        return name if count == 1 else f"{name}#{count}"

    def _swap(self, call: _Call, name: str, watcher: Watcher | None = None) -> None:
        settings = self._session._settings
        decide, min_bytes = settings.decide, settings.min_bytes
        if watcher is not None:
            decide = _watched(watcher, settings)
            min_bytes = 0 if watcher.records else min_bytes  # what is too small is counted, once
        call.region = Region(self._session._source.hub, name, self.number)
        call.packer = _native.Packer(
            find=call.region.open,
            keep=self._keep,
            min_bytes=min_bytes,
            decide=decide,
        )
        call.hooks = push_hooks(call.packer)

    def _offload(self, call: _Call) -> None:
        """Starts a call's offload, and waits for the one before (row M4)."""
        if call.packer is not None:
            self._session._source.counted["tensors_kept"] += call.packer.kept
        group = call.region.group if call.region else None
        if group is None:
            return  # the one before may take as long as nothing else leaves
        before, self._before = self._before, group
        group.start_offload()
        wait_offload(before)

    def _watch_gradient(self, call: _Call, name: str, output: object) -> None:
        """Tells where memory is, and what runs, from the moment on when backward reaches this layer."""
        tensor = next((tensor for tensor in tensors(output) if tensor.requires_grad), None)
        if tensor is not None and tensor.grad_fn is not None and left_alone() is None:
            came = _GradientCame(self._session._places, self._session._backward, name)
            if call.number >= 0:
                came.watcher, came.number = self._watcher, call.number
            tensor.register_hook(came)

    def _unwind(self) -> list[_Call]:
        """Hooks that are still on autograd's stack come off: a KeyboardInterrupt runs no forward hooks."""
        left, self._calls = self._calls[::-1], []
        for call in left:
            call.close()
            self._session._source.hub.mark_give_up(call.mark)
        return left

    def _settle(self, left: list[_Call]) -> None:
        """The step ended well. Calls may be left over all the same, if it caught an interrupt itself."""
        for call in left:
            self._offload(call)
        before, self._before = self._before, None
        wait_offload(before)

    def _warn(self) -> None:
        for text in self._session._take_warnings():
            warnings.warn(text, EbbtideWarning, stacklevel=3)


class _GradientCame:
    """Tensor hook: the gradient of a layer's output has been computed."""

    def __init__(self, places: _places.Places, backward: BackwardRow, name: str) -> None:
        self._places = weakref.ref(places)
        self._backward = weakref.ref(backward)
        self._name = name
        self.watcher: Watcher | None = None
        self.number = -1

    def __call__(self, _: torch.Tensor) -> None:
        if self.watcher is not None:
            self.watcher.reaches(self.number)
        places, backward = self._places(), self._backward()
        if places is not None:
            places.mark(_places.BACKWARD)
        if backward is not None:
            backward.reaches(self._name)


class BackwardRow:
    """Marks in a session's timeline which layer's backward runs.

    A layer's backward begins when the gradient of its output is there, and ends where the next one's begins or
    the whole backward ends. Called by autograd's threads, one at a time; `give_up` by the session's thread, while no
    backward of it runs.
    """

    def __init__(self, hub: _native.Hub) -> None:
        self._hub = hub
        self._mark = 0
        self._task = -1  # autograd's number of the backward

    def reaches(self, name: str) -> None:
        self._hub.mark_end(self._mark)
        self._mark = self._hub.mark_begin(f"backward {name}")  # 0 without a timeline
        if self._mark:
            self._task = at_end(self._task, self._over)

    def give_up(self) -> None:
        """A backward that failed has left its mark open, and doesn't tell when that was."""
        self._hub.mark_give_up(self._mark)
        self._mark = 0

    def _over(self) -> None:
        self._hub.mark_end(self._mark)
        self._mark = 0


def _watched(watcher: Watcher, settings: Settings) -> Predicate:
    """Asks whether a tensor may leave, and then the plan; who records a step is told of what may not."""

    def decide(tensor: torch.Tensor) -> bool:
        may = tensor.nbytes >= settings.min_bytes and (settings.decide is None or settings.decide(tensor))
        if may:
            return watcher.saves(tensor)
        watcher.stays(tensor)
        return False

    return decide


def wait_offload(group: _native.Group | None) -> None:
    """Waits for an offload, unless backward came before its end or nobody needs it any more."""
    if group is not None and group.phase == "offloading":
        group.wait_offload()


def push_hooks(packer: Callable[[torch.Tensor], object]) -> saved_tensors_hooks:
    """Puts a packer on this thread's stack of saved-tensor hooks; `__exit__` of the result takes it off."""
    hooks = saved_tensors_hooks(packer, _native.unpack)
    try:
        hooks.__enter__()
    except RuntimeError as error:
        refused = refused_by_transform(error)
        if refused is None:
            raise
        raise refused from error
    return hooks


def refused_by_transform(error: BaseException | None) -> EbbtideError | None:
    """Our words for PyTorch's refusal of hooks under `torch.func` transforms; None for other errors."""
    if not isinstance(error, RuntimeError) or isinstance(error, EbbtideError):
        return None
    if "saved tensor hooks" not in str(error) and "saved tensors hooks" not in str(error):
        return None
    return SettingError(
        f"a functional transform met a swapped layer ({str(error).splitlines()[0]})",
        "run torch.func.grad, vjp, jacrev and hessian outside of swapped layers and of offload(): keep that layer "
        '(policy={"its.name": "keep", …}), or use torch.autograd.grad inside of it, which works',
    )
