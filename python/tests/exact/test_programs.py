"""Random programs: operators, views, changes in place, regions in regions, dropped values and partial backwards."""

from __future__ import annotations

import contextlib
import gc
import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import ebbtide.torch

from .bits import Bits, bits, difference
from .inputs import seed_all
from .regions import IN_PLACE, KINDS, Regions

UNDER_WAY = ("offload to file, under way", "offload to host, under way")
"""Regions whose copies are not waited for."""
OFTEN = {"enter": 10, "exit": 10, "unary": 30, "binary": 25, "change": 4, "drop": 8, "grad": 6}
SIDE = 6
LEAVES = 3
Enter = Callable[[str], AbstractContextManager[object]]
Instruction = tuple[Any, ...]

UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": lambda a: a.clamp(-2, 2).exp(),
    "sin": torch.sin,
    "tanh": torch.tanh,
    "softmax": lambda a: a.softmax(-1),
    "norm": lambda a: torch.nn.functional.layer_norm(a, (SIDE,)),
    "dropout": lambda a: torch.nn.functional.dropout(a, 0.3),
    "rrelu": lambda a: torch.nn.functional.rrelu(a, training=True),
    "cumprod": lambda a: a.tanh().cumprod(0),
    "sort": lambda a: a.sort(-1)[0],
    "max": lambda a: a * a.amax(-1, keepdim=True),
    "complex": lambda a: torch.complex(a, a.t()).conj().abs(),
    # Views.
    "t": lambda a: a.t(),
    "same": lambda a: a.view(-1).view(SIDE, SIDE) if a.is_contiguous() else a[:],
    "row": lambda a: a[2:3].expand(SIDE, SIDE),
    "halves": lambda a: torch.cat([a[SIDE // 2 :], a[: SIDE // 2]]),
    "detached": lambda a: a.detach().t(),
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mul": torch.mul,
    "div": lambda a, b: a / (b.square() + 1),
    "matmul": lambda a, b: (a @ b) / SIDE,
    "where": lambda a, b: torch.where(a > b, a, b * 2),
    "add": torch.add,
    "chunks": lambda a, b: torch.cat([p * q for p, q in zip(a.chunk(3), b.chunk(3), strict=True)]),
}
INPLACE: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda a: a.add_(0.5),
    "mul_ of a row": lambda a: a[1].mul_(0.5),
    "tanh_": lambda a: a.tanh_(),
    "relu_": lambda a: a.relu_(),
}


def program(seed: int) -> list[Instruction]:
    """Instructions over a growing list of values; numbers are drawn modulo its length.

    What is registered in place must not be changed (T5), so a program has one of the two.
    """
    draw = random.Random(seed)
    made: list[Instruction] = []
    changing = draw.random() < 0.5
    kinds = [kind for kind in (*KINDS, *UNDER_WAY) if not (changing and kind == IN_PLACE)]
    depth = 0
    for _ in range(draw.randint(10, 40)):
        kind = draw.choices(sorted(OFTEN), [OFTEN[kind] for kind in sorted(OFTEN)])[0]
        a, b = draw.randrange(1 << 20), draw.randrange(1 << 20)
        if kind == "enter" and depth < 2:
            made.append(("enter", draw.choice(kinds)))
            depth += 1
        elif kind == "exit" and depth:
            made.append(("exit",))
            depth -= 1
        elif kind == "unary":
            made.append(("unary", draw.choice(sorted(UNARY)), a))
        elif kind == "binary":
            made.append(("binary", draw.choice(sorted(BINARY)), a, b))
        elif kind == "change" and changing:
            made.append(("change", draw.choice(sorted(INPLACE)), a))
        elif kind == "drop":
            made.append(("drop", a))
        elif kind == "grad":
            made.append(("grad", a, draw.random() < 0.7))
    made += [("exit",)] * depth
    made += [("grad", draw.randrange(1 << 20), draw.random() < 0.5) for _ in range(3)]
    return made


class Machine:
    """Runs a program."""

    def __init__(self, seed: int, enter: Enter) -> None:
        seed_all(seed)
        self.leaves = [torch.randn(SIDE, SIDE, requires_grad=True) for _ in range(LEAVES)]
        self.values: list[torch.Tensor] = list(self.leaves)
        self.enter = enter
        self.open: list[AbstractContextManager[object]] = []
        self.found: list[Bits | str | None] = []

    def run(self, instructions: list[Instruction]) -> list[Bits | str | None]:
        """What the program found: gradients, values, errors; it ends at the first error."""
        try:
            for kind, *rest in instructions:
                getattr(self, "enter_" if kind == "enter" else kind)(*rest)
        except RuntimeError as error:
            self.found.append(f"error: {type(error).__name__}")
        else:
            self.found += [bits(value) for value in self.values]
        while self.open:
            with contextlib.suppress(RuntimeError):
                self.open.pop().__exit__(None, None, None)
        return self.found

    def _at(self, number: int) -> int:
        return number % len(self.values)

    def enter_(self, kind: str) -> None:
        context = self.enter(kind)
        context.__enter__()
        self.open.append(context)

    def exit(self) -> None:
        self.open.pop().__exit__(None, None, None)

    def unary(self, name: str, a: int) -> None:
        self.values.append(UNARY[name](self.values[self._at(a)]))

    def binary(self, name: str, a: int, b: int) -> None:
        self.values.append(BINARY[name](self.values[self._at(a)], self.values[self._at(b)]))

    def change(self, name: str, a: int) -> None:
        value = self.values[self._at(a)]
        if not value.is_leaf or not value.requires_grad:
            INPLACE[name](value)

    def drop(self, a: int) -> None:
        if len(self.values) > 1:
            del self.values[self._at(a)]

    def grad(self, a: int, retain: bool) -> None:
        value = self.values[self._at(a)]
        if not value.requires_grad:
            return
        towards = [leaf for leaf in self.leaves if leaf.requires_grad]
        grads = torch.autograd.grad(value.sum(), towards, retain_graph=retain, allow_unused=True)
        self.found += [None if grad is None else bits(grad) for grad in grads]


class Tiers:
    """A maker of regions of every kind."""

    def __init__(self) -> None:
        self.regions = {kind: Regions(kind) for kind in KINDS}

    def enter(self, kind: str) -> AbstractContextManager[object]:
        if kind in UNDER_WAY:
            return ebbtide.torch.offload(tier=kind.removesuffix(", under way").split()[-1], min_bytes=0)
        return self.regions[kind].region()

    def moved(self) -> int:
        return sum(regions.moved() for kind, regions in self.regions.items() if kind != "offload to host")

    def close(self) -> None:
        for regions in self.regions.values():
            regions.close()


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    """Fresh ones."""
    made = Tiers()
    yield made
    made.close()


def mismatch(expected: list[Bits | str | None], got: list[Bits | str | None]) -> str | None:
    """How the findings of two machines differ.

    Where plain torch raises, swap may give what was saved, or raise earlier.
    """
    for number, one in enumerate(expected):
        if isinstance(one, str):
            return None
        if number >= len(got) or isinstance(got[number], str):
            return f"finding {number}: expected {one}, got {got[number:]}"
        text = difference(one, got[number])  # type: ignore[arg-type]  # no text here
        if text is not None:
            return f"finding {number}: {text}"
    return None if len(expected) == len(got) else f"{len(expected)} findings expected, {len(got)} found"


def plain(kind: str) -> AbstractContextManager[object]:
    """No region."""
    return contextlib.nullcontext()


@pytest.mark.parametrize("block", range(200 if os.environ.get("EBBTIDE_LONG") else 10))
def test_random_programs(block: int, tiers: Tiers) -> None:
    failed = []
    for seed in range(block * 60, block * 60 + 60):
        instructions = program(seed)
        expected = Machine(seed, plain).run(instructions)
        got = Machine(seed, tiers.enter).run(instructions)
        text = mismatch(expected, got)
        if text is not None:
            failed.append(f"seed {seed}: {text}")
    assert not failed, "\n".join(failed)
    assert tiers.moved() > 100
    # A backward that failed leaves nodes in torch's queue until the next backward.
    torch.zeros((), requires_grad=True).mul(2).backward()
    gc.collect()
    ebbtide.torch.synchronize()
    stats = ebbtide.torch.stats()
    assert stats["active_groups"] == stats["live_bytes"] == stats["bytes_held"] == 0, stats
