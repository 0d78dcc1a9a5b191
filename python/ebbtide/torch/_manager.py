"""Groups by name, and modules that drive their own: see `ebbtide._manager`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ebbtide._manager import Manager
from ebbtide.torch._chain import ModuleLayers
from ebbtide.torch._step import refused_by_transform
from ebbtide.torch._tensors import SwapGroup


class SwapManager(Manager[nn.Module]):
    """Owns all groups by name. There is one in a process: constructing it again returns it.

    Example:
        >>> manager = SwapManager()
        >>> for first, second in zip(model.blocks, model.blocks[1:]):
        ...     manager.set_forward_prefetch_layer(first, second)
        >>> model.blocks = nn.ModuleList(swap_wrapper(block) for block in model.blocks)

    or, without layers:
        >>> with manager.group_context("stage 0"):
        ...     y = swap(stage, x)
        >>> manager.launch_offload("stage 0"); manager.wait_offload("stage 0")
    """

    @classmethod
    def _make_layers(cls) -> ModuleLayers:
        return ModuleLayers()

    @staticmethod
    def _make_group(group_name: str) -> SwapGroup:
        return SwapGroup(group_name)

    @contextmanager
    def group_context(self, group_name: str | None) -> Iterator[None]:
        """Makes a group current for a while; then the outer one is again, also after an exception."""
        with super().group_context(group_name):
            try:
                yield
            except RuntimeError as error:
                refused = refused_by_transform(error)
                if refused is None:
                    raise
                raise refused from error
