"""One step: what the layers of a session save between `with s.step():` and its end.

A layer's forward is a region of its own (`_region`). When it ends the group's offload is started, then the offload
of the layer before is waited for, so at most two layers' activations are in memory; a layer that stays waits, too.
Backward needs nothing from here: an unpack brings a group home and starts loading the next one. Under a plan, or
while one is made, a `_plan.Follower` says what leaves, and when what comes back.

Access: a step belongs to the thread of its session. It is entered once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import mindspore as ms

from ebbtide import _native
from ebbtide._layers import Word
from ebbtide._plan import Planned, Recorded
from ebbtide._record import CALLED_WITH
from ebbtide.errors import PhaseError, SettingError
from ebbtide.mindspore import _alone
from ebbtide.mindspore._bits import fingerprint
from ebbtide.mindspore._cells import Construct, storages, tensors
from ebbtide.mindspore._region import Region, Saved
from ebbtide.mindspore._tally import OUTSIDE, Tally
from ebbtide.mindspore._views import keys_of, returned

if TYPE_CHECKING:
    from ebbtide.mindspore._session import Session


class Step:
    """A step of a session; made by `Session.step()`, entered once with `with`.

    Forward and backward run inside of it: in MindSpore one call of what `value_and_grad` has made does both. A step
    may also be around forward alone, inside of the function that `value_and_grad` is called with. A step that an
    exception leaves is given up: what it moved is forgotten, and the next step is as if it had never been.
    """

    def __init__(self, session: Session, tally: Tally | None = None, *, keeps_all: bool = False) -> None:
        self._session = session
        self._tally = tally or session._tally
        self._keeps_all = keeps_all  # for `verify`: what plain training has in memory is counted
        self.number = 0
        self.is_whole = True  # around forward and backward, and not around forward alone
        self._called: dict[str, int] = {}
        self._before: _native.Group | None = None  # the layer before's, whose offload was started
        self._keep: set[int] = set()
        self._saved: weakref.WeakSet[Saved] = weakref.WeakSet()
        self._follower: Recorded | Planned | None = None

    def __repr__(self) -> str:
        return f"<step {self.number or 'not entered yet'} of {self._session!r}>"

    def __enter__(self) -> Step:
        if self.number:
            raise PhaseError(
                f"step {self.number} was entered before", "take a new one from session.step() for each pass"
            )
        self.number, cell = self._session._begin(self)
        try:
            self._keep = storages(cell)
            self._follower = None if self._keeps_all else self._session._follow(cell)
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
            self._tally.place = OUTSIDE
            self._session._end(self, done=done)
            if not done:
                self.drop()
        if done:
            self._session._warn()
        elif refused := _alone.refused_by_graph(error):
            raise refused from error

    def drop(self) -> None:
        """Lets go of all that it saved, which nobody can ask for any more."""
        for saved in list(self._saved):
            saved.drop()

    def over(self) -> None:
        """Its backward has run, or will never run."""
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.over()

    # ---- called in place of a layer's construct

    def call(self, name: str, inner: Construct, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a layer the way its word says."""
        session = self._session
        session._source.counted["layer_calls"] += 1
        why = _alone.left_alone()
        if why is not None:
            session._source.counted[why] += 1
            session._left_alone(name, why)
            return inner(*args, **kwargs)
        if self._follower is not None and session.is_planned(name):
            return self._followed(self._follower, name, inner, args, kwargs)
        word: Word = "keep" if self._keeps_all else session.policy[name]
        if word == "recompute":
            inner = functools.partial(recomputed, name, inner)
        # The backward of a layer that stays comes before that of the layer before.
        ahead = self._before if word != "swap" and session._prefetch else None
        region = self._region(self._numbered(name), (args, kwargs), swap=word == "swap", ahead=ahead)
        output = self._run(region, inner, args, kwargs)
        region.close()
        session._source.counted["tensors_kept"] += region.kept if word == "swap" else 0
        if leaves(region):
            before, self._before = self._before, region.group
            assert region.group is not None
            region.group.start_offload()
        else:
            before = self._before
        wait_offload(before)
        return output

    def _followed(
        self,
        follower: Recorded | Planned,
        name: str,
        inner: Construct,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs a layer under a plan, or records it."""
        named = self._numbered(name)
        follower.enter(named, keys_of((args, kwargs)))
        reaches = functools.partial(follower.reaches, follower.layer)
        if self._session.recomputes(name):
            inner = functools.partial(recomputed, name, inner)
        region = self._region(named, (args, kwargs), swap=True, leaves=follower.saves, began=reaches)
        output = self._run(region, inner, args, kwargs)
        follower.ends()
        region.close()
        self._session._source.counted["tensors_kept"] += region.kept
        if isinstance(follower, Recorded):
            look_at(follower, (args, kwargs))
        follower.leave(region.group if leaves(region) else None, *returned(output))
        return output

    def _numbered(self, name: str) -> str:
        """The name of a layer's call: the layer's, with a number from the second call in this step on."""
        count = self._called[name] = self._called.get(name, 0) + 1
        return name if count == 1 else f"{name}#{count}"

    def _run(self, region: Region, inner: Construct, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._tally.place = f"forward of {region.label}"
        with region:
            return inner(*args, **kwargs)

    def _region(
        self,
        named: str,
        inputs: object,
        *,
        swap: bool,
        ahead: _native.Group | None = None,
        leaves: Callable[[int, int], bool] | None = None,
        began: Callable[[], None] | None = None,
    ) -> Region:
        session = self._session
        settings, hub, number, tally = session._settings, session._source.hub, self.number, self._tally

        def backward() -> None:
            tally.place = f"backward of {named}"
            if began is not None:
                began()

        return Region(
            lambda: hub.open(named, number) if swap else None,
            named,
            keep=self._keep,
            inputs=tensors(inputs),
            min_bytes=settings.min_bytes,
            decide=settings.decide,
            hashed=session._checksums,
            ahead=ahead,
            seen=self._saved.add,
            leaves=leaves,
            began=backward,
            tally=tally,
        )


def look_at(recorded: Recorded, inputs: object) -> None:
    """What running the layer again would need besides: what it is called with and does not save."""
    record = recorded.recorder.layers[-1]
    for tensor in tensors(inputs):
        storage = tensor.untyped_storage()
        key = int(storage.data_ptr())
        if not key or key in record.saved or key == record.reads or tensor.param_info is not None:
            continue
        if tensor._requires_grad:
            recorded.cannot_again(CALLED_WITH)
        else:
            recorded.recorder.lent(key, int(storage.nbytes()))


def recomputed(name: str, inner: Construct, *args: Any, **kwargs: Any) -> Any:
    """Runs a construct, and in backward once more, which has to come to the same.

    MindSpore restores its random generators for the second run, but not the states that some operations keep for
    themselves (`nn.Dropout`); what comes of that is another output, and is refused.
    """
    names, count = tuple(kwargs), len(args)
    first: list[bytes] = []

    def run(*values: Any) -> Any:
        output = inner(*values[:count], **dict(zip(names, values[count:], strict=True)))
        bits = fingerprint(tensors(output))
        if not first:
            first.append(bits)
        elif bits != first[0]:
            raise SettingError(
                f"{name} was recomputed and gave another output than in forward: it draws random numbers that can't be "
                "drawn again (nn.Dropout), or changes something that it reads",
                f'swap or keep this layer: policy={{{name!r}: "swap", …}}',
            )
        return output

    # With early_stop the second run would end before its output, and would not put the generators back.
    return ms.recompute(run, *args, *kwargs.values(), use_reentrant=False, early_stop=False)


def leaves(region: Region) -> bool:
    """Whether anything of a region leaves. A group that got nothing is closed."""
    if region.group is not None and not region.moved:
        region.group.close()
    return region.group is not None and region.moved > 0


def wait_offload(group: _native.Group | None) -> None:
    """Waits for an offload, unless backward came before its end or nobody needs it any more."""
    if group is not None and group.phase == "offloading":
        group.wait_offload()
