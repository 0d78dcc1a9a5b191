"""Code whose saved tensors are swapped: wrappers, a function, a context.

Everything that autograd saves while the code runs is offered to the current group: first whether it may
move at all, then the policy, then the group. One run of the code makes one region. Without a current
group, and in the last layer of a chain unless a policy names the tensor, it stays on the device.

Inside a function that `torch.utils.checkpoint` runs, nothing is swapped: hooks there would switch the
checkpoint off. What is saved there is computed again, as the checkpoint promises.

Access contract: a context belongs to the thread that entered it; every call of a wrapper makes its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ebbtide._native import Group, Packer
from ebbtide._policy import check_policy, decide_by
from ebbtide._trees import leaves, same_tree
from ebbtide.errors import SettingError
from ebbtide.torch import _defaults
from ebbtide.torch._hooks import in_checkpoint
from ebbtide.torch._manager import SwapManager
from ebbtide.torch._marks import MARKS, Called
from ebbtide.torch._pool import native_pool
from ebbtide.torch._step import push_hooks, refused_by_transform
from ebbtide.torch._swapped import base_check_fn, movable

T = TypeVar("T")
Policy = Callable[[torch.Tensor], object]
_warned_in_checkpoint = _warned_of_old_torch = False


def current_group(*, named: bool) -> Callable[[], Group | None]:
    """Finds the engine's group for what is saved when the first tensor comes.

    `named`: a policy names what is swapped, so that the last layer of a chain leaves as well.
    """
    return lambda: SwapManager()._group_to_pack(named=named)


def region_packer(policy_fn: Policy | None, group_swap: bool, cpu_pool: object | None) -> Packer:
    """The pack hook for one region."""
    check_policy(policy_fn)
    decide = None if policy_fn is None else decide_by(policy_fn)
    find = current_group(named=policy_fn is not None)
    return Packer(find=find, decide=decide, **copies(group_swap, cpu_pool))


def copies(group_swap: bool, cpu_pool: object | None) -> dict[str, Any]:
    """How a region's copies are made, as the engine takes it."""
    pool = native_pool(cpu_pool)
    pooled: dict[str, Any] = {} if pool is None else {"pool": pool}
    return {"pack": bool(group_swap), **pooled}


class AsyncSaveOnCpu(saved_tensors_hooks):
    """Swaps what autograd saves inside `with`: one region each time it is entered.

    Args:
        policy_fn: Asked once about each tensor that could move; answers `CheckpointPolicy.MUST_SWAP` or
            `MUST_SAVE`. None: all move.
        group_swap: Whether small tensors share host buffers.
        cpu_pool: A `PinnedMemoryPool` for the copies.

    Raises:
        SettingError: An argument is of a wrong kind; inside, the policy's answer makes no sense.

    Example:
        >>> with SwapManager().group_context("mlp"), AsyncSaveOnCpu():
        ...     y = mlp(x)
    """

    def __init__(
        self,
        policy_fn: Policy | None = None,
        group_swap: bool = False,
        cpu_pool: object | None = None,
    ) -> None:
        check_policy(policy_fn)
        native_pool(cpu_pool)
        self._settings = (policy_fn, group_swap, cpu_pool)
        self._entered: list[saved_tensors_hooks | None] = []

    def __enter__(self) -> None:
        if in_checkpoint():
            _warn_in_checkpoint()
            self._entered.append(None)
            return
        self._entered.append(push_hooks(region_packer(*self._settings)))

    def __exit__(self, *raised: object) -> None:
        hooks = self._entered.pop()
        if hooks is not None:
            hooks.__exit__()
        error = raised[1] if len(raised) > 1 else None
        if not isinstance(error, BaseException):
            return
        refused = refused_by_transform(error)
        if refused is not None:
            raise refused from error


def _warn_in_checkpoint() -> None:
    global _warned_in_checkpoint
    if not _warned_in_checkpoint:
        _warned_in_checkpoint = True
        text = "swapping was asked for inside a checkpointed function: what is saved there is recomputed"
        hint = "put the checkpoint inside of the swapped code, or use checkpoint(policy_fn=…)"
        _defaults.warn(f"{text}, not swapped; {hint}", stacklevel=4)


def async_save_on_cpu(
    policy_fn: Policy | None = None, group_swap: bool = False, cpu_pool: object | None = None
) -> AsyncSaveOnCpu:
    """A context that swaps what autograd saves inside.

    Args:
        policy_fn: Asked once about each tensor that could move; answers `CheckpointPolicy.MUST_SWAP` or
            `MUST_SAVE`. None: all move.
        group_swap: Whether small tensors share host buffers.
        cpu_pool: A `PinnedMemoryPool` for the copies.

    Returns:
        An `AsyncSaveOnCpu`, which may be entered more than once.

    Raises:
        SettingError: An argument is of a wrong kind; inside, the policy's answer makes no sense.

    Example:
        >>> with SwapManager().group_context("mlp"), async_save_on_cpu():
        ...     y = mlp(x)
    """
    return AsyncSaveOnCpu(policy_fn, group_swap, cpu_pool)


