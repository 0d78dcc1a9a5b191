"""Marks on what is wrapped, and warnings for what is wrapped twice.

Wrapping marks the region, every module below it, and the public callables that these hold as attributes of
their own. A region within a region would save, swap or recompute twice, so wrapping warns of every mark
that it meets, and goes ahead. Functions and methods are exempt: they say nothing about who uses them. So is what
a framework's operations are, where those are objects.

No framework is imported here: a front end says what its modules are. "Module" stands for what a framework
calls so: a `Cell` in MindSpore.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Marks:
    """How a framework's modules are marked.

    A wrapper has what it wraps as `_inner` in its `__dict__`, a module made of a callable as `function`.
    """

    module: type[Any]
    called: type[Any]  # the module that a callable becomes
    within: Callable[[Any], Iterable[Any]]  # a module and all below it
    warn: Callable[[str], None]
    operations: tuple[type[Any], ...] = ()

    @property
    def _plain(self) -> tuple[type[Any], ...]:
        return (*_PLAIN, *self.operations)

    def mark_region(self, region: object) -> None:
        """Warns of the marks that a region about to be wrapped has in it, then marks all of it."""
        if self.is_exempt(region):
            return
        name = self.class_name(region)
        if self.is_marked(region):
            self._warn(f"{name} is wrapped already, or lies within something that is")
        below = list(self._below(region))
        held = [item for module in (region, *below) for item in self._callables_of(module)]
        for module in below:
            if self.is_marked(module):
                self._warn(f"{name} has {self.class_name(module)} in it, which is wrapped already")
        for item in held:
            if self.is_marked(item):
                self._warn(f"{name} holds the callable {self.class_name(item)}, which is wrapped already")
        for item in (region, *below, *held):
            self._mark(item)

    def _warn(self, text: str) -> None:
        self.warn(f"{text}; it is saved and moved twice")

    def is_exempt(self, region: object) -> bool:
        """Whether something is a plain function, a builtin, a bound method, or a wrapper of one."""
        return isinstance(self._innermost(region), self._plain)

    def _innermost(self, region: object) -> object:
        """What wrappers hold, however many there are."""
        while isinstance(region, self.module):
            inside = region.function if isinstance(region, self.called) else region.__dict__.get("_inner")
            if inside is None:
                return region
            region = inside
        return region

    def class_name(self, region: object) -> str:
        """The class of a module, or of the callable that it holds."""
        return type(region.function if isinstance(region, self.called) else region).__name__

    def _below(self, region: object) -> Iterator[Any]:
        """The modules within a module, but for those that only hold a plain function."""
        if isinstance(region, self.module):
            for module in self.within(region):
                if module is not region and not self.is_exempt(module):
                    yield module

    def _callables_of(self, region: object) -> Iterator[object]:
        """The public callables that a module has as attributes of its own."""
        if not isinstance(region, self.module):
            return
        for name, value in list(vars(region).items()):
            public = not name.startswith("_") and callable(value)
            if public and not isinstance(value, (self.module, *self._plain)):
                yield value

    def is_marked(self, item: object) -> bool:
        """Whether something is a region, or part of one."""
        if isinstance(item, self.module):
            return MARK in item.__dict__
        try:
            return getattr(item, MARK, False) is True
        except Exception:
            return False

    def _mark(self, item: object) -> None:
        if isinstance(item, self.module):
            item.__dict__[MARK] = True
            return
        try:
            setattr(item, MARK, True)
        except Exception:
            return  # it refuses: then it is left as it is
