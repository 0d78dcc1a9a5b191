"""Row M12, cases C17, C18 and C23, the budget: `session(memory=…)` and `session(plan=…)`."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from managed import managed
from session_models import Chain, Gpt, assert_clean, assert_same, gpt, loss_of, plain, result, stepped
from torch import nn

import ebbtide.torch
from ebbtide import NoRoomError, PhaseError, SettingError
from ebbtide._link import Link
from ebbtide._plan import LATE, RECORDED
from ebbtide.torch import _link, _plan


def planned_session(model: nn.Module, memory: int | str = "100%", **settings: Any) -> ebbtide.torch.Session:
    """A session whose next step follows a plan."""
    s = ebbtide.torch.session(model, memory=memory, min_bytes=0, **settings)
    for _ in range(RECORDED):
        stepped(s, model)
    return s


def budgets(model: Gpt, count: int = 5) -> list[int]:
    """From the least to what keeping everything takes."""
    model = copy.deepcopy(model)
    with planned_session(model) as s:
        stepped(s, model)
        assert s._planner is not None and s._planner.trace is not None
        _, least, most, _ = s._planner.trace.range()
    return [least + (most - least) * at // (count - 1) for at in range(count)]


def test_m12_a_budget_is_never_exceeded_and_bits_are_those_of_plain() -> None:
    model = gpt(layers=5)
    expected = plain(model)
    for budget in budgets(model):
        with planned_session(model, budget) as s, managed(s, model) as meter:
            for _ in range(3):
                assert_same(expected, stepped(s, model))
            plan = s.plan()
            assert plan is not None and plan["memory_bytes"] == budget
            assert meter.peak + _plan.static_bytes(model) <= budget
            assert plan["predicted_peak_bytes"] <= budget
            assert_clean(s)


def test_m12_the_first_steps_need_no_more_than_one_layer() -> None:
    model = gpt(layers=6)
    with ebbtide.torch.session(model, memory="100%", min_bytes=0) as s:
        expected = plain(model)
        with managed(s, model) as meter:
            for _ in range(RECORDED):
                assert_same(expected, stepped(s, model))
        stepped(s, model)
        assert s._planner is not None and s._planner.trace is not None
        base, least, most, _ = s._planner.trace.range()
        assert base + meter.peak <= least < most


def edited(s: ebbtide.torch.Session, file: Path, changes: dict[int, dict[str, Any]], memory: int = 1 << 30) -> Path:
    """The plan of a session with other decisions for some layers, as a file."""
    s.save_plan(file)
    plan = json.loads(file.read_text())
    plan["memory_bytes"] = memory
    for line in plan["layers"]:
        line.update(recompute=False, swap=[])
        line.pop("tier", None)
        line.pop("load_at", None)
    for at, change in changes.items():
        plan["layers"][at].update(change)
    file.write_text(json.dumps(plan))
    return file


def test_m12_every_mix_of_words_gives_the_same_bits(tmp_path: Path) -> None:
    model = gpt(layers=4)
    expected = plain(model)
    with planned_session(model) as s:
        stepped(s, model)
        out: dict[str, Any] = {"swap": ["out"], "tier": "file"}
        some: dict[str, Any] = {"swap": ["s1", "s4", "out"], "tier": "file"}
        again: dict[str, Any] = {"recompute": True}
        mixes: list[dict[int, dict[str, Any]]] = [
            {1: again, 2: again},
            {0: out, 1: again | out, 2: again | out, 3: again},
            {0: some, 1: again, 3: {"swap": ["s2"], "tier": "file"}},
            {0: again, 1: again, 2: again, 3: again},
        ]
        files = [edited(s, tmp_path / f"{at}.json", mix) for at, mix in enumerate(mixes)]
    for file, mix in zip(files, mixes, strict=True):
        with ebbtide.torch.session(model, plan=file, min_bytes=0) as s:
            for _ in range(RECORDED + 2):
                assert_same(expected, stepped(s, model))
            recomputed = [at for at, word in enumerate(s.policy.values()) if word == "recompute"]
            assert recomputed == [at for at, change in mix.items() if "recompute" in change]
            assert_clean(s)


def test_a_plan_is_saved_read_and_refused(tmp_path: Path) -> None:
    model = gpt(layers=4)
    file = tmp_path / "p.json"
    with ebbtide.torch.session(model, memory="60%", min_bytes=0) as s:
        with pytest.raises(PhaseError, match="there is no plan yet"):
            s.save_plan(file)
        for _ in range(RECORDED + 1):
            stepped(s, model)
        s.save_plan(file)
        s.save_trace(tmp_path / "t.json")
        with pytest.raises(SettingError, match="can't be written"):
            s.save_plan(tmp_path / "none" / "p.json")
        made = s.plan()
    assert json.loads((tmp_path / "t.json").read_text())["format"] == "ebbtide.trace"
    with ebbtide.torch.session(model, plan=file, min_bytes=0) as s:
        for _ in range(RECORDED + 1):
            stepped(s, model)
        again = s.plan()
    assert made is not None and again is not None
    assert [layer["swap"] for layer in again["layers"]] == [layer["swap"] for layer in made["layers"]]
    other = gpt(layers=3)
    with ebbtide.torch.session(other, plan=file, min_bytes=0) as s:
        stepped(s, other)
        with pytest.raises(SettingError, match="4 layers"):
            stepped(s, other)


def test_a_budget_that_nothing_can_meet_says_what_would() -> None:
    model = gpt(layers=4)
    with ebbtide.torch.session(model, memory=100_000, min_bytes=0) as s:
        stepped(s, model)
        with pytest.raises(NoRoomError, match=r"no plan fits 97\.7 KiB: the least found is") as error:
            stepped(s, model)
        assert_clean(s)
    least = str(error.value).split("the least found is ")[1].split(" (")[0]
    with planned_session(model, least) as s:
        stepped(s, model)
        assert s.plan() is not None


BAD: list[tuple[dict[str, Any], str]] = [
    ({"memory": "40%", "policy": "swap"}, "they exclude each other"),
    ({"memory": "40%", "plan": "p.json"}, "they exclude each other"),
    ({"memory": "much"}, 'memory="much": size `much`: it does not start with a number'),
    ({"memory": "-3%"}, "no number before the %"),
    ({"memory": 0}, "leaves nothing"),
    ({"memory": 1.5}, "is a float"),
    ({"memory": True}, "is a bool"),
    ({"plan": "/nowhere/p.json"}, "can't be read"),
    ({"plan": 3}, "takes the path"),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    model = gpt()
    with pytest.raises(SettingError, match=message):
        ebbtide.torch.session(model, **settings)


def test_a_plan_that_is_none_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text('{"format":"ebbtide.trace"}')
    with pytest.raises(SettingError, match="this is no plan"):
        ebbtide.torch.session(gpt(), plan=file)


def test_c17_a_budget_above_the_need_keeps_everything_and_says_so() -> None:
    model = gpt()
    with planned_session(model, "100%") as s:
        before = s.stats()["bytes_out"]
        stepped(s, model)
        assert s.stats()["bytes_out"] == before
        assert "0 of 4 layers swap, 0 are recomputed" in s.report()


def test_c18_the_report_names_budget_plan_and_prediction() -> None:
    model = gpt()
    with ebbtide.torch.session(model, memory="50%", min_bytes=0) as s:
        assert "none yet: recording" in s.report()
        for _ in range(RECORDED + 1):
            stepped(s, model)
        report = s.report()
    assert "budget" in report and "predicted" in report


def test_c23_longer_sequences_are_recorded_and_planned_for_anew() -> None:
    model = gpt(layers=4)
    with planned_session(model, "100%") as s:
        stepped(s, model)
        first = s.plan()
        long = 24
        for _ in range(3):
            expected = plain(model, lambda m: loss_of(m, length=long))
            assert_same(expected, stepped(s, model, lambda m: loss_of(m, length=long)))
        second = s.plan()
        assert first is not None and second is not None
        assert second["memory_bytes"] > first["memory_bytes"]
        # Shorter ones fit into what was planned.
        assert_same(plain(model), stepped(s, model))
        assert s.plan() == second
        assert_clean(s)


class Boom(Exception):
    """Planned."""


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_c10_after_a_failed_step_the_next_is_right(where: str) -> None:
    model = gpt(layers=4)
    expected = plain(model)

    def boom(*_: object) -> None:
        raise Boom

    for failing in range(RECORDED + 2):
        with ebbtide.torch.session(model, memory="60%", min_bytes=0) as s:
            for number in range(RECORDED + 3):
                if number != failing:
                    assert_same(expected, stepped(s, model))
                    continue
                block = model.blocks[2]
                register = block.register_forward_pre_hook if where == "forward" else block.register_full_backward_hook
                handle = register(boom)
                with pytest.raises(Boom), s.step():
                    loss_of(model).backward()
                handle.remove()
            assert s.plan() is not None
            assert_clean(s)


def test_micro_batches_and_two_backwards_under_a_plan() -> None:
    model = gpt(layers=4, dropout=0.0)
    copied = copy.deepcopy(model)
    for seed in range(3):
        loss_of(copied, seed).backward()
    expected = result(copied, torch.zeros(()))
    with planned_session(model, "50%") as s:
        model.zero_grad()
        losses = []
        for seed in range(3):
            with s.step():
                losses.append(loss_of(model, seed))
        for loss in losses:
            loss.backward()
        assert_same(expected, result(model, torch.zeros(())))
        with s.step():
            loss = loss_of(model)
        loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        assert_same(plain(model), result(model, loss))
        del loss, losses
        assert_clean(s)


def test_layers_in_another_order_than_was_recorded() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
            self.turned = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in reversed(self.blocks) if self.turned else self.blocks:
                x = block(x)
            return x

    def run(m: nn.Module) -> torch.Tensor:
        return m(torch.linspace(0, 1, 128 * 8).view(128, 8)).square().sum()

    torch.manual_seed(0)
    model = Turned()
    with ebbtide.torch.session(model, memory="50%", min_bytes=0) as s:
        for turned in (False, False, False, True, True, False):
            model.turned = turned
            assert_same(plain(model, run), stepped(s, model, run))
        assert_clean(s)


def test_layers_that_save_what_they_return() -> None:
    torch.manual_seed(0)
    model = Chain(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(6)))

    def run(m: nn.Module) -> torch.Tensor:
        return m(torch.linspace(-1, 1, 256 * 16).view(256, 16)).square().sum()

    for memory in ("30%", "60%", "100%"):
        with ebbtide.torch.session(model, memory=memory, min_bytes=0) as s:
            try:
                for _ in range(RECORDED + 2):
                    assert_same(plain(model, run), stepped(s, model, run))
            except NoRoomError as error:
                assert memory == "30%", error
            assert_clean(s)


def test_excluded_layers_stay_as_they_are() -> None:
    model = gpt(layers=4)
    with ebbtide.torch.session(model, memory="100%", exclude="blocks.1", min_bytes=0) as s:
        for _ in range(RECORDED + 1):
            assert_same(plain(model), stepped(s, model))
        plan = s.plan()
        assert plan is not None
        assert [layer["name"] for layer in plan["layers"]] == ["blocks.0", "blocks.2", "blocks.3"]


def test_backward_that_never_comes_records_nothing() -> None:
    model = gpt()
    with ebbtide.torch.session(model, memory="50%", min_bytes=0) as s:
        for _ in range(3):
            with s.step():
                loss_of(model)
        assert s.plan() is None
        assert "no backward came to the first layer" in s.report()
        for _ in range(RECORDED + 1):
            assert_same(plain(model), stepped(s, model))
        assert s.plan() is not None


def test_c23_a_link_that_became_slower_is_planned_for_anew() -> None:
    model = gpt(layers=4)
    slow = Link(out_per_s=1000, in_per_s=1000, latency_ns=0)
    with planned_session(model, "60%") as s, mock.patch.object(_link, "measure", return_value=slow):
        assert_same(plain(model), stepped(s, model))
        planner = s._planner
        assert planner is not None and planner._planned is not None
        before = planner.trace
        planner._planned.seconds, planner._late = 1e9, LATE - 1
        assert_same(plain(model), stepped(s, model))  # recorded
        assert_same(plain(model), stepped(s, model))
        assert planner.trace is not before and planner.trace is not None
        assert json.loads(planner.trace.json())["tiers"][0]["out"]["bytes_per_s"] == 1000
        assert_clean(s)
