"""A fixed choice of 2,000 inputs of torch's own operator database, forward and backward under swap.

Every input runs as given, through handles to the file tier and in place; with gaps between its elements, through
handles to host memory; and with nobody else holding its storages, in place to the file tier. The in-place form of the
operator runs as well where it has one. `scripts/opinfo-all` runs all inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from . import native
from .inputs import Input, choose, differentiable, operators
from .runs import Case, Verdict

COUNT = 2000
NAMES = [op.full_name for op in operators() if differentiable(op)]


class Totals:
    """What all operators together gave."""

    def __init__(self) -> None:
        self.operators = 0
        self.kinds: Counter[str] = Counter()
        self.away: Counter[str] = Counter()
        self.unsettled: list[str] = []

    def add(self, case: Case, way: str, verdict: Verdict) -> None:
        self.kinds[verdict.kind] += 1
        self.away[way] += verdict.away
        if verdict.kind == "unsettled":
            self.unsettled.append(case.name)


@pytest.fixture(scope="module")
def chosen() -> dict[str, list[Input]]:
    """The inputs of each operator."""
    by_name: dict[str, list[Input]] = {name: [] for name in NAMES}
    for one in choose(COUNT):
        by_name[one.op.full_name].append(one)
    return by_name


@pytest.fixture(scope="module")
def ways() -> Iterator[native.Ways]:
    """To file, to host, in place."""
    made = native.Ways()
    yield made
    made.close()


@pytest.fixture(scope="module")
def totals() -> Totals:
    """Filled by every operator, read by the last test."""
    return Totals()


@pytest.mark.parametrize("name", NAMES)
def test_exact(name: str, chosen: dict[str, list[Input]], ways: native.Ways, totals: Totals) -> None:
    assert chosen[name], "every operator is in the choice"
    different = []
    for one in chosen[name]:
        for case, verdicts in native.judged(one, ways):
            for way, verdict in verdicts.items():
                totals.add(case, way, verdict)
                if verdict.kind == "different":
                    different.append(f"{case.name}, {way}: {verdict.text}")
    totals.operators += 1
    assert not different, "\n".join(different)


def test_enough_was_swapped(chosen: dict[str, list[Input]], totals: Totals) -> None:
    """Nothing above means anything if tensors stayed where they were."""
    assert sum(map(len, chosen.values())) == COUNT
    if totals.operators < len(NAMES):
        pytest.skip("only a part of the operators ran")
    assert not totals.unsettled, "plain torch differs from itself"
    assert all(count > 2500 for count in totals.away.values()), totals.away
    assert len(totals.away) == 3
    assert totals.kinds["same"] > 4 * COUNT
