"""How MindSpore's cells are walked, for `ebbtide._layers`, and how a session gets around a cell's forward."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

from mindspore import Tensor, nn

from ebbtide._layers import Kind
from ebbtide.errors import SettingError
from ebbtide.mindspore._cover import unwrap_cell

Construct = Callable[..., Any]
Around = Callable[[Construct, tuple[Any, ...], dict[str, Any]], Any]


def _has_parameters(cell: nn.Cell) -> bool:
    return next(iter(cell.get_parameters()), None) is not None


KIND = Kind(
    named=lambda cell: dict(cell.cells_and_names()),
    children=lambda cell: iter(cell.name_cells().items()),
    has_parameters=_has_parameters,
    containers=(nn.CellList, nn.SequentialCell),
    class_of=lambda cell: type(unwrap_cell(cell)),
    containers_text="a CellList or SequentialCell",
    names_text="cell.cells_and_names()",
    instead="ebbtide.mindspore.async_save_on_cpu()",
)


class _Surrounded:
    """Stands in for a cell's construct. A copy of the cell has its own construct again."""

    def __init__(self, cell: nn.Cell, around: Around) -> None:
        self._cell = weakref.ref(cell)
        self._around = around
        self.__signature__ = inspect.signature(cell.construct)

    def __getattr__(self, name: str) -> Any:
        # What MindSpore looks up on a construct: its code, its defaults, its name.
        if name.startswith("_cell") or name in ("__deepcopy__", "__wrapped__"):
            raise AttributeError(name)
        cell = self._cell()
        if cell is None:
            raise AttributeError(name)
        return getattr(_construct_of(cell), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cell = self._cell()
        assert cell is not None  # it is being called
        return self._around(_construct_of(cell), args, kwargs)

    @property
    def __func__(self) -> Callable[..., Any]:
        # What ms.jit() asks a cell's construct for.
        raise SettingError(
            f"ms.jit() of {type(self._cell()).__name__}, a layer of a session: hooks see nothing of what a "
            "compiled graph saves",
            "leave the layer uncompiled, or close the session",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Construct:
        cell = self._cell()
        return _construct_of(memo.get(id(cell), cell))

    def __reduce__(self) -> tuple[Callable[[nn.Cell], Construct], tuple[nn.Cell | None]]:
        return _construct_of, (self._cell(),)


def _construct_of(cell: nn.Cell) -> Construct:
    return MethodType(type(cell).construct, cell)


def surround(cell: nn.Cell, around: Around) -> Callable[[], None]:
    """Has `around(construct, args, kwargs)` called instead of a cell's construct; returns what takes it off again.

    An attribute of the cell itself hides the method of its class, so hooks that the user has registered run outside
    of it, in the order in which they always do. The cell is not kept alive.

    Raises:
        SettingError: Something else sits there already.
    """
    if "construct" in cell.__dict__:
        raise SettingError(
            f"the construct of {type(cell).__name__} was replaced already",
            "close the other session of this cell first, or name another layer",
        )
    surrounded = _Surrounded(cell, around)
    cell.__dict__["construct"] = surrounded
    reference = weakref.ref(cell)

    def remove() -> None:
        cell = reference()
        if cell is not None and cell.__dict__.get("construct") is surrounded:
            del cell.__dict__["construct"]

    return remove


def owned(cell: nn.Cell) -> list[Tensor]:
    """What a cell and those below it own: parameters, buffers, tensors that are attributes."""
    own: list[Tensor] = [*cell.get_parameters(), *cell.buffers()]
    for _, each in cell.cells_and_names():
        own += [value for value in vars(each).values() if isinstance(value, Tensor)]
    return own


def storages(cell: nn.Cell) -> set[int]:
    """Addresses of what a cell and those below it own."""
    return {int(tensor.untyped_storage().data_ptr()) for tensor in owned(cell)}


def tensors(tree: object) -> Iterator[Tensor]:
    """The tensors in dicts, lists and tuples, however deep."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from tensors(value)
