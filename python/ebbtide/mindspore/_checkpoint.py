"""Checkpointing: what a region saves is computed again in backward.

This is `ms.recompute` without reentrance, with two things added. The *inputs* of the region, which a checkpoint has
to keep, can be swapped. And what the recomputation gives is compared with what forward gave: `nn.Dropout` on a CPU
draws from a state that nothing sets back, so a block with dropout can't be computed again there, and MindSpore would
not say so. For this the recomputation always runs to its end, where MindSpore by itself may stop earlier (and then
leaves the state of its random numbers where the recomputation began).

Access contract: a call belongs to the thread that makes it, its recomputation to the one that runs backward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import mindspore as ms
from mindspore import Tensor, nn

from ebbtide._trees import leaves, same_tree
from ebbtide.errors import ChangedError, SettingError
from ebbtide.mindspore._alone import is_recorded
from ebbtide.mindspore._cover import ActivationWrapper
from ebbtide.mindspore._graph import in_jit, refuse_graph, refuse_jitted, refused_in_jit
from ebbtide.mindspore._wrap import AsyncSaveOnCpu, check_pool, in_checkpoint

T = TypeVar("T")
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class Settings(NamedTuple):
    """How a region is checkpointed."""

    swap_inputs: bool = False
    policy_fn: object | None = None
    context_fn: Contexts | None = None
    group_swap: bool = False
    cpu_pool: object | None = None
    early_stop: bool = True


def checkpoint(
    function: Callable[..., T],
    *args: Any,
    swap_inputs: bool = False,
    policy_fn: object | None = None,
    context_fn: Contexts | None = None,
    group_swap: bool = False,
    cpu_pool: object | None = None,
    early_stop: bool = True,
    **kwargs: Any,
) -> T:
    """Calls a function whose saved tensors are computed again in backward.

    Args:
        function: Must compute the same when it is called again. What it draws from MindSpore's own generator is
            drawn again as it was. The values of its result are compared; other values are a `ChangedError` in
            backward.
        *args: Its arguments; tensors may be nested in dicts, lists and tuples.
        swap_inputs: Whether the tensors among the arguments are swapped until backward, in the current
            group. Those without a gradient (a mask, a table) stay: others use them as well.
        policy_fn: None; what MindSpore offers to see operations (`MsDispatchMode`) is experimental, and hangs
            where a recomputation hands out results of some of them.
        context_fn: As MindSpore's: makes the contexts of the first run and of the recomputation.
        group_swap: Whether small tensors that are swapped share host buffers. They always do here.
        cpu_pool: None; there are no pools of one's own here.
        early_stop: Whether recomputation may end with the last tensor that is needed. It doesn't make use of that
            here, so that its result can be compared.
        **kwargs: Keyword arguments of the function.

    Returns:
        What `function(*args, **kwargs)` returns.

    Raises:
        SettingError: Something is of a wrong kind, graph mode, or `ms.jit` compiles the function.

    Example:
        >>> y = checkpoint(block, x, swap_inputs=True)
    """
    if in_jit():  # @jit.cond: True
        return refused_in_jit("checkpoint")
    _refuse_reentrant(kwargs)
    settings = Settings(swap_inputs, policy_fn, context_fn, group_swap, cpu_pool, early_stop)
    _check(function, settings)
    refuse_graph("checkpoint")
    refuse_jitted(function, "checkpoint")
    result: T = run(function, args, kwargs, settings)
    return result


def _refuse_reentrant(kwargs: dict[str, Any]) -> None:
    if kwargs.pop("use_reentrant", False):
        hint = "leave use_reentrant out; what it is for works without it"
        raise SettingError("use_reentrant=True is not supported", hint)


def _check(function: object, settings: Settings) -> None:
    if not callable(function):
        raise SettingError(f"a {type(function).__name__} can't be checkpointed", "pass a function")
    if settings.policy_fn is not None:
        raise SettingError(
            f"policy_fn is {settings.policy_fn!r}: policies for operations can't be had with MindSpore",
            "leave it out, or swap by tensors: swap_wrapper(cell, policy_fn)",
        )
    check_pool(settings.cpu_pool)


def run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings) -> Any:
    """Calls a function under a checkpoint."""
    if not is_recorded():
        return function(*args, **kwargs)
    # MindSpore keeps tensors among positional arguments as it keeps saved tensors, which hooks around it see; all
    # others it just holds. So every tensor becomes a positional argument.
    tensors: list[Tensor] = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
    numbers = iter(range(len(tensors)))
    tree = same_tree((args, kwargs), lambda x: _Slot(next(numbers)) if isinstance(x, Tensor) else x)
    region = _Region(function, tree)
    swapping: AbstractContextManager[Any] = nullcontext()
    if settings.swap_inputs:
        swapping = AsyncSaveOnCpu(None, settings.group_swap, settings.cpu_pool).of(function, tensors)
    with swapping:
        return ms.recompute(region, *tensors, use_reentrant=False, early_stop=False, context_fn=settings.context_fn)


class _Slot:
    """Stands for one of the tensors."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Region:
    """A function of the tensors among its arguments, whose runs are compared."""

    def __init__(self, function: Callable[..., Any], tree: Any) -> None:
        self._function = function
        self._tree = tree
        self._first: list[object] | None = None

    def __call__(self, *tensors: Tensor) -> Any:
        args, kwargs = same_tree(self._tree, lambda x: tensors[x.number] if isinstance(x, _Slot) else x)
        with in_checkpoint():
            output = self._function(*args, **kwargs)
        values = [_value(leaf) for leaf in leaves(output)]
        if self._first is None:
            self._first = values
        else:
            self._compare(self._first, values)
        return output

    def _compare(self, first: list[object], again: list[object]) -> None:
        other = [number for number, pair in enumerate(zip(first, again, strict=False)) if pair[0] != pair[1]]
        if len(first) == len(again) and not other:
            return
        what = f"{len(other)} of its {len(first)} results" if len(first) == len(again) else "the number of its results"
        raise ChangedError(
            f"computing {_name(self._function)} again for backward gave other values than forward: {what} differ",
            "dropout of MindSpore on a CPU draws other numbers each time: swap what has dropout, swap_wrapper(cell), "
            "and checkpoint the rest",
        )


