"""A region: one call of a piece of code, and what MindSpore saves for backward meanwhile.

    forward    pack: only appends, since a look at a tensor would make MindSpore wait for the operation
    its end    what may move is put into spans and given to a group; what stays is held by an alias without a graph
    backward   unpack: brings the group home, and makes the tensor again

Access: a region belongs to the thread that runs the code. What was saved belongs to MindSpore's graph from the
region's end on: a `Saved` refers to its span and its group, never to the region.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType, TracebackType

import mindspore as ms
from mindspore import Tensor
from mindspore.graph.api import _pynative_executor

from ebbtide import _native
from ebbtide.errors import ChangedError, EbbtideError, PhaseError
from ebbtide.mindspore._bits import fingerprint
from ebbtide.mindspore._passes import running
from ebbtide.mindspore._spans import Span
from ebbtide.mindspore._tally import Kept, Tally
from ebbtide.mindspore._views import View, look

FindGroup = Callable[[], _native.Group | None]
Decide = Callable[[Tensor], bool]
Leaves = Callable[[int, int], bool]  # of a storage and its bytes


class Saved:
    """What MindSpore keeps instead of a saved tensor."""

    __slots__ = (
        "__weakref__",
        "_kept",
        "_shown",
        "ahead",
        "began",
        "bits",
        "group",
        "label",
        "may_move",
        "number",
        "span",
        "tensor",
        "version",
        "view",
        "with_graph",
    )

    def __init__(self, tensor: Tensor, label: str, *, may_move: bool) -> None:
        self.tensor: Tensor | None = tensor  # until the region ends; what stays: an alias from then on
        self.version = int(tensor._version)
        self.with_graph = bool(tensor._requires_grad)
        self.label = label
        self.may_move = may_move
        self.view: View | None = None
        self.span: Span | None = None
        self.number = 0  # among the tensors of the span
        self.group: _native.Group | None = None
        self.bits: bytes | None = None  # what stays, where changes are looked for by its bytes
        self.ahead: _native.Group | None = None  # what comes next in backward, if the tensor stays
        self.began: Began | None = None  # told that it is asked for
        self._shown: Tensor | None = None
        self._kept: Kept | None = None

    def stay(self, tally: Tally | None = None) -> None:
        """Holds the tensor without its graph, which would hold this."""
        assert self.tensor is not None
        if self.bits is None:  # else the tensor itself is looked at: an assignment may give it other memory
            self.tensor = alias(self.tensor)
        _staying.add(self)
        if tally is not None:
            storage = self.tensor.untyped_storage()
            self._kept = tally.keep(storage.data_ptr(), storage.nbytes())

    def unpack(self) -> Tensor:
        """The tensor."""
        if self.with_graph and _is_differentiated():
            raise PhaseError(
                f"a backward that is itself recorded asks for what {self.label} saved, which has no graph any more",
                "take second derivatives of code that is neither swapped nor watched",
            )
        began, self.began = self.began, None
        if began is not None:
            began()
        if self.tensor is not None:
            ahead, self.ahead = self.ahead, None
            _start_load(ahead)
            self._check(self.tensor, self.version)
            if self.bits is not None and fingerprint([self.tensor]) != self.bits:
                raise ChangedError(
                    f"{self._name(self.tensor)} was changed after it was saved, which its version doesn't show",
                    "assignments to elements and copies between storages change what backward reads; save a copy",
                )
            return self.tensor
        if self._shown is None:
            self._shown, self.version = self._bring()
        self._check(self._shown, self.version)
        return self._shown

    def _bring(self) -> tuple[Tensor, int]:
        """The tensor and its version, wherever its bytes are."""
        span, group, view = self.span, self.group, self.view
        if span is not None and group is not None and view is not None:
            if span.home is None:
                _come_home(group)
            if span.home is not None:
                made = view.over(span.home, span.first)
                return made, int(made._version)
            here = span.tensor(self.number)  # its copy failed or was called off
            if here is not None:
                return here, self.version
        raise PhaseError(
            f"what {self.label} saved is asked for, whose step was given up",
            "run forward again; a step is given up when an exception leaves it",
        )

    def _check(self, tensor: Tensor, version: int) -> None:
        now = int(tensor._version)
        if now != version:
            raise ChangedError(
                f"{self._name(tensor)} was modified in place: its version was {version}, is {now}",
                "use the operation that makes a new tensor, or save a copy",
            )

    def _name(self, tensor: Tensor) -> str:
        return f"a tensor of shape {tuple(tensor.shape)} that {self.label} saved for backward"

    def drop(self) -> None:
        """Lets go of everything; an unpack is an error from here on."""
        self.tensor = self.span = self.group = self.ahead = self.began = self._shown = self._kept = None


class Began:
    """Tells once that the backward of a region begins: that something it saved is asked for."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell: Callable[[], None] | None = tell

    def __call__(self) -> None:
        tell, self._tell = self._tell, None
        if tell is not None:
            tell()


