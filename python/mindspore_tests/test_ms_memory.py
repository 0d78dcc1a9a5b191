"""Bytes: what a session counts against what is alive, `verify`, and budgets: `session(memory=…)`, `session(plan=…)`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from cells import Chain, Does, doing, mixed
from checks import SMALL, all_tensors, array, assert_clean, bits, fresh_bytes, grad_of, plain, stepped
from mindspore import Tensor, nn
from models import GPT, Size, batch, gradients_of, made

import ebbtide.mindspore
from ebbtide import NoRoomError, PhaseError, SettingError
from ebbtide._plan import RECORDED
from ebbtide.mindspore import Session
from ebbtide.mindspore._plan import static_bytes

# ---- bytes


def growth(s: Session | None, model: GPT, size: Size) -> tuple[int, int]:
    """Bytes of storages at the end of forward that weren't there before, and what the session counts."""
    before = all_tensors()
    found = (0, 0)

    def forward(*given: Tensor) -> Tensor:
        nonlocal found
        loss = model(*given)
        ebbtide.mindspore.synchronize()
        found = fresh_bytes(before, model), int(s.stats()["live_bytes"]) if s is not None else 0
        return loss

    grad = grad_of(forward, model)
    if s is None:
        grad(*batch(size, 0))
    else:
        with s.step():
            grad(*batch(size, 0))
    return found


@pytest.mark.parametrize("policy", ["swap", {"blocks.*": "swap"}, {"blocks.1": "swap"}], ids=str)
def test_m4_live_bytes_are_those_of_storages_that_are_alive(policy: Any) -> None:
    size = Size(length=64)
    model = made(size)
    with ebbtide.mindspore.session(model, policy, min_bytes=0) as s:
        fresh, counted = growth(s, model, size)
        # Outside of layers: the logits, tokens, targets, the loss and the sum that goes in.
        outside = 6 * size.batch * size.length * size.vocabulary * 4
        assert counted <= fresh <= counted + outside
        assert_clean(s)


def test_m4_most_of_what_layers_save_is_away_at_the_end_of_forward() -> None:
    size = Size(layers=8, length=64)
    model = made(size)
    with ebbtide.mindspore.session(model, {"blocks.*": "keep", "blocks.0": "swap"}, min_bytes=0, prefetch=1) as s:
        growth(s, model, size)
        kept = s._tally.peak
    with ebbtide.mindspore.session(model, {"blocks.*": "swap"}, min_bytes=0) as s:
        growth(s, model, size)
        assert s._tally.peak <= 0.4 * kept
        assert_clean(s)
    for prefetch in (0, 1):
        with ebbtide.mindspore.session(model, min_bytes=0, prefetch=prefetch) as s:
            _, counted = growth(s, model, size)
            assert counted <= 0.2 * kept, "the last layer stays, all others have left"
            assert_clean(s)


# ---- verify


@pytest.mark.parametrize("policy", ["swap", "recompute", "keep"])
def test_verify_says_that_all_is_identical(policy: Any) -> None:
    model = made(SMALL)
    grad = gradients_of(model)
    with ebbtide.mindspore.session(model, policy, min_bytes=0) as s:
        found = s.verify(lambda: grad(*batch(SMALL, 0)))
        assert found.identical and found.repeatable
        assert found.compared == 1 + len(model.trainable_params())
        assert (found.bytes_out > 0) == (policy == "swap")
        assert found.plain_peak > 0
        assert policy == "keep" or found.swapped_peak < found.plain_peak
        assert str(found).startswith("identical: ")
        assert_clean(s)


def test_verify_puts_everything_back_and_draws_dropout_anew() -> None:
    size = Size(dropout=0.2)
    model = made(size)
    operations = [block.drop.dropout for block in model.blocks]
    grad = gradients_of(model)
    generator = bits([ms.get_rng_state()])
    with ebbtide.mindspore.session(model, min_bytes=0) as s:
        found = s.verify(lambda: grad(*batch(size, 0)))
        assert found.identical and found.repeatable
        assert [block.drop.dropout for block in model.blocks] == operations
        assert bits([ms.get_rng_state()]) == generator


