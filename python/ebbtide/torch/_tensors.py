"""Tensors that are swapped in place, together: regions and groups. See `ebbtide._regions`."""

from __future__ import annotations

from collections.abc import Callable

from ebbtide._native import Group
from ebbtide._regions import GroupOfRegions, Region, Storage
from ebbtide._trees import leaves
from ebbtide.torch._swapped import SwapTensor, base_check_fn, movable

__all__ = ["Region", "Storage", "SwapGroup", "SwapTensor", "base_check_fn"]


class SwapGroup(GroupOfRegions):
    """Regions that move together: usually what one layer saved in one pass.

    Emptied is only what nothing outside uses: storages of other tensors, of the autograd graph and of
    the user's variables stay on the device.

    Args:
        group_name: Name in messages.

    Raises:
        SettingError: The name is no text, or empty.

    Example:
        >>> group = SwapGroup("layer 0"); group.add(region)
        >>> group.launch_offload(); group.wait_offload()
        >>> group.launch_load(); group.wait_load()
    """

    @staticmethod
    def _is_last(group_name: str) -> bool:
        from ebbtide.torch._manager import SwapManager  # which is made of groups

        return SwapManager().is_last_group(group_name)

    @staticmethod
    def _shared(tensors: object) -> tuple[set[int], Callable[[Group], int]]:
        shared = [own for own in map(movable, leaves(tensors)) if own is not None]
        return {own.untyped_storage()._cdata for own in shared}, lambda group: group.protect(shared)
