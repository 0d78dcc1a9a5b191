"""Graph mode and `ms.jit` are refused: hooks see nothing there, so nothing would be swapped or recomputed.

How each way of compiling is noticed:

| what compiles | Python that runs | noticed by |
| --- | --- | --- |
| graph mode, `ms.jit` by source | none, but `refused_in_jit` | MindSpore, which takes `in_jit` for true |
| graph mode, of a wrapper itself | its call | MindSpore's mode |
| `ms.jit` by tracing | all, once | MindSpore's trace |
| `ms.jit` by bytecode | all | a frame of it on the stack |
| what is wrapped is compiled itself | its wrapper | a mark that `ms.jit` leaves on functions |

Access: nothing is kept.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import mindspore as ms
from mindspore import nn
from mindspore.graph.api import _run_in_jit as in_jit  # MindSpore knows it by what it does, not by its name
from mindspore.graph.jit_context import jit_context
from mindspore.ops.primitive import constexpr

from ebbtide.errors import SettingError

_INSTEAD = "leave ms.jit off this cell and off what calls it, or use the cell without it: unwrap_cell(cell)"
_BYTECODE = "mindspore/graph/_utils/pijit_context.py"

__all__ = ["in_jit", "refuse_graph", "refuse_jitted", "refused_in_jit"]


@constexpr(check=False)
def refused_in_jit(what: str) -> None:
    """Called where MindSpore compiles by source.

    Raises:
        SettingError: Always.
    """
    raise _inside(what)


def _inside(what: str) -> SettingError:
    return SettingError(
        f"{what} was called in what MindSpore compiles, graph mode or ms.jit, where nothing that is saved can be seen",
        f"train in PyNative mode, and {_INSTEAD}",
    )


def refuse_graph(what: str) -> None:
    """Refuses a call in graph mode, or in what `ms.jit` runs.

    Raises:
        SettingError: So it is.
    """
    if ms.get_context("mode") == ms.GRAPH_MODE or jit_context() or _runs_bytecode():
        raise _inside(what)


def _runs_bytecode() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_BYTECODE):
            return True
        frame = frame.f_back
    return False


def refuse_jitted(region: Any, what: str) -> None:
    """Refuses what `ms.jit` compiles, or has a cell in it that it compiles.

    Raises:
        SettingError: So it is.
    """
    cells = [each for _, each in region.cells_and_names()] if isinstance(region, nn.Cell) else []
    for each in (region, *cells):
        compiled = getattr(each, "construct", None) if isinstance(each, nn.Cell) else each
        if getattr(compiled, "__wrapped_by_jit__", False) is True:
            name = type(each).__name__ if isinstance(each, nn.Cell) else getattr(each, "__name__", repr(each))
            inside = "" if each is region else f", which is in {type(region).__name__},"
            raise SettingError(
                f"{what} got {name}{inside} that ms.jit compiles: nothing that is saved there can be seen", _INSTEAD
            )
