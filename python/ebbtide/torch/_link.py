"""How fast a tier takes and gives bytes of a device of PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ebbtide import _link, _native
from ebbtide._link import Link


def measure(open_hub: Callable[[], _native.Hub], device: torch.device) -> Link:
    """Moves a block of 16 MiB out and in three times, and one of 4 KiB."""

    def fill(group: _native.Group, count: int) -> torch.Tensor:
        block = torch.ones(count, dtype=torch.uint8, device=device)
        group.add(block, "block", sole=False)
        return block

    return _link.measure(open_hub, fill, functools.partial(settle, device))


def settle(device: torch.device) -> None:
    """Waits until an accelerator has done what was queued."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
