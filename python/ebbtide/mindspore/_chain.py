"""Cells that follow one another, and the hooks by which they drive their groups: see `ebbtide._chain`.

Backward is noticed by a hook on the tensors of a layer's output, which gives back the gradient that it is given.
What a layer is called with, what it returns, and what it and the cells below it own is never emptied: MindSpore
can't tell who else uses a storage.

Access contract: that of `ebbtide._chain`. In a copy of a model (`deepcopy`, pickle) the hooks are inert.
"""

from __future__ import annotations

from collections.abc import Callable

from mindspore import Tensor, nn
from mindspore.graph.api import _pynative_executor

from ebbtide._chain import End, Hook, Layer, Layers
from ebbtide._manager import Manager
from ebbtide._trees import leaves
from ebbtide.mindspore._alone import is_recorded
from ebbtide.mindspore._cells import owned

Cells = Manager[nn.Cell]


class CellLayers(Layers[nn.Cell]):
    """All declared cells of the process."""

    layer_class = nn.Cell
    runs_text = "cell"
    calls_in = (nn.Cell.__module__, "_run_construct")

    def hang(self, manager: Cells, layer: Layer, module: nn.Cell) -> None:
        """Hangs forward hooks on a layer that has none."""
        before, after = Hook(manager, _before), Hook(manager, _after)
        layer.handles.append(module.register_forward_pre_hook(before, prepend=True))
        layer.handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def watch_gradients(self, output: object, came: Callable[[object], None]) -> None:
        """Hooks on the tensors of a layer's output that have a graph."""

        def hook(gradient: Tensor) -> Tensor:
            came(gradient)
            return gradient

        if is_recorded():
            for tensor in leaves(output):
                # A hook of a parameter would stay with it.
                if isinstance(tensor, Tensor) and tensor._requires_grad and tensor.param_info is None:
                    tensor.register_hook(hook)

    def in_backward(self) -> bool:
        """Whether this thread is inside of a backward."""
        return bool(_pynative_executor.get_current_autodiff_engine_id() != -1)

    def hooks_for_named(self, manager: Cells) -> End | None:
        """Hooks that move what is saved of tensors that were named; see `_named`."""
        from ebbtide.mindspore._named import hooks_for_named  # which asks the manager, which is made of this

        name = manager.get_current_group_name()
        return None if name is None else hooks_for_named(name)


# ---- the hooks


def _before(manager: Cells, module: nn.Cell, _: object) -> None:
    manager._layers.enter_if_free(manager, module)


def _after(manager: Cells, module: nn.Cell, args: object, kwargs: object, output: object) -> None:
    manager._layers.leave_if_free(manager, module, output, used=lambda: [args, kwargs, owned(module)])
