"""What planning asks of MindSpore; `ebbtide._plan` has the plan.

**What is counted**: tensors that layers save, parameters, buffers, and a gradient for each trainable parameter. Not
counted is the optimizer's state: leave room for it.

A layer with an `nn.Dropout` that is active is never recomputed, since it would draw other numbers, nor one with a
batch norm in training, which would update its statistics twice, nor one that is called with a tensor that its backward
does not need. The backward of a layer
begins when the first tensor that it saved is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint, nn

from ebbtide import _link, _native
from ebbtide._plan import Framework, OpenHub
from ebbtide.mindspore._alone import executor
from ebbtide.mindspore._cells import owned
from ebbtide.mindspore._spans import Span
from ebbtide.mindspore._views import look

# These keep the state of their random numbers inside of an operation, where nothing can put it back.
DRAWING = tuple(getattr(nn, name) for name in ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d") if hasattr(nn, name))
# These change parameters of their own in every forward.
COUNTING = tuple(getattr(nn, name) for name in dir(nn) if "BatchNorm" in name and isinstance(getattr(nn, name), type))


def static_bytes(cell: nn.Cell) -> int:
    """Parameters, buffers and gradients."""
    seen: dict[int, int] = {}
    for tensor in owned(cell):
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values()) + sum(parameter.nbytes for parameter in cell.trainable_params())


def draws(cell: nn.Cell) -> bool:
    """Whether a cell draws random numbers that can't be drawn again."""
    return any(isinstance(each, DRAWING) and each.training and _share(each) > 0 for each in _cells(cell))


def _cells(cell: nn.Cell) -> list[nn.Cell]:
    return [each for _, each in cell.cells_and_names()]


def _share(dropout: Any) -> float:
    """Of the elements that become zero."""
    for name in ("p", "prob"):
        share: Any = getattr(dropout, name, None)
        if share is not None:
            return float(share)
    return 1.0 - float(getattr(dropout, "keep_prob", 0.0))


def _why_not(cell: nn.Cell, name: str) -> str | None:
    layer = cell.get_sub_cell(name)
    if draws(layer):
        return "it draws random numbers (nn.Dropout)"
    if any(isinstance(each, COUNTING) and each.training for each in _cells(layer)):
        return "it updates running statistics (nn.BatchNorm)"
    return None


def _measure(open_hub: OpenHub, _: nn.Cell) -> _link.Link:
    def fill(group: _native.Group, count: int) -> tuple[Span, Tensor]:
        block = mint.ones((count,), dtype=ms.uint8)
        span = Span(look(block), 0, count, [block], "link")
        group.look_after(span, "link", id(span))
        return span, block

    return _link.measure(open_hub, fill, settle)


def settle() -> None:
    """Waits until MindSpore has done what was queued."""
    executor().sync()


def _settle(_: nn.Cell) -> Callable[[], None]:
    return settle


FRAMEWORK = Framework(
    source=f"mindspore {ms.__version__}",
    measure=_measure,
    static_bytes=static_bytes,
    settle=_settle,
    why_not=_why_not,
    counted="saved tensors, parameters, buffers and gradients",
)