_staying: weakref.WeakSet[Saved] = weakref.WeakSet()


def stays(storage: int) -> bool:
    """Whether something that was saved and stays lies in the storage at this address, which must not be emptied."""
    return any(each.tensor is not None and look(each.tensor).storage == storage for each in list(_staying))


class Region:
    """What is saved while it is entered; usable once, with `with`.

    `find` is asked for the group once, when the first tensor that may move arrives. `keep` holds the addresses of
    storages that never leave. `inputs` are what the code is called with: of them, what has no graph stays (a mask, a
    table: others use it as well). With `hashed` nothing moves and bytes are compared. `ahead` is a group that
    starts to come back when something that stayed is asked for. `seen` is called with all that is saved, and is then
    to drop what is left of it; without it that is done when the pass ends. `leaves` is asked at the end about each
    storage that may move, in the order in which they were saved. `began` is called when the first of all that was
    saved is asked for. `tally` counts what is in memory.
    """

    def __init__(
        self,
        find: FindGroup,
        label: str,
        *,
        keep: Iterable[int] = (),
        inputs: Iterable[Tensor] = (),
        min_bytes: int = 1,
        decide: Decide | None = None,
        hashed: bool = False,
        ahead: _native.Group | None = None,
        seen: Callable[[Saved], None] | None = None,
        leaves: Leaves | None = None,
        began: Callable[[], None] | None = None,
        tally: Tally | None = None,
    ) -> None:
        self.group: _native.Group | None = None
        self.kept = 0
        self.moved = 0
        self._find: FindGroup | None = find
        self.label = label
        self._keep = frozenset(keep)
        self._inputs = [tensor for tensor in inputs if not tensor._requires_grad]
        self._min_bytes = min_bytes
        self._decide = decide
        self._hashed = hashed
        self._ahead = ahead
        self._seen = seen
        self._leaves = leaves
        self._began = None if began is None else Began(began)
        self._tally = tally
        self._saved: list[Saved] = []
        self._hooks: ms.saved_tensors_hooks | None = None

    def __enter__(self) -> Region:
        if self._seen is None:
            of = running()
            self._seen = (lambda _: None) if of is None else of.saved.add
        self._hooks = ms.saved_tensors_hooks(self._pack, Saved.unpack)
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(kind, error, trace)
        if kind is not None:
            self.drop()

    def _pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor, self.label, may_move=self._may_move(tensor))
        saved.began = self._began
        if self._hashed:
            saved.bits = fingerprint([tensor])
        self._saved.append(saved)
        if self._seen is not None:
            self._seen(saved)
        return saved

    def _may_move(self, tensor: Tensor) -> bool:
        """Asked as it is saved; must not look at where its memory is."""
        movable = tensor.param_info is None and 0 not in tensor.shape
        movable = movable and tensor.nbytes >= self._min_bytes
        movable = movable and (self._decide is None or self._decide(tensor))
        if movable:
            if self._find is not None:
                find, self._find = self._find, None
                self.group = find()
            movable = self.group is not None
        return movable

    def _moves(self, saved: Saved) -> bool:
        """Asked at the end about what may move, in the order in which it was saved."""
        if self._hashed or saved.tensor is None or saved.view is None:
            return False
        return self._leaves is None or self._leaves(saved.view.storage, saved.tensor.untyped_storage().nbytes())

    def close(self) -> None:
        """The code is over: what may move goes to the group, which is left open."""
        saved, self._saved = self._saved, []
        keep = self._keep | {look(tensor).storage for tensor in self._inputs}
        self._inputs = []
        by_storage: dict[int, list[Saved]] = {}
        for each in saved:
            assert each.tensor is not None
            view = each.view = look(each.tensor) if each.may_move else None
            if view is not None and self._can_move(each, view, keep) and self._moves(each):
                by_storage.setdefault(view.storage, []).append(each)
                continue
            own = each.tensor.param_info is None and (view is None or view.storage not in self._keep)
            each.stay(self._tally if own else None)
            each.ahead = self._ahead
            self.kept += 1
        for sharing in by_storage.values():
            for part in _parts(sharing):
                self._give(part)

    def _can_move(self, saved: Saved, view: View, keep: frozenset[int] | set[int]) -> bool:
        # What was changed since it was saved stays, so that its unpack is an error.
        unchanged = saved.tensor is not None and int(saved.tensor._version) == saved.version
        return bool(view.storage) and view.storage not in keep and unchanged

    def _give(self, sharing: list[Saved]) -> None:
        """Has one span made of tensors that lie close to each other in one storage."""
        assert self.group is not None and sharing[0].view is not None
        reaches = [each.view.reach for each in sharing if each.view is not None]
        first, last = min(start for start, _ in reaches), max(end for _, end in reaches)
        tensors = [each.tensor for each in sharing if each.tensor is not None]
        label = sharing[0].label
        span = Span(sharing[0].view, first, last, tensors, label, self._tally)
        self.group.look_after(span, f"{label} {list(sharing[0].view.sizes)}", id(span))
        self.moved += len(sharing)
        for number, each in enumerate(sharing):
            each.span, each.number, each.group, each.tensor = span, number, self.group, None

    def drop(self) -> None:
        """The code failed: what it saved is let go of."""
        for each in self._saved:
            each.drop()
        self._saved, self._inputs = [], []