def swap(
    function: Callable[..., T],
    *args: Any,
    policy_fn: Policy | None = None,
    group_swap: bool = False,
    cpu_pool: object | None = None,
    **kwargs: Any,
) -> T:
    """Calls a function, swapping what autograd saves meanwhile; see `swap_wrapper`.

    Args:
        function: Any callable.
        *args: Its arguments.
        policy_fn: `f(tensor) -> CheckpointPolicy.MUST_SWAP` or `MUST_SAVE`. None: all move.
        group_swap: Whether small tensors share host buffers.
        cpu_pool: A `PinnedMemoryPool` for the copies.
        **kwargs: Keyword arguments of the function.

    Returns:
        What `function(*args, **kwargs)` returns.

    Raises:
        SettingError: An argument is of a wrong kind, or the policy's answer makes no sense.

    Example:
        >>> y = swap(mlp, x, policy_fn=large)
    """
    if not callable(function):
        raise SettingError(f"a {type(function).__name__} can't be called", "pass a function or a module")
    with AsyncSaveOnCpu(policy_fn, group_swap, cpu_pool):
        return function(*args, **kwargs)


# ---- wrappers


# What the wrapper and the module inside share: whoever changes one changes both.
_SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class ActivationWrapper(nn.Module):
    """A module around another one that nobody notices.

    Parameters, buffers and children are those of the module inside, under the same names: wrapping
    renames nothing, in `named_parameters`, in state dicts, alone or within a parent. Attributes are the
    wrapper's own, then those of the module inside. `modules()` lists the wrapper and then the module.

    Args:
        module: A module, or any callable, which becomes a module without parameters.

    Raises:
        SettingError: It is neither.
    """

    _inner: nn.Module

    def __init__(self, module: nn.Module | Callable[..., Any]) -> None:
        super().__init__()
        if not isinstance(module, nn.Module) and not callable(module):
            hint = "pass a torch.nn.Module or a function"
            raise SettingError(f"a {type(module).__name__} can't be wrapped", hint)
        MARKS.mark_region(module)
        inner = module if isinstance(module, nn.Module) else Called(module)
        self.__dict__["_inner"] = inner
        for name in _SHARED:
            if name in inner.__dict__:
                self.__dict__[name] = inner.__dict__[name]

    @property
    def training(self) -> bool:
        """Of the module inside."""
        inner = self.__dict__.get("_inner")
        return True if inner is None else bool(inner.training)

    @training.setter
    def training(self, mode: bool) -> None:
        inner = self.__dict__.get("_inner")
        if inner is not None:
            inner.training = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module inside."""
        return self._inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("_inner")
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Special methods are the wrapper's: a copy of it must not become one of what is inside.
            special = name.startswith("__") and name.endswith("__")
            if inner is None or special or not hasattr(inner, name):
                raise
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_inside(name):
            setattr(self._inner, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_inside(name):
            delattr(self._inner, name)
        else:
            super().__delattr__(name)

    def _is_inside(self, name: str) -> bool:
        """Whether an attribute is that of the module inside."""
        own = "_inner" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name)
        return not own and hasattr(self._inner, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *self.__dict__, *dir(self._inner)})

    def __getitem__(self, index: Any) -> Any:
        return self._inner[index]  # type: ignore[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._inner[index] = value  # type: ignore[operator]

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __iter__(self) -> Any:
        return iter(self._inner)  # type: ignore[call-overload]

    def __contains__(self, item: object) -> bool:
        return item in self._inner  # type: ignore[operator]

    def __bool__(self) -> bool:
        return bool(self._inner)

    # -- what torch asks every module of a tree

    def named_modules(self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        """The wrapper and what is inside, under the names that they have without it."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        inside = self._inner.named_modules(memo, prefix, remove_duplicate)
        for name, module in inside:
            # Else parameters of the module inside would be listed twice.
            if remove_duplicate or module is not self._inner:
                yield name, module

    def apply(self, fn: Callable[[nn.Module], None]) -> ActivationWrapper:
        """Calls `fn` for every module inside, then for the wrapper."""
        self._inner.apply(fn)
        fn(self)
        return self

    def train(self, mode: bool = True) -> ActivationWrapper:
        """As the module inside."""
        self._inner.train(mode)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ActivationWrapper:
        self._inner._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the module inside."""
        return self._inner.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._inner._load_from_state_dict(*args, **kwargs)

    def get_extra_state(self) -> Any:
        """As the module inside."""
        return self._inner.get_extra_state()

    def set_extra_state(self, state: Any) -> None:
        """As the module inside."""
        self._inner.set_extra_state(state)

    def _get_name(self) -> str:
        return f"{type(self).__name__}({self._inner._get_name()})"

    def extra_repr(self) -> str:
        """As the module inside."""
        return self._inner.extra_repr()


class SwapWrapper(ActivationWrapper):
    """A module or callable whose saved tensors are swapped; made by `swap_wrapper`."""

    def __init__(
        self,
        module: nn.Module | Callable[..., Any],
        policy_fn: Policy | None = None,
        group_swap: bool = False,
        cpu_pool: object | None = None,
    ) -> None:
        check_policy(policy_fn)
        native_pool(cpu_pool)
        super().__init__(module)
        self.__dict__["_swap_settings"] = (policy_fn, group_swap, cpu_pool)
        _prepare_for_compile()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module inside; what it saves is one region of the current group."""
        if torch.compiler.is_compiling():
            return _untraced_call(self, args, kwargs)
        return _swapped_call(self, args, kwargs)


