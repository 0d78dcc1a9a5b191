"""What a session hangs on the layers of a model, and how it takes it off again.

Each layer gets a forward pre-hook, which runs before the user's, and a forward hook, which runs after those
that were there and also when the forward fails; a layer that is recomputed gets a `forward` of its own as
well. All of them hold the session weakly, so a session that is dropped is freed at once, and its finalizer
takes the hooks off; a model that is dropped takes them with it. A copy of a model (`copy.deepcopy`, pickle)
does not belong to the session: what was hung on the layers becomes inert there.

Access: hooks run on whatever thread calls the model. They act only inside of a step and on the thread of the
session.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable
from types import FrameType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from ebbtide._chain import Inert
from ebbtide._layers import Layer

if TYPE_CHECKING:
    from ebbtide.torch._session import Session

SessionRef = Callable[[], "Session | None"]


# ---- the hooks


class _Hook:
    """A hook of one layer. What it runs is never traced by torch.compile, but run as it is."""

    def __init__(self, session: SessionRef, layer: nn.Module, name: str, run: Callable[..., None]) -> None:
        self._session = session
        self._layer = weakref.ref(layer)
        self._name = name
        self._run = untraced(run)

    def __call__(self, module: nn.Module, inputs: object, *output: object) -> None:
        """A pre-hook is called with the inputs, a hook with the output as well."""
        self._run(self._session, self._layer, self._name, module, output[0] if output else inputs)

    def __deepcopy__(self, memo: object) -> Inert:
        return Inert()

    def __reduce__(self) -> tuple[type[Inert], tuple[()]]:
        return Inert, ()


def _enter(
    session: SessionRef, layer: Callable[[], nn.Module | None], name: str, module: nn.Module, inputs: object
) -> None:
    opened = session()
    step = opened.running_step() if opened is not None else None
    if step is not None and module is layer():
        step.enter(module, name, inputs)


def _leave(
    session: SessionRef, layer: Callable[[], nn.Module | None], name: str, module: nn.Module, output: object
) -> None:
    opened = session()
    step = opened.running_step() if opened is not None else None
    if step is not None and module is layer():
        step.leave(module, name, output)


class _Recomputed:
    """Stands in for a layer's `forward`: checkpointed inside of a step, else as it always was."""

    def __init__(self, session: SessionRef, layer: nn.Module, name: str) -> None:
        self._session = session
        self._layer = weakref.ref(layer)
        self._name = name
        self.before = layer.__dict__.get("forward")  # a forward that was set on this very module
        self._run = untraced(_Recomputed._checkpointed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self, *args, **kwargs)

    def _forward(self) -> Callable[..., Any]:
        layer = self._layer()
        assert layer is not None  # it is being called
        return _forward_of(layer, self.before)

    def _checkpointed(self, *args: Any, **kwargs: Any) -> Any:
        session, forward = self._session(), self._forward()
        step = session.running_step() if session is not None else None
        if session is None or step is None or left_alone() is not None or not session.recomputes(self._name):
            return forward(*args, **kwargs)
        return _run_checkpointed(forward, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return _forward_of(memo[id(self._layer())], copy.deepcopy(self.before, memo))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _forward_of, (self._layer(), self.before)


def _run_checkpointed(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`checkpoint`, with keywords as well, and with nothing left on autograd's stack if the first run fails."""
    # It watches tensors among positional arguments only, and would take some keywords for its own.
    names, count = tuple(kwargs), len(args)
    failed: list[BaseException] = []
    first = True

    def run(*values: Any) -> Any:
        nonlocal first
        is_first, first = first, False
        try:
            return forward(*values[:count], **dict(zip(names, values[count:], strict=True)))
        except BaseException as error:
            if not is_first:
                raise
            # Some versions take their hooks off no earlier than when the traceback is dropped.
            failed.append(error)

    result = checkpoint(run, *args, *kwargs.values(), use_reentrant=False)
    if failed:
        raise failed.pop()
    return result


def _forward_of(layer: nn.Module, before: Callable[..., Any] | None) -> Callable[..., Any]:
    """What a copy of a recomputed layer has as its `forward`."""
    return before if before is not None else MethodType(type(layer).forward, layer)


# ---- hanging on, taking off


class Wiring:
    """All that one session hung on a model.

    `remove` takes it off, once; it may be called while the model dies.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._recomputed: list[tuple[weakref.ref[nn.Module], _Recomputed]] = []

    def hang(self, session: SessionRef, layers: list[Layer], *, planned: bool) -> None:
        """With `planned` every layer that is swapped may be recomputed instead."""
        for layer in layers:
            self._wire(session, layer, planned)

    def _wire(self, session: SessionRef, layer: Layer, planned: bool) -> None:
        module = layer.module
        if layer.word == "recompute" or (planned and layer.word == "swap"):
            recomputed = _Recomputed(session, module, layer.name)
            module.forward = recomputed
            self._recomputed.append((weakref.ref(module), recomputed))
        enter = _Hook(session, module, layer.name, _enter)
        leave = _Hook(session, module, layer.name, _leave)
        self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        while self._recomputed:
            reference, recomputed = self._recomputed.pop()
            module = reference()
            # If somebody else replaced `forward` meanwhile theirs may call ours, which then just goes
            # through.
            if module is None or module.__dict__.get("forward") is not recomputed:
                continue
            if recomputed.before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = recomputed.before


@functools.cache
def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as torch.compile leaves it alone: it runs eagerly, with a break of the graph around it."""
    # Imports a large part of PyTorch, which every optimizer does as well; so not before a session is opened.
    disable: Callable[..., Callable[..., Any]] = torch.compiler.disable
    return disable(function)


# ---- when to do nothing


def left_alone() -> str | None:
    """Why nothing may be swapped right now on this thread: the counter that this counts for, or None.

    Without gradients nothing is saved. During a backward, forward code is a recomputation, whose tensors are
    used at once. Inside of a function that torch.utils.checkpoint runs, hooks of ours would switch the
    checkpoint off without a word.
    """
    if not torch.is_grad_enabled():
        return "left_without_grad"
    if in_backward() or in_checkpoint():
        return "left_to_checkpoint"
    return None


def in_backward() -> bool:
    """Whether this thread is inside of a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_checkpoint() -> bool:
    """Whether what is saved now goes to torch.utils.checkpoint, in its first run or when it runs again."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None:  # before torch 2.8
        return _called_by_checkpoint(sys._getframe(1))
    hooks = top(False)
    return hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__module__


def _called_by_checkpoint(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") == checkpoint.__module__:
            return True
        frame = frame.f_back
    return False
