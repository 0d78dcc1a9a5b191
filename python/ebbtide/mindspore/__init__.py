"""ebbtide for MindSpore in PyNative mode: training in less memory, with the same losses and gradients, bit for bit.

import ebbtide.mindspore

s = ebbtide.mindspore.session(cell, "swap")
grad = ms.value_and_grad(forward, None, cell.trainable_params())
for x in data:
    with s.step():
        loss, gradients = grad(x)
    optimizer(gradients)
"""

from ebbtide._policy import CheckpointPolicy
from ebbtide._stats import reset, shrink, stats, synchronize
from ebbtide._verify import Verified
from ebbtide.mindspore._session import Session, session
from ebbtide.mindspore._step import Step

__all__ = ["CheckpointPolicy", "Session", "Step", "Verified", "reset", "session", "shrink", "stats", "synchronize"]
