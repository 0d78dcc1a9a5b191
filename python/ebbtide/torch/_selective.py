"""Checkpointing in which a policy decides operation by operation: save, swap, or compute again.

Two modes see every operation of a region below autograd. The first, in forward, asks the policy and keeps
or swaps outputs. The second, in the recomputation, hands these out instead of running the operation.

What a policy can't change, so that the recomputation computes the same: views, memory that is not filled yet
and operations that write into their arguments always run again (that costs next to nothing: what a view
shows or an operation writes into is there in the recomputation, too). And an operation that draws random
numbers draws those that it drew before, whatever became of the draws between.

Access contract: a pair of modes belongs to one call of a region and its backward. The recomputation may
run on another thread than the forward, later.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS

from ebbtide import _native
from ebbtide._policy import CheckpointPolicy, operation_policy
from ebbtide._trees import same_tree
from ebbtide.errors import ChangedError, PhaseError, SettingError
from ebbtide.torch._pool import native_pool
from ebbtide.torch._wrap import copies, current_group

Operation = Any  # torch._ops.OpOverload, or a higher-order operator
Outputs = Any  # a tensor, or a tree of tensors and other values


class OperationContext:
    """What a policy for operations is told besides the operation and its arguments.

    `op_output` is the output, `is_recompute` always False: the policy is asked in forward only.
    """

    def __init__(self, op_output: Any) -> None:
        self.op_output = op_output
        self.is_recompute = False


class _Saved:
    """A tensor that stays, in the version that it had."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = alias(tensor)
        self._version = tensor._version

    def get(self) -> torch.Tensor:
        now = self._tensor._version
        if now != self._version:
            shape = tuple(self._tensor.shape)
            hint = "let the policy recompute it, or pass allow_cache_entry_mutation=True"
            text = f"a saved output of shape {shape} was modified in place after it was saved"
            raise ChangedError(f"{text}: its version was {self._version}, is {now}", hint)
        return self._tensor


class _Swapped:
    """A tensor that was given to a group, or kept where no group takes it."""

    def __init__(self, packer: _native.Packer, tensor: torch.Tensor) -> None:
        with _counting_versions():
            self._packed = packer(tensor)

    def get(self) -> torch.Tensor:
        with _counting_versions():
            return alias(_native.unpack(self._packed))


class _Entry:
    """What became of one call of an operation."""

    def __init__(self, drawn: tuple[_Generator, torch.Tensor] | None) -> None:
        self._drawn = drawn  # the generator that it drew from, and its state before
        self._kept: Any = None
        self._is_kept = self._is_used = False

    def keep(self, output: Outputs, how: Callable[[torch.Tensor], Any]) -> None:
        """Keeps the tensors of the output in some way."""
        self._kept = same_tree(output, lambda leaf: how(leaf) if isinstance(leaf, torch.Tensor) else leaf)
        self._is_kept = True

    def output(self, run: Callable[[], Outputs], allow_mutation: bool) -> Outputs:
        """What was kept, once; else what the operation computes now."""
        if not self._is_kept:
            return self._run(run)
        if self._is_used:
            hint = "run forward again, or use a checkpoint without a policy for operations"
            text = "a second backward over a region with a policy for operations"
            raise PhaseError(f"{text}: what it had saved was used up by the first", hint)
        kept, self._kept, self._is_used = self._kept, None, True
        try:
            return same_tree(kept, lambda leaf: leaf.get() if isinstance(leaf, (_Saved, _Swapped)) else leaf)
        except ChangedError:
            if not allow_mutation:
                raise
        return self._run(run)

    def _run(self, run: Callable[[], Outputs]) -> Outputs:
        if self._drawn is None:
            return run()
        generator, state = self._drawn
        before = generator.state()
        generator.set(state)
        try:
            return run()
        finally:
            generator.set(before)


class _Record:
    """What became of each operation of a region, in order of its calls."""

    def __init__(self) -> None:
        self._entries: dict[Operation, list[_Entry]] = defaultdict(list)

    def add(self, operation: Operation, entry: _Entry) -> None:
        self._entries[operation].append(entry)

    def entry(self, operation: Operation, number: int) -> _Entry:
        """That of the `number`-th call."""
        entries = self._entries.get(operation, [])
        if number < len(entries):
            return entries[number]
        hint = "a checkpointed function must do the same each time it runs"
        raise PhaseError(f"{operation} runs in the recomputation, but did not in forward", hint)


