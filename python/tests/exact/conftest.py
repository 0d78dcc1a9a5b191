"""What all tests of exactness share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import ebbtide.torch

from .inputs import seed_all
from .regions import KINDS, Regions


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small operators are faster on one thread, and sums have one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    seed_all(0)
    ebbtide.torch.reset()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=KINDS)
def regions(request: pytest.FixtureRequest) -> Iterator[Regions]:
    """Regions of each kind."""
    made = Regions(request.param)
    yield made
    made.close()
