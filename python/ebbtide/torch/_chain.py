"""Layers that follow one another, and the hooks by which they drive their groups.

A declared layer gets a forward pre-hook, which runs before the user's, and a forward hook, which runs
after those that were there and also when the forward fails. Its backward is noticed where the gradient of
its output comes: a hook on the tensor, not on the module, because module hooks for backward put a view
between a layer and its user, who then can't work in place. Only where the user has such hooks on a layer
already, ours is put in front of them.

Access contract: tables change under the lock of `Layers`. Calls under way belong to the thread that makes
them. Module hooks and finalizers hold no module: a model that is dropped is freed at once, and its wiring
is torn down at the next use of the manager, never inside a finalizer. In a copy of a model (`deepcopy`,
pickle) the hooks are inert.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from ebbtide._native import Chain, Packer
from ebbtide._trees import leaves
from ebbtide.errors import SettingError
from ebbtide.torch import _defaults
from ebbtide.torch._hooks import Inert, in_backward, untraced
from ebbtide.torch._step import push_hooks

if TYPE_CHECKING:
    from ebbtide.torch._manager import SwapManager
    from ebbtide.torch._tensors import SwapGroup


class Layer:
    """A declared layer. Its key names it in messages and is unique for the life of the process."""

    _numbers = itertools.count()

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.key = f"{type(module).__name__}.{next(self._numbers)}"
        self.group_name = ""
        self.handles: list[RemovableHandle] = []
        self.in_front = False
        self.latest: LayerCall | None = None


class LayerCall:
    """A call of a layer: what was current before, what was put on autograd's stack, what it saved."""

    def __init__(self, layer: Layer, outer: str | None, frame: FrameType | None) -> None:
        self.layer = layer
        self.group_name = layer.group_name
        self.previous: LayerCall | None = None
        self.group: weakref.ref[SwapGroup] | None = None
        self.hooks: saved_tensors_hooks | None = None
        self._outer = outer
        # Of the module's call: tells whether that is still under way. Held only as long as it is.
        self._frame = frame
        self._begun = False

    def open_group(self) -> SwapGroup | None:
        """The group of this very call, while anybody has it."""
        return None if self.group is None else self.group()

    def close(self) -> str | None:
        """Takes the hooks off autograd's stack, once; returns what was current before."""
        hooks, self.hooks, self._frame = self.hooks, None, None
        top = _defaults.top_hooks()
        # After a KeyboardInterrupt somebody else's may be on top: then nothing can be done.
        if hooks is not None and (top is None or top[0] is hooks.pack_hook):
            hooks.__exit__()
        return self._outer

    def under_way(self) -> bool:
        """Whether the call is on this thread's stack, as far as can be told."""
        if self._frame is None:
            return True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None

    def failed(self) -> bool:
        """Whether an exception that is being handled came through the call."""
        error = sys.exc_info()[1]
        trace: TracebackType | None = None if error is None else error.__traceback__
        while trace is not None and trace.tb_frame is not self._frame:
            trace = trace.tb_next
        return trace is not None and self._frame is not None

    def begins_backward(self) -> bool:
        """Whether this is the first time that somebody says so."""
        begun, self._begun = self._begun, True
        return not begun


