"""Tensors that a layer names from inside of its forward, and what is saved of them.

    a layer's forward begins    the manager asks for hooks (`hooks_for_named`) if tensors were named in it before
    swap_tensor_wrapper         notes the tensors with the region that those hooks belong to
    the forward ends            what was saved of the memory of named tensors goes to the group; all else stays

Nothing is emptied: memory goes with its last owner. Access: a region belongs to the thread of its layer's call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from mindspore import Tensor
from mindspore.graph.api import _pynative_executor

from ebbtide import _defaults
from ebbtide._trees import leaves, same_tree
from ebbtide.mindspore._alone import is_recorded
from ebbtide.mindspore._manager import SwapManager
from ebbtide.mindspore._region import Saved
from ebbtide.mindspore._views import look
from ebbtide.mindspore._wrap import HandRegion, check_pool, is_in_checkpoint, may_leave

T = TypeVar("T")


class NamedRegion(HandRegion):
    """What is saved while a layer runs; of that, what lies in the memory of tensors that it names moves."""

    def __init__(self, group_name: str) -> None:
        super().__init__(None)
        self.group_name = group_name
        self._named: list[tuple[Tensor, str]] = []
        self._tags: dict[int, str] = {}

    def name(self, tensor: Tensor, tag: str) -> None:
        """Has a tensor moved, whether it was saved already or will be."""
        self._named.append((tensor, tag))

    def _moves(self, saved: Saved) -> bool:
        tag = None if saved.view is None else self._tags.get(saved.view.storage)
        if tag is None or not super()._moves(saved):
            return False
        saved.label = tag
        return True

    def close(self) -> None:
        """The layer's forward is over."""
        # Held until here, so that no memory has become another tensor's meanwhile.
        named, self._named = self._named, []
        self._tags = {look(tensor).storage: tag for tensor, tag in named}
        super().close()


class _Local(threading.local):
    """The regions of this thread that are open, the innermost last."""

    def __init__(self) -> None:
        self.regions: list[NamedRegion] = []


_local = _Local()


def hooks_for_named(group_name: str) -> Callable[[bool], None] | None:
    """Begins a region for the tensors that are named in a group; what ends it is told whether the code has failed.

    None if nothing is recorded, or if hooks of somebody else apply, which must not be hidden.
    """
    if not is_recorded() or _pynative_executor.is_saved_tensor_hook_active():
        return None
    region = NamedRegion(group_name)
    region.__enter__()
    _local.regions.append(region)

    def end(failed: bool) -> None:
        _local.regions.remove(region)
        region.__exit__(RuntimeError if failed else None, None, None)
        if not failed:
            region.close()

    return end


def swap_tensor_wrapper(
    target: T, tag: str | None = None, group_swap: bool = False, cpu_pool: object | None = None
) -> T:
    """Swaps tensors by name, from inside a layer's forward; use the result as you used `target`.

    The tensors named here are copied out with the group of the layer, and their memory goes when the
    last who uses it has let go. What a layer saved before its very first call of this is not watched and
    keeps its memory; from the second pass on everything is. Where hooks for saved tensors of somebody else apply
    (a session, a swapped layer), theirs decide, and this changes nothing.

    Args:
        target: Tensors in any nesting of dicts (values), lists and tuples. Anything else is passed
            through.
        tag: Label in messages. None: the name of the group.
        group_swap: Whether small tensors share host buffers. They always do here.
        cpu_pool: None; there are no pools of one's own here.

    Returns:
        The same tensors in containers of the same types. Without a current group, and in the last layer
        of a chain, the very object.

    Raises:
        SettingError: `cpu_pool` is something.

    Example:
        >>> hidden = swap_tensor_wrapper(self.up(x), "up")
    """
    check_pool(cpu_pool)
    manager = SwapManager()
    name = manager.get_current_group_name()
    if name is None:
        text = f"`{tag}` was to be swapped outside of any group: it stays on the device"
        _defaults.warn(text)
        return target
    if manager.is_last_group(name) or is_in_checkpoint():
        return target
    eligible = [leaf for leaf in leaves(target) if isinstance(leaf, Tensor) and may_leave(leaf)]
    if eligible and not manager._layers.in_backward():
        manager._layers.watch(manager, name)
        region = _local.regions[-1] if _local.regions else None
        if region is not None and region.group_name == name:
            for leaf in eligible:
                region.name(leaf, tag or name)
    try:
        rebuilt: T = same_tree(target)
    except Exception:
        return target  # a container that can't be built from its content; the leaves are the same
    return rebuilt
