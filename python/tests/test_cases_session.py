"""Faults seen in the field, on sessions: failing steps, changed tensors, foreign references, threads, signals."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from session_models import (
    WIDTH,
    Block,
    Chain,
    Gpt,
    assert_clean,
    assert_same,
    bits_equal,
    gpt,
    hooked,
    loss_of,
    plain,
    result,
    stepped,
    tokens,
)
from torch import nn

import ebbtide.torch
from ebbtide import ChangedError, EbbtideError, NoRoomError, PhaseError, SettingError


class Planned(Exception):
    """What the tests raise."""


# ---- C10, C26: a step that fails


def raise_planned(*_: object) -> None:
    raise Planned


def in_forward(s: ebbtide.torch.Session, model: Gpt) -> None:
    handle = model.get_submodule("blocks.2.norm1").register_forward_pre_hook(raise_planned)
    try:
        with s.step():
            loss_of(model)
    finally:
        handle.remove()


def in_a_hook_of_the_layer(s: ebbtide.torch.Session, model: Gpt) -> None:
    with hooked(model.blocks[2], raise_planned), s.step():
        loss_of(model)


def in_backward(s: ebbtide.torch.Session, model: Gpt) -> None:
    with s.step():
        loss = failing_backward(model)
        loss.backward()


def in_backward_after_the_step(s: ebbtide.torch.Session, model: Gpt) -> None:
    with s.step():
        loss = failing_backward(model)
    loss.backward()


def failing_backward(model: Gpt) -> torch.Tensor:
    def fail(_module: object, _inputs: object, output: torch.Tensor) -> None:
        output.register_hook(raise_planned)

    with hooked(model.blocks[1], fail):
        return loss_of(model)


def between_layers(s: ebbtide.torch.Session, model: Gpt) -> None:
    with s.step():
        loss_of(model)
        raise Planned


def in_the_predicate(s: ebbtide.torch.Session, model: Gpt) -> None:
    with ebbtide.torch.session(model, exclude=raise_planned) as other, other.step():  # type: ignore[arg-type]
        loss_of(model)


FAILURES = [
    in_forward,
    in_a_hook_of_the_layer,
    in_backward,
    in_backward_after_the_step,
    between_layers,
    in_the_predicate,
]


@pytest.mark.parametrize("policy", ["swap", "recompute"])
@pytest.mark.parametrize("fail", FAILURES, ids=lambda fail: fail.__name__)
def test_c10_after_a_failed_step_the_next_one_is_right(fail: Callable[..., None], policy: Any) -> None:
    model = gpt()
    expected = plain(model)
    with ebbtide.torch.session(model, policy) as s:
        for _ in range(2):
            with pytest.raises(Planned) as caught:
                fail(s, model)
            del caught  # its traceback has the frames with the graph
            assert_clean(s)
            assert_same(stepped(s, model), expected)
            assert_clean(s)
        assert s.stats()["steps"] == (4 if fail is in_backward_after_the_step else 2)


def test_c10_failing_again_and_again_leaves_nothing() -> None:
    model = gpt()
    expected = plain(model)
    with ebbtide.torch.session(model) as s:
        for number in range(60):
            fail = FAILURES[number % 5]
            with pytest.raises(Planned):
                fail(s, model)
            if number % 20 == 19:
                gc.collect()
                assert_clean(s)
        assert_same(stepped(s, model), expected)
        assert s.stats()["live_bytes"] == 0


def test_c10_an_abandoned_graph_says_so() -> None:
    model = gpt()
    with ebbtide.torch.session(model) as s:
        kept: list[torch.Tensor] = []
        with pytest.raises(Planned), s.step():
            kept.append(loss_of(model))
            raise Planned
        with pytest.raises(PhaseError, match="given up"):
            kept[0].backward()
        assert_clean(s)


@pytest.mark.parametrize("error", [Planned, KeyboardInterrupt])
def test_c10_c26_what_is_caught_inside_of_the_step(error: type[BaseException]) -> None:
    def raise_planned(*_: object) -> None:
        raise error

    model = gpt(dropout=0.0)
    expected = plain(model)
    with ebbtide.torch.session(model) as s:
        model.zero_grad()
        with s.step():
            with hooked(model.get_submodule("blocks.1.drop"), raise_planned), pytest.raises(error):
                loss_of(model)
            loss = loss_of(model)
        loss.backward()
        assert_same(result(model, loss), expected)
        assert_clean(s)


def test_c10_out_of_host_memory() -> None:
    model = gpt()
    expected = plain(model)
    with ebbtide.torch.session(model, tier="host", host_bytes=1 << 16, min_bytes=0) as s:
        for _ in range(3):
            with pytest.raises(NoRoomError) as caught:
                stepped(s, model)
            assert caught.value.hint
            assert isinstance(caught.value, MemoryError)
            del caught
            gc.collect()
            assert_clean(s)
    assert_same(plain(model), expected)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_c26_interrupted_in_a_forward(interrupt: type[BaseException]) -> None:
    model = gpt()
    expected = plain(model)

    def stop(*_: object) -> None:
        if interrupt is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        raise interrupt

    with ebbtide.torch.session(model) as s:
        for module in (model.get_submodule("blocks.1.norm2"), model.blocks[1], model.head):
            with pytest.raises(interrupt), hooked(module, stop), s.step():
                loss_of(model)
            assert_clean(s)
            assert_same(stepped(s, model), expected)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_c26_c22_a_signal_leaves_no_file(name: str, tmp_path: Path) -> None:
    program = """
