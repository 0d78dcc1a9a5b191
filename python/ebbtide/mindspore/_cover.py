"""A cell around another one that nobody notices.

What a cell consists of (parameters, buffers, children, flags, its phase) is the inner cell's alone: the wrapper
looks it up there each time, so whoever changes one changes both. The wrapper's own are what MindSpore's call needs
of a cell: its hooks, its caches, whether it is at the top.

Access: as for any cell, whoever trains it. Nothing is kept elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mindspore import Parameter, nn

from ebbtide.errors import SettingError
from ebbtide.mindspore._graph import in_jit, refuse_graph, refuse_jitted, refused_in_jit
from ebbtide.mindspore._marks import MARKS, FuncCell

# Attributes that are the inner cell's, also where MindSpore reads or replaces them.
_INNER = (
    "_params",
    "_cells",
    "_buffers",
    "_params_list",
    "_primitives",
    "_lazy_non_persistent_buffers_set",
    "_lazy_state_dict_hooks",
    "_lazy_state_dict_pre_hooks",
    "_lazy_load_state_dict_pre_hooks",
    "_lazy_load_state_dict_post_hooks",
    "_lazy_user_parameters",
    "_exist_names",
    "_exist_objs",
    "training",
    "_phase",
    "_scope",
    "_param_prefix",
    "_auto_prefix",
    "_amp_level",
    "_jit_config_dict",
    "_create_time",
    "cell_type",
)
# Methods that change or tell what a cell consists of. `self` in an answer is the wrapper.
_METHODS = (
    "_apply",
    "_load_from_state_dict",
    "_mp_comm_recompute",
    "_parallel_optimizer_comm_recompute",
    "_recompute",
    "_recompute_slice_activation",
    "_save_to_state_dict",
    "_set_recompute_scope",
    "_update_local_parameters_name",
    "add_flags",
    "add_flags_recursive",
    "extend_repr",
    "recompute",
    "get_extra_state",
    "get_flags",
    "init_parameters_data",
    "insert_child_to_cell",
    "insert_param_to_cell",
    "load_state_dict",
    "name_cells",
    "parameters_and_names",
    "register_buffer",
    "set_boost",
    "set_broadcast_flag",
    "set_comm_fusion",
    "set_extra_state",
    "set_grad",
    "set_jit_config",
    "set_train",
    "state_dict",
    "to",
    "to_empty",
    "to_float",
    "update_cell_prefix",
    "update_cell_type",
)


class ActivationWrapper(nn.Cell):
    """A cell around another one that nobody notices.

    Parameters, buffers and children are those of the cell inside, under the same names: wrapping renames nothing,
    in `parameters_and_names`, `cells_and_names`, checkpoints and state dicts, alone or within a parent.
    Attributes are the wrapper's own, then those of the cell inside. A parent's `cells()` has the wrapper,
    `cells_and_names()` the cell inside.

    Args:
        module: A cell, or any callable, which becomes a cell without parameters.

    Raises:
        SettingError: It is neither, or is compiled by `ms.jit`.
    """

    _what = "ActivationWrapper"  # in messages

    def __init__(self, module: nn.Cell | Callable[..., Any]) -> None:
        if not isinstance(module, nn.Cell) and not callable(module):
            hint = "pass a mindspore.nn.Cell or a function"
            raise SettingError(f"a {type(module).__name__} can't be wrapped", hint)
        refuse_jitted(module, self._what)
        super().__init__(auto_prefix=False)
        MARKS.mark_region(module)
        inner = module if isinstance(module, nn.Cell) else FuncCell(module)
        self.__dict__["_inner"] = inner
        self.__dict__["_names"] = {name: parameter.name for name, parameter in inner.parameters_and_names()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the cell inside, with the hooks of both."""
        refuse_graph(self._what)
        return nn.Cell.__call__(self, *args, **kwargs)

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the cell inside."""
        if in_jit():  # @jit.cond: True
            return refused_in_jit("a wrapped cell")
        return self._inner(*args, **kwargs)

    # -- attributes

    def __getattr__(self, name: str) -> Any:
        # MindSpore's base class asks for attributes before there is anything inside.
        inner = self.__dict__.get("_inner")
        # Special methods are the wrapper's: a copy of it must not become one of what is inside.
        special = name.startswith("__") and name.endswith("__")
        if inner is None or special or not hasattr(inner, name):
            return super().__getattr__(name)
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name):
            super().__setattr__(name, value)
        else:
            setattr(self._inner, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            object.__delattr__(self, name)
        else:
            delattr(self._inner, name)

    def _is_own(self, name: str) -> bool:
        """Whether an attribute is the wrapper's."""
        return "_inner" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *self.__dict__, *dir(self._inner)})

    # -- containers

    def __getitem__(self, index: Any) -> Any:
        return self._inner[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._inner[index] = value

    def __delitem__(self, index: Any) -> None:
        del self._inner[index]

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._inner)

    def __contains__(self, item: object) -> bool:
        return item in self._inner

    def __bool__(self) -> bool:
        return bool(self._inner)

    # -- what MindSpore asks every cell of a tree

    def cells_and_names(self, cells: Any = None, name_prefix: str = "") -> Iterator[tuple[str, nn.Cell]]:
        """The cell inside and those below it, under the names that they have without the wrapper."""
        yield from self._inner.cells_and_names(cells, name_prefix)

    def apply(self, fn: Callable[[nn.Cell], Any]) -> ActivationWrapper:
        """Calls `fn` for every cell inside."""
        self._inner.apply(fn)
        return self

    def update_parameters_name(self, prefix: str = "", recurse: bool = True) -> None:
        """As the cell inside, but a name that has the prefix already, at the place where a parent puts it, stays.

        So a wrapper takes the place of what it wraps without a new name, however deep in a model that is. Only
        parameters whose name changes count as not initialised.
        """
        if isinstance(self._inner, ActivationWrapper):
            self._inner.update_parameters_name(prefix, recurse)
            return
        inside: list[tuple[str, Parameter]] = list(self._inner.parameters_and_names(expand=recurse))
        before = [(parameter.name, parameter.is_init) for _, parameter in inside]
        self._inner.update_parameters_name(prefix, recurse)
        names = self.__dict__["_names"]
        for (name, parameter), (current, initialised) in zip(inside, before, strict=True):
            if prefix:
                known = (old for old in (current, names.get(name)) if old and _ends_with(old, prefix + name))
                parameter.name = next(known, parameter.name)
            if parameter.name == current:
                parameter.is_init = initialised
            names[name] = parameter.name

    def _get_name(self) -> str:
        return f"{type(self).__name__}({self._inner._get_name()})"


