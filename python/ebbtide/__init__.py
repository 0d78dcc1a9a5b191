"""ebbtide: train a model inside less memory, with the same losses and gradients, bit for bit.

Saved activations leave device memory for pinned host memory or a file after a layer's forward and come back
before its backward needs them. The front end for PyTorch is `ebbtide.torch`, which is the only part that
imports PyTorch:

    import ebbtide.torch

    s = ebbtide.torch.session(model, "swap")
    with s.step():
        loss = model(x).mean()
        loss.backward()

This module itself has the errors (`ebbtide.EbbtideError` and what derives from it) and the version.
"""

from ebbtide._native import VERSION as __version__
from ebbtide.errors import (
    ChangedError,
    CopyError,
    EbbtideError,
    EbbtideWarning,
    NoRoomError,
    NotSavedError,
    PhaseError,
    SettingError,
)

__all__ = [
    "ChangedError",
    "CopyError",
    "EbbtideError",
    "EbbtideWarning",
    "NoRoomError",
    "NotSavedError",
    "PhaseError",
    "SettingError",
    "__version__",
]
