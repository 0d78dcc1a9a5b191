"""Counts the bytes that a session manages, from outside: storages that are kept by weak references, those that are
swapped as the engine counts what is on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

import ebbtide.torch
from ebbtide.torch import _plan


class Managed:
    """The most bytes that were on the device at one time, apart from what is always there."""

    def __init__(self, session: ebbtide.torch.Session) -> None:
        self._session = session
        self._kept: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def keeps(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._kept[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def look(self, *_: object) -> None:
        self._kept = {key: entry for key, entry in self._kept.items() if not entry[0].expired()}
        kept = sum(size for _, size in self._kept.values())
        self.peak = max(self.peak, kept + int(self._session.stats()["live_bytes"]))


@contextmanager
def managed(session: ebbtide.torch.Session, model: torch.nn.Module) -> Iterator[Managed]:
    """Looks whenever a tensor is saved, a module has run, or a gradient has come to a module."""
    meter = Managed(session)
    saves = _plan.Watcher.saves

    def watched(self: _plan.Watcher, tensor: torch.Tensor) -> bool:
        leaves = saves(self, tensor)
        if not leaves:
            meter.keeps(tensor)
        meter.look()
        return leaves

    stays = _plan.Watcher.stays

    def left_out(self: _plan.Watcher, tensor: torch.Tensor) -> None:
        stays(self, tensor)
        meter.keeps(tensor)
        meter.look()

    handles = [module.register_forward_hook(meter.look) for module in model.modules()]
    handles += [module.register_full_backward_hook(meter.look) for module in model.modules()]
    with mock.patch.object(_plan.Watcher, "saves", watched), mock.patch.object(_plan.Watcher, "stays", left_out):
        try:
            yield meter
        finally:
            for handle in handles:
                handle.remove()