def _come_home(group: _native.Group) -> None:
    """All of a group is home, and the next one is on its way. Does nothing for a group that was given up."""
    if group.phase != "closed":
        group.prefetch()
        group.need()


def _start_load(group: _native.Group | None) -> None:
    """A hint: what can't be started is loaded on demand, or says then why it can't be."""
    if group is not None and group.phase in ("offloading", "away"):
        with suppress(EbbtideError):
            group.start_load()


def alias(tensor: Tensor) -> Tensor:
    """A tensor of the same memory and version, without a graph."""
    with ms._no_grad():  # a view counts changes together with its tensor, which `tensor.data` does not
        return tensor.permute(tuple(range(tensor.ndim)))


def _parts(sharing: list[Saved]) -> list[list[Saved]]:
    """Tensors of a storage in parts that don't move many bytes that nobody saved."""
    ordered = sorted(sharing, key=lambda each: each.view.reach if each.view is not None else (0, 0))
    parts: list[list[Saved]] = []
    end = wanted = start = 0
    for each in ordered:
        assert each.view is not None
        first, last = each.view.reach
        if parts and max(end, last) - start <= 2 * (wanted + last - first):
            parts[-1].append(each)
            end, wanted = max(end, last), wanted + max(0, last - max(end, first))
        else:
            parts.append([each])
            start, end, wanted = first, last, last - first
    return parts


def _is_differentiated() -> bool:
    """Whether the backward that runs is part of a forward, so that it will be differentiated itself."""
    if not _pynative_executor.requires_grad():
        return False
    # MindSpore says so as well after any forward that has failed, so look who called.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_pynative_func_grad_forward":
        frame = frame.f_back
    return frame is not None
