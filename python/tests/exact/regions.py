"""Contexts around a forward, by name: the public `offload`, and the ways of the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

import ebbtide.torch

from . import native
from .bits import assert_same, tree_bits
from .inputs import seed_all
from .ways import Region, Way

Context = Callable[[], AbstractContextManager[object]]
IN_PLACE = "in place to file"
KINDS = ("offload to file", "offload to host", "handles to file", IN_PLACE)


class Regions:
    """Makes regions of one kind: what was saved in one is away when its `with` has ended, unless something holds it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.open: list[Region] = []
        self._native = native.Ways() if not kind.startswith("offload") else None

    def _way(self) -> Way:
        assert self._native is not None
        ways = (self._native.to_file, self._native.to_host, self._native.in_place)
        return next(way for way in ways if way.name == self.kind)

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """A region of this kind."""
        if self._native is None:
            with ebbtide.torch.offload(tier=self.kind.split()[-1], min_bytes=0):
                yield
            ebbtide.torch.synchronize()
            return
        region = self._way().region()
        self.open.append(region)
        with region.hooks():
            yield
        region.away()

    def moved(self) -> int:
        """Tensors that left so far."""
        if self._native is None:
            return int(ebbtide.torch.stats()["tensors_out"])
        ways = (self._native.to_file, self._native.to_host, self._native.in_place)
        return sum(int(way.hub.stats()["tensors_out"]) for way in ways)

    def bytes_moved(self) -> int:
        """Bytes that left so far."""
        if self._native is None:
            return int(ebbtide.torch.stats()["bytes_out"])
        ways = (self._native.to_file, self._native.to_host, self._native.in_place)
        return sum(int(way.hub.stats()["bytes_out"]) for way in ways)

    def close(self) -> None:
        """Gives everything back."""
        for region in self.open:
            region.close()
        if self._native is not None:
            self._native.close()


def same(compute: Callable[[Context], Any], regions: Regions, *, enough: int = 1, seed: int = 5) -> Any:
    """Fails unless a computation gives the same tensors plain and with regions; returns what plain torch gave.

    `enough`: how many tensors have to move at least; in place any number may, since the computation may hold them.
    """
    seed_all(seed)
    expected = tree_bits(compute(contextlib.nullcontext))
    before = regions.moved()
    seed_all(seed)
    got = tree_bits(compute(regions.region))
    assert_same(expected, got)
    if regions.kind != IN_PLACE:
        assert regions.moved() - before >= enough, regions.moved() - before
    return expected


class Keeping(torch.autograd.Function):
    """Saves any tensors; backward calls `look` with them as they come back."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, look: Callable[..., None], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.look = look
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.look(*ctx.saved_tensors)
        return grads[0], None, *[None] * len(ctx.saved_tensors)


def keep(look: Callable[..., None], *tensors: torch.Tensor) -> torch.Tensor:
    """A result whose graph saved these tensors."""
    anchor = torch.zeros((), requires_grad=True)
    result: torch.Tensor = Keeping.apply(anchor, look, *tensors)
    return result