def _swapped_call(wrapper: SwapWrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with AsyncSaveOnCpu(*wrapper.__dict__["_swap_settings"]):
        return wrapper._inner(*args, **kwargs)


# The same as torch.compile leaves it alone, with a break of the graph around it.
_untraced_call = _swapped_call
_INSTEAD = (
    "swap_wrapper runs eagerly. Compile what is inside of it, swap_wrapper(torch.compile(block)), "
    "and leave fullgraph=True out"
)


def _prepare_for_compile() -> None:
    """Done before anything is traced. Imports a large part of PyTorch, as every optimizer does."""
    global _untraced_call
    if _untraced_call is not _swapped_call:
        return
    disable: Callable[..., Any] = torch.compiler.disable
    try:
        _untraced_call = disable(_swapped_call, reason=_INSTEAD)
    except TypeError:  # before PyTorch 2.7
        _untraced_call = disable(_swapped_call)


def swap_wrapper(
    module: nn.Module | Callable[..., Any],
    policy_fn: Policy | None = None,
    group_swap: bool = False,
    cpu_pool: object | None = None,
) -> SwapWrapper:
    """Wraps a module or function: each call is one region, whose saved tensors are swapped.

    Eligible are tensors with memory that are no parameters and no views of parameters. The policy is
    asked once about each of them. They go to the group that is current when the first one comes; without
    one they stay, and in the last layer of a chain they stay unless the policy says `MUST_SWAP`.

    Args:
        module: A `torch.nn.Module`, or any callable.
        policy_fn: `f(tensor) -> CheckpointPolicy.MUST_SWAP` or `MUST_SAVE`. None: all move.
        group_swap: Whether small tensors share host buffers.
        cpu_pool: A `PinnedMemoryPool` for the copies.

    Returns:
        A module with the same parameters, buffers, children and names.

    Raises:
        SettingError: An argument is of a wrong kind.

    Example:
        >>> model.blocks = nn.ModuleList(swap_wrapper(block) for block in model.blocks)
        >>> for a, b in zip(model.blocks, model.blocks[1:]):
        ...     SwapManager().set_forward_prefetch_layer(a, b)
    """
    return SwapWrapper(module, policy_fn, group_swap, cpu_pool)


# ---- tensors by name


def swap_tensor_wrapper(
    target: T, tag: str | None = None, group_swap: bool = False, cpu_pool: object | None = None
) -> T:
    """Swaps tensors by name, from inside a layer's forward; use the result as you used `target`.

    The tensors named here are copied out with the group of the layer, and their memory goes when the
    last who uses it has let go. What a layer saved before its very first call of this is not watched and
    keeps its memory; from the second pass on everything is.

    Before PyTorch 2.8 nothing moves, with a warning: it can't tell whether saved-tensor hooks of somebody
    else apply, which must not be hidden. `swap_wrapper` with a policy works there.

    Args:
        target: Tensors in any nesting of dicts (values), lists and tuples. Anything else is passed
            through.
        tag: Label in messages. None: the name of the group.
        group_swap: Whether small tensors share host buffers.
        cpu_pool: A `PinnedMemoryPool` for the copies.

    Returns:
        The same tensors in containers of the same types. Without a current group, and in the last layer
        of a chain, the very object.

    Raises:
        SettingError: `cpu_pool` is no `PinnedMemoryPool`.

    Example:
        >>> hidden = swap_tensor_wrapper(self.up(x), "up")
    """
    native_pool(cpu_pool)
    manager = SwapManager()
    name = manager.get_current_group_name()
    if name is None:
        text = f"`{tag}` was to be swapped outside of any group: it stays on the device"
        _defaults.warn(text)
        return target
    if manager.is_last_group(name) or in_checkpoint():
        return target
    eligible = [leaf for leaf in leaves(target) if base_check_fn(leaf)]
    if eligible and not _defaults.hooks_can_be_seen():
        _warn_of_old_torch()
        eligible = []
    group = manager._group_to_pack(named=False) if eligible else None
    if group is not None:
        manager._layers.watch(manager, name)
        for leaf in eligible:
            own = movable(leaf)
            if own is not None:
                group.mark(own, f"{tag or name} {list(own.shape)}", **copies(group_swap, cpu_pool))
    try:
        rebuilt: T = same_tree(target)
    except Exception:
        return target  # a container that can't be built from its content; the leaves are the same
    return rebuilt


def _warn_of_old_torch() -> None:
    global _warned_of_old_torch
    if not _warned_of_old_torch:
        _warned_of_old_torch = True
        text = f"swap_tensor_wrapper moves nothing with PyTorch {torch.__version__}: it needs 2.8"
        hint = "wrap the layer with swap_wrapper(layer, policy_fn) and name its tensors in the policy"
        _defaults.warn(f"{text}; {hint}", stacklevel=3)
