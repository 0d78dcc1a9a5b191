"""Groups by name, and cells that drive their own: see `ebbtide._manager`."""

from __future__ import annotations

from mindspore import nn

from ebbtide._manager import Manager
from ebbtide.mindspore._chain import CellLayers
from ebbtide.mindspore._tensors import SwapGroup


class SwapManager(Manager[nn.Cell]):
    """Owns all groups by name. There is one in a process: constructing it again returns it.

    Example:
        >>> manager = SwapManager()
        >>> for first, second in zip(model.blocks[:-1], model.blocks[1:]):
        ...     manager.set_forward_prefetch_layer(first, second)

    or, without layers:
        >>> with manager.group_context("stage 0"):
        ...     y = swap(stage, x)
        >>> manager.launch_offload("stage 0"); manager.wait_offload("stage 0")

    What a failed pass has sent out is given up by itself where `ms.value_and_grad` and its relatives ran it; after a
    failed `nn.TrainOneStepCell`, call `ebbtide.mindspore.reset()`. Tensors named by hand wait for `abort_group`.
    """

    @classmethod
    def _make_layers(cls) -> CellLayers:
        return CellLayers()

    @staticmethod
    def _make_group(group_name: str) -> SwapGroup:
        return SwapGroup(group_name)

    def ensure_group(self, group_name: str) -> SwapGroup:
        """The open group of a name, made if there is none or if the one there is has left already.

        Raises:
            SettingError: The name is no text, or empty.
        """
        self._tidy()
        group: SwapGroup = super().ensure_group(group_name)
        return group

    def _tidy(self) -> None:
        """Gives up what passes have left that are over."""
        super()._tidy()
        with self._lock:
            groups = [group for named in self._groups.values() for group in named]
        for group in groups:
            if isinstance(group, SwapGroup) and group._is_waste:
                self._forget(group)
                group._give_up()
