"""Dicts, lists and tuples in any nesting: what they hold, and the same with something else inside."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any


def leaves(tree: object) -> Iterator[object]:
    """What lists, tuples and values of dicts hold, however deep."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


def same_tree(tree: Any, replace: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """A tree with new dicts, lists and tuples, of the same types, and what `replace` makes of the leaves."""
    if isinstance(tree, dict):
        return _same_dict(tree, replace)
    if isinstance(tree, list):
        return _same_list(tree, [same_tree(item, replace) for item in tree])
    if isinstance(tree, tuple):
        items = [same_tree(item, replace) for item in tree]
        if hasattr(tree, "_fields"):
            return type(tree)._make(items)  # type: ignore[attr-defined]
        return tuple(items) if type(tree) is tuple else _built(type(tree), items, tree)
    return replace(tree)


def _same_dict(tree: dict[Any, Any], replace: Callable[[Any], Any]) -> Any:
    values = {key: same_tree(value, replace) for key, value in tree.items()}
    if type(tree) is dict:
        return values
    return _built(type(tree), values, tree)


def _same_list(tree: list[Any], items: list[Any]) -> Any:
    return items if type(tree) is list else _built(type(tree), items, tree)


def _built(kind: type, content: Any, like: Any) -> Any:
    """A container of a subclass: a shallow copy of the old one, with other content."""
    if isinstance(like, tuple):
        return kind(content)
    made = copy.copy(like)
    if isinstance(made, list):
        made[:] = content
    else:
        for key, value in content.items():
            made[key] = value
    return made
