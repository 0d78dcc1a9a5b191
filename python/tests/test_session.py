"""Sessions: settings, the life of the hooks, who may do what when, and what is reported."""

from __future__ import annotations

import copy
import gc
import io
import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from session_models import (
    Gpt,
    assert_clean,
    assert_same,
    gpt,
    hooks_on,
    loss_of,
    plain,
    result,
    stepped,
    tokens,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ebbtide.torch
from ebbtide import EbbtideError, PhaseError, SettingError, _stats

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("tier", {"tier": "disk"}, "disk"),
    ("spill_dir that is not there", {"spill_dir": "/nowhere/at/all"}, "/nowhere/at/all"),
    ("spill_dir that is no path", {"spill_dir": 3}, "takes the path of a folder"),
    ("min_bytes", {"min_bytes": -1}, "min_bytes=-1 is negative"),
    ("min_bytes as text", {"min_bytes": "1 MiB"}, "whole number"),
    ("host_bytes", {"host_bytes": -5}, "host_bytes=-5 is negative"),
    ("tier that is no text", {"tier": 3}, "tier=3 is a int"),
    ("tiers", {"tier": ["file"]}, "is a list"),
    ("host_bytes as text", {"host_bytes": "1 GiB"}, "whole number"),
    ("host_bytes that nobody has", {"host_bytes": 1 << 70}, "is larger than"),
    ("min_bytes that nobody has", {"min_bytes": 1 << 70}, "is larger than"),
    ("prefetch without end", {"prefetch": 1 << 70}, "is larger than"),
    ("a file as a truth", {"timeline": "t.json"}, "True or False"),
    ("prefetch", {"prefetch": 1.5}, "whole number"),
    ("a truth as a number", {"prefetch": True}, "whole number"),
]


