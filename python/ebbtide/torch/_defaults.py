"""The engine behind everything that is driven by hand, and whose saved-tensor hooks apply now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ebbtide._defaults import configure, hub, pass_on_warnings, source, warn

__all__ = ["configure", "hooks_are_free", "hooks_can_be_seen", "hub", "pass_on_warnings", "source", "top_hooks", "warn"]


def top_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The saved-tensor hooks that apply now on this thread: pack and unpack of the innermost pair.

    None, too, where PyTorch can't say, which is so before 2.8.
    """
    look = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    top: tuple[Callable[..., Any], Callable[..., Any]] | None = None if look is None else look(False)
    return top


def hooks_can_be_seen() -> bool:
    """Whether PyTorch can say which saved-tensor hooks apply, which it can from 2.8 on."""
    return hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")


def hooks_are_free() -> bool:
    """Whether it is certain that nobody's saved-tensor hooks apply now, which ours would hide."""
    return hooks_can_be_seen() and top_hooks() is None
