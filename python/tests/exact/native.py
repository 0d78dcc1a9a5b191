"""The ways of the engine: handles to the file tier and to host memory, and in place to the file tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ebbtide import _native

from .inputs import Input
from .runs import Case, Verdict, cases, compare
from .ways import Region, swappable

Open = Callable[[], _native.Group]


class HandleRegion:
    """A group of its own whose tensors become handles in the pack hook."""

    def __init__(self, open_group: Open) -> None:
        self.group = open_group()
        self.packer = _native.Packer(self.group)

    def hooks(self) -> AbstractContextManager[object]:
        return saved_tensors_hooks(self.packer, _native.unpack)

    def away(self) -> int:
        if self.packer.tensors and self.group.phase == "open":
            self.group.start_offload()
            if self.group.phase == "offloading":  # it closes when nobody holds any of its handles
                self.group.wait_offload()
        return self.packer.tensors

    def close(self) -> None:
        self.group.close()


class InPlaceRegion:
    """A group of its own whose storages are emptied and filled again; more if backward runs inside of it."""

    def __init__(self, open_group: Open) -> None:
        self.open_group = open_group
        self.group = open_group()
        self.aliases: list[torch.Tensor] = []

    def hooks(self) -> AbstractContextManager[object]:
        return saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, _native.Group | None]:
        alias = tensor.detach()
        if not swappable(tensor):
            return alias, None
        if self.group.phase != "open":
            self.group = self.open_group()
        # The alias is ours alone: its Python references don't count, other tensors on its storage do.
        self.group.add(alias, f"saved {len(self.aliases)}", sole=False)
        self.aliases.append(alias)
        return alias, self.group

    def unpack(self, packed: tuple[torch.Tensor, _native.Group | None]) -> torch.Tensor:
        alias, group = packed
        if group is not None and group.phase != "closed":  # it closes when everything is home
            group.need()
        return alias

    def away(self) -> int:
        if self.aliases and self.group.phase == "open":
            self.group.start_offload()
            self.group.wait_offload()
        return sum(alias.untyped_storage().nbytes() == 0 for alias in self.aliases)

    def close(self) -> None:
        self.group.close()


class Native:
    """Regions of one kind on one hub."""

    def __init__(self, name: str, kind: Any, tier: str) -> None:
        self.name = name
        self.kind = kind
        self.hub = _native.Hub(tier=tier)
        self.count = 0

    def region(self) -> Region:
        region: Region = self.kind(self.open)
        return region

    def open(self) -> _native.Group:
        """A group of its own."""
        self.count += 1
        return self.hub.open("operator", self.count)

    def close(self) -> None:
        """Gives everything back."""
        self.hub.close()


class Ways:
    """All of them, each with a hub of its own."""

    def __init__(self) -> None:
        self.to_file = Native("handles to file", HandleRegion, "file")
        self.to_host = Native("handles to host", HandleRegion, "host")
        self.in_place = Native("in place to file", InPlaceRegion, "file")

    def close(self) -> None:
        """Gives everything back."""
        for way in (self.to_file, self.to_host, self.in_place):
            way.close()


def judged(one: Input, ways: Ways) -> Iterator[tuple[Case, dict[str, Verdict]]]:
    """Each form of an input, and the verdicts on the ways that it goes."""
    for case in cases(one):
        yield case, compare(case, [ways.to_file, ways.in_place])
    for case in cases(one, strided=True):
        yield case, compare(case, [ways.to_host])
    for case in cases(one, loose=True):
        yield case, compare(case, [ways.in_place])
