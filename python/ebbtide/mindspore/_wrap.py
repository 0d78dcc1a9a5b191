"""Code whose saved tensors are swapped: wrappers, a function, a context.

Everything that MindSpore saves for backward while the code runs is offered to the current group: first whether it
may move at all, then the policy, then the group. One run of the code makes one region; policy and group are asked
when it ends, since a look at a tensor's memory makes MindSpore wait. Without a current group, and in the last
layer of a chain unless a policy names the tensor, it stays on the device.

Inside of `checkpoint` nothing is swapped: what is saved there is computed again, as a checkpoint promises.

Access contract: a context belongs to the thread that entered it; every call of a wrapper makes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar

from mindspore import Tensor, nn

from ebbtide import _defaults
from ebbtide._policy import check_policy, decide_by
from ebbtide.errors import SettingError
from ebbtide.mindspore._alone import is_recorded
from ebbtide.mindspore._cells import storages, tensors
from ebbtide.mindspore._cover import ActivationWrapper
from ebbtide.mindspore._graph import in_jit, refuse_graph, refuse_jitted, refused_in_jit
from ebbtide.mindspore._manager import SwapManager
from ebbtide.mindspore._region import Region, Saved

T = TypeVar("T")
Policy = Callable[[Tensor], object]
_in_checkpoint: ContextVar[bool] = ContextVar("ebbtide_in_checkpoint", default=False)
_warned_in_checkpoint = False


def check_pool(cpu_pool: object | None) -> None:
    """Refuses a pool of one's own.

    Raises:
        SettingError: One was given.
    """
    if cpu_pool is not None:
        hint = "leave it out: the engine has host memory"
        raise SettingError(f"cpu_pool={cpu_pool!r} can't be used with MindSpore", hint)


class HandRegion(Region):
    """A region of the group that is current when its first tensor arrives.

    `owner` is the cell that runs, if one is known: what it owns never moves. `inputs` are as for `Region`.
    """

    def __init__(self, policy_fn: Policy | None, owner: nn.Cell | None = None, inputs: Iterable[Tensor] = ()) -> None:
        name = "swapped code" if owner is None else type(owner).__name__
        super().__init__(lambda: None, name, inputs=inputs)
        self._policy = None if policy_fn is None else decide_by(policy_fn)
        self._owner = owner
        self._group_name: str | None = None
        self._arrived = self._asked = False

    def _may_move(self, tensor: Tensor) -> bool:
        if not may_leave(tensor):
            return False
        if not self._arrived:
            self._arrived = True
            self._group_name = SwapManager().get_current_group_name()
        return True

    def _moves(self, saved: Saved) -> bool:
        if self._policy is not None and not self._policy(saved.tensor):
            return False
        if not self._asked:
            self._asked = True
            self.group = group_named(self._group_name, by_policy=self._policy is not None)
            if self.group is not None:
                self.label = self.group.name
        saved.label = self.label
        return self.group is not None

    def close(self) -> None:
        """The code is over: what moves goes to the group, which is left open."""
        saved = list(self._saved)
        try:
            if self._arrived and self._owner is not None:
                self._keep |= storages(self._owner)
            super().close()
        except BaseException:
            for each in saved:
                each.drop()
            raise


def group_named(name: str | None, *, by_policy: bool) -> Any:
    """The engine's group for what is saved, as if the group of that name were current; None: it stays."""
    manager = SwapManager()
    outer = manager.get_current_group_name()
    manager.set_current_group_name(name)
    try:
        return manager._group_to_pack(named=by_policy)
    finally:
        manager.set_current_group_name(outer)


def may_leave(tensor: Tensor) -> bool:
    """Whether a saved tensor may be swapped, as far as can be told without a look at its memory."""
    return tensor.param_info is None and 0 not in tensor.shape


def is_in_checkpoint() -> bool:
    """Whether this thread runs what will be computed again."""
    return _in_checkpoint.get()


@contextmanager
def in_checkpoint() -> Iterator[None]:
    """What runs inside is computed again."""
    token = _in_checkpoint.set(True)
    try:
        yield
    finally:
        _in_checkpoint.reset(token)


