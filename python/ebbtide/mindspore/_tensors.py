"""Tensors that are swapped in place, together: regions and groups. See `ebbtide._regions`."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from mindspore import Tensor

from ebbtide._native import Group
from ebbtide._regions import GroupOfRegions, Region, Storage
from ebbtide._trees import leaves
from ebbtide.mindspore._keepers import address, find
from ebbtide.mindspore._passes import running
from ebbtide.mindspore._swapped import SwapTensor, base_check_fn, movable

__all__ = ["Region", "Storage", "SwapGroup", "SwapTensor", "base_check_fn"]


class SwapGroup(GroupOfRegions):
    """Regions that move together: usually what one layer saved in one pass.

    MindSpore can't tell who uses a storage. Kept are parameters, memory that isn't MindSpore's own, what
    another group has as well, and what `protect_alias_tensors` was told of; all else is emptied, and must
    not be read until it is loaded.

    Args:
        group_name: Name in messages.

    Raises:
        SettingError: The name is no text, or empty.

    Example:
        >>> group = SwapGroup("layer 0"); group.add(region)
        >>> group.launch_offload(); group.wait_offload()
        >>> group.launch_load(); group.wait_load()
    """

    def __init__(self, group_name: str) -> None:
        super().__init__(group_name)
        of = running()
        self._pass = None if of is None else weakref.ref(of)

    @property
    def _is_waste(self) -> bool:
        """Whether its pass is over, and nothing in it was named by hand, which lives on."""
        return self._pass is not None and self._pass() is None and not self._regions

    @staticmethod
    def _is_last(group_name: str) -> bool:
        from ebbtide.mindspore._manager import SwapManager  # which is made of groups

        return SwapManager().is_last_group(group_name)

    @staticmethod
    def _shared(tensors: object) -> tuple[set[int], Callable[[Group], int]]:
        shared: list[Tensor] = [own for own in map(movable, leaves(tensors)) if own is not None]
        keys = [keeper.key for keeper in map(find, shared) if keeper is not None]
        addresses = {at for at in map(address, shared) if at}
        return addresses | set(keys), lambda group: group.protect_keys(keys)

    def _keep_users(self, tensors: Callable[[], object]) -> None:
        """Only what is named by hand is emptied: without that, nothing needs to be kept, nor looked at."""
        if self._regions:
            self.protect_alias_tensors(tensors())
