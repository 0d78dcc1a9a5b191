"""Training steps on the fake accelerator, drawn from seeds: right bits, and not one unordered access.

Each mistake that an engine can make in the order of its work is planted, too, and has to be reported.
"""

from __future__ import annotations

from collections.abc import Iterator

import fake
import pytest
import torch
from accelerator_runs import (
    MISTAKES,
    Plan,
    StepPlan,
    new_model,
    plant,
    quiet,
    scheduled,
    swapped,
    train,
)
from session_models import bits_equal

SEEDS = 200
PLANTED_SEEDS = 40
# Bytes that went to the spill file or came from there, in one test.
spilled: list[int] = []


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def access(address: int, byte_count: int, writes: bool) -> None:
        spilled.append(byte_count)
        torch.ops.fake_accelerator.host_access(address, byte_count, writes)

    # The spill file's threads are part of what is checked.
    monkeypatch.setattr(torch.get_device_module("fake"), "_ebbtide_host_access", access, raising=False)
    spilled.clear()
    quiet()
    yield
    quiet()
    torch.set_num_threads(threads)


# Small pools are full now and then, which is told.
@pytest.mark.filterwarnings("ignore:a prefetch could not be started:ebbtide.EbbtideWarning")
@pytest.mark.parametrize("first", range(0, SEEDS, 20))
def test_no_access_is_unordered(first: int) -> None:
    moved = 0
    for seed in range(first, first + 20):
        plan = Plan.draw(seed)
        with scheduled(plan):
            expected = train(plan, None, new_model(plan))
        fake.clear_reports()
        seen, figures = swapped(plan)
        assert not fake.reports(), (plan, fake.reports()[:3])
        assert len(seen) == len(expected)
        assert all(bits_equal(*pair) for pair in zip(seen, expected, strict=True)), plan
        assert (figures["active_groups"], figures["bytes_held"]) == (0, 0), plan
        moved += int(figures["bytes_in"])
    assert moved > 0
    assert spilled


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_is_reported(mistake: str) -> None:
    for seed in range(PLANTED_SEEDS):
        plan = Plan.draw(seed)
        plan.layers, plan.side_stream = 4, False
        # The host's mistake needs a pool that is too small.
        plan.settings = {"min_bytes": 0, "host_bytes": 60 << 10} if "host" in mistake else {"min_bytes": 0}
        plan.steps = [StepPlan([seed], seed % 2 == 0, "no exception", 0, False)]
        fake.clear_reports()
        with pytest.MonkeyPatch.context() as patch:
            plant(patch, mistake)
            swapped(plan)
        assert fake.reports(), plan
