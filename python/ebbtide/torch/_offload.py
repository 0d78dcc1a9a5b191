"""`offload`: swaps what any code saves, without a session.

Access: each `with` belongs to the thread that enters it. What lasts from one to the next is per thread.
"""

from __future__ import annotations

import itertools
import os
import threading
import warnings
from contextlib import ContextDecorator, suppress
from types import TracebackType

import torch
from torch.autograd.graph import saved_tensors_hooks

from ebbtide import _native, _stats
from ebbtide._checks import (
    MIN_BYTES,
    Predicate,
    Selection,
    check_group_name,
    check_numbers,
    check_tier,
    deciding,
    folder,
    split_selection,
)
from ebbtide.errors import EbbtideError, EbbtideWarning, PhaseError, SettingError
from ebbtide.torch._hooks import left_alone
from ebbtide.torch._step import Region, push_hooks, refused_by_transform, wait_offload

_numbers = itertools.count(1)


class _Before(threading.local):
    """Per thread: the group whose offload was started last, which the next one waits for."""

    group: _native.Group | None = None


_before = _Before()


@_stats.at_reset
def _forget() -> None:
    _before.group = None


class offload(ContextDecorator):
    """Context (or decorator) in which what autograd saves is swapped, as one group.

    What was saved has left when the `with` ends. On an accelerator the host does not wait for that, only its
    compute stream does. With `wait=False` the copies run while the code after it runs, and their memory is free
    at the latest when the next `with` of the thread ends. So one around each part of a model lowers the peak; one
    around all of it only lowers what is held between forward and backward. Inside of a function that
    `torch.utils.checkpoint` runs it does nothing, with a warning.

    Args:
        tier: `"file"`, `"host"` or None, as for `session`.
        spill_dir: Folder of the spill file.
        host_bytes: The most bytes of host memory. All with the same three share one engine, until `reset()`.
        min_bytes: Tensors of fewer bytes stay.
        include: A function `f(tensor) -> bool`, or a list of them, asked about each tensor once.
        exclude: The same for what stays.
        wait: Whether the copies are complete at the end.
        name: What the group is called in messages and timelines. The order in which groups come home is learnt
            by name, so different parts of a model want different ones.

    Raises:
        SettingError: A setting is wrong.

    Example:
        >>> for i, block in enumerate(blocks):
        ...     with ebbtide.torch.offload(name=f"block {i}", wait=False):
        ...         x = block(x)
        >>> x.mean().backward()
    """

    def __init__(
        self,
        tier: str | None = None,
        *,
        spill_dir: str | os.PathLike[str] | None = None,
        host_bytes: int | None = None,
        min_bytes: int = MIN_BYTES,
        include: Selection | None = None,
        exclude: Selection | None = None,
        wait: bool = True,
        name: str = "offload",
    ) -> None:
        _refuse_compiling()
        check_tier(tier)
        check_numbers(min_bytes=min_bytes, host_bytes=host_bytes)
        check_group_name(name)
        self._decide = deciding(_functions(include, "include"), _functions(exclude, "exclude"))
        self._settings = (tier, folder(spill_dir), host_bytes)
        self._min_bytes = min_bytes
        self._wait = wait
        self._name = name
        self._region: Region | None = None
        self._hooks: saved_tensors_hooks | None = None
        self._entered = False
        self._source()

    def _source(self) -> _stats.Source:
        tier, spill_dir, host_bytes = self._settings
        return _stats.shared_source(tier=tier, spill_dir=spill_dir, host_bytes=host_bytes)

    def _recreate_cm(self) -> offload:
        """As a decorator: a context for each call, so that calls may nest and run in several threads."""
        tier, spill_dir, host_bytes = self._settings
        fresh = offload(tier, spill_dir=spill_dir, host_bytes=host_bytes, min_bytes=self._min_bytes, name=self._name)
        fresh._decide, fresh._wait = self._decide, self._wait
        return fresh

    def __enter__(self) -> offload:
        _refuse_compiling()
        if self._entered:
            raise PhaseError(f"this offload({self._name!r}) is entered already", "make one for each `with`")
        self._entered = True
        why = left_alone()
        if why == "left_to_checkpoint":
            warnings.warn(
                f"offload({self._name!r}) does nothing inside of torch.utils.checkpoint; put it around the checkpoint",
                EbbtideWarning,
                stacklevel=2,
            )
        if why is None:
            self._push()
        return self

    def _push(self) -> None:
        region = Region(self._source().hub, self._name, next(_numbers))
        packer = _native.Packer(find=region.open, min_bytes=self._min_bytes, decide=self._decide)
        self._hooks = push_hooks(packer)
        self._region = region

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered = False
        region, self._region = self._region, None
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__()
        group = region.group if region is not None else None
        if kind is None and group is not None:
            self._send(group)
        elif group is not None:
            with suppress(EbbtideError):  # the other error is the one to know
                group.start_offload()  # a group that has left ends with its tensors; an open one would stay
        if refused := refused_by_transform(error):
            raise refused from error

    def _send(self, group: _native.Group) -> None:
        before, _before.group = _before.group, None if self._wait else group
        group.start_offload()
        wait_offload(before)
        if self._wait:
            wait_offload(group)
        for text in self._source().hub.take_warnings():
            warnings.warn(text, EbbtideWarning, stacklevel=3)


def _refuse_compiling() -> None:
    if torch.compiler.is_compiling():
        raise SettingError("offload() inside of a compiled function", "put it around the call of that function")


def _functions(selection: object, what: str) -> list[Predicate]:
    patterns, functions = split_selection(selection, what)
    if patterns:
        raise SettingError(
            f"{what}={patterns[0]!r} of offload() is a text",
            "there are no layers here: pass a function of a tensor",
        )
    return functions
