"""The errors and the warning of ebbtide.

Everything the package raises on purpose derives from `EbbtideError`. The text is one line: what is wrong,
with the facts that show it, then what to do about it. `error.hint` is that last part alone, and
`error.__cause__` is the error underneath where there was one (an `OSError` of the disk, an error of PyTorch).

    try:
        s = ebbtide.torch.session(model, "swap", spill_dir="/mnt/nvme")
    except ebbtide.SettingError as error:
        print(error, error.hint)
"""

from __future__ import annotations


class EbbtideError(RuntimeError):
    """What all errors of the package have in common.

    `hint` says what to do, or is None; it is the end of `str(error)`.
    """

    hint: str | None

    def __init__(self, message: str = "", hint: str | None = None) -> None:
        ends_so = hint is None or message.endswith(hint)
        super().__init__(message if ends_so else f"{message}; {hint}")
        self.hint = hint


class SettingError(EbbtideError, ValueError):
    """A setting that is wrong, or could have no effect: an unknown word, a pattern that matches nothing."""


class PhaseError(EbbtideError):
    """A call at the wrong time: out of order, from a wrong thread, on something closed or given up."""


class ChangedError(EbbtideError):
    """A tensor was resized or modified in place after it was saved, where plain PyTorch raises as well."""


class CopyError(EbbtideError):
    """A copy between the device and a tier failed; `__cause__` has the reason."""


class NoRoomError(EbbtideError, MemoryError):
    """More room was needed than a limit or the machine has."""


class NotSavedError(EbbtideError):
    """Bytes were asked for that nobody saved."""


class EbbtideWarning(UserWarning):
    """Something works, but not as one would like: a spill folder in RAM, a layer left to a checkpoint."""


__all__ = [
    "ChangedError",
    "CopyError",
    "EbbtideError",
    "EbbtideWarning",
    "NoRoomError",
    "NotSavedError",
    "PhaseError",
    "SettingError",
]
