"""The engine behind everything that is driven by hand.

One *hub* serves all groups of the process that no session owns. It opens when the first tensor is saved,
or with `configure`, and again after `reset()`. What it notices (a spill folder in RAM, a prefetch that
failed) is passed on as `EbbtideWarning`.

Access contract: any thread may ask for the hub. `configure` belongs to whoever sets things up while
nobody trains: it refuses as long as a group exists.
"""

from __future__ import annotations

import os
import threading
import warnings
from os import PathLike
from typing import NamedTuple

from ebbtide import _stats
from ebbtide._checks import check_numbers, check_tier, folder
from ebbtide._native import Hub
from ebbtide.errors import EbbtideWarning, PhaseError


class Settings(NamedTuple):
    """Where by-hand swapping puts tensors."""

    tier: str | None = None
    spill_dir: str | None = None
    host_bytes: int | None = None


_lock = threading.Lock()
_settings = Settings()
_source: _stats.Source | None = None
_forked = False


def hub() -> Hub:
    """The hub of the process, with the settings of `configure`."""
    return source().hub


def source() -> _stats.Source:
    """The hub with the front end's own counters. Opened if it isn't, or was closed by `reset()`."""
    global _source
    with _lock:
        if _source is None:
            opened = _stats.open_source if _forked else _stats.shared_source
            _source = opened(**_settings._asdict())
        return _source


def configure(
    tier: str | None = None,
    spill_dir: str | PathLike[str] | None = None,
    host_bytes: int | None = None,
) -> None:
    """Chooses where by-hand swapping puts tensors, from now on.

    Args:
        tier: "file" or "host". None: a file for tensors on a CPU; for those on an accelerator pinned
            host memory, then a file.
        spill_dir: Folder of the file. None: the system's temporary folder.
        host_bytes: Host memory that may be used, in bytes. None: what the machine can spare.

    Raises:
        SettingError: Unknown tier, bad size, or a folder that can't be used. Nothing has changed.
        PhaseError: Groups hold tensors at the moment.

    Example:
        >>> configure(tier="file", spill_dir="/mnt/nvme")
    """
    global _settings, _source
    check_tier(tier)
    check_numbers(host_bytes=host_bytes)
    wanted = Settings(tier, folder(spill_dir), host_bytes)
    with _lock:
        if _source is not None:
            _refuse_if_busy(_source.hub)
        made = _stats.shared_source(**wanted._asdict())
        _source, _settings = made, wanted


def _refuse_if_busy(current: Hub) -> None:
    current.collect()
    groups = current.active_groups
    if groups:
        hint = "configure before the first step, or run backward or abort the groups first"
        raise PhaseError(f"{groups} groups hold tensors with the settings there were so far", hint)


def _forget() -> None:
    """`reset()` closes all shared hubs; the settings stay."""
    global _source
    with _lock:
        _source = None


_stats.at_reset(_forget)


def _in_child() -> None:
    """A forked child opens a hub of its own: what there is belongs to the parent."""
    global _lock, _source, _forked
    _lock = threading.Lock()
    _source, _forked = None, True


os.register_at_fork(after_in_child=_in_child)


def pass_on_warnings(stacklevel: int = 2) -> None:
    """Shows what the engine has noticed since the last call."""
    current = _source
    if current is None:
        return
    for text in current.hub.take_warnings():
        warn(text, stacklevel + 1)


def warn(text: str, stacklevel: int = 2) -> None:
    """Something works, but not as one would like."""
    warnings.warn(text, EbbtideWarning, stacklevel=stacklevel + 1)
