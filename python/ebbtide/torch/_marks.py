"""Marks on what is wrapped, and warnings for what is wrapped twice.

Wrapping marks the region, every module below it, and the public callables that these hold as attributes of
their own. A region within a region would save, swap or recompute twice, so wrapping warns of every mark
that it meets, and goes ahead. Functions and methods are exempt: they say nothing about who uses them.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ebbtide.torch import _defaults

MARK = "_ebbtide_region"
_PLAIN = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)


class Called(nn.Module):
    """A plain callable as a module without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it."""
        return self.function(*args, **kwargs)

    def extra_repr(self) -> str:
        """What it calls."""
        return str(getattr(self.function, "__name__", self.function))


def mark_region(region: object) -> None:
    """Warns of the marks that a region about to be wrapped has in it, then marks all of it."""
    if is_exempt(region):
        return
    name = class_name(region)
    if is_marked(region):
        _warn(f"{name} is wrapped already, or lies within something that is")
    below = list(modules_below(region))
    held = [item for module in (region, *below) for item in callables_of(module)]
    for module in below:
        if is_marked(module):
            _warn(f"{name} has {class_name(module)} in it, which is wrapped already")
    for item in held:
        if is_marked(item):
            _warn(f"{name} holds the callable {class_name(item)}, which is wrapped already")
    for item in (region, *below, *held):
        _mark(item)


def _warn(text: str) -> None:
    _defaults.warn(f"{text}; it is saved and moved twice", stacklevel=6)


def is_exempt(region: object) -> bool:
    """Whether something is a plain function, a builtin, a bound method, or a wrapper of one."""
    return isinstance(innermost(region), _PLAIN)


def innermost(region: object) -> object:
    """What wrappers hold, however many there are."""
    while isinstance(region, nn.Module):
        inside = region.function if isinstance(region, Called) else region.__dict__.get("_inner")
        if inside is None:
            return region
        region = inside
    return region


def class_name(region: object) -> str:
    """The class of a module, or of the callable that it holds."""
    return type(region.function if isinstance(region, Called) else region).__name__


def modules_below(region: object) -> Iterator[nn.Module]:
    """The modules within a module, but for those that only hold a plain function."""
    if isinstance(region, nn.Module):
        for module in region.modules():
            if module is not region and not is_exempt(module):
                yield module


def callables_of(region: object) -> Iterator[object]:
    """The public callables that a module has as attributes of its own."""
    if not isinstance(region, nn.Module):
        return
    for name, value in list(vars(region).items()):
        public = not name.startswith("_") and callable(value)
        if public and not isinstance(value, (nn.Module, *_PLAIN)):
            yield value


def is_marked(item: object) -> bool:
    """Whether something is a region, or part of one."""
    if isinstance(item, nn.Module):
        return MARK in item.__dict__
    try:
        return getattr(item, MARK, False) is True
    except Exception:
        return False


def _mark(item: object) -> None:
    if isinstance(item, nn.Module):
        item.__dict__[MARK] = True
        return
    try:
        setattr(item, MARK, True)
    except Exception:
        return  # it refuses: then it is left as it is