def test_verify_names_what_differs() -> None:
    cell = Chain(Does(mixed, 32, 32), Does(mixed, 32, 32, seed=1))
    grad = grad_of(lambda x: cell(x).sum(), cell)
    with ebbtide.mindspore.session(cell, {"layers.*": "swap"}) as s:
        cell.layers[0].function = lambda x, w: mixed(x, w) * (1 if s.running_step() is None else 1.5)
        found = s.verify(lambda: grad(array(64, 32)))
        assert not found.identical and found.repeatable
        assert "loss" in found.different and "gradient of layers.1.weight" in found.different
        counter = iter(range(100))
        found = s.verify(lambda: grad(array(64, 32, seed=next(counter))))
        assert not found.repeatable
        assert "not deterministic" in str(found)


def test_verify_refuses_what_proves_nothing() -> None:
    model = made(SMALL)
    grad = gradients_of(model)
    optimizer = nn.SGD(model.trainable_params(), learning_rate=0.1)
    before = bits(model.get_parameters())

    def training() -> Any:
        loss, gradients = grad(*batch(SMALL, 0))
        optimizer(gradients)
        return loss, gradients

    with ebbtide.mindspore.session(model) as s:
        with pytest.raises(SettingError, match=r"changed the parameter.*optimizer"):
            s.verify(training)
        with pytest.raises(SettingError, match="returned a NoneType"):
            s.verify(lambda: None)
        with pytest.raises(SettingError, match="pass a function"):
            s.verify(3)  # type: ignore[arg-type]
        assert_clean(s)
    assert bits(model.get_parameters()) == before


# ---- budgets


def planned(model: GPT, memory: int | str = "100%", **settings: Any) -> Session:
    """A session whose next step follows a plan."""
    s = ebbtide.mindspore.session(model, memory=memory, min_bytes=0, **settings)
    for _ in range(RECORDED):
        stepped(s, model)
    return s


