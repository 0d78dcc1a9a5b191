"""Ways in which saved tensors may travel during a test.

A *way* opens a *region* for each forward pass: its hooks are on while the forward runs, `away` sends everything that
was saved out of the device, backward brings it back, `close` ends it. `Plain` keeps everything, `Copied` and `InPlace`
are right ways in plain Python, `Copied` with a wrong kind of slot is one that the harness has to find. Those of the
engine are in `native`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


class Region(Protocol):
    """One forward pass and its backward."""

    def hooks(self) -> AbstractContextManager[object]:
        """On while the forward runs."""

    def away(self) -> int:
        """Sends out what was saved; the number of tensors that are out."""

    def close(self) -> None:
        """After backward, or instead of it."""


class Way(Protocol):
    """A place that saved tensors go to."""

    name: str

    def region(self) -> Region:
        """A region for the next forward."""


def swappable(tensor: torch.Tensor) -> bool:
    """Whether a way in Python moves this tensor; what is unusual stays as it is."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return tensor.device.type == "cpu" and not tensor.is_quantized and tensor.numel() > 0


class PlainRegion:
    """No hooks at all."""

    def hooks(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def away(self) -> int:
        return 0

    def close(self) -> None:
        pass


class Plain:
    """Plain torch: what everything is compared with."""

    name = "plain"

    def region(self) -> Region:
        return PlainRegion()


class Slot:
    """A saved tensor of a way in Python: an alias until it is sent away, then a copy of its storage."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.alias: torch.Tensor | None = tensor.detach()
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.dtype = tensor.dtype
        self.bits = (tensor.is_conj(), tensor.is_neg())
        self.copy: torch.UntypedStorage | None = None

    def send(self) -> None:
        """Copies the storage and lets go of the alias."""
        if self.alias is not None:
            self.copy = self.alias.untyped_storage().clone()
            self.alias = None

    def rebuilt(self) -> torch.Tensor:
        """The tensor as it was saved."""
        if self.alias is not None:
            return self.alias
        assert self.copy is not None
        bare = torch.empty(0, dtype=self.dtype).set_(self.copy, self.offset, self.shape, self.stride)
        return self.marked(bare)

    def marked(self, bare: torch.Tensor) -> torch.Tensor:
        """With the conjugate and negative bits that it had."""
        conj, neg = self.bits
        return torch._neg_view(bare.conj() if conj else bare) if neg else (bare.conj() if conj else bare)


class CopiedRegion:
    """Hooks that keep slots, which are copied when the forward is over."""

    slot: type[Slot] = Slot

    def __init__(self) -> None:
        self.slots: list[Slot] = []

    def hooks(self) -> AbstractContextManager[object]:
        return saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> Any:
        if not swappable(tensor):
            return tensor.detach()
        self.slots.append(self.slot(tensor))
        return self.slots[-1]

    def unpack(self, packed: Any) -> torch.Tensor:
        return packed.rebuilt() if isinstance(packed, Slot) else packed

    def away(self) -> int:
        for slot in self.slots:
            slot.send()
        return len(self.slots)

    def close(self) -> None:
        self.slots.clear()


class StridelessSlot(Slot):
    """Wrong: forgets the strides."""

    def rebuilt(self) -> torch.Tensor:
        assert self.copy is not None
        flat = torch.empty(0, dtype=self.dtype).set_(self.copy)
        count = self.shape.numel()
        enough = flat[self.offset :][:count].clone()
        enough.resize_(count)
        return self.marked(enough.view(self.shape))


class ShiftedSlot(Slot):
    """Wrong: a view that begins one element too early, where there is one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.offset = max(0, self.offset - 1)


class EarlySlot(Slot):
    """Wrong: copies inside the pack hook, before the operator has filled all of its buffers."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.send()


class Copied:
    """Right: copies after the forward, exact in every respect. With another kind of slot: wrong."""

    def __init__(self, name: str = "copied", slot: type[Slot] = Slot) -> None:
        self.name = name
        self.slot = slot

    def region(self) -> Region:
        region = CopiedRegion()
        region.slot = self.slot
        return region


class InPlaceRegion:
    """Storages are emptied where nothing outside the region uses them, and filled again at the first unpack."""

    def __init__(self) -> None:
        self.aliases: list[torch.Tensor] = []
        self.copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def hooks(self) -> AbstractContextManager[object]:
        return saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        alias = tensor.detach()
        if swappable(tensor):
            self.aliases.append(alias)
        return alias

    def unpack(self, alias: torch.Tensor) -> torch.Tensor:
        self.fill()
        return alias

    def away(self) -> int:
        storages = {alias.untyped_storage()._cdata: alias.untyped_storage() for alias in self.aliases}
        own: dict[int, int] = {}
        for alias in self.aliases:
            key = alias.untyped_storage()._cdata
            own[key] = own.get(key, 0) + 1
        for key, storage in storages.items():
            # One use more than the aliases is the Python object of the storage itself.
            if torch._C._storage_Use_Count(key) == own[key] + 1:
                self.copies.append((storage, storage.clone()))
                storage.resize_(0)
        return len(self.copies)

    def fill(self) -> None:
        """Brings everything back."""
        for storage, copy in self.copies:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        self.copies.clear()

    def close(self) -> None:
        self.fill()
        self.aliases.clear()


class InPlace:
    """Right: in place, in plain Python."""

    name = "in place, Python"

    def region(self) -> Region:
        return InPlaceRegion()
