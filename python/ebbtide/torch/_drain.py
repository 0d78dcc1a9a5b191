"""What a backward that failed leaves behind in autograd.

Nodes that such a backward did not get to stay in its thread's queue, with their saved tensors, until the next
backward on that thread. At the end of the process that queue is destroyed after Python is, and nodes that hold
hooks of Python then end it with a segmentation fault: torch's own `save_on_cpu` does so, too. A backward of
nothing empties the queue.
"""

from __future__ import annotations

import atexit
import functools

import torch

from ebbtide import _stats


def drain() -> None:
    """Lets go of what failed backwards of this thread have left. Does nothing inside of a backward."""
    if torch._C._current_graph_task_id() != -1:
        return
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), requires_grad=True).mul(2).backward()


@_stats.at_open
@functools.cache
def drain_at_exit() -> None:
    """Has `drain` called when the process ends; once, however often it is asked for."""
    atexit.register(drain)