class AsyncSaveOnCpu:
    """Swaps what MindSpore saves inside `with`: one region each time it is entered.

    Args:
        policy_fn: Asked once about each tensor that could move, when the region ends; answers
            `CheckpointPolicy.MUST_SWAP` or `MUST_SAVE`. None: all move.
        group_swap: Whether small tensors share host buffers. They always do here.
        cpu_pool: None; there are no pools of one's own here.

    Raises:
        SettingError: An argument is of a wrong kind; graph mode; at the end, the policy's answer makes no sense.

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
        check_pool(cpu_pool)
        self._policy_fn = policy_fn
        self._entered: list[HandRegion | None] = []

        self._of: tuple[nn.Cell | None, Iterable[Tensor]] = (None, ())

    def of(self, function: object, inputs: Iterable[Tensor]) -> AsyncSaveOnCpu:
        """This, as the context of a function that is called with these tensors; then more is known of what stays."""
        owner = getattr(function, "__self__", function)
        self._of = (owner if isinstance(owner, nn.Cell) else None, inputs)
        return self

    def __enter__(self) -> None:
        refuse_graph(type(self).__name__)
        region = None
        if is_in_checkpoint():
            _warn_in_checkpoint()
        elif is_recorded():
            region = HandRegion(self._policy_fn, *self._of)
            region.__enter__()
        self._entered.append(region)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        region = self._entered.pop()
        if region is not None:
            region.__exit__(kind, error, trace)
            if kind is None:
                region.close()


def _warn_in_checkpoint() -> None:
    global _warned_in_checkpoint
    if not _warned_in_checkpoint:
        _warned_in_checkpoint = True
        text = "swapping was asked for inside a checkpointed function: what is saved there is recomputed"
        hint = "put the checkpoint inside of the swapped code"
        _defaults.warn(f"{text}, not swapped; {hint}", stacklevel=5)


def async_save_on_cpu(
    policy_fn: Policy | None = None, group_swap: bool = False, cpu_pool: object | None = None
) -> AsyncSaveOnCpu:
    """A context that swaps what MindSpore saves inside.

    Args:
        policy_fn: Asked once about each tensor that could move, when the region ends; answers
            `CheckpointPolicy.MUST_SWAP` or `MUST_SAVE`. None: all move.
        group_swap: Whether small tensors share host buffers. They always do here.
        cpu_pool: None; there are no pools of one's own here.

    Returns:
        An `AsyncSaveOnCpu`, which may be entered more than once.

    Raises:
        SettingError: An argument is of a wrong kind; inside, graph mode; the policy's answer makes no sense.

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
    """Calls a function, swapping what MindSpore saves meanwhile; see `swap_wrapper`.

    Args:
        function: Any callable.
        *args: Its arguments.
        policy_fn: `f(tensor) -> CheckpointPolicy.MUST_SWAP` or `MUST_SAVE`. None: all move.
        group_swap: Whether small tensors share host buffers. They always do here.
        cpu_pool: None; there are no pools of one's own here.
        **kwargs: Keyword arguments of the function.

    Returns:
        What `function(*args, **kwargs)` returns.

    Raises:
        SettingError: An argument is of a wrong kind, the policy's answer makes no sense, graph mode, or
            `ms.jit` compiles the function.

    Example:
        >>> y = swap(mlp, x, policy_fn=large)
    """
    if in_jit():  # @jit.cond: True
        return refused_in_jit("swap")
    refuse_graph("swap")
    if not callable(function):
        raise SettingError(f"a {type(function).__name__} can't be called", "pass a function or a cell")
    context = AsyncSaveOnCpu(policy_fn, group_swap, cpu_pool).of(function, tensors((args, kwargs)))
    refuse_jitted(function, "swap")
    with context:
        return function(*args, **kwargs)


# ---- wrappers


class SwapWrapper(ActivationWrapper):
    """A cell or callable whose saved tensors are swapped; made by `swap_wrapper`."""

    _what = "swap_wrapper"

    def __init__(
        self,
        module: nn.Cell | Callable[..., Any],
        policy_fn: Policy | None = None,
        group_swap: bool = False,
        cpu_pool: object | None = None,
    ) -> None:
        check_policy(policy_fn)
        check_pool(cpu_pool)
        super().__init__(module)
        self.__dict__["_swap_settings"] = (policy_fn, group_swap, cpu_pool)

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the cell inside; what it saves is one region of the current group."""
        if in_jit():  # @jit.cond: True
            return refused_in_jit("swap_wrapper")
        inputs = tensors((args, kwargs))
        with AsyncSaveOnCpu(*self.__dict__["_swap_settings"]).of(self._inner, inputs):
            return self._inner(*args, **kwargs)


def swap_wrapper(
    module: nn.Cell | Callable[..., Any],
    policy_fn: Policy | None = None,
    group_swap: bool = False,
    cpu_pool: object | None = None,
) -> SwapWrapper:
    """Wraps a cell or function: each call is one region, whose saved tensors are swapped.

    Eligible are tensors with memory that are no parameters and no views of parameters of the cell. The policy is
    asked once about each of them. They go to the group that is current when the first one comes; without
    one they stay, and in the last layer of a chain they stay unless the policy says `MUST_SWAP`.

    Args:
        module: A `mindspore.nn.Cell`, or any callable.
        policy_fn: `f(tensor) -> CheckpointPolicy.MUST_SWAP` or `MUST_SAVE`. None: all move.
        group_swap: Whether small tensors share host buffers. They always do here.
        cpu_pool: None; there are no pools of one's own here.

    Returns:
        A cell with the same parameters, buffers, children and names.

    Raises:
        SettingError: An argument is of a wrong kind, or `ms.jit` compiles the cell or one inside of it.

    Example:
        >>> for number, block in enumerate(model.blocks):
        ...     model.blocks[number] = swap_wrapper(block)
        >>> for a, b in zip(model.blocks, model.blocks[1:]):
        ...     SwapManager().set_forward_prefetch_layer(a, b)
    """
    return SwapWrapper(module, policy_fn, group_swap, cpu_pool)
