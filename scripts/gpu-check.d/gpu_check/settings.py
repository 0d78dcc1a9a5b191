"""What the stages are told, and what they write down. Imports nothing but the standard library."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

MODES = ("plain", "save_on_cpu", "checkpoint", "swap_fit", "swap_all")
"""The ways in which the GPT blocks are trained. `swap_fit`: as many layers as fit under compute."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the check: a module of this package, the mode that it is to run, and its time limit."""

    name: str
    module: str
    limit: float  # seconds, the start of Python and torch included
    mode: str = ""


def stages() -> list[Stage]:
    """All of them, in order. Their limits add up to less than five minutes."""
    blocks = [Stage(f"blocks-{mode}", "blocks", 34.0, mode) for mode in MODES]
    return [
        Stage("machine", "machine", 40.0),
        Stage("exact", "exact", 45.0),
        *blocks,
        Stage("failures", "failures", 25.0),
    ]


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the models and copies."""

    layers: int = 24
    width: int = 2048
    heads: int = 16
    tokens: int = 2048
    batch: int = 4
    steps: int = 5  # that are timed, after two that are not
    copy_bytes: int = 256 << 20
    exact_layers: int = 6
    exact_width: int = 256
    exact_tokens: int = 128
    exact_steps: int = 6


SMALL = Size(
    layers=4, width=64, heads=2, tokens=64, batch=2, steps=2, copy_bytes=1 << 20,
    exact_layers=3, exact_width=32, exact_tokens=16, exact_steps=3,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a stage is told."""

    size: Size
    cpu: bool  # use the CPU and the file tier, whatever else there is
    out: Path
    mode: str = ""
    deadline: float = 0.0  # of `time.time()`: steps that are only there for better medians end before it

    def to_json(self) -> str:
        """For the command line of a child."""
        return json.dumps({**dataclasses.asdict(self), "out": str(self.out)})

    @staticmethod
    def from_json(text: str) -> Settings:
        """What `to_json` made."""
        given = json.loads(text)
        return Settings(**{**given, "size": Size(**given["size"]), "out": Path(given["out"])})

    def other(self, stage: str) -> dict[str, Any]:
        """What an earlier stage wrote; empty if it got nowhere."""
        return read(self.out / f"{stage}.json")

    def time_left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.time()


class Record:
    """What a stage found. Every `put` is on disk when it returns, so that a stage that is stopped leaves it.

    `missing` are parts that could not run here, each with the reason; `wrong` are results that must not be.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.values: dict[str, Any] = {"missing": [], "wrong": []}
        self.put()

    def put(self, **values: Any) -> None:
        """Adds values, or replaces them."""
        self.values.update(values)
        half = self._path.with_suffix(".tmp")
        half.write_text(json.dumps(self.values, indent=1) + "\n")
        os.replace(half, self._path)

    def missing(self, what: str) -> None:
        """Names a part that can't run here."""
        self.put(missing=[*self.values["missing"], what])

    def wrong(self, what: str) -> None:
        """Names a result that must not be."""
        self.put(wrong=[*self.values["wrong"], what])


def read(path: Path) -> dict[str, Any]:
    """A record that was written, or an empty one."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def one_line(error: BaseException) -> str:
    """An error for a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
