"""ebbtide for PyTorch in eager mode: training in less memory, with the same losses and gradients, bit for bit.

`session` is all that most trainings need. It finds the layers of a model and swaps what they save:

    import ebbtide.torch

    s = ebbtide.torch.session(model, "swap")
    for x in data:
        optimizer.zero_grad()
        with s.step():
            loss = model(x).mean()
            loss.backward()
        optimizer.step()
    print(s.report())

`s.verify(lambda: model(x).mean())` compares a swapped step with a plain one, bit by bit. `offload` swaps what the code
in its `with` saves, without layers. `stats`, `synchronize`, `shrink` and `reset` are about the whole process.

The rest is swapping by hand: functions and modules to wrap (`swap`, `swap_wrapper`, `swap_tensor_wrapper`,
`checkpoint`, `checkpoint_wrapper`, `async_save_on_cpu`, `create_selective_checkpoint_contexts`), groups that are
driven by name or by layer (`SwapManager`), the tensors they consist of (`SwapTensor`, `Region`, `SwapGroup`) and host
memory (`PinnedMemoryPool`); `configure` says where all of that goes.
"""

from ebbtide._policy import CheckpointPolicy
from ebbtide._stats import reset, shrink, stats, synchronize
from ebbtide._verify import Verified
from ebbtide.torch._checkpoint import CheckpointWrapper, checkpoint, checkpoint_wrapper
from ebbtide.torch._defaults import configure
from ebbtide.torch._manager import SwapManager
from ebbtide.torch._offload import offload
from ebbtide.torch._pool import PinnedMemoryPool
from ebbtide.torch._selective import create_selective_checkpoint_contexts
from ebbtide.torch._session import Session, session
from ebbtide.torch._step import Step
from ebbtide.torch._tensors import Region, Storage, SwapGroup, SwapTensor, base_check_fn
from ebbtide.torch._wrap import (
    ActivationWrapper,
    AsyncSaveOnCpu,
    SwapWrapper,
    async_save_on_cpu,
    swap,
    swap_tensor_wrapper,
    swap_wrapper,
)

__all__ = [
    "ActivationWrapper",
    "AsyncSaveOnCpu",
    "CheckpointPolicy",
    "CheckpointWrapper",
    "PinnedMemoryPool",
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
    "create_selective_checkpoint_contexts",
    "offload",
    "reset",
    "session",
    "shrink",
    "stats",
    "swap",
    "swap_tensor_wrapper",
    "swap_wrapper",
    "synchronize",
]
