"""Whether a module's forward changes the module, so that it can't be run a second time without a trace."""

from __future__ import annotations

import random
import sys

import torch
from torch import nn

PLAIN = (int, float, complex, str, bytes, bool, type(None))


def state_of(module: nn.Module) -> object:
    """What a forward must leave as it is: versions of buffers, generators but torch's global one, plain attributes.

    Equal before and after a forward that changes nothing. What a forward changes elsewhere is not seen. Torch's
    global generators are put back when a layer runs again, so they may change.
    """
    numpy = sys.modules.get("numpy")
    return [
        random.getstate(),
        repr(numpy.random.get_state()) if numpy is not None else None,
        *((name, id(buffer), _version(buffer)) for name, buffer in module.named_buffers()),
        *((name, _attributes(below)) for name, below in module.named_modules()),
    ]


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _attributes(module: nn.Module) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, value in vars(module).items():
        if isinstance(value, PLAIN):
            found.append((name, repr(value)))
        elif isinstance(value, torch.Generator):
            found.append((name, value.get_state().numpy().tobytes().hex()))
        elif isinstance(value, (list, tuple, set, dict)) and len(value) < 64:
            plain = value.values() if isinstance(value, dict) else value
            if all(isinstance(each, PLAIN) for each in plain):
                found.append((name, repr(value)))
    return found
