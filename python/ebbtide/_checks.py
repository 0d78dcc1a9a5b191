"""Settings that users give: what is wrong with them is said before anything is opened. No framework, no state."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ebbtide.errors import SettingError

Predicate = Callable[[Any], bool]  # of a tensor
Selection = str | Predicate | Sequence[str | Predicate]
MIN_BYTES = 4096  # a page: less than that does not go back to the system
MOST = 2**63 - 1  # what the engine can count


@dataclass(frozen=True)
class Settings:
    """Which tensors of a swapped layer may move."""

    min_bytes: int
    decide: Predicate | None


def check_numbers(**numbers: object) -> None:
    """Refuses what is no whole number from 0 to `MOST`; host_bytes and prefetch may be None."""
    for name, value in numbers.items():
        if value is None and name in ("host_bytes", "prefetch"):
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise SettingError(f"{name}={value!r} is a {type(value).__name__}", f"{name} takes a whole number")
        if value < 0:
            raise SettingError(f"{name}={value} is negative", f"{name} takes a whole number from 0 on")
        if value > MOST:
            raise SettingError(f"{name}={value} is larger than {MOST}", f"{name} takes a smaller number")


def check_tier(tier: object) -> None:
    """Refuses what is no text. Which words there are is the engine's to say."""
    if tier is not None and not isinstance(tier, str):
        raise SettingError(f"tier={tier!r} is a {type(tier).__name__}", 'tier takes "file" or "host", or None')


def one_of(**settings: object) -> None:
    """Refuses more than one of settings that exclude each other."""
    given = [name for name, value in settings.items() if value is not None]
    if len(given) > 1:
        raise SettingError(f"{' and '.join(f'{name}=' for name in given)} were given", "they exclude each other")


def check_truth(name: str, value: object) -> None:
    """Refuses what is neither True nor False."""
    if not isinstance(value, bool):
        raise SettingError(f"{name}={value!r} is a {type(value).__name__}", f"{name} takes True or False")


def check_group_name(name: object) -> None:
    """Refuses what is no text, or an empty one."""
    if not isinstance(name, str) or not name:
        raise SettingError(f"{name!r} is no name of a group", "pass a text that isn't empty")


def folder(path: str | os.PathLike[str] | None) -> str | None:
    """A spill folder as the native module takes it."""
    if path is None:
        return None
    if not isinstance(path, (str, os.PathLike)):
        raise SettingError(f"spill_dir={path!r} is a {type(path).__name__}", "spill_dir takes the path of a folder")
    return os.fsdecode(path)


def layer_patterns(layers: object) -> list[str]:
    """The patterns of `layers=`."""
    patterns: list[Any] = [layers]
    if isinstance(layers, Iterable) and not isinstance(layers, str):
        patterns = list(layers)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise SettingError(
                f"layers= has {pattern!r}, a {type(pattern).__name__}", "it takes patterns of module names, as texts"
            )
    return patterns


def split_selection(selection: object, what: str) -> tuple[list[str], list[Predicate]]:
    """The patterns and the functions of `include=` or `exclude=`."""
    if selection is None:
        return [], []
    items: list[Any] = [selection]
    if isinstance(selection, Iterable) and not isinstance(selection, str):
        items = list(selection)
    for item in items:
        if not isinstance(item, str) and not callable(item):
            raise SettingError(
                f"{what}= has {item!r}, a {type(item).__name__}",
                "it takes patterns of layers and functions of a tensor; for a size there is min_bytes=",
            )
    if not items:
        raise SettingError(f"{what}={selection!r} is empty", f"leave {what}= out, or name something")
    return [item for item in items if isinstance(item, str)], [item for item in items if not isinstance(item, str)]


def deciding(include: Sequence[Predicate], exclude: Sequence[Predicate]) -> Predicate | None:
    """One question about a tensor that puts all of them; None if there are none."""
    if not include and not exclude:
        return None

    def decide(tensor: Any) -> bool:
        wanted = not include or any(ask(tensor) for ask in include)
        return wanted and not any(ask(tensor) for ask in exclude)

    return decide