class _Forward(TorchDispatchMode):
    """Asks the policy about every operation, and keeps what it says."""

    def __init__(self, policy_fn: Callable[..., object], record: _Record, group_swap: bool, cpu_pool: object) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._policy_fn = policy_fn
        self._record = record
        find = current_group(named=True)
        self._packer = _native.Packer(find=find, **copies(group_swap, cpu_pool))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled block is one piece: what happens within it is its own business."""
        return True

    def __torch_dispatch__(
        self, func: Operation, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        entry = _Entry(_generator_state(func, args, kwargs))
        output = func(*args, **kwargs)
        answer = self._policy_fn(OperationContext(output), func, *args, **kwargs)
        policy = operation_policy(answer, func)
        if not (policy.recomputes or must_run(func)):
            entry.keep(output, self._swapped if policy is CheckpointPolicy.MUST_SWAP else _Saved)
        self._record.add(func, entry)
        return output

    def _swapped(self, tensor: torch.Tensor) -> _Swapped:
        return _Swapped(self._packer, tensor)


class _Recomputation(TorchDispatchMode):
    """Hands out what forward kept, and runs the rest."""

    def __init__(self, record: _Record, allow_mutation: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record
        self._allow_mutation = allow_mutation
        self._calls: dict[Operation, int] = defaultdict(int)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As in forward."""
        return True

    def __enter__(self) -> Any:
        self._calls.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Operation, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        number = self._calls[func]
        self._calls[func] += 1
        entry = self._record.entry(func, number)
        return entry.output(functools.partial(func, *args, **kwargs), self._allow_mutation)


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Callable[..., object] | Sequence[Operation],
    allow_cache_entry_mutation: bool = False,
    group_swap: bool = False,
    cpu_pool: object | None = None,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts for the first run and the recomputation of a region, by a policy for operations.

    Args:
        policy_fn_or_list: `f(context, operation, *args, **kwargs)` with a `CheckpointPolicy` or a bool
            (save, recompute) as answer, asked once for each operation, in forward; or a list of
            operations whose outputs are saved. `context.op_output` is the output.
        allow_cache_entry_mutation: Whether a saved output may be modified in place meanwhile: it is
            computed again then. Without, that is an error.
        group_swap: Whether small outputs that are swapped share host buffers.
        cpu_pool: A `PinnedMemoryPool` for the copies.

    Returns:
        Two contexts, for the `context_fn` of a checkpoint, this one's or PyTorch's.

    Raises:
        SettingError: Neither a function nor a list of operations.

    Example:
        >>> def policy(context, operation, *args, **kwargs):
        ...     if operation is torch.ops.aten.mm.default:
        ...         return CheckpointPolicy.MUST_SWAP
        ...     return CheckpointPolicy.PREFER_RECOMPUTE
        >>> contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        >>> y = checkpoint(block, x, context_fn=contexts)
    """
    native_pool(cpu_pool)
    policy_fn = _policy(policy_fn_or_list)
    record = _Record()
    forward = _Forward(policy_fn, record, group_swap, cpu_pool)
    return forward, _Recomputation(record, allow_cache_entry_mutation)


def _policy(given: object) -> Callable[..., object]:
    if isinstance(given, (list, tuple, set, frozenset)):
        for operation in given:
            _check_operation(operation)
        saved = frozenset(given)
        return lambda context, operation, *args, **kwargs: operation in saved
    if not callable(given):
        hint = "pass f(context, operation, *args, **kwargs), or a list of operations to save"
        raise SettingError(f"a {type(given).__name__} is no policy for operations", hint)
    return given


def _check_operation(operation: object) -> None:
    if isinstance(operation, torch._ops.OpOverloadPacket):
        hint = f"name an overload of it, for example torch.ops.{operation}.default"
        raise SettingError(f"{operation} has several overloads", hint)
    if not isinstance(operation, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        hint = "pass operations such as torch.ops.aten.mm.default"
        raise SettingError(f"{operation!r} is no operation", hint)


# ---- operations


def must_run(func: Operation) -> bool:
    """Whether an operation runs again whatever a policy says."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    if schema.is_mutable or any(value.alias_info is not None for value in schema.returns):
        return True
    return str(schema.name).startswith(("aten::empty", "aten::new_empty"))


class _Generator:
    """Where an operation draws random numbers from."""

    def __init__(self, given: torch.Generator | None, device: torch.device) -> None:
        self._given = given
        self._device = device

    def state(self) -> torch.Tensor:
        if self._given is not None:
            return self._given.get_state()
        if self._device.type == "cpu":
            return torch.get_rng_state()
        state: torch.Tensor = torch.get_device_module(self._device).get_rng_state(self._device)
        return state

    def set(self, state: torch.Tensor) -> None:
        if self._given is not None:
            self._given.set_state(state)
        elif self._device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(self._device).set_rng_state(state, self._device)


def _generator_state(func: Operation, args: Any, kwargs: dict[str, Any]) -> tuple[_Generator, torch.Tensor] | None:
    """The generator that an operation draws from, and its state before; None if it draws nothing."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return None
    values = [*args, *kwargs.values()]
    given = next((value for value in values if isinstance(value, torch.Generator)), None)
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    device = next((tensor.device for tensor in tensors), kwargs.get("device"))
    generator = _Generator(given, torch.device(device or torch.get_default_device()))
    return generator, generator.state()


# ---- tensors below autograd


def _counting_versions() -> AbstractContextManager[Any]:
    """Inside, `detach` shares the version counter, as above autograd: below it does not by default."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory and version, without what refers to the graph."""
    with _counting_versions():
        return tensor.detach()