def _value(leaf: object) -> object:
    """What tells whether a result is the same again; nothing for what is no tensor."""
    if not isinstance(leaf, Tensor):
        return None
    digest = hashlib.blake2b(leaf.asnumpy().tobytes(), digest_size=16).digest()
    return tuple(leaf.shape), str(leaf.dtype), digest


def _name(function: object) -> str:
    return type(function).__name__ if isinstance(function, nn.Cell) else str(getattr(function, "__name__", function))


class CheckpointWrapper(ActivationWrapper):
    """A cell or callable that is checkpointed; made by `checkpoint_wrapper`."""

    _what = "checkpoint_wrapper"

    def __init__(self, module: nn.Cell | Callable[..., Any], **checkpoint_kwargs: Any) -> None:
        given = dict(checkpoint_kwargs)
        _refuse_reentrant(given)
        unknown = sorted(set(given) - set(Settings._fields))
        if unknown:
            known = ", ".join(Settings._fields)
            raise SettingError(f"checkpoint_wrapper doesn't know {', '.join(unknown)}", f"it knows {known}")
        settings = Settings(**given)
        _check(module, settings)
        super().__init__(module)
        self.__dict__["_checkpoint_settings"] = settings

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the cell inside under a checkpoint."""
        if in_jit():  # @jit.cond: True
            return refused_in_jit("checkpoint_wrapper")
        return run(self._inner, args, kwargs, self.__dict__["_checkpoint_settings"])


def checkpoint_wrapper(module: nn.Cell | Callable[..., Any], **checkpoint_kwargs: Any) -> CheckpointWrapper:
    """Wraps a cell or function so that every call is a `checkpoint`.

    Args:
        module: A `mindspore.nn.Cell`, or any callable.
        **checkpoint_kwargs: Keywords of `checkpoint`.

    Returns:
        A cell with the same parameters, buffers, children and names.

    Raises:
        SettingError: An unknown keyword, an argument of a wrong kind, or `ms.jit` compiles the cell or one inside
            of it.

    Example:
        >>> block = checkpoint_wrapper(block, swap_inputs=True)
    """
    return CheckpointWrapper(module, **checkpoint_kwargs)
