"""Records what the layers of a step take and save: the material of a trace.

While a step is recorded every layer is swapped, the last one too, and at most one layer's activations are in
memory, so that a small budget holds meanwhile. Storages get their names by the order in which they are saved.

| what | how it is found |
| --- | --- |
| time of a forward | between the hooks of the layer; its copies are waited for outside |
| time of a backward | from the gradient of its output to that of the layer before, without waits for loads |
| the border of two layers | a storage that one layer returns and the next one is called with |
| what a layer can't make again | saved storages that it was called with |

Access: as `_step`: the session's thread in forward, autograd's threads in backward, one at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

Waited = Callable[[], float]  # milliseconds that the training thread has waited so far


@dataclass
class Saved:
    """One storage that a layer saved."""

    name: str
    bytes: int


@dataclass
class Record:
    """One layer of a step."""

    name: str
    forward_ns: int = 0
    backward_ns: int = 0
    saved: dict[int, Saved] = field(default_factory=dict)  # by storage
    inputs: frozenset[int] = frozenset()  # storages that it was called with
    reads: int = 0  # that of them which the layer before has returned, or 0
    output: int = 0  # the storage that it returned, or 0
    output_bytes: int = 0


class Recorder:
    """Records one step, of which nothing moves but what the step itself moves."""

    def __init__(self, waited: Waited, settle: Callable[[], None]) -> None:
        self.layers: list[Record] = []
        self.is_complete = False  # backward has been through the first layer
        self.fixed_ns = 0  # outside of layers
        self._waited = waited
        self._settle = settle  # until the device has done what was queued
        self._started = time.perf_counter_ns()
        self._forward = 0
        self._backward: tuple[int, int, float] | None = None  # which layer, since when, waited by then

    # ---- forward

    def enter(self, name: str, inputs: object) -> None:
        record = Record(name, inputs=frozenset(key_of(tensor) for tensor in tensors(inputs)))
        before = self.layers[-1].output if self.layers else 0
        record.reads = before if before in record.inputs else 0
        self.layers.append(record)
        self._settle()
        self._forward = time.perf_counter_ns()

    def saves(self, tensor: torch.Tensor) -> None:
        """A tensor that may move is saved by the layer that runs."""
        record = self.layers[-1]
        key = key_of(tensor)
        if key not in record.saved:
            name = "in" if key == record.reads else f"s{len(record.saved)}"
            record.saved[key] = Saved(name, tensor.untyped_storage().nbytes())

    def leave(self, output: object) -> None:
        record = self.layers[-1]
        self._settle()
        record.forward_ns = time.perf_counter_ns() - self._forward
        tensor = next(tensors(output), None)
        if tensor is not None and tensor.requires_grad:
            record.output, record.output_bytes = key_of(tensor), tensor.untyped_storage().nbytes()

    # ---- backward

    def reaches(self, layer: int) -> None:
        """The gradient of this layer's output has come."""
        self._ends()
        self._backward = (layer, time.perf_counter_ns(), self._waited())

    def over(self) -> None:
        """The whole backward has ended."""
        self._ends()
        self._backward = None
        seen = [record for record in self.layers if record.backward_ns]
        self.is_complete = len(seen) == len(self.layers) > 0
        inside = sum(record.forward_ns + record.backward_ns for record in self.layers)
        self.fixed_ns = max(0, time.perf_counter_ns() - self._started - inside - int(self._waited() * 1e6))

    def _ends(self) -> None:
        self._settle()
        if self._backward is not None:
            layer, since, waited = self._backward
            took = time.perf_counter_ns() - since - int((self._waited() - waited) * 1e6)
            self.layers[layer].backward_ns = max(took, 1)

    # ---- what it comes to

    def storages(self, layer: int) -> list[tuple[str, int, str]]:
        """What a layer makes that lives on, as `Recording.layer` takes it."""
        record = self.layers[layer]
        own = [
            (saved.name, saved.bytes, "fixed" if key in record.inputs else "inner")
            for key, saved in record.saved.items()
            if key != record.reads
        ]
        after = self.layers[layer + 1] if layer + 1 < len(self.layers) else None
        if after is not None and after.reads:
            # Where this layer saves what it returns, too, there are two copies of it.
            own.append(("out", record.output_bytes, "output" if after.reads in after.saved else "passed"))
        return own


def key_of(tensor: torch.Tensor) -> int:
    """What a storage is known by while it is alive; 0 for none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def tensors(tree: object) -> Iterator[torch.Tensor]:
    """The tensors among a layer's inputs or outputs."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from tensors(value)