@pytest.mark.parametrize(("settings", "text"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_settings(settings: dict[str, Any], text: str) -> None:
    model = gpt()
    open_before = len(_stats._sources)
    with pytest.raises(SettingError) as caught:
        ebbtide.torch.session(model, **settings)
    assert text in str(caught.value)
    assert caught.value.hint
    assert (hooks_on(model), len(_stats._sources)) == (0, open_before)


def test_bad_models() -> None:
    with pytest.raises(SettingError, match="no parameters"):
        ebbtide.torch.session(nn.Sequential(nn.ReLU(), nn.ReLU()))
    with pytest.raises(SettingError, match=r"not a torch.nn.Module"):
        ebbtide.torch.session([nn.Linear(1, 1)])  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="meta device"):
        ebbtide.torch.session(Gpt(2).to("meta"))


def test_an_accelerator_that_is_not_there() -> None:
    """The only tensors of such a device are those of PyTorch's fake mode."""
    missing = next(name for name in ("xpu", "mps", "cuda") if not torch.get_device_module(name).is_available())
    model = nn.Linear(3, 3)
    with FakeTensorMode():
        model.weight = nn.Parameter(torch.empty(3, 3, device=missing))
    open_before = len(_stats._sources)
    with pytest.raises(SettingError, match=f"{missing}.*isn't there") as caught:
        ebbtide.torch.session(model)
    assert caught.value.hint
    assert (hooks_on(model), len(_stats._sources)) == (0, open_before)


def test_w10_a_compiled_model_is_refused() -> None:
    in_place = gpt()
    in_place.compile()
    wrapped: Any = torch.compile(gpt())
    for compiled in (in_place, wrapped):
        with pytest.raises(SettingError, match="compile its blocks"):
            ebbtide.torch.session(compiled)


# ---- the life of the hooks


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_close_takes_everything_off(policy: Any) -> None:
    model = gpt()
    s = ebbtide.torch.session(model, policy)
    assert hooks_on(model) > 0
    stepped(s, model)
    s.close()
    assert hooks_on(model) == 0
    s.close()
    with pytest.raises(PhaseError, match="closed"):
        s.step()
    assert "closed" in repr(s)


def test_a_dropped_session_takes_its_hooks_off_and_its_graphs_still_run() -> None:
    model = gpt()
    expected = plain(model)
    s = ebbtide.torch.session(model)
    torch.manual_seed(1)
    with s.step():
        loss = loss_of(model)
    gone = weakref.ref(s)
    del s
    assert gone() is None
    assert hooks_on(model) == 0
    loss.backward()
    assert_same({"loss": loss, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}, expected)


def test_m6_a_dropped_model_is_freed_and_its_session_says_so() -> None:
    model = gpt()
    s = ebbtide.torch.session(model, "recompute")
    stepped(s, model)
    gone = weakref.ref(model)
    del model
    assert gone() is None
    with pytest.raises(PhaseError, match=r"model \(Gpt\) is gone"):
        s.step()
    s.close()


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_a_copied_model_is_not_the_session_s(policy: Any) -> None:
    model = gpt()
    with ebbtide.torch.session(model, policy) as s:
        twins = [copy.deepcopy(model)]
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twins.append(torch.load(file, weights_only=False))
        for twin in twins:
            with torch.no_grad():
                twin.embed.weight.add_(1.0)
            expected = plain(twin)
            before = s.stats()["layer_calls"]
            twin.zero_grad()
            assert_same(stepped(s, twin), expected)
            assert s.stats()["layer_calls"] == before


def test_a_session_that_fails_to_open_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt()

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no hooks here")

    monkeypatch.setattr(model.blocks[2], "register_forward_hook", refuse)
    open_before = len(_stats._sources)
    with pytest.raises(RuntimeError, match="no hooks here"):
        ebbtide.torch.session(model, "recompute")
    assert (hooks_on(model), len(_stats._sources)) == (0, open_before)


def test_two_sessions_on_one_model_take_turns() -> None:
    model = gpt()
    expected = plain(model)
    with ebbtide.torch.session(model) as one, ebbtide.torch.session(model, "recompute") as other:
        for s in (one, other, one):
            assert_same(stepped(s, model), expected)
        assert (one.stats()["steps"], other.stats()["steps"]) == (2, 1)
    assert hooks_on(model) == 0


# ---- who, when


def test_steps_one_at_a_time_each_once() -> None:
    model = gpt()
    with ebbtide.torch.session(model) as s:
        with s.step() as step:
            for wrong in (s.step, s.close, lambda: s.verify(lambda: loss_of(model))):
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


def test_a_session_belongs_to_one_thread() -> None:
    model = gpt()
    caught: list[BaseException] = []

    def elsewhere() -> None:
        for use in (s.step, s.__enter__, lambda: s.verify(lambda: loss_of(model))):
            try:
                use()
            except PhaseError as error:
                caught.append(error)

    s = ebbtide.torch.session(model)
    thread = threading.Thread(target=elsewhere, name="other")
    thread.start()
    thread.join()
    assert len(caught) == 3
    assert "on thread other" in str(caught[0])
    assert "MainThread" in str(caught[0])
    s.close()


def test_hooks_do_nothing_outside_of_steps_and_on_other_threads() -> None:
    model = gpt()
    expected = plain(model)
    with ebbtide.torch.session(model) as s:
        got = [trained_once(model)]
        with s.step():
            thread = threading.Thread(target=lambda: got.append(trained_once(model)))
            thread.start()
            thread.join()
        assert s.stats()["layer_calls"] == 0
    assert len(got) == 2
    for found in got:
        assert_same(found, expected)


def trained_once(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    loss = loss_of(model)
    loss.backward()
    return result(model, loss)


def test_errors_are_the_package_s_own() -> None:
    assert issubclass(SettingError, ValueError)
    assert issubclass(ebbtide.NoRoomError, MemoryError)
    error = EbbtideError("it is so", "do that")
    assert (str(error), error.hint) == ("it is so; do that", "do that")
    again = copy.copy(EbbtideError("it is so; do that", hint="do that"))
    assert (str(again), again.hint) == ("it is so; do that", "do that")


# ---- what is reported


def test_stats_of_sessions_and_of_the_process_have_the_same_keys() -> None:
    ebbtide.torch.reset()
    before = ebbtide.torch.stats()
    assert not any(before.values())
    model = gpt()
    with ebbtide.torch.session(model) as s:
        stepped(s, model)
        figures = s.stats()
        assert figures.keys() == before.keys()
        for key in ("bytes_out", "bytes_in", "tensors_out", "live_bytes", "missed_prefetches", "wait_ms"):
            assert key in figures
        assert figures["bytes_out"] == figures["bytes_in"] > 0
        assert ebbtide.torch.stats()["bytes_out"] == figures["bytes_out"]
    assert ebbtide.torch.stats()["bytes_out"] == figures["bytes_out"]  # closed sessions count
    ebbtide.torch.reset()
    assert not any(ebbtide.torch.stats().values())


def test_reset_gives_up_what_is_in_flight_and_sessions_go_on() -> None:
    model = gpt()
    expected = plain(model)
    with ebbtide.torch.session(model) as s:
        with s.step():
            loss = loss_of(model)
        ebbtide.torch.synchronize()
        ebbtide.torch.reset()
        with pytest.raises(PhaseError):
            loss.backward()
        del loss
        assert_same(stepped(s, model), expected)
        assert_clean(s)


HEAD_IS_THE_PEAK = """
import torch, ebbtide.torch
from session_models import Chain
from torch import nn

torch.manual_seed(0)
head = nn.Linear(64, 40_000)  # short sequences and many classes: the logits are the peak
model = Chain(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)))
with ebbtide.torch.session(model) as s:
    for _ in range(2):
        with s.step():
            hidden = model(torch.randn(600, 64))
            if INSIDE:
                head(hidden).logsumexp(-1).sum().backward()
        if not INSIDE:
            head(hidden).logsumexp(-1).sum().backward()
    print(s.report())
"""


@pytest.mark.parametrize("inside", [True, False], ids=["backward in the step", "after it"])
def test_c18_the_report_says_where_memory_was_highest(inside: bool) -> None:
    """In a process of its own: the kernel's figure of the peak is that of the whole life of a process."""
    report = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"INSIDE = {inside}\n{HEAD_IS_THE_PEAK}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=Path(__file__).parent,
    ).stdout
    assert "reached: after the last layer: head and loss" in report
    assert "forward of layers: up to" in report


def test_c17_the_report_says_why_nothing_moved() -> None:
    model = gpt()
    with ebbtide.torch.session(model, "keep") as s:
        stepped(s, model)
        assert "moved nothing because no layer is swapped" in s.report()
    with ebbtide.torch.session(model) as s:
        assert "no layer was called inside of a step" in s.report()
        with torch.no_grad(), s.step():
            model(tokens())
        assert "every layer ran without gradients" in s.report()
    with ebbtide.torch.session(model, min_bytes=1 << 30) as s:
        stepped(s, model)
        assert f"smaller than min_bytes={1 << 30}" in s.report()
    with ebbtide.torch.session(model) as s:
        stepped(s, model)
        assert "moved nothing" not in s.report()


def test_tensors_by_size_and_by_a_function() -> None:
    model = gpt()
    expected = plain(model)
    asked: list[torch.Size] = []

    def wide(tensor: torch.Tensor) -> bool:
        asked.append(tensor.shape)
        return tensor.shape[-1] == 4 * 32

    moved = []
    for settings in (
        {"include": wide},
        {"exclude": [wide, "blocks.0"]},
        {"min_bytes": 16 * 1024},
        {"min_bytes": 0},
    ):
        with ebbtide.torch.session(model, **settings) as s:
            assert_same(stepped(s, model), expected)
            moved.append(s.stats()["tensors_out"])
    assert asked
    assert moved[0] == 3 * 2  # gelu's input and output in three layers
    assert moved[2] < moved[3]


def test_timeline(tmp_path: Path) -> None:
    model = gpt()
    with ebbtide.torch.session(model, timeline=True) as s:
        stepped(s, model)
        count = s.timeline(tmp_path / "t.json")
        assert count > 0
        entries = json.loads((tmp_path / "t.json").read_text())
        shown = {entry["name"] for entry in entries if entry["ph"] == "X"}
        blocks = [f"blocks.{i}" for i in range(4)]
        assert {f"{way} {block}" for way in ("forward", "backward") for block in blocks} <= shown
        assert set(blocks[:3]) <= shown, "copies of the layers that are swapped"
    with ebbtide.torch.session(model) as s:
        with pytest.raises(SettingError, match="timeline=True"):
            s.timeline(tmp_path / "none.json")
        with pytest.raises(SettingError, match="path of the file"):
            s.timeline(3)  # type: ignore[arg-type]


def test_a_backward_that_failed_is_not_drawn_over_the_next_step(tmp_path: Path) -> None:
    model, failing = gpt(), [True]

    def fail(_: torch.Tensor) -> None:
        if failing[0]:
            raise ValueError("planned")

    handle = next(model.blocks[1].parameters()).register_hook(fail)
    with ebbtide.torch.session(model, timeline=True) as s:
        with pytest.raises(ValueError, match="planned"):
            stepped(s, model)
        failing[0] = False
        stepped(s, model)
        s.timeline(tmp_path / "t.json")
    handle.remove()
    entries = json.loads((tmp_path / "t.json").read_text())
    spans = [entry for entry in entries if entry["ph"] == "X" and "ward blocks" in entry["name"]]
    second = max(entry["ts"] for entry in spans if entry["name"] == "forward blocks.0")
    crossing = [entry["name"] for entry in spans if entry["ts"] < second < entry["ts"] + entry["dur"]]
    assert not crossing
    assert len([entry for entry in spans if entry["name"] == "backward blocks.1"]) == 1


def test_repr_and_report_are_readable() -> None:
    model = gpt()
    with ebbtide.torch.session(model) as s:
        assert repr(s) == "<ebbtide session of Gpt: 4 layers (3 swap, 1 keep), 0 steps>"
        step = s.step()
        assert "not entered yet" in repr(step)
        with step:
            assert "step 1 of" in repr(step)
        lines = s.report().splitlines()
    assert lines[0] == "ebbtide session of Gpt"
    assert all(line.startswith("  ") and len(line) < 120 for line in lines[1:])


def test_nothing_is_kept_alive_by_a_session_that_is_closed() -> None:
    model = gpt()
    s = ebbtide.torch.session(model)
    stepped(s, model)
    s.close()
    session, source = weakref.ref(s), weakref.ref(s._source)
    del s
    gc.collect()
    assert session() is None
    assert source() is None
