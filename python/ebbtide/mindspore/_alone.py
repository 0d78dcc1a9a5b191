"""When a layer's call is left alone, and when a cell is none that hooks can see."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType, FunctionType, MethodType
from typing import Any

import mindspore as ms
from mindspore import nn

from ebbtide.errors import EbbtideError, SettingError

_INSTEAD = "run the cell in PyNative mode (ms.set_context(mode=ms.PYNATIVE_MODE)) without @ms.jit, or have the graph "
_INSTEAD += "compiler recompute: cell.recompute()"
# Where functions are that run what users write while MindSpore records.
_RECORDING = frozenset(
    {"mindspore.ops.composite.base", "mindspore.graph.api", "mindspore.nn.cell", "mindspore.common.api"}
)
_PARSER = "Parse Resolve convert failed"


def executor() -> Any:
    """What runs MindSpore's operations in PyNative mode."""
    return ms.graph.api._pynative_executor


def is_recorded() -> bool:
    """Whether MindSpore records operations for a backward now."""
    return bool(executor().requires_grad())


def within_call() -> bool:
    """Whether a call of MindSpore's is among the callers that may be recording on purpose: a gradient's, a cell's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in _RECORDING:
            return True
        frame = frame.f_back
    return False


def recover() -> None:
    """Has MindSpore forget a recording that an exception has ended. It goes on with it else, and with wrong indices."""
    if is_recorded():
        executor().clear_res()


def left_alone() -> str | None:
    """Why nothing may be swapped right now: the counter that this counts for, or None.

    Without gradients nothing is saved. During a backward, forward code is a recomputation, whose tensors are used
    at once. Inside of a checkpoint, which works by hooks, others would switch it off.
    """
    if not is_recorded():
        return "left_without_grad"
    if executor().get_current_autodiff_engine_id() != -1:
        return "left_to_checkpoint"
    if executor().is_saved_tensor_hook_active() and _in_checkpoint(sys._getframe(1)):
        return "left_to_checkpoint"
    return None


def _in_checkpoint(frame: FrameType | None) -> bool:
    """Whether `ms.recompute` is among the callers. Hooks of the user's own don't tell whose they are."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "mindspore.common.recompute":
            return True
        frame = frame.f_back
    return False


def refuse_devices() -> None:
    """Refuses memory that the host can't read.

    Raises:
        SettingError: MindSpore runs on something else than a CPU.
    """
    target = ms.get_context("device_target")
    if target != "CPU":
        raise SettingError(
            f"MindSpore runs on {target}: this front end moves memory of a CPU only",
            'call ms.set_device("CPU"), or train without ebbtide',
        )


def refuse_graph_mode(what: str) -> None:
    """Refuses what would see nothing.

    Raises:
        SettingError: MindSpore is in graph mode.
    """
    if ms.get_context("mode") == ms.GRAPH_MODE:
        raise SettingError(f"{what} in graph mode: hooks see nothing of what a compiled graph saves", _INSTEAD)


def refuse_jit(cell: nn.Cell, layers: Iterable[tuple[str, nn.Cell]]) -> None:
    """Refuses a cell whose construct `@ms.jit` compiles, and layers.

    Raises:
        SettingError: One of them is.
    """
    for name, each in (("the cell", cell), *layers):
        if is_jitted(each):
            raise SettingError(
                f"the construct of {name} ({type(each).__name__}) is compiled by @ms.jit: hooks see nothing of what a "
                "compiled graph saves",
                _INSTEAD,
            )


def refuse_recomputed(layers: Iterable[tuple[str, nn.Cell]]) -> None:
    """Refuses layers that MindSpore is to recompute: it has kept their construct, and would never call a session's.

    Raises:
        SettingError: One of them is.
    """
    for name, each in layers:
        if getattr(each, "_recompute_cell", None) is not None:
            raise SettingError(
                f"{name} was told to recompute by cell.recompute(), and is left to that",
                f'take cell.recompute() away and say policy={{{name!r}: "recompute"}}, or leave the layer out',
            )


def refused_by_graph(error: BaseException | None) -> EbbtideError | None:
    """Our words for what the graph compiler says of a layer of a session; None for other errors."""
    if isinstance(error, EbbtideError) or not isinstance(error, RuntimeError) or _PARSER not in str(error):
        return None
    return SettingError("a function that @ms.jit compiles calls a layer of a session, which it can't read", _INSTEAD)


def is_jitted(cell: nn.Cell) -> bool:
    """Whether a decorator of `ms.jit` is on the construct of a cell or of its class, whatever it captures with."""
    construct: Any = type(cell).construct
    own = cell.__dict__.get("construct")
    if isinstance(own, (FunctionType, MethodType)):
        construct = own
    while construct is not None:
        function = construct.__func__ if isinstance(construct, MethodType) else construct
        if getattr(function, "__wrapped_by_jit__", False) or _is_of_jit(function):
            return True
        construct = getattr(function, "__wrapped__", None)
    return False


def _is_of_jit(function: Any) -> bool:
    """Whether MindSpore's own code has wrapped a function: what users write is never of those modules."""
    module = str(getattr(getattr(function, "__code__", None), "co_filename", "")).replace("\\", "/")
    return module.endswith(("mindspore/graph/api.py", "mindspore/graph/_utils/pijit_context.py"))
