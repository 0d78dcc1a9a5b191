"""Checkpointing: what a region saves is computed again in backward, except what a policy saves or swaps.

This is `torch.utils.checkpoint` without reentrance, with two things added. The *inputs* of the region,
which a checkpoint has to keep, can be swapped. And a policy for operations can have outputs saved or
swapped instead of computed again, on any version of PyTorch.

Access contract: nothing is kept between calls.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from ebbtide._trees import leaves, same_tree
from ebbtide.errors import SettingError
from ebbtide.torch._pool import native_pool
from ebbtide.torch._selective import create_selective_checkpoint_contexts
from ebbtide.torch._wrap import ActivationWrapper, AsyncSaveOnCpu

T = TypeVar("T")
OperationPolicy = Callable[..., object] | Sequence[Any]
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

# Settings of PyTorch's own checkpoint that go through to it.
_TORCHS = ("preserve_rng_state", "determinism_check", "debug", "respect_saved_tensors_hooks")
_KNOWN = frozenset(inspect.signature(torch_checkpoint.checkpoint).parameters)


class Settings(NamedTuple):
    """How a region is checkpointed."""

    swap_inputs: bool = False
    policy_fn: OperationPolicy | None = None
    context_fn: Contexts | None = None
    group_swap: bool = False
    cpu_pool: object | None = None
    early_stop: bool = True
    torchs: tuple[tuple[str, Any], ...] = ()


def checkpoint(
    function: Callable[..., T],
    *args: Any,
    swap_inputs: bool = False,
    policy_fn: OperationPolicy | None = None,
    context_fn: Contexts | None = None,
    group_swap: bool = False,
    cpu_pool: object | None = None,
    early_stop: bool = True,
    **kwargs: Any,
) -> T:
    """Calls a function whose saved tensors are computed again in backward.

    Args:
        function: Must compute the same when it is called again. Random numbers are drawn again as they
            were.
        *args: Its arguments; tensors may be nested in dicts, lists and tuples.
        swap_inputs: Whether the tensors among the arguments are swapped until backward, in the current
            group.
        policy_fn: `f(context, operation, *args, **kwargs)` with a `CheckpointPolicy` or bool as answer,
            or a list of operations to save; asked once about each operation.
        context_fn: As PyTorch's: makes the contexts of the first run and of the recomputation.
        group_swap: Whether small tensors that are swapped share host buffers.
        cpu_pool: A `PinnedMemoryPool` for the copies.
        early_stop: Whether recomputation ends with the last tensor that is needed.
        **kwargs: Keyword arguments of the function. PyTorch's `preserve_rng_state`,
            `determinism_check` and `debug` are taken for its checkpoint.

    Returns:
        What `function(*args, **kwargs)` returns.

    Raises:
        SettingError: Both `policy_fn` and `context_fn` were given, or something is of a wrong kind.

    Example:
        >>> y = checkpoint(block, x, swap_inputs=True)
        >>> save = [torch.ops.aten.mm.default]
        >>> y = checkpoint(block, x, policy_fn=save)
    """
    torchs = tuple((name, kwargs.pop(name)) for name in _TORCHS if name in kwargs)
    _refuse_reentrant(kwargs)
    settings = Settings(swap_inputs, policy_fn, context_fn, group_swap, cpu_pool, early_stop, torchs)
    _check(function, settings)
    result: T = run(function, args, kwargs, settings)
    return result


def _refuse_reentrant(kwargs: dict[str, Any]) -> None:
    if kwargs.pop("use_reentrant", False):
        hint = "leave use_reentrant out; what it is for works without it"
        raise SettingError("use_reentrant=True is not supported", hint)


def _check(function: object, settings: Settings) -> None:
    if not callable(function):
        raise SettingError(f"a {type(function).__name__} can't be checkpointed", "pass a function")
    if settings.policy_fn is not None and settings.context_fn is not None:
        hint = "pass one of them: a policy makes its own contexts"
        raise SettingError("both policy_fn and context_fn were given", hint)
    native_pool(settings.cpu_pool)


def run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings) -> Any:
    """Calls a function under a checkpoint."""
    if not settings.swap_inputs:
        return _call(function, args, kwargs, settings)
    # A checkpoint keeps tensors among positional arguments as autograd keeps tensors, which hooks
    # around it see; all others it just holds. So every tensor becomes a positional argument.
    tensors: list[torch.Tensor] = [x for x in leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    numbers = iter(range(len(tensors)))
    tree = same_tree((args, kwargs), lambda x: _Slot(next(numbers)) if isinstance(x, torch.Tensor) else x)
    function_on_tensors = functools.partial(_with_tensors, function, tree)
    with AsyncSaveOnCpu(None, settings.group_swap, settings.cpu_pool):
        return _call(function_on_tensors, tuple(tensors), {}, settings)


class _Slot:
    """Stands for one of the tensors."""

    def __init__(self, number: int) -> None:
        self.number = number


def _with_tensors(function: Callable[..., Any], tree: Any, *tensors: torch.Tensor) -> Any:
    filled = same_tree(tree, lambda x: tensors[x.number] if isinstance(x, _Slot) else x)
    return function(*filled[0], **filled[1])


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings) -> Any:
    passed = dict(settings.torchs)
    contexts = settings.context_fn
    if settings.policy_fn is not None:
        contexts = functools.partial(
            create_selective_checkpoint_contexts,
            settings.policy_fn,
            group_swap=settings.group_swap,
            cpu_pool=settings.cpu_pool,
        )
    if contexts is not None:
        passed["context_fn"] = contexts
    if kwargs:
        # Names of the function's own that PyTorch's checkpoint would take for itself.
        function = functools.partial(function, **kwargs)
    with _early_stop(settings.early_stop, passed):
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **passed)


def _early_stop(wanted: bool, passed: dict[str, Any]) -> AbstractContextManager[Any]:
    """Before PyTorch 2.9 the only way to switch it off is a context."""
    if wanted:
        return contextlib.nullcontext()
    if "early_stop" in _KNOWN:
        passed["early_stop"] = False
        return contextlib.nullcontext()
    return torch_checkpoint.set_checkpoint_early_stop(False)


class CheckpointWrapper(ActivationWrapper):
    """A module or callable that is checkpointed; made by `checkpoint_wrapper`."""

    def __init__(self, module: nn.Module | Callable[..., Any], **checkpoint_kwargs: Any) -> None:
        given = dict(checkpoint_kwargs)
        _refuse_reentrant(given)
        torchs = tuple((name, given.pop(name)) for name in _TORCHS if name in given)
        unknown = sorted(set(given) - set(Settings._fields[:-1]))
        if unknown:
            known = ", ".join((*Settings._fields[:-1], *_TORCHS))
            raise SettingError(f"checkpoint_wrapper doesn't know {', '.join(unknown)}", f"it knows {known}")
        settings = Settings(**given, torchs=torchs)
        _check(module, settings)
        super().__init__(module)
        self.__dict__["_checkpoint_settings"] = settings

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module inside under a checkpoint."""
        return run(self._inner, args, kwargs, self.__dict__["_checkpoint_settings"])


def checkpoint_wrapper(module: nn.Module | Callable[..., Any], **checkpoint_kwargs: Any) -> CheckpointWrapper:
    """Wraps a module or function so that every call is a `checkpoint`.

    Args:
        module: A `torch.nn.Module`, or any callable.
        **checkpoint_kwargs: Keywords of `checkpoint`.

    Returns:
        A module with the same parameters, buffers, children and names.

    Raises:
        SettingError: An unknown keyword, or an argument of a wrong kind.

    Example:
        >>> block = checkpoint_wrapper(block, swap_inputs=True)
    """
    return CheckpointWrapper(module, **checkpoint_kwargs)