import sys, time, torch, ebbtide.torch
from session_models import gpt, loss_of
model = gpt()
s = ebbtide.torch.session(model, spill_dir=sys.argv[1], min_bytes=0)
with s.step():
    loss = loss_of(model)
    print("in the step", s.stats()["bytes_out"] > 0, flush=True)
    while True:
        time.sleep(0.01)
"""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "in the step True\n"
    child.send_signal(getattr(signal, name))
    _, errors = child.communicate(timeout=60)
    assert child.returncode == -getattr(signal, name)
    assert ("KeyboardInterrupt" in errors) == (name == "SIGINT")
    assert list(tmp_path.iterdir()) == []


# ---- C7, C19: others use what was saved


class Changed(nn.Module):
    """Saves a tensor, and changes it afterwards if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4096))
        self.change = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        z = y * y
        if self.change:
            y.add_(10)
        return z


@pytest.mark.parametrize("where", [0, 1])
def test_c7_changed_in_place_after_it_was_saved(where: int) -> None:
    layers = [Changed(), Changed()]
    model = Chain(*layers)
    x = torch.ones(4096)
    with ebbtide.torch.session(model, {"layers.0": "swap"}) as s:
        layers[where].change = True
        with pytest.raises(RuntimeError) as caught, s.step():
            model(x).sum().backward()
        assert isinstance(caught.value, ChangedError) or where == 1
        layers[where].change = False
        del caught
        with s.step():
            model(x).sum().backward()
        assert_clean(s)


def test_c7_changed_between_forward_and_backward() -> None:
    model = gpt(dropout=0.0)
    seen: list[torch.Tensor] = []

    def keep(_module: object, _inputs: object, output: torch.Tensor) -> None:
        seen.append(output)

    with ebbtide.torch.session(model, min_bytes=0) as s:
        with hooked(model.get_submodule("blocks.0.up"), keep), s.step():
            loss = loss_of(model)
        with torch.no_grad():
            seen[0].mul_(2)
        # What was copied before the change may be used; another gradient may not come out.
        try:
            loss.backward()
        except ChangedError:
            return
        assert_same(result(model, loss), plain(model))