def _ends_with(name: str, end: str) -> bool:
    """Whether a name's last parts, between dots, are these."""
    return name == end or name.endswith("." + end)


def unwrap_cell(cell: nn.Cell) -> nn.Cell:
    """The bare cell inside of wrappers, however many there are; a cell that is none is returned as it is.

    What was a function is a `FuncCell`.

    Raises:
        SettingError: It is no cell.

    Example:
        >>> unwrap_cell(swap_wrapper(block)) is block
        True
    """
    if not isinstance(cell, nn.Cell):
        raise SettingError(f"a {type(cell).__name__} is no cell", "pass a cell, wrapped or not")
    while isinstance(cell, ActivationWrapper):
        cell = cell._inner
    return cell


def _looked_up(name: str) -> property:
    """An attribute that is the inner cell's. While MindSpore constructs the wrapper there is none."""

    def get(self: ActivationWrapper) -> Any:
        if "_inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_inner"], name)

    def put(self: ActivationWrapper, value: Any) -> None:
        if "_inner" in self.__dict__:
            # As it is: MindSpore has checked it already.
            object.__setattr__(self.__dict__["_inner"], name, value)

    return property(get, put)


def _passed_on(name: str) -> Callable[..., Any]:
    """A method that is the inner cell's."""

    def method(self: ActivationWrapper, *args: Any, **kwargs: Any) -> Any:
        inner = self.__dict__["_inner"]
        answer = getattr(inner, name)(*args, **kwargs)
        return self if answer is inner else answer

    method.__name__ = name
    method.__doc__ = "As the cell inside."
    return method


for _name in _INNER:
    setattr(ActivationWrapper, _name, _looked_up(_name))
for _name in _METHODS:
    if hasattr(nn.Cell, _name):
        setattr(ActivationWrapper, _name, _passed_on(_name))
