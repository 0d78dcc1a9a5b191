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
from ebbtide._verify import Verified
from ebbtide.mindspore._checkpoint import CheckpointWrapper, checkpoint, checkpoint_wrapper
from ebbtide.mindspore._cover import ActivationWrapper, unwrap_cell
from ebbtide.mindspore._manager import SwapManager
from ebbtide.mindspore._marks import FuncCell
from ebbtide.mindspore._named import swap_tensor_wrapper
from ebbtide.mindspore._session import Session, session
from ebbtide.mindspore._step import Step
from ebbtide.mindspore._tensors import Region, Storage, SwapGroup, SwapTensor, base_check_fn
from ebbtide.mindspore._wrap import AsyncSaveOnCpu, SwapWrapper, async_save_on_cpu, swap, swap_wrapper

__all__ = [
    "ActivationWrapper",
    "AsyncSaveOnCpu",
    "CheckpointPolicy",
    "CheckpointWrapper",
    "FuncCell",
    "Region",
    "Session",
    "Step",
    "Storage",
    "SwapGroup",
    "SwapManager",
    "SwapTensor",
    "SwapWrapper",
    "Verified",
    "async_save_on_cpu",
    "base_check_fn",
    "checkpoint",
    "checkpoint_wrapper",
    "configure",
    "reset",
    "session",
    "shrink",
    "stats",
    "swap",
    "swap_tensor_wrapper",
    "swap_wrapper",
    "synchronize",
    "unwrap_cell",
]
