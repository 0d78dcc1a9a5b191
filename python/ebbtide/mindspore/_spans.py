"""A span: bytes of one storage that saved tensors lie in, while they are here, away, and back.

MindSpore has no use counts, so that nobody else uses a storage can't be proven, and a storage that is emptied under
a user ends the process. So nothing is emptied: a span holds the tensors until their bytes are copied, then lets them
go, and the memory goes with its last owner. What comes back is a tensor of its own.

| content | memory | who leaves it |
| --- | --- | --- |
| `tensors` | the saved tensors' | `vacate`, when the copy is complete |
| neither | none | `allocate`, when a load starts |
| `_coming` | a tensor of its own, without its bytes yet | `arrive`, or `retract` |
| `home` | the same, with its bytes | nobody: it goes with the span |

Access: the methods are called by the engine, under its lock and with the GIL, so they never call the engine. A
span is made by its region and then belongs to the handles of its saved tensors.
"""

from __future__ import annotations

import weakref

import mindspore as ms
from mindspore import Tensor, mint

from ebbtide.mindspore._tally import Tally
from ebbtide.mindspore._views import View


class Span:
    """Elements of one storage; what the engine moves."""

    __slots__ = (
        "__weakref__",
        "_address",
        "_coming",
        "_facts",
        "_storage",
        "_tally",
        "_tensors",
        "count",
        "dtype",
        "first",
        "home",
        "itemsize",
        "label",
    )

    def __init__(
        self, view: View, first: int, last: int, tensors: list[Tensor], label: str, tally: Tally | None = None
    ) -> None:
        self.first = first
        self.count = last - first
        self.dtype: ms.Type = view.dtype
        self.itemsize = view.itemsize
        self.label = label
        self.home: Tensor | None = None
        self._coming: Tensor | None = None
        self._tensors: list[Tensor] = tensors
        self._address = view.storage + first * view.itemsize
        self._storage = view.storage
        _spans.add(self)
        self._facts = (self.nbytes, 0)
        self._facts = self.facts()
        self._tally = tally
        self._counts(self.nbytes)

    def __del__(self) -> None:
        if self.is_here:
            self._counts(-self.nbytes)

    def _counts(self, count: int) -> None:
        if self._tally is not None:
            self._tally.add(count)

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.count * self.itemsize

    @property
    def is_here(self) -> bool:
        """Whether it takes memory of the device."""
        return bool(self._tensors) or self._coming is not None or self.home is not None

    def tensor(self, number: int) -> Tensor | None:
        """One of the tensors that it was made of, while it has them."""
        return self._tensors[number] if self._tensors else None

    # ---- the engine's

    def facts(self) -> tuple[int, int]:
        """Size, and a number that grows with every change that MindSpore counts."""
        if self._tensors:
            return self.nbytes, sum(int(tensor._version) for tensor in self._tensors)
        return self._facts

    def lend(self) -> int:
        """The address of its bytes; the tensors keep the memory."""
        return self._address

    def vacate(self) -> None:
        """Its bytes are copied: the tensors may go."""
        before, self._tensors = self.is_here, []
        if before and not self.is_here:
            self._counts(-self.nbytes)

    def allocate(self) -> int:
        """Memory of its own, of which the address is returned."""
        before, self._coming = self.is_here, mint.empty((self.count,), dtype=self.dtype)
        if not before:
            self._counts(self.nbytes)
        return int(self._coming.untyped_storage().data_ptr())

    def arrive(self) -> None:
        """Its bytes are there. If they never left, the tensors still have them."""
        self.home, self._coming = self._coming, None

    def retract(self) -> None:
        """That memory is not needed."""
        before, self._coming = self.is_here, None
        if before and not self.is_here:
            self._counts(-self.nbytes)


_spans: weakref.WeakSet[Span] = weakref.WeakSet()


def is_lent(storage: int) -> bool:
    """Whether a span has tensors of the storage at this address, which must not be emptied then."""
    return any(span._storage == storage and span._tensors for span in list(_spans))
