"""What `Session.verify` finds, and how the results of two steps are compared. No framework, no state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ebbtide._report import size

TOO_SMALL = 16 << 20  # bytes; the process itself varies by some MiB


@dataclass(frozen=True)
class Verified:
    """What `Session.verify` found: `print` it, or ask for `identical`.

    Attributes:
        different: Names of what was not the same to the last bit: `"loss"`, `"gradient of …"`, `"buffer …"`.
        compared: How many losses, gradients and buffers were compared.
        repeatable: Whether a second plain step gave the same as the first. If not, the model itself is not
            deterministic, and the comparison says nothing.
        plain_peak: The most bytes above what was in use when the plain step began.
        swapped_peak: The same of the step through the session.
        plain_ms: Time of the plain step.
        swapped_ms: The same of the step through the session.
        bytes_out: What that one moved.
    """

    different: tuple[str, ...]
    compared: int
    repeatable: bool
    plain_peak: int
    swapped_peak: int
    plain_ms: float
    swapped_ms: float
    bytes_out: int

    @property
    def identical(self) -> bool:
        """Whether all of it was the same, bit for bit."""
        return not self.different

    def __str__(self) -> str:
        if self.identical:
            first = f"identical: {self.compared} losses, gradients and buffers are the same to the last bit"
        else:
            shown = ", ".join(self.different[:5]) + (" …" if len(self.different) > 5 else "")
            first = f"NOT identical: {len(self.different)} of {self.compared} differ: {shown}"
        if not self.repeatable:
            first += "; but two plain steps differ as well: the model is not deterministic, so this proves nothing"
        share = (
            f" ({self.swapped_peak / self.plain_peak:.2f}x)"
            if self.plain_peak >= TOO_SMALL
            else " (too small to compare)"
        )
        second = f"peak above the start: plain {size(self.plain_peak)}, swapped {size(self.swapped_peak)}{share}"
        third = (
            f"time: plain {self.plain_ms:.0f} ms, swapped {self.swapped_ms:.0f} ms, moved out {size(self.bytes_out)}"
        )
        return "\n".join([first, second, third])


def leaves(value: object, kind: type, where: str = "") -> Iterator[tuple[str, Any]]:
    """What is of this kind in dicts, lists and tuples, and where it is: `["a"][0]`."""
    if isinstance(value, kind):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, kind, f"{where}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from leaves(item, kind, f"{where}[{index}]")


def different(one: Mapping[str, Any], other: Mapping[str, Any], same: Callable[[Any, Any], bool]) -> tuple[str, ...]:
    """Names of what is not the same in both, or only in one."""
    names = [*one, *(name for name in other if name not in one)]
    return tuple(name for name in names if name not in one or name not in other or not same(one[name], other[name]))
