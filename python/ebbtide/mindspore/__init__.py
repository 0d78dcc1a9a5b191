"""ebbtide for MindSpore in PyNative mode: training in less memory, with the same losses and gradients, bit for bit.

import ebbtide.mindspore

s = ebbtide.mindspore.session(cell, "swap")
grad = ms.value_and_grad(forward, None, cell.trainable_params())
for x in data:
    with s.step():
        loss, gradients = grad(x)
    optimizer(gradients)
"""

from ebbtide._defaults import configure
from ebbtide._policy import CheckpointPolicy
from ebbtide._stats import reset, shrink, stats, synchronize
from ebbtide.mindspore._manager import SwapManager
from ebbtide.mindspore._session import Session, session
from ebbtide.mindspore._step import Step
from ebbtide.mindspore._tensors import Region, Storage, SwapGroup, SwapTensor, base_check_fn

__all__ = [
    "CheckpointPolicy",
    "Region",
    "Session",
    "Step",
    "Storage",
    "SwapGroup",
    "SwapManager",
    "SwapTensor",
    "base_check_fn",
    "configure",
    "reset",
    "session",
    "shrink",
    "stats",
    "synchronize",
]
