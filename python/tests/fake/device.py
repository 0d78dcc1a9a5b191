"""What PyTorch looks up in the module of a device, here `torch.fake`."""

from __future__ import annotations

import os
from types import TracebackType

import torch

_initialized = True
_process = os.getpid()


def is_initialized() -> bool:
    return _initialized


def _is_in_bad_fork() -> bool:
    return os.getpid() != _process


def is_available() -> bool:
    return True


def device_count() -> int:
    return 2


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: int | str | torch.device) -> None:
    torch.accelerator.set_device_index(_index(device))


def synchronize(device: int | str | torch.device | None = None) -> None:
    torch.accelerator.synchronize(_index(device))


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def _index(device: int | str | torch.device | None) -> int:
    if isinstance(device, int):
        return device
    found = None if device is None else torch.device(device).index
    return current_device() if found is None else found


def _generator(index: int) -> torch.Generator:
    return torch._C._accelerator_getDefaultGenerator(index)


def manual_seed(seed: int) -> None:
    _generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def initial_seed() -> int:
    return _generator(current_device()).initial_seed()


def get_rng_state(device: int | str | torch.device = "fake") -> torch.Tensor:
    return _generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: int | str | torch.device = "fake") -> None:
    _generator(_index(device)).set_state(state)


class device:
    """A device that is the current one within a `with`. PyTorch looks for this name."""

    def __init__(self, device: int | str | torch.device | None) -> None:
        self._index = _index(device)
        self._previous = -1

    def __enter__(self) -> None:
        self._previous = current_device()
        set_device(self._index)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        set_device(self._previous)