def test_c7_the_optimizer_steps_between_forward_and_backward() -> None:
    model = gpt(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ebbtide.torch.session(model) as s:
        stepped(s, model)
        with s.step():
            loss = loss_of(model)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified"):
            loss.backward()


def test_c19_what_somebody_else_holds_is_counted() -> None:
    model = gpt(dropout=0.0)
    expected = plain(model)
    held: list[torch.Tensor] = []
    with ebbtide.torch.session(model, min_bytes=0) as s:
        stepped(s, model)
        before = s.stats()["not_freed_bytes"]
        with hooked(model.get_submodule("blocks.0.up"), lambda _m, _i, output: held.append(output)):
            got = stepped(s, model)
        more = s.stats()["not_freed_bytes"] - before
        assert more >= held[0].nbytes
        assert_same(got, expected)
        assert "still referenced" in s.report()


# ---- C20: functional transforms


class Transformed(nn.Module):
    """A layer that differentiates inside of its forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "func":
            return x + torch.func.grad(lambda x: self.inner(x).square().sum())(x)
        if self.how == "vmap":
            return x + torch.func.vmap(self.inner)(x)
        x = x if x.requires_grad else x.requires_grad_()
        (slope,) = torch.autograd.grad(self.inner(x).square().sum(), x, create_graph=True)
        return x + slope


def run_on_ones(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(32, 64)).sum()


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_c20_func_grad_inside_of_a_layer_says_what_to_do(policy: Any) -> None:
    torch.manual_seed(0)
    model = Chain(*(Transformed("func") for _ in range(3)))
    expected = plain(model, run_on_ones)
    with ebbtide.torch.session(model, policy) as s:
        with pytest.raises(SettingError, match=r"functional transform.*keep that layer") as caught:
            stepped(s, model, run_on_ones)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert_clean(s)
    with ebbtide.torch.session(model, {"layers.*": "keep"}) as s:
        assert_same(stepped(s, model, run_on_ones), expected)


@pytest.mark.parametrize("how", ["vmap", "autograd"])
def test_c20_what_works_inside_of_a_layer(how: str) -> None:
    torch.manual_seed(0)
    model = Chain(*(Transformed(how) for _ in range(3)))
    expected = plain(model, run_on_ones)
    with ebbtide.torch.session(model, min_bytes=0) as s:
        for _ in range(2):
            assert_same(stepped(s, model, run_on_ones), expected)
        assert_clean(s)


def test_c20_func_grad_around_a_session_s_model() -> None:
    model = Chain(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)))
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (torch.ones(2, 64),)).sum()

    want = torch.func.grad(loss)(parameters)
    with ebbtide.torch.session(model) as s:
        with pytest.raises(SettingError, match="functional transform"), s.step():
            torch.func.grad(loss)(parameters)
        assert_clean(s)
        got = torch.func.grad(loss)(parameters)  # outside of a step
    assert all(bits_equal(got[name], want[name]) for name in want)


# ---- C21: the spill folder


def test_c21_the_folder_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "spill"
    folder.mkdir()
    model = gpt()
    expected = plain(model)
    with ebbtide.torch.session(model, spill_dir=folder) as s:
        folder.rmdir()
        # The file has no name: either it is there already, or it can't be made any more.
        try:
            assert_same(stepped(s, model), expected)
        except EbbtideError as error:
            assert str(folder) in str(error)
        assert_clean(s)


# ---- C24: several at once


def test_c24_two_models_interleaved() -> None:
    models = [gpt(0), gpt(7)]
    expected = [plain(model) for model in models]
    with ebbtide.torch.session(models[0]) as one, ebbtide.torch.session(models[1], tier="host") as other:
        losses = []
        for s, model in ((one, models[0]), (other, models[1])):
            torch.manual_seed(1)
            with s.step():
                losses.append(loss_of(model))
        for loss in losses:
            loss.backward()
        for model, loss, want in zip(models, losses, expected, strict=True):
            assert_same(result(model, loss), want)


def test_c24_steps_of_two_sessions_inside_of_each_other() -> None:
    models = [gpt(0, dropout=0.0), gpt(7, dropout=0.0)]
    expected = [plain(model) for model in models]
    with (
        ebbtide.torch.session(models[0]) as one,
        ebbtide.torch.session(models[1]) as other,
        one.step(),
        other.step(),
    ):
        losses = [loss_of(model) for model in models]
        for model, loss, want in zip(models, losses, expected, strict=True):
            loss.backward()
            assert_same(result(model, loss), want)


def test_c24_two_threads() -> None:
    models = [gpt(seed, dropout=0.0) for seed in (0, 7)]
    expected = [plain(model) for model in models]
    got: list[list[dict[str, torch.Tensor]]] = [[], []]
    together = threading.Barrier(2)

    def train(index: int) -> None:
        model = models[index]
        with ebbtide.torch.session(model, min_bytes=0) as s:
            together.wait()
            for _ in range(8):
                model.zero_grad()
                with s.step():
                    loss = loss_of(model)
                loss.backward()
                got[index].append(result(model, loss))
            assert_clean(s)

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        assert len(got[index]) == 8
        for found in got[index]:
            assert_same(found, expected[index])


def test_c25_a_forked_child_touches_nothing() -> None:
    model = gpt()
    expected = plain(model)
    with ebbtide.torch.session(model) as s:
        torch.manual_seed(1)
        with s.step():
            loss = loss_of(model)
        child = os.fork()
        if child == 0:
            try:
                del loss
                s.close()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        model.zero_grad()
        loss.backward()
        assert_same(result(model, loss), expected)


def test_layers_of_many_kinds() -> None:
    """What else layers are made of: an LSTM, a convolution, an embedding bag, attention with a mask."""

    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
            self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
            self.norm = nn.BatchNorm1d(WIDTH)
            self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.lstm(x)[0]
            x = self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            return x + self.attention(x, x, x, attn_mask=mask)[0]

    torch.manual_seed(0)
    model = Chain(*(Kinds() for _ in range(3)))

    def run(model: nn.Module) -> torch.Tensor:
        return model(torch.linspace(-1, 1, 2 * 16 * WIDTH).reshape(2, 16, WIDTH)).square().mean()

    reference = copy.deepcopy(model)
    with ebbtide.torch.session(model, min_bytes=0) as s:
        for _ in range(3):
            reference.zero_grad()
            loss = run(reference)
            loss.backward()
            assert_same(stepped(s, model, run), result(reference, loss))
            buffers = zip(model.buffers(), reference.buffers(), strict=True)
            assert all(bits_equal(a, b) for a, b in buffers)
        assert_clean(s)


def test_blocks_are_usable_by_themselves() -> None:
    block = Block()
    model = Chain(block, Block())
    with ebbtide.torch.session(model) as s, s.step():
        block(torch.ones(2, 16, WIDTH)).sum().backward()
    assert tokens().shape == (4, 16)