def test_m12_a_budget_is_never_exceeded_and_bits_are_those_of_plain() -> None:
    expected = plain(steps=2)
    with planned(model := made(SMALL)) as s:
        stepped(s, model)
        assert s._planner is not None and s._planner.trace is not None
        _, least, most, _ = s._planner.trace.range()
    for budget in (least, (least + most) // 2, most):
        model = made(SMALL)
        with planned(model, budget) as s:
            assert s.stats()["live_bytes"] == 0
            s._tally.peak = 0
            assert [stepped(s, model, number=number) for number in range(2)] == expected
            plan = s.plan()
            assert plan is not None and plan["memory_bytes"] == budget
            assert s._tally.peak + static_bytes(model) <= budget
            assert plan["predicted_peak_bytes"] <= budget
            assert_clean(s)


def edited(s: Session, file: Path, changes: dict[int, dict[str, Any]]) -> Path:
    """The plan of a session with other decisions for some layers, as a file."""
    s.save_plan(file)
    plan = json.loads(file.read_text())
    plan["memory_bytes"] = 1 << 30
    for line in plan["layers"]:
        line.update(recompute=False, swap=[])
        line.pop("tier", None)
        line.pop("load_at", None)
    for at, change in changes.items():
        plan["layers"][at].update(change)
    file.write_text(json.dumps(plan))
    return file


def test_m12_every_mix_of_words_gives_the_same_bits(tmp_path: Path) -> None:
    expected = plain()[0]
    out: dict[str, Any] = {"swap": ["out"], "tier": "file"}
    some: dict[str, Any] = {"swap": ["s1", "s4", "out"], "tier": "file"}
    again: dict[str, Any] = {"recompute": True}
    mixes: list[dict[int, dict[str, Any]]] = [
        {1: again, 2: again},
        {0: out, 1: again | out, 2: again | out, 3: again},
        {0: some, 1: again, 3: {"swap": ["s2"], "tier": "file"}},
    ]
    with planned(model := made(SMALL)) as s:
        stepped(s, model)
        files = [edited(s, tmp_path / f"{at}.json", mix) for at, mix in enumerate(mixes)]
    for file, mix in zip(files, mixes, strict=True):
        model = made(SMALL)
        with ebbtide.mindspore.session(model, plan=file, min_bytes=0) as s:
            for _ in range(RECORDED + 2):
                assert stepped(s, model) == expected
            recomputed = [at for at, word in enumerate(s.policy.values()) if word == "recompute"]
            assert recomputed == [at for at, change in mix.items() if "recompute" in change]
            assert_clean(s)


def test_a_plan_is_saved_read_and_refused(tmp_path: Path) -> None:
    model, file = made(SMALL), tmp_path / "p.json"
    with ebbtide.mindspore.session(model, memory="60%", min_bytes=0) as s:
        assert "none yet: recording" in s.report()
        with pytest.raises(PhaseError, match="there is no plan yet"):
            s.save_plan(file)
        for _ in range(RECORDED + 1):
            stepped(s, model)
        s.save_plan(file)
        s.save_trace(tmp_path / "t.json")
        made_first = s.plan()
        assert "budget" in s.report() and "predicted" in s.report()
    assert json.loads((tmp_path / "t.json").read_text())["format"] == "ebbtide.trace"
    with ebbtide.mindspore.session(model, plan=file, min_bytes=0) as s:
        for _ in range(RECORDED + 1):
            stepped(s, model)
        again = s.plan()
    assert made_first is not None and again is not None
    assert [layer["swap"] for layer in again["layers"]] == [layer["swap"] for layer in made_first["layers"]]
    size = Size(layers=3)
    other = made(size)
    with ebbtide.mindspore.session(other, plan=file, min_bytes=0) as s:
        stepped(s, other, size)
        with pytest.raises(SettingError, match="4 layers"):
            stepped(s, other, size)


def test_a_budget_that_nothing_can_meet_says_what_would() -> None:
    model = made(SMALL)
    with ebbtide.mindspore.session(model, memory=100_000, min_bytes=0) as s:
        stepped(s, model)
        with pytest.raises(NoRoomError, match=r"no plan fits 97\.7 KiB: the least found is"):
            stepped(s, model)
        assert_clean(s)


def test_c17_a_budget_above_the_need_keeps_everything_and_says_so() -> None:
    with planned(model := made(SMALL), "100%") as s:
        before = s.stats()["bytes_out"]
        assert stepped(s, model) == plain()[0]
        assert s.stats()["bytes_out"] == before
        assert "0 of 4 layers swap, 0 are recomputed" in s.report()


def test_c8_layers_with_dropout_are_never_planned_to_be_recomputed() -> None:
    size = Size(dropout=0.2)
    model = made(size)
    with ebbtide.mindspore.session(model, memory="50%", min_bytes=0) as s:
        for number in range(RECORDED + 2):
            stepped(s, model, size, number)
        assert "recompute" not in s.policy.values()


def test_c10_c23_failed_and_longer_steps_under_a_plan() -> None:
    model = made(SMALL)
    longer = Size(batch=3)
    with planned(model, "60%") as s:
        with pytest.raises(KeyError), s.step():
            gradients_of(model)(*batch(SMALL, 0))
            raise KeyError
        assert stepped(s, model) == plain()[0]
        for _ in range(3):
            assert stepped(s, model, longer) == plain(longer)[0]
        assert_clean(s)


def test_layers_that_save_what_they_return() -> None:
    cell = doing(lambda x, weight: ms.mint.tanh(x * weight), 256, 16, layers=6)
    grad = grad_of(lambda x: cell(x).sum(), cell)
    x = Tensor(np.linspace(-1, 1, 256 * 16, dtype=np.float32).reshape(256, 16))
    expected = bits(grad(x))
    for memory in ("60%", "100%"):
        with ebbtide.mindspore.session(cell, memory=memory, min_bytes=0) as s:
            for _ in range(RECORDED + 2):
                with s.step():
                    assert bits(grad(x)) == expected
            assert_clean(s)
