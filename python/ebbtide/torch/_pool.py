"""Explicit pools of pinned host memory."""

from __future__ import annotations

import torch

from ebbtide import _native
from ebbtide._checks import MOST
from ebbtide.errors import NoRoomError, SettingError
from ebbtide.torch import _defaults


class PinnedMemoryPool:
    """Host memory with a hard bound, reused between copies; pinned where there is an accelerator.

    Pass it as `cpu_pool=` to have copies go through it, or take buffers from it by hand. Any thread may
    use it.

    Args:
        max_host_bytes: Bytes that the pool may ever have allocated at a time.

    Raises:
        SettingError: `max_host_bytes` is no positive whole number.

    Example:
        >>> pool = PinnedMemoryPool(64 << 20)
        >>> buffer = pool.acquire(1 << 20)  # a uint8 tensor of 1 MiB
        >>> pool.release(buffer)
    """

    def __init__(self, max_host_bytes: int) -> None:
        _check_size("max_host_bytes", max_host_bytes)
        self._native = _defaults.hub().pool(max_host_bytes)

    @property
    def max_host_bytes(self) -> int:
        """The bound, in bytes."""
        return self._native.max_host_bytes

    @property
    def total_allocated(self) -> int:
        """Bytes that are allocated now, handed out or not."""
        return self._native.total_allocated

    def acquire(self, size: int) -> torch.Tensor:
        """Takes a buffer.

        With no room left it waits for the earliest buffer that was released with an event.

        Args:
            size: Bytes wanted.

        Returns:
            A `uint8` tensor of shape `(size,)` on the CPU.

        Raises:
            NoRoomError: All of the pool is in use; names what was asked for, what is pooled and the
                bound, in bytes.
            SettingError: `size` is no positive whole number.
        """
        _check_size("size", size)
        try:
            return self._native.acquire(size)
        except NoRoomError as error:
            pooled = f"{self.total_allocated} of at most {self.max_host_bytes} bytes are pooled"
            hint = "give buffers back first, or make the pool larger"
            raise NoRoomError(f"{size} bytes were asked for, {pooled}", hint) from error

    def release(self, tensor: torch.Tensor, event: object | None = None) -> None:
        """Gives a buffer back.

        Args:
            tensor: What `acquire` returned.
            event: An event of the device; the buffer is handed out again only when it has completed.

        Raises:
            EbbtideError: The tensor is not from this pool, or was given back before.
        """
        self._native.release(tensor, event)

    def shrink(self) -> int:
        """Gives the memory of buffers back that nobody has; returns bytes."""
        return self._native.shrink()

    def __repr__(self) -> str:
        return f"PinnedMemoryPool({self.total_allocated} of {self.max_host_bytes} bytes allocated)"

    def __deepcopy__(self, memo: object) -> PinnedMemoryPool:
        """A copy of what uses a pool uses the same pool."""
        return self


def _check_size(name: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise SettingError(f"{name}={size!r} is no positive number of bytes", f"{name} is in bytes")
    if size > MOST:
        raise SettingError(f"{name}={size} is larger than {MOST}", f"{name} is in bytes")


def native_pool(cpu_pool: object) -> _native.Pool | None:
    """What the engine knows a `cpu_pool=` by.

    Raises:
        SettingError: It is neither None nor a `PinnedMemoryPool`.
    """
    if cpu_pool is None:
        return None
    if isinstance(cpu_pool, PinnedMemoryPool):
        return cpu_pool._native
    hint = "pass ebbtide.torch.PinnedMemoryPool(max_host_bytes) or leave it out"
    raise SettingError(f"cpu_pool is a {type(cpu_pool).__name__}", hint)
