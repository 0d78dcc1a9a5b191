"""Sessions on an accelerator (the fake one): the same bits, backward on another thread, memory of the device."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import fake
import pytest
import torch
from accelerator_runs import DEVICE, quiet
from session_models import Gpt, assert_same, gpt, plain, result, stepped, tokens
from torch import nn
from torch.nn import functional

import ebbtide.torch


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    access = torch.ops.fake_accelerator.host_access
    monkeypatch.setattr(torch.get_device_module("fake"), "_ebbtide_host_access", access, raising=False)
    quiet()
    yield
    gc.collect()
    torch.accelerator.synchronize(0)
    assert not fake.reports()
    quiet()
    torch.set_num_threads(threads)


def on_device(**settings: Any) -> Gpt:
    return gpt(dropout=0.0, **settings).to(DEVICE)


def run(model: nn.Module) -> torch.Tensor:
    given = tokens().to(DEVICE)
    return functional.cross_entropy(model(given).flatten(0, 1), given.flatten())


@pytest.mark.parametrize("tier", [None, "host"])
@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_steps_are_the_same(policy: Any, tier: str | None) -> None:
    model = on_device()
    expected = plain(model, run)
    with ebbtide.torch.session(model, policy, tier, min_bytes=0) as s:
        for inside in (False, True, False):
            model.zero_grad()
            with s.step():
                loss = run(model)
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            assert_same(result(model, loss), expected)
        assert (s.stats()["bytes_out"] > 0) == (policy == "swap")
        assert s.stats()["active_groups"] == 0


@pytest.mark.parametrize("memory", ["30%", "60%", "100%"])
def test_m12_budgets_on_a_device(memory: str) -> None:
    model = on_device(layers=5)
    expected = plain(model, run)
    with ebbtide.torch.session(model, memory=memory, min_bytes=0) as s:
        for _ in range(4):
            assert_same(stepped(s, model, run), expected)
        plan = s.plan()
        assert plan is not None
        # Which of the two, times decide.
        done = [layer for layer in plan["layers"] if layer["swap"] or layer["recompute"]]
        assert bool(done) == (memory != "100%")
        gc.collect()
        assert s.stats()["active_groups"] == 0


def test_verify_and_report_are_about_the_device() -> None:
    model = on_device(layers=6)
    with ebbtide.torch.session(model, min_bytes=0) as s:
        found = s.verify(lambda: run(model))
        assert found.identical
        assert found.repeatable
        assert 0 < found.swapped_peak < found.plain_peak
        assert f"of {DEVICE}" in s.report()


def test_m4_on_a_device_memory_goes_while_the_forward_runs() -> None:
    model = on_device(layers=8)
    seen: list[int] = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: seen.append(torch.accelerator.memory_allocated(DEVICE)))
    with ebbtide.torch.session(model, min_bytes=0) as s:
        stepped(s, model, run)
        seen.clear()
        stepped(s, model, run)
    swapped = max(seen) - seen[0]
    seen.clear()
    model.zero_grad()
    run(model).backward()
    kept = max(seen) - seen[0]
    assert swapped < 0.5 * kept


def test_a_failed_step_leaves_nothing() -> None:
    model = on_device()
    expected = plain(model, run)

    def fail(*_: object) -> None:
        raise RuntimeError("planned")

    with ebbtide.torch.session(model, min_bytes=0) as s:
        for _ in range(2):
            handle = model.get_submodule("blocks.2.norm1").register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="planned"), s.step():
                run(model)
            handle.remove()
            assert s.stats()["active_groups"] == 0
            assert_same(stepped(s, model, run), expected)


def test_a_model_on_two_kinds_of_devices() -> None:
    """Layers on the CPU beside an accelerator are let through untouched."""
    model = gpt(dropout=0.0)
    names = plain(model).keys()
    model.head.to(DEVICE)

    def both(model: nn.Module) -> torch.Tensor:
        assert isinstance(model, Gpt)
        given = tokens()
        x = model.embed(given)
        for block in model.blocks:
            x = block(x)
        logits = model.head(x.to(DEVICE))
        return functional.cross_entropy(logits.flatten(0, 1).cpu(), given.flatten())

    expected = plain(model, both)
    with ebbtide.torch.session(model, {"blocks.*": "swap", "head": "swap"}, min_bytes=0) as s:
        for _ in range(2):
            assert_same(stepped(s, model, both), expected)
    assert expected.keys() == names
