"""What becomes of wrappers in what MindSpore compiles, as JSON: which error, or how many tensors left. Its own process:
an exception inside of a trace leaves MindSpore tracing."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable

import mindspore as ms
from covers import array
from mindspore import Tensor, nn

from ebbtide.mindspore import (
    AsyncSaveOnCpu,
    SwapManager,
    async_save_on_cpu,
    checkpoint,
    checkpoint_wrapper,
    swap,
    swap_wrapper,
)


class Outer(nn.Cell):
    def __init__(self, inner: nn.Cell) -> None:
        super().__init__()
        self.inner = inner

    def construct(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


dense = nn.Dense(4, 4)
swapped = Outer(swap_wrapper(nn.Dense(4, 4)))
checkpointed = Outer(checkpoint_wrapper(nn.Dense(4, 4)))


def through_swap_wrapper(x: Tensor) -> Tensor:
    return swapped(x)


def through_checkpoint_wrapper(x: Tensor) -> Tensor:
    return checkpointed(x)


def through_swap(x: Tensor) -> Tensor:
    return swap(dense, x)


def through_checkpoint(x: Tensor) -> Tensor:
    return checkpoint(dense, x)


def through_context(x: Tensor) -> Tensor:
    with async_save_on_cpu():
        return dense(x)


def through_class(x: Tensor) -> Tensor:
    with AsyncSaveOnCpu():
        return dense(x)


FUNCTIONS = [
    *(through_swap_wrapper, through_checkpoint_wrapper, through_swap),
    *(through_checkpoint, through_context, through_class),
]


def outcome(function: Callable[[Tensor], Tensor]) -> list[str]:
    """The class of the error and its text; or what says that there was none."""

    def forward(x: Tensor) -> Tensor:
        with SwapManager().group_context("g"):
            return function(x).sum()

    try:
        ms.value_and_grad(forward, 0)(array(2, 4))
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def main() -> None:
    os.chdir(tempfile.mkdtemp())  # MindSpore writes what it could not compile to where it runs
    found: dict[str, dict[str, list[str]]] = {"plain": {}, "ast": {}, "strict": {}, "bytecode": {}, "graph": {}}
    for function in FUNCTIONS:
        name = function.__name__
        found["plain"][name] = outcome(function)
        found["ast"][name] = outcome(ms.jit(function))
        found["strict"][name] = outcome(ms.jit(function, fullgraph=True))
        found["bytecode"][name] = outcome(ms.jit(function, capture_mode="bytecode"))
    ms.set_context(mode=ms.GRAPH_MODE)
    for cell in (swapped, checkpointed, swapped.inner, checkpointed.inner):
        name = type(cell.inner if isinstance(cell, Outer) else cell).__name__
        name += " in a cell" if isinstance(cell, Outer) else ""
        try:
            cell(array(2, 4))
        except Exception as error:
            found["graph"][name] = [type(error).__name__, str(error)]
    ms.set_context(mode=ms.PYNATIVE_MODE)
    found["trace"] = {"through_swap_wrapper": outcome(ms.jit(through_swap_wrapper, capture_mode="trace"))}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # MindSpore ends the process with an error after an exception inside of a trace
