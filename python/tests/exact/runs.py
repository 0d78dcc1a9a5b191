"""Runs an operator forward and backward in one way or another, and compares what comes out."""

from __future__ import annotations

import copy
import functools
import random
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from .bits import Bits, all_bits, differences
from .inputs import Input, rank, seed_all
from .ways import Plain, Region, Way

REPEATS = 6
"""How often plain torch runs again before a difference counts against a way."""


@dataclass(frozen=True)
class Outcome:
    """What one run gave: the error it ended with, outputs, gradients, the number of tensors that were away."""

    error: str | None
    outputs: tuple[Bits | None, ...] = ()
    grads: tuple[Bits | None, ...] = ()
    away: int = 0

    def unlike(self, other: Outcome) -> str | None:
        """How `other` differs from this one; None if in nothing but the number of tensors away."""
        if self.error != other.error:
            return f"expected error {self.error}, got {other.error}"
        found = {
            "outputs": differences(self.outputs, other.outputs),
            "gradients": differences(self.grads, other.grads),
        }
        texts = [f"{what}: {text}" for what, text in found.items() if text is not None]
        return "; ".join(texts) if texts else None


@dataclass(frozen=True)
class Case:
    """A computation to compare: a function and its arguments, which each run copies before use.

    With `loose`, the function gets inputs that nobody else holds, and its outputs are let go of before what was saved
    is sent away; otherwise the caller holds both.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any]
    seed: int
    loose: bool


def duplicate(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """The same values, strides and offset in a copy of the storage; with one memo, shared storages stay shared."""
    bare = tensor.detach()
    copied: torch.Tensor = copy.deepcopy(bare, memo) if bare.layout is torch.strided else bare.clone()
    return copied


class Own(torch.autograd.Function):
    """The same values in a storage of their own, which nothing but the graph holds; saves nothing."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return duplicate(tensor, {})

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def own(tensor: torch.Tensor) -> torch.Tensor:
    """`Own` as a function."""
    result: torch.Tensor = Own.apply(tensor)
    return result


def _copied(tree: Any) -> Any:
    """A private copy of all arguments: shape, strides, offsets and shared storages as they were."""
    memo: dict[int, Any] = {}

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return duplicate(leaf, memo).requires_grad_(leaf.requires_grad)

    return tree_map(one, tree)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _wanted(tree: Any) -> list[torch.Tensor]:
    return list({id(leaf): leaf for leaf in _tensors(tree) if leaf.requires_grad}.values())


def _loosened(tree: Any) -> Any:
    return tree_map(lambda leaf: own(leaf) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf, tree)


def _forward(case: Case, args: Any, kwargs: Any, region: Region) -> list[torch.Tensor]:
    """The outputs that have gradients."""
    seed_all(case.seed)
    with region.hooks():
        outputs = case.function(*args, **kwargs)
    found = [output for output in _tensors(case.process(outputs)) if output.requires_grad]
    return [output.clone() for output in found] if case.loose else found


def _towards(outputs: Iterable[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Gradients to begin backward with."""
    seed_all(seed + 1)
    return [
        torch.randn_like(output.detach()) if output.layout is torch.strided else torch.ones_like(output)
        for output in outputs
    ]


def _both(case: Case, region: Region) -> Outcome:
    args, kwargs = _copied((case.args, case.kwargs))
    wanted = _wanted((args, kwargs))
    if case.loose:
        args, kwargs = _loosened((args, kwargs))
    try:
        outputs = _forward(case, args, kwargs, region)
    except Exception as error:
        return Outcome(f"forward: {described(error)}")
    del args, kwargs
    away = region.away()
    before = all_bits(outputs)
    if not outputs or not wanted:
        return Outcome(None, before, (), away)
    try:
        grads = torch.autograd.grad(outputs, wanted, _towards(outputs, case.seed), allow_unused=True)
    except Exception as error:
        return Outcome(f"backward: {described(error)}", before, (), away)
    return Outcome(None, before, all_bits(grads), away)


def described(error: BaseException) -> str:
    """Type and first line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def run(case: Case, way: Way) -> Outcome:
    """One forward and backward."""
    region = way.region()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _both(case, region)
    finally:
        region.close()


@dataclass(frozen=True)
class Verdict:
    """`kind`: same, different, or unsettled (plain torch itself differs between identical runs)."""

    kind: str
    text: str = ""
    away: int = 0
    error: str | None = None


def scribble() -> None:
    """Leaves memory behind that is full of other values, for what is read without having been written."""
    blocks = [torch.full((size,), random.uniform(1, 2)) for size in (4, 16, 64, 256, 1024) for _ in range(8)]
    del blocks


def settled(case: Case, expected: Outcome) -> str | None:
    """None if plain torch gives this outcome every time; else how it differs from itself."""
    for _ in range(REPEATS):
        scribble()
        text = expected.unlike(run(case, Plain()))
        if text is not None:
            return text
    return None


def compare(case: Case, ways: Iterable[Way]) -> dict[str, Verdict]:
    """The verdict on each way for this case."""
    expected = run(case, Plain())
    again = expected.unlike(run(case, Plain()))
    if again is not None:
        return {way.name: Verdict("unsettled", again) for way in ways}
    return {way.name: _verdict(case, expected, run(case, way)) for way in ways}


def _verdict(case: Case, expected: Outcome, got: Outcome) -> Verdict:
    text = expected.unlike(got)
    if text is None:
        return Verdict("same", away=got.away, error=expected.error)
    unsettled = settled(case, expected)
    if unsettled is not None:
        return Verdict("unsettled", unsettled, got.away)
    return Verdict("different", text, got.away)


def variants(one: Input) -> list[tuple[str, Callable[..., Any]]]:
    """The operator, and its in-place form where it has one with a backward."""
    op, sample = one.op, one.sample
    found: list[tuple[str, Callable[..., Any]]] = [("", functools.partial(op.gradcheck_wrapper, op.get_op()))]
    inplace = op.get_inplace()
    if inplace is not None and op.supports_inplace_autograd and not sample.broadcasts_input:
        found.append((" in place", functools.partial(op.gradcheck_wrapper, inplace)))
    return found


def spread(sample: Any) -> Any:
    """The sample with gaps between the elements of its tensors; sparse ones have no strides and stay."""
    try:
        return sample.noncontiguous()
    except RuntimeError:
        return sample


def cases(one: Input, loose: bool = False, strided: bool = False) -> list[Case]:
    """The cases of one input of the database; `strided`: of the same input with gaps between its elements."""
    sample = spread(one.sample) if strided else one.sample
    args = (sample.input, *sample.args)
    seed = rank(one) % 2**31
    found = []
    for suffix, function in variants(one):
        called = _own_first(function) if suffix else function
        process = sample.output_process_fn_grad
        name = f"{one}{' strided' if strided else ''}{suffix}"
        found.append(Case(name, called, args, sample.kwargs, process, seed, loose))
    return found


def _own_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """In place on a copy of the first argument: a leaf can't be modified."""

    def called(first: Any, *args: Any, **kwargs: Any) -> Any:
        mine = tree_map(lambda leaf: own(leaf) if isinstance(leaf, torch.Tensor) else leaf, first)
        return function(mine, *args, **kwargs)

    return called
