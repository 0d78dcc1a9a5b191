"""How MindSpore's cells are walked, for `ebbtide._layers`, and how a session gets around a cell's forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def surround(cell: nn.Cell, around: Around) -> Callable[[], None]:
    """Has `around(construct, args, kwargs)` called instead of a cell's construct; returns what takes it off again.

    An attribute of the cell itself hides the method of its class, so hooks that the user has registered run outside
    of it, in the order in which they always do.

    Raises:
        SettingError: Something else sits there already.
    """
    if "construct" in cell.__dict__:
        raise SettingError(
            f"the construct of {type(cell).__name__} was replaced already",
            "close the other session of this cell first, or name another layer",
        )
    inner = cell.construct

    def construct(*args: Any, **kwargs: Any) -> Any:
        return around(inner, args, kwargs)

    cell.__dict__["construct"] = construct

    def remove() -> None:
        if cell.__dict__.get("construct") is construct:
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
