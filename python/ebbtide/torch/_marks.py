"""What a wrapped callable becomes, and how PyTorch's modules are marked, which `ebbtide._marks` does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ebbtide._marks import Marks
from ebbtide.torch import _defaults


class Called(nn.Module):
    """A plain callable as a module without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it."""
        return self.function(*args, **kwargs)

    def extra_repr(self) -> str:
        """What it calls."""
        return str(getattr(self.function, "__name__", self.function))


MARKS = Marks(
    module=nn.Module,
    called=Called,
    within=nn.Module.modules,
    warn=functools.partial(_defaults.warn, stacklevel=6),
)
