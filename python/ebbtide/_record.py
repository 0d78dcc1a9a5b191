"""Records what the layers of a step take and save: the material of a trace.

While a step is recorded every layer is swapped, the last one too, and at most one layer's activations are in
memory, so that a small budget holds meanwhile. Storages get their names by the order in which they are saved.

| what | how it is found |
| --- | --- |
| time of a forward | from its begin to its end; its copies are waited for outside |
| time of a backward | from its begin to that of the layer before, without waits for loads |
| the border of two layers | a storage that one layer returns and the next one is called with |
| what a layer can't make again | saved storages that it was called with |
| what is there besides | saved storages that never move, and inputs without gradients that no layer saves |

A storage is known by a number, its *key*, while it is alive; 0 is none. No framework.

Access: as a step: the session's thread in forward, the threads of backward in backward, one at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

CALLED_WITH = "it is called with a tensor that its backward does not need"
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
    why_not: str | None = None  # it can't be run a second time


class Recorder:
    """Records one step, of which nothing moves but what the step itself moves."""

    def __init__(self, waited: Waited, settle: Callable[[], None]) -> None:
        self.layers: list[Record] = []
        self.is_complete = False  # backward has been through the first layer that saved anything
        self._beside: dict[int, int] = {}  # bytes of storages that are saved and never move
        self._lent: dict[int, tuple[int, set[int]]] = {}  # bytes of inputs without gradients, and whose they are
        self.fixed_ns = 0  # outside of layers
        self._waited = waited
        self._settle = settle  # until the device has done what was queued
        self._started = time.perf_counter_ns()
        self._forward = 0
        self._backward: tuple[int, int, float] | None = None  # which layer, since when, waited by then

    # ---- forward

    def enter(self, name: str, keys: frozenset[int]) -> None:
        """A layer begins, called with these storages. A name stands for one call of a step."""
        record = Record(name, inputs=keys)
        before = self.layers[-1].output if self.layers else 0
        record.reads = before if before in record.inputs else 0
        self.layers.append(record)
        self._settle()
        self._forward = time.perf_counter_ns()

    def saves(self, key: int, count: int) -> None:
        """A storage of so many bytes, which may move, is saved by the layer that runs."""
        record = self.layers[-1]
        if key not in record.saved:
            name = "in" if key and key == record.reads else f"s{len(record.saved)}"
            record.saved[key] = Saved(name, count)

    def stays(self, key: int, count: int) -> None:
        """A storage of so many bytes is there and never moves."""
        if key:
            self._beside[key] = count

    def lent(self, number: int, count: int) -> None:
        """The layer that runs was called with this, which needs no gradient and which it does not save."""
        self._lent.setdefault(number, (count, set()))[1].add(len(self.layers) - 1)

    def cannot_again(self, why: str) -> None:
        """The layer that runs, or ran last, can't be run a second time."""
        self.layers[-1].why_not = why

    def ends(self) -> None:
        """The layer that runs has run. What it saved may be told after this."""
        self._settle()
        self.layers[-1].forward_ns = time.perf_counter_ns() - self._forward

    def leave(self, key: int, count: int) -> None:
        """It is left; it returns this storage, if that needs a gradient."""
        record = self.layers[-1]
        record.output, record.output_bytes = key, count

    # ---- backward

    def reaches(self, layer: int) -> None:
        """The backward of this layer begins."""
        self._ends()
        self._backward = (layer, time.perf_counter_ns(), self._waited())

    def over(self) -> None:
        """The whole backward has ended."""
        self._ends()
        self._backward = None
        # Backward comes from the last one, and doesn't come to layers that are frozen or whose result is not used.
        first = next((record for record in self.layers if record.saved), None)
        self.is_complete = first is not None and first.backward_ns > 0
        inside = sum(record.forward_ns + record.backward_ns for record in self.layers)
        self.fixed_ns = max(0, time.perf_counter_ns() - self._started - inside - int(self._waited() * 1e6))

    def _ends(self) -> None:
        self._settle()
        if self._backward is not None:
            layer, since, waited = self._backward
            took = time.perf_counter_ns() - since - int((self._waited() - waited) * 1e6)
            self.layers[layer].backward_ns = max(took, 1)

    # ---- what it comes to

    def beside_bytes(self) -> int:
        """Bytes of storages that are there whatever the plan, and that no layer saves.

        What several layers are called with (a mask, a table) counts as such. What only one is called with may go
        when it has run, unless it is to run again, so that is not planned.
        """
        saved = {key for record in self.layers for key in record.saved}
        total = sum(count for key, count in self._beside.items() if key not in saved)
        for count, layers in self._lent.values():
            if len(layers) > 1:
                total += count
            elif self.layers[min(layers)].saved:
                self.layers[min(layers)].why_not = CALLED_WITH
        return total

    def grow(self, known: dict[tuple[str, str], int]) -> None:
        """Storages are as large as they ever were in a recorded step, of which `known` keeps the most."""
        for record in self.layers:
            for saved in record.saved.values():
                most = known[record.name, saved.name] = max(saved.bytes, known.get((record.name, saved.name), 0))
                saved.bytes = most
            most = known[record.name, "out"] = max(record.output_bytes, known.get((record.name, "out"), 0))
            record.output_bytes = most

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