class Layers:
    """All declared layers of the process, in their chains."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._chain = Chain()
        self._layers: dict[int, Layer] = {}
        self._gone: deque[int] = deque()
        self._watched: set[str] = set()
        self._local = _Local()

    # -- declaring

    def follow(self, manager: SwapManager, first: nn.Module, second: nn.Module) -> None:
        """Declares an order; as `SwapManager.set_forward_prefetch_layer`."""
        for module in (first, second):
            if not isinstance(module, nn.Module):
                hint = "pass the modules whose forward runs one after the other"
                raise SettingError(f"a {type(module).__name__} is no layer", hint)
        if first is second:
            text = f"a layer ({type(first).__name__}) was declared to follow itself"
            _defaults.warn(f"{text}; nothing has changed", stacklevel=4)
            return
        with self._lock:
            one, two = (self.of(module) or Layer(module) for module in (first, second))
            self._chain.follow(one.key, two.key)
            for layer, module in ((one, first), (two, second)):
                self._enrol(layer, module)
                self._hook(manager, layer, module)

    def _enrol(self, layer: Layer, module: nn.Module) -> None:
        if self.of(module) is None:
            self._layers[id(module)] = layer
            layer.group_name = self._chain.group(layer.key) or layer.key
            weakref.finalize(module, self._gone.append, id(module)).atexit = False

    def _hook(self, manager: SwapManager, layer: Layer, module: nn.Module) -> None:
        """Hangs hooks on a layer that has none."""
        if layer.handles:
            return
        before, after = _Hook(manager, _before), _Hook(manager, _after)
        layer.handles.append(module.register_forward_pre_hook(before, prepend=True))
        layer.handles.append(module.register_forward_hook(after, always_call=True))
        layer.in_front = False
        self._come_before_users(manager, layer, module)

    def _come_before_users(self, manager: SwapManager, layer: Layer, module: nn.Module) -> None:
        """Where the user has backward hooks on the layer, ours runs before them."""
        if layer.in_front or not (module._backward_pre_hooks or module._backward_hooks):
            return
        hook = _Hook(manager, _backward)
        layer.handles.append(module.register_full_backward_pre_hook(hook, prepend=True))
        layer.in_front = True

    def unhook(self, module: nn.Module) -> int:
        """Takes the hooks off a layer; returns how many there were."""
        with self._lock:
            layer = self.of(module)
            handles = [] if layer is None else layer.handles
            count = len(handles)
            while handles:
                handles.pop().remove()
            return count

    def remove(self, module: nn.Module) -> str | None:
        """Takes a layer out of its chain; the name of its group, or None if it was in none."""
        with self._lock:
            layer = self.of(module)
            if layer is None:
                return None
            self.unhook(module)
            return self._take_out(id(module))

    def bury(self) -> list[str]:
        """Takes out layers whose modules are gone; the names of their groups."""
        names = []
        with self._lock:
            while self._gone:
                number = self._gone.popleft()
                layer = self._layers.get(number)
                if layer is not None and layer.module() is None:
                    names.append(self._take_out(number))
        return names

    def _take_out(self, number: int) -> str:
        layer = self._layers.pop(number)
        self._chain.unlink(layer.key)
        self._watched.discard(layer.group_name)
        self._local.last.pop(layer.key, None)
        layer.latest = None
        return layer.group_name

    def forget_names(self) -> None:
        """Groups are watched again only when a tensor is named in them again."""
        self._watched.clear()

    def forked(self) -> None:
        """In a forked child: locks are new, calls under way are the parent's."""
        self._lock = threading.RLock()
        self._local = _Local()

    # -- asking

    def of(self, module: nn.Module) -> Layer | None:
        """The layer that a module is."""
        layer = self._layers.get(id(module))
        return layer if layer is not None and layer.module() is module else None

    def is_last_group(self, group_name: str) -> bool:
        """Whether a group is that of the last layer of a chain."""
        return self._chain.is_last_group(group_name)

    def group_before(self, layer: Layer) -> str | None:
        """The group of the layer that runs before this one."""
        previous = self._chain.previous(layer.key)
        return None if previous is None else self._chain.group(previous)

    # -- calls

    def enter(self, manager: SwapManager, layer: Layer, module: nn.Module) -> None:
        """A layer's forward begins: its group is current."""
        self.purge()
        call = LayerCall(layer, manager.get_current_group_name(), _frame_of_call())
        before = self._chain.previous(layer.key)
        call.previous = None if before is None else self._local.last.get(before)
        self._local.last[layer.key] = layer.latest = call
        self._local.calls.append(call)
        manager.set_current_group_name(layer.group_name)
        self._come_before_users(manager, layer, module)
        call.hooks = self.watching(manager, layer.group_name)

    def watching(self, manager: SwapManager, group_name: str | None) -> saved_tensors_hooks | None:
        """Hooks that watch what is saved, in a group in which `swap_tensor_wrapper` names tensors.

        They swap what it has named and what it will name. They are on autograd's stack when this returns.
        """
        if group_name not in self._watched or not (torch.is_grad_enabled() and _defaults.hooks_are_free()):
            return None
        find = lambda: manager._group_to_pack(named=False)  # noqa: E731
        return push_hooks(Packer(find=find, marked_only=True))

    def watch(self, manager: SwapManager, group_name: str) -> None:
        """A tensor is named in a group: from now on it is watched, also for the rest of this call."""
        if group_name in self._watched:
            return
        self._watched.add(group_name)
        calls = self._local.calls
        if calls and calls[-1].group_name == group_name and calls[-1].hooks is None:
            calls[-1].hooks = self.watching(manager, group_name)

    def leave(self, manager: SwapManager, layer: Layer) -> tuple[LayerCall, bool] | None:
        """A layer's forward ended; the call, and whether it succeeded."""
        calls = self._local.calls
        # One that fails is not on the stack any more, but its exception still is.
        failed = bool(calls) and calls[-1].layer is layer and calls[-1].failed()
        if not failed:
            self.purge()
        if not calls or calls[-1].layer is not layer:
            return None  # its pre-hook did nothing
        call = calls.pop()
        manager.set_current_group_name(call.close())
        return call, not failed

    def purge(self) -> None:
        """Ends calls that a KeyboardInterrupt left, which runs no forward hooks."""
        from ebbtide.torch._manager import set_current_group_name

        calls = self._local.calls
        while calls and not calls[-1].under_way():
            set_current_group_name(calls.pop().close())


