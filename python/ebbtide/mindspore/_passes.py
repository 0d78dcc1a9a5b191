"""When a pass is over, for what has no session whose step would say so.

In MindSpore one call runs forward and backward: whatever ends it ends the pass, and what was saved in it and is still
there then is waste. After an exception that is all of it, since MindSpore goes on to hold what hooks have given it.
So a *pass* is an object that the frame of that call holds among its variables; with the frame it goes.

Where a cell is called first and its gradients are taken by a call of its own (`nn.TrainOneStepCell`), there is no such
frame, and no pass: after an exception in such a step what it had sent out stays until `abort_group` or `reset()`.

Access: a pass belongs to the thread that runs it. At its end, in a finalizer, only Python's own objects are touched;
groups are given up by the manager when it is used next.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ebbtide.mindspore._region import Saved

KEY = "ebbtide's pass"
RUNS_IN, RUNS_AS = "mindspore.ops.composite.base", "after_grad"


class Pass:
    """A forward and the backward after it."""

    def __init__(self) -> None:
        self.saved: weakref.WeakSet[Saved] = weakref.WeakSet()
        weakref.finalize(self, _let_go, self.saved).atexit = False


def running() -> Pass | None:
    """The pass that this thread is in; of passes within each other the outermost. None where nobody takes gradients."""
    frame: FrameType | None = sys._getframe(1)
    outermost: FrameType | None = None
    while frame is not None:
        if frame.f_code.co_name == RUNS_AS and frame.f_globals.get("__name__") == RUNS_IN:
            outermost = frame
        frame = frame.f_back
    if outermost is None:
        return None
    variables = outermost.f_locals
    found = variables.get(KEY)
    if isinstance(found, Pass):
        return found
    made = variables[KEY] = Pass()
    return made


def _let_go(saved: weakref.WeakSet[Saved]) -> None:
    for each in list(saved):
        each.drop()
