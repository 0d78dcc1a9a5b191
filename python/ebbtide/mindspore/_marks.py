"""What a wrapped callable becomes, and how MindSpore's cells are marked, which `ebbtide._marks` does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from mindspore import nn
from mindspore.ops import Primitive

from ebbtide import _defaults
from ebbtide._marks import Marks
from ebbtide.errors import SettingError


class FuncCell(nn.Cell):
    """A function, or any other callable, as a cell without parameters.

    Args:
        function: What is called, with positional and keyword arguments as they come.

    Raises:
        SettingError: It can't be called.

    Example:
        >>> gelu = FuncCell(ops.gelu)
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            hint = "pass a function"
            raise SettingError(f"a {type(function).__name__} can't be called", hint)
        super().__init__(auto_prefix=False)
        # Not as an attribute that MindSpore looks at: a cell in here would become a child.
        self.__dict__["function"] = function

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it."""
        return self.function(*args, **kwargs)

    def extend_repr(self) -> str:
        """What it calls."""
        return str(getattr(self.function, "__name__", self.function))


def _within(cell: nn.Cell) -> Iterator[nn.Cell]:
    return (each for _, each in cell.cells_and_names())


MARKS = Marks(
    module=nn.Cell,
    called=FuncCell,
    within=_within,
    warn=functools.partial(_defaults.warn, stacklevel=6),
    operations=(Primitive,),
)
