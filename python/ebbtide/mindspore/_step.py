"""One step: what the layers of a session save between `with s.step():` and its end.

A layer's forward is a region of its own (`_region`). When it ends the group's offload is started, then the offload
of the layer before is waited for, so at most two layers' activations are in memory. Backward needs nothing from
here: an unpack brings a group home and starts loading the next one.

Access: a step belongs to the thread of its session. It is entered once.
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

import mindspore as ms

from ebbtide import _native
from ebbtide.errors import PhaseError
from ebbtide.mindspore._cells import Construct, storages, tensors
from ebbtide.mindspore._region import Region, Saved

if TYPE_CHECKING:
    from ebbtide.mindspore._session import Session


class Step:
    """A step of a session; made by `Session.step()`, entered once with `with`.

    Forward and backward run inside of it: in MindSpore one call of what `value_and_grad` has made does both. A step
    that an exception leaves is given up: what it moved is forgotten, and the next step is as if it had never been.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.number = 0
        self._called: dict[str, int] = {}
        self._before: _native.Group | None = None  # the layer before's, whose offload was started
        self._keep: set[int] = set()
        self._saved: weakref.WeakSet[Saved] = weakref.WeakSet()

    def __enter__(self) -> Step:
        if self.number:
            raise PhaseError(
                f"step {self.number} was entered before", "take a new one from session.step() for each pass"
            )
        self.number, cell = self._session._begin(self)
        try:
            self._keep = storages(cell)
        except BaseException:
            self._session._end(self, done=False)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        done = False
        try:
            if kind is None:
                before, self._before = self._before, None
                wait_offload(before)
                done = True
        finally:
            self._before = None
            self._session._end(self, done=done)
            if not done:
                for saved in list(self._saved):
                    saved.drop()

    # ---- called in place of a layer's construct

    def call(self, name: str, inner: Construct, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a layer the way its word says."""
        counted = self._session._source.counted
        counted["layer_calls"] += 1
        if not is_recorded():
            counted["left_without_grad"] += 1
            return inner(*args, **kwargs)
        word = self._session.policy[name]
        if word == "recompute":
            return ms.recompute(inner, *args, use_reentrant=False, **kwargs)
        if word == "keep" and (self._before is None or not self._session._prefetch):
            return inner(*args, **kwargs)
        return self._in_region(name, word == "swap", inner, args, kwargs)

    def _in_region(self, name: str, swap: bool, inner: Construct, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        count = self._called[name] = self._called.get(name, 0) + 1
        named = name if count == 1 else f"{name}#{count}"
        settings, hub = self._session._settings, self._session._source.hub
        region = Region(
            lambda: hub.open(named, self.number) if swap else None,
            named,
            keep=self._keep,
            inputs=tensors((args, kwargs)),
            min_bytes=settings.min_bytes,
            decide=settings.decide,
            hashed=self._session._checksums,
            # The backward of a layer that is kept comes before that of the layer before.
            ahead=None if swap else self._before,
            seen=self._saved.add,
        )
        with region:
            output = inner(*args, **kwargs)
        region.close()
        self._session._source.counted["tensors_kept"] += region.kept
        if region.group is not None:
            before, self._before = self._before, region.group
            region.group.start_offload()
            wait_offload(before)
        return output


def is_recorded() -> bool:
    """Whether MindSpore records operations for a backward now."""
    executor = ms.graph.api._pynative_executor
    return bool(executor.requires_grad())


def wait_offload(group: _native.Group | None) -> None:
    """Waits for an offload, unless backward came before its end or nobody needs it any more."""
    if group is not None and group.phase == "offloading":
        group.wait_offload()