class _Local(threading.local):
    """What a thread has of its own: calls under way, and the latest call of each layer."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []
        self.last: dict[str, LayerCall] = {}


def _frame_of_call() -> FrameType | None:
    """Python's frame of the module call that a hook is called from."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != nn.Module.__module__:
        frame = frame.f_back
    return frame


# ---- the hooks


class _Hook:
    """A hook that torch.compile runs as it is, never traced."""

    def __init__(self, manager: SwapManager, run: Callable[[SwapManager, nn.Module, Any], None]) -> None:
        self._manager = manager
        self._run = untraced(run)

    def __call__(self, module: nn.Module, _: object, output: object = None) -> None:
        self._run(self._manager, module, output)

    def __deepcopy__(self, memo: object) -> Inert:
        return Inert()

    def __reduce__(self) -> tuple[type[Inert], tuple[()]]:
        return Inert, ()


def _before(manager: SwapManager, module: nn.Module, _: object) -> None:
    manager._tidy()
    layer = manager._layers.of(module)
    if layer is not None and not in_backward():
        manager._layers.enter(manager, layer, module)


def _after(manager: SwapManager, module: nn.Module, output: object) -> None:
    layer = manager._layers.of(module)
    left = None if layer is None or in_backward() else manager._layers.leave(manager, layer)
    if left is None:
        return
    call, succeeded = left
    if not succeeded:
        manager._forward_failed(call)
        return
    manager._forward_done(call, output)
    if torch.is_grad_enabled():
        for tensor in leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(_GradientCame(manager, call))


class _GradientCame:
    """Tensor hook: the gradient of a layer's output has been computed, so its backward begins."""

    def __init__(self, manager: SwapManager, call: LayerCall) -> None:
        self._manager = manager
        self._call = call

    def __call__(self, _: torch.Tensor) -> None:
        if self._call.begins_backward():
            self._manager._backward_begins(self._call)


def _backward(manager: SwapManager, module: nn.Module, _: object) -> None:
    layer = manager._layers.of(module)
    call = None if layer is None else layer.latest
    if call is not None and call.begins_backward():
        manager._backward_begins(call)
