"""Layers that follow one another, and what their hooks do to drive their groups.

A declared layer gets a forward pre-hook, which runs before the user's, and a forward hook, which runs
after those that were there and also when the forward fails. Its backward is noticed where the gradient of
its output comes, by a hook on the tensor. Which hooks there are is the framework's: a front end makes its
own `Layers` of those here.

Access contract: tables change under the lock of `Layers`. Calls under way belong to the thread that makes
them. Hooks and finalizers hold no layer: a model that is dropped is freed at once, and its wiring is torn
down at the next use of the manager, never inside a finalizer.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from ebbtide import _defaults
from ebbtide._native import Chain
from ebbtide.errors import SettingError

if TYPE_CHECKING:
    from ebbtide._manager import Manager
    from ebbtide._regions import GroupOfRegions

Module = TypeVar("Module")
# Takes hooks off the framework's stack; is told whether the code that they were for has failed.
End = Callable[[bool], None]


class Layer:
    """A declared layer. Its key names it in messages and is unique for the life of the process."""

    _numbers = itertools.count()

    def __init__(self, module: object) -> None:
        self.module = weakref.ref(module)
        self.key = f"{type(module).__name__}.{next(self._numbers)}"
        self.group_name = ""
        self.handles: list[Any] = []  # of hooks; each has `remove()`
        self.in_front = False
        self.latest: LayerCall | None = None


class LayerCall:
    """A call of a layer: what was current before, which hooks for saved tensors it has, what it saved."""

    def __init__(self, layer: Layer, outer: str | None, frame: FrameType | None) -> None:
        self.layer = layer
        self.group_name = layer.group_name
        self.previous: LayerCall | None = None
        self.group: weakref.ref[GroupOfRegions] | None = None
        self.end: End | None = None
        self._outer = outer
        # Of the layer's call: tells whether that is still under way. Held only as long as it is.
        self._frame = frame
        self._begun = False

    def open_group(self) -> GroupOfRegions | None:
        """The group of this very call, while anybody has it."""
        return None if self.group is None else self.group()

    def close(self, *, failed: bool) -> str | None:
        """Takes its hooks for saved tensors off, once; returns what was current before."""
        end, self.end, self._frame = self.end, None, None
        if end is not None:
            end(failed)
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


class Layers(Generic[Module]):
    """All declared layers of the process, in their chains. A front end adds what its framework has."""

    layer_class: ClassVar[type]
    runs_text: ClassVar[str]  # what one is to pass, in messages
    calls_in: ClassVar[tuple[str, str | None]]  # where a layer's call is Python's frame: module, name of function

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._chain = Chain()
        self._layers: dict[int, Layer] = {}
        self._gone: deque[int] = deque()
        self._watched: set[str] = set()
        self._local = _Local()

    # -- what the framework has

    def hang(self, manager: Manager[Module], layer: Layer, module: Module) -> None:
        """Hangs forward hooks on a layer: `enter_if_free` before those there are, `leave_if_free` after."""
        raise NotImplementedError

    def entering(self, manager: Manager[Module], layer: Layer, module: Module) -> None:
        """A layer's forward begins."""

    def watch_gradients(self, output: object, came: Callable[[object], None]) -> None:
        """Has `came` called with the gradient of each tensor of a layer's output."""
        raise NotImplementedError

    def in_backward(self) -> bool:
        """Whether this thread is inside of a backward."""
        raise NotImplementedError

    def hooks_for_named(self, manager: Manager[Module]) -> End | None:
        """Puts hooks on the framework's stack that swap what is saved of tensors that were named."""
        raise NotImplementedError

    def is_layer(self, module: object) -> bool:
        """Whether something can be declared."""
        return isinstance(module, self.layer_class)

    def check_layer(self, module: object) -> None:
        """Refuses what can't be declared."""
        if not self.is_layer(module):
            raise SettingError(f"a {type(module).__name__} is no layer", f"pass the {self.runs_text} that was declared")

    # -- declaring

    def follow(self, manager: Manager[Module], first: Module, second: Module) -> None:
        """Declares an order; as `SwapManager.set_forward_prefetch_layer`."""
        for module in (first, second):
            if not self.is_layer(module):
                hint = f"pass the {self.runs_text}s whose forward runs one after the other"
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

    def _enrol(self, layer: Layer, module: Module) -> None:
        if self.of(module) is None:
            self._layers[id(module)] = layer
            layer.group_name = self._chain.group(layer.key) or layer.key
            weakref.finalize(module, self._gone.append, id(module)).atexit = False

    def _hook(self, manager: Manager[Module], layer: Layer, module: Module) -> None:
        """Hangs hooks on a layer that has none."""
        if not layer.handles:
            self.hang(manager, layer, module)

    def unhook(self, module: Module) -> int:
        """Takes the hooks off a layer; returns how many there were."""
        with self._lock:
            layer = self.of(module)
            handles = [] if layer is None else layer.handles
            count = len(handles)
            while handles:
                handles.pop().remove()
            return count

    def remove(self, module: Module) -> str | None:
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

    def of(self, module: Module) -> Layer | None:
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

    def enter(self, manager: Manager[Module], layer: Layer, module: Module) -> None:
        """A layer's forward begins: its group is current."""
        self.purge(manager)
        call = LayerCall(layer, manager.get_current_group_name(), self._frame_of_call())
        before = self._chain.previous(layer.key)
        call.previous = None if before is None else self._local.last.get(before)
        self._local.last[layer.key] = layer.latest = call
        self._local.calls.append(call)
        manager.set_current_group_name(layer.group_name)
        self.entering(manager, layer, module)
        call.end = self.watching(manager, layer.group_name)

    def watching(self, manager: Manager[Module], group_name: str | None) -> End | None:
        """Hooks that watch what is saved, in a group in which `swap_tensor_wrapper` names tensors.

        They swap what it has named and what it will name. They are on the framework's stack when this returns.
        """
        return self.hooks_for_named(manager) if group_name in self._watched else None

    def watch(self, manager: Manager[Module], group_name: str) -> None:
        """A tensor is named in a group: from now on it is watched, also for the rest of this call."""
        if group_name in self._watched:
            return
        self._watched.add(group_name)
        calls = self._local.calls
        if calls and calls[-1].group_name == group_name and calls[-1].end is None:
            calls[-1].end = self.watching(manager, group_name)

    def leave(self, manager: Manager[Module], layer: Layer) -> tuple[LayerCall, bool] | None:
        """A layer's forward ended; the call, and whether it succeeded."""
        calls = self._local.calls
        # One that fails is not on the stack any more, but its exception still is.
        failed = bool(calls) and calls[-1].layer is layer and calls[-1].failed()
        if not failed:
            self.purge(manager)
        if not calls or calls[-1].layer is not layer:
            return None  # its pre-hook did nothing
        call = calls.pop()
        manager.set_current_group_name(call.close(failed=failed))
        return call, not failed

    def purge(self, manager: Manager[Module]) -> None:
        """Ends calls that a KeyboardInterrupt left, which runs no forward hooks."""
        calls = self._local.calls
        while calls and not calls[-1].under_way():
            manager.set_current_group_name(calls.pop().close(failed=True))

    def _frame_of_call(self) -> FrameType | None:
        """Python's frame of the layer's call that a hook is called from."""
        where, name = self.calls_in
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not (
            frame.f_globals.get("__name__") == where and name in (None, frame.f_code.co_name)
        ):
            frame = frame.f_back
        return frame

    # -- what the hooks do

    def enter_if_free(self, manager: Manager[Module], module: Module) -> None:
        """Before a layer's forward."""
        manager._tidy()
        layer = self.of(module)
        if layer is not None and not self.in_backward():
            self.enter(manager, layer, module)

    def leave_if_free(
        self, manager: Manager[Module], module: Module, output: object, used: Callable[[], object] = tuple
    ) -> None:
        """After a layer's forward, also when it has failed. `used` tells what others use besides the output."""
        layer = self.of(module)
        left = None if layer is None or self.in_backward() else self.leave(manager, layer)
        if left is None:
            return
        call, succeeded = left
        if not succeeded:
            manager._forward_failed(call)
            return
        manager._forward_done(call, output, used)
        self.watch_gradients(output, _GradientCame(manager, call))

    def backward_begins(self, manager: Manager[Module], module: Module) -> None:
        """Before a layer's backward, of its latest call."""
        layer = self.of(module)
        if layer is not None and layer.latest is not None:
            _GradientCame(manager, layer.latest)(None)


class Inert:
    """What the hooks of a layer become in a copy of the model: a hook that does nothing."""

    def __call__(self, *_: object) -> None:
        return None


class Hook:
    """A hook of a layer: calls a function with the manager and what it is called with."""

    def __init__(self, manager: Manager[Any], run: Callable[..., None]) -> None:
        self._manager = manager
        self._run = run

    def __call__(self, *args: object) -> None:
        self._run(self._manager, *args)

    def __deepcopy__(self, memo: object) -> Inert:
        return Inert()

    def __reduce__(self) -> tuple[type[Inert], tuple[()]]:
        return Inert, ()


class _GradientCame:
    """Tensor hook: the gradient of a layer's output has been computed, so its backward begins."""

    def __init__(self, manager: Manager[Any], call: LayerCall) -> None:
        self._manager = manager
        self._call = call

    def __call__(self, _: object) -> None:
        if self._call.begins_backward():
            self._manager._backward_begins(self._call)


class _Local(threading.local):
    """What a thread has of its own: calls under way, and the latest call of each layer."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []
        self.last: dict[str, LayerCall] = {}
