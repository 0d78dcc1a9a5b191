"""Sessions: bits, policies, settings, the life of what surrounds the layers, who may do what when, what is reported."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from contextlib import nullcontext
from typing import Any

import mindspore as ms
import pytest
from cells import Jitted, made_with_dropout
from checks import SMALL, assert_clean, bits, grad_of, plain, stepped
from mindspore import Tensor, nn
from models import GPT, Size, batch, gradients_of, made

import ebbtide.mindspore
from ebbtide import PhaseError, SettingError, _stats

LAYERS = ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
POLICIES: list[Any] = [
    "swap",
    "keep",
    "recompute",
    {"blocks.*": "swap"},
    {"blocks.0": "recompute", "blocks.2": "swap"},
    {"blocks.*": "recompute", "blocks.1": "keep", "blocks.3": "swap"},
]


# ---- bits


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_losses_and_gradients_of_10_steps_are_those_of_plain(policy: Any) -> None:
    expected = plain(steps=10)
    model = made(SMALL)
    with ebbtide.mindspore.session(model, policy, min_bytes=0) as s:
        assert [stepped(s, model, number=number) for number in range(10)] == expected
        assert_clean(s)


@pytest.mark.parametrize("policy", ["swap", "keep", {"blocks.*": "swap"}], ids=str)
def test_losses_and_gradients_with_dropout_are_those_of_plain(policy: Any) -> None:
    def train(model: GPT, s: ebbtide.mindspore.Session | None) -> list[list[bytes]]:
        grad, found = gradients_of(model), []
        for number in range(10):
            ms.set_seed(number)
            with s.step() if s else nullcontext():
                found.append(bits(grad(*batch(SMALL, number))))
        return found

    expected = train(made_with_dropout(SMALL), None)
    assert expected[0] != plain()[0]
    model = made_with_dropout(SMALL)
    with ebbtide.mindspore.session(model, policy, min_bytes=0) as s:
        assert train(model, s) == expected
        assert_clean(s)


@pytest.mark.parametrize("tier", ["file", "host"])
def test_m12_depths_and_tiers_change_no_bit(tier: str) -> None:
    expected = plain(steps=2)
    for prefetch in (0, 1, 3):
        model = made(SMALL)
        with ebbtide.mindspore.session(model, tier=tier, prefetch=prefetch, min_bytes=0) as s:
            assert [stepped(s, model, number=number) for number in range(2)] == expected
            figures = s.stats()
            assert figures["bytes_out"] == figures["bytes_in"] > 0
            assert_clean(s)


def test_g3_operations_that_run_behind_python_change_no_bit() -> None:
    """The other tests have MindSpore run each operation before the next line."""
    expected = plain(steps=2)
    model = made(SMALL)
    ms.set_context(pynative_synchronize=False)
    try:
        with ebbtide.mindspore.session(model, {"blocks.*": "swap", "blocks.1": "recompute"}, min_bytes=0) as s:
            assert [stepped(s, model, number=number) for number in range(2)] == expected
            assert_clean(s)
    finally:
        ms.set_context(pynative_synchronize=True)


def test_g9_the_last_layer_stays_unless_it_is_named() -> None:
    model = made(SMALL)
    with ebbtide.mindspore.session(model) as s:
        assert dict(s.policy) == dict.fromkeys(LAYERS[:3], "swap") | {"blocks.3": "keep"}
    with ebbtide.mindspore.session(model, {"blocks.[23]": "swap"}) as s:
        assert dict(s.policy) == dict.fromkeys(LAYERS[:2], "keep") | dict.fromkeys(LAYERS[2:], "swap")


def test_tensors_by_size_and_by_a_function() -> None:
    expected = plain()[0]
    asked: list[tuple[int, ...]] = []

    def wide(tensor: Tensor) -> bool:
        asked.append(tuple(tensor.shape))
        return tensor.shape[-1] == 4 * SMALL.width

    moved = []
    for settings in ({"include": wide}, {"exclude": [wide, "blocks.0"]}, {"min_bytes": 8 * 1024}, {"min_bytes": 0}):
        model = made(SMALL)
        with ebbtide.mindspore.session(model, **settings) as s:
            assert stepped(s, model) == expected
            moved.append(s.stats()["tensors_out"])
            assert_clean(s)
    assert asked
    assert moved[0] and moved[1] and 0 < moved[2] < moved[3]


# ---- settings

BAD: list[tuple[dict[str, Any], str]] = [
    ({"tier": "disk"}, "disk"),
    ({"tier": 3}, "tier=3 is a int"),
    ({"spill_dir": "/nowhere/at/all"}, "/nowhere/at/all"),
    ({"spill_dir": 3}, "takes the path of a folder"),
    ({"min_bytes": -1}, "min_bytes=-1 is negative"),
    ({"min_bytes": "1 MiB"}, "whole number"),
    ({"host_bytes": 1 << 70}, "is larger than"),
    ({"prefetch": 1.5}, "whole number"),
    ({"prefetch": True}, "whole number"),
    ({"checksums": "yes"}, "True or False"),
    ({"policy": "swop"}, "did you mean 'swap'"),
    ({"policy": {"blocks.7": "swap"}}, "blocks.7"),
    ({"policy": {}}, "decides nothing"),
    ({"layers": "encoder.*"}, "matches none of"),
    ({"include": "blocks.9"}, "blocks.9"),
    ({"exclude": []}, "is empty"),
    ({"exclude": "blocks.*"}, "would have no effect"),
    ({"policy": "swap", "memory": "40%"}, "they exclude each other"),
    ({"checksums": True, "memory": "40%"}, "they exclude each other"),
]


@pytest.mark.parametrize(("settings", "text"), BAD, ids=str)
def test_c17_bad_settings_are_refused_and_change_nothing(settings: dict[str, Any], text: str) -> None:
    model = made(SMALL)
    before = len(_stats._sources)
    with pytest.raises(SettingError) as caught:
        ebbtide.mindspore.session(model, **settings)
    assert text in str(caught.value)
    assert caught.value.hint
    assert len(_stats._sources) == before
    assert not surrounded(model)


def test_c17_bad_cells() -> None:
    with pytest.raises(SettingError, match=r"not a mindspore\.nn\.Cell"):
        ebbtide.mindspore.session([nn.Dense(1, 1)])
    with pytest.raises(SettingError, match="no repeated blocks in a CellList or SequentialCell"):
        ebbtide.mindspore.session(nn.Dense(3, 3))
    with pytest.raises(SettingError, match="would have no effect"):
        ebbtide.mindspore.session(made(Size(layers=1)), layers="blocks.*")


def test_c17_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ms.get_context
    monkeypatch.setattr(ms, "get_context", lambda key: "Ascend" if key == "device_target" else known(key))
    with pytest.raises(SettingError, match="runs on Ascend"):
        ebbtide.mindspore.session(made(SMALL))


def test_c17_the_report_says_why_nothing_moved() -> None:
    model = made(SMALL)
    with ebbtide.mindspore.session(model, "keep") as s:
        stepped(s, model)
        assert "moved nothing because no layer is swapped" in s.report()
    with ebbtide.mindspore.session(model) as s:
        assert "no layer was called inside of a step" in s.report()
        with s.step():
            model(*batch(SMALL, 0))
        assert "every layer ran without gradients" in s.report()
    with ebbtide.mindspore.session(model, min_bytes=1 << 30) as s:
        stepped(s, model)
        assert f"smaller than min_bytes={1 << 30}" in s.report()
    with ebbtide.mindspore.session(model, min_bytes=0) as s:
        stepped(s, model)
        assert "moved nothing" not in s.report()


# ---- the life of what surrounds the layers


def surrounded(model: nn.Cell) -> list[str]:
    return [name for name, cell in model.cells_and_names() if "construct" in cell.__dict__]


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_close_gives_the_cell_back(policy: Any) -> None:
    model = made(SMALL)
    s = ebbtide.mindspore.session(model, policy)
    assert surrounded(model) == LAYERS
    stepped(s, model)
    s.close()
    assert surrounded(model) == []
    s.close()
    with pytest.raises(PhaseError, match="closed"):
        s.step()
    assert "closed" in repr(s)


def test_a_dropped_session_gives_the_cell_back() -> None:
    model = made(SMALL)
    s = ebbtide.mindspore.session(model)
    stepped(s, model)
    gone = weakref.ref(s)
    del s
    assert gone() is None
    assert surrounded(model) == []


def test_m6_a_dropped_cell_is_freed_and_its_session_says_so() -> None:
    model = made(SMALL)
    s = ebbtide.mindspore.session(model, "recompute")
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(PhaseError, match=r"cell \(GPT\) is gone"):
        s.step()
    s.close()


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_a_copied_cell_is_not_the_session_s(policy: Any) -> None:
    model = made(SMALL)
    with ebbtide.mindspore.session(model, policy) as s:
        twin = copy.deepcopy(model)
        assert type(twin.blocks[0].construct.__self__) is type(twin.blocks[0])
        assert twin.blocks[0].construct.__self__ is twin.blocks[0]
        before = s.stats()["layer_calls"]
        assert stepped(s, twin) == plain()[0]
        assert s.stats()["layer_calls"] == before
        assert stepped(s, model) == plain()[0]


def test_a_session_that_fails_to_open_leaves_nothing() -> None:
    model = made(SMALL)
    with ebbtide.mindspore.session(model, {"blocks.2": "swap"}, layers="blocks.2"):
        before = len(_stats._sources)
        with pytest.raises(SettingError, match="replaced already"):
            ebbtide.mindspore.session(model)
        assert surrounded(model) == ["blocks.2"]
        assert len(_stats._sources) == before


def test_w8_w9_the_cell_s_names_are_not_changed() -> None:
    model = made(SMALL)
    names = [name for name, _ in model.parameters_and_names()]
    with ebbtide.mindspore.session(model):
        assert [name for name, _ in model.parameters_and_names()] == names
        assert [p.name for p in model.trainable_params()] == [p.name for p in made(SMALL).trainable_params()]


# ---- who, when


def test_steps_one_at_a_time_each_once() -> None:
    model = made(SMALL)
    with ebbtide.mindspore.session(model) as s:
        with s.step() as step:
            for wrong in (s.step, s.close, lambda: s.verify(lambda: None)):
                with pytest.raises(PhaseError, match="inside of step 1"):
                    wrong()
        with pytest.raises(PhaseError, match="entered before"), step:
            pass
        two = [s.step(), s.step()]
        with two[0], pytest.raises(PhaseError, match="still running"), two[1]:
            pass
        with pytest.raises(PhaseError, match="entered before"), s:
            pass
        assert_clean(s)


def test_c24_a_session_belongs_to_one_thread() -> None:
    model = made(SMALL)
    caught: list[BaseException] = []

    def elsewhere() -> None:
        for use in (s.step, s.__enter__, lambda: s.verify(lambda: None)):
            try:
                use()
            except PhaseError as error:
                caught.append(error)

    s = ebbtide.mindspore.session(model)
    thread = threading.Thread(target=elsewhere, name="other")
    thread.start()
    thread.join()
    assert len(caught) == 3
    assert "on thread other" in str(caught[0])
    assert "MainThread" in str(caught[0])
    s.close()


# ---- what is reported


def test_stats_of_sessions_and_of_the_process_have_the_same_keys() -> None:
    ebbtide.mindspore.reset()
    before = ebbtide.mindspore.stats()
    assert not any(before.values())
    model = made(SMALL)
    with ebbtide.mindspore.session(model, min_bytes=0) as s:
        stepped(s, model)
        figures = s.stats()
        assert figures.keys() == before.keys()
        assert figures["bytes_out"] == figures["bytes_in"] > 0
        assert (figures["steps"], figures["layer_calls"]) == (1, 4)
        assert ebbtide.mindspore.stats()["bytes_out"] == figures["bytes_out"]
    assert ebbtide.mindspore.stats()["bytes_out"] == figures["bytes_out"]  # closed sessions count
    ebbtide.mindspore.reset()
    assert not any(ebbtide.mindspore.stats().values())


def test_repr_and_report_are_readable() -> None:
    model = made(SMALL)
    with ebbtide.mindspore.session(model, min_bytes=0) as s:
        assert repr(s) == "<ebbtide session of GPT: 4 layers (3 swap, 1 keep), 0 steps>"
        step = s.step()
        assert "not entered yet" in repr(step)
        with step:
            assert "step 1 of" in repr(step)
        stepped(s, model)
        lines = s.report().splitlines()
    assert lines[0] == "ebbtide session of GPT"
    assert all(line.startswith("  ") and len(line) < 120 for line in lines[1:])
    assert any("saved tensors" in line and "ward of blocks." in line for line in lines)


def test_nothing_is_kept_alive_by_a_session_that_is_closed() -> None:
    model = made(SMALL)
    s = ebbtide.mindspore.session(model)
    stepped(s, model)
    s.close()
    session, source = weakref.ref(s), weakref.ref(s._source)
    del s
    gc.collect()
    assert session() is None
    assert source() is None


# ---- graphs


def test_w10_graph_mode_is_refused() -> None:
    model = made(SMALL)
    s = ebbtide.mindspore.session(model)
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        with pytest.raises(SettingError, match="PyNative mode"):
            ebbtide.mindspore.session(made(SMALL))
        with pytest.raises(SettingError, match="graph mode"), s.step():
            pass
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    assert stepped(s, model) == bits([gradients_of(made(SMALL))(*batch(SMALL, 0))])
    s.close()


def test_w10_a_jitted_layer_is_refused() -> None:
    with pytest.raises(SettingError, match=r"0 \(Jitted\) is compiled by @ms\.jit"):
        ebbtide.mindspore.session(nn.SequentialCell([Jitted(), Jitted(), Jitted()]))
    model = made(SMALL)
    with ebbtide.mindspore.session(model), pytest.raises(SettingError, match="layer of a session"):
        ms.jit(model.blocks[0])


def test_w10_a_jitted_cell_is_refused() -> None:
    model = made(SMALL)
    with ebbtide.mindspore.session(model) as s:
        jitted = ms.jit(model)
        with pytest.raises(SettingError, match="calls a layer of a session") as caught, s.step():
            grad_of(lambda *given: jitted(*given), model)(*batch(SMALL, 0))
        assert "PyNative mode" in str(caught.value)
        assert stepped(s, model) == plain()[0]
