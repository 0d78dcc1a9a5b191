"""Modules that follow one another, and the hooks by which they drive their groups: see `ebbtide._chain`.

Backward is noticed by a hook on the tensor, not on the module, because module hooks for backward put a view
between a layer and its user, who then can't work in place. Only where the user has such hooks on a layer
already, ours is put in front of them.

Access contract: that of `ebbtide._chain`. In a copy of a model (`deepcopy`, pickle) the hooks are inert.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ebbtide._chain import End, Hook, Layer, Layers
from ebbtide._manager import Manager
from ebbtide._native import Packer
from ebbtide._trees import leaves
from ebbtide.torch import _defaults
from ebbtide.torch._hooks import in_backward, untraced
from ebbtide.torch._step import push_hooks

Modules = Manager[nn.Module]


class ModuleLayers(Layers[nn.Module]):
    """All declared modules of the process."""

    layer_class = nn.Module
    runs_text = "module"
    calls_in = (nn.Module.__module__, None)

    def hang(self, manager: Modules, layer: Layer, module: nn.Module) -> None:
        """Hangs forward hooks on a layer that has none."""
        before, after = Hook(manager, untraced(_before)), Hook(manager, untraced(_after))
        layer.handles.append(module.register_forward_pre_hook(before, prepend=True))
        layer.handles.append(module.register_forward_hook(after, always_call=True))
        layer.in_front = False
        self.entering(manager, layer, module)

    def entering(self, manager: Modules, layer: Layer, module: nn.Module) -> None:
        """Where the user has backward hooks on the layer, ours runs before them."""
        if layer.in_front or not (module._backward_pre_hooks or module._backward_hooks):
            return
        hook = Hook(manager, untraced(_backward))
        layer.handles.append(module.register_full_backward_pre_hook(hook, prepend=True))
        layer.in_front = True

    def watch_gradients(self, output: object, came: Callable[[object], None]) -> None:
        """Hooks on the tensors of a layer's output that have a graph."""
        if torch.is_grad_enabled():
            for tensor in leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                    tensor.register_hook(came)

    def in_backward(self) -> bool:
        """Whether this thread is inside of a backward."""
        return in_backward()

    def hooks_for_named(self, manager: Modules) -> End | None:
        """Hooks for saved tensors, unless they would hide somebody's."""
        if not (torch.is_grad_enabled() and _defaults.hooks_are_free()):
            return None
        find = lambda: manager._group_to_pack(named=False)  # noqa: E731
        return partial(_take_off, push_hooks(Packer(find=find, marked_only=True)))


def _take_off(hooks: saved_tensors_hooks, _: bool) -> None:
    top = _defaults.top_hooks()
    # After a KeyboardInterrupt somebody else's may be on top: then nothing can be done.
    if top is None or top[0] is hooks.pack_hook:
        hooks.__exit__()


# ---- the hooks


# torch.compile runs them as they are, never traced.


def _before(manager: Modules, module: nn.Module, _: object) -> None:
    manager._layers.enter_if_free(manager, module)


def _after(manager: Modules, module: nn.Module, _: object, output: object) -> None:
    manager._layers.leave_if_free(manager, module, output)


def _backward(manager: Modules, module: nn.Module, _: object) -> None:
    manager._layers.backward_begins(manager, module)
