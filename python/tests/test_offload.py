"""`offload`: a plain context around any code."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from session_models import WIDTH, Block, assert_no_hooks, assert_same, bits_equal, result
from torch import nn
from torch.utils.checkpoint import checkpoint

import ebbtide.torch
from ebbtide import EbbtideWarning, PhaseError, SettingError


@pytest.fixture(autouse=True)
def fresh() -> Any:
    ebbtide.torch.reset()
    yield
    ebbtide.torch.reset()


def blocks(count: int = 4) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(count))


def run(layers: nn.ModuleList, context: Any) -> dict[str, torch.Tensor]:
    layers.zero_grad()
    torch.manual_seed(1)
    x = torch.ones(4, 16, WIDTH)
    for number, layer in enumerate(layers):
        with context(number):
            x = layer(x)
    loss = x.square().mean()
    loss.backward()
    return result(layers, loss)


def assert_gone() -> None:
    gc.collect()
    ebbtide.torch.synchronize()
    figures = ebbtide.torch.stats()
    assert (figures["bytes_held"], figures["active_groups"]) == (0, 0)
    assert_no_hooks()


@pytest.mark.parametrize("tier", [None, "file", "host"])
def test_one_around_each_part(tier: str | None) -> None:
    layers = blocks()
    expected = run(layers, lambda _: warnings.catch_warnings())
    for _ in range(3):
        got = run(layers, lambda number: ebbtide.torch.offload(tier, name=f"block {number}"))
        assert_same(got, expected)
    assert ebbtide.torch.stats()["bytes_out"] > 0
    assert_gone()


def test_one_around_everything_and_as_a_decorator() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64, requires_grad=True)

    def work(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x.cos()).exp().sum()

    @ebbtide.torch.offload(min_bytes=0)
    def decorated(x: torch.Tensor, depth: int = 1) -> torch.Tensor:
        return decorated(x, depth - 1) if depth else work(x)

    (want,) = torch.autograd.grad(work(x), x)
    with ebbtide.torch.offload():
        y = work(x)
    (got,) = torch.autograd.grad(y, x)
    assert bits_equal(got, want)
    y = decorated(x)
    ebbtide.torch.synchronize()
    (got,) = torch.autograd.grad(y, x)
    assert bits_equal(got, want)
    assert ebbtide.torch.stats()["tensors_out"] > 0
    del y
    assert_gone()


def test_memory_is_free_when_the_next_one_ends() -> None:
    x = torch.ones(1 << 16, requires_grad=True)
    live = []
    y = x
    for _ in range(6):
        with ebbtide.torch.offload(min_bytes=0):
            y = (y * 2).sin().exp()
        live.append(ebbtide.torch.stats()["live_bytes"])
    assert max(live[1:]) <= 2.1 * live[0]
    (got,) = torch.autograd.grad(y.sum(), x)
    z = x
    for _ in range(6):
        z = (z * 2).sin().exp()
    assert bits_equal(got, torch.autograd.grad(z.sum(), x)[0])


def test_which_tensors() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    moved = []
    for settings in (
        {},
        {"min_bytes": 1 << 20},
        {"exclude": lambda tensor: True},
        {"include": [lambda tensor: True]},
    ):
        before = ebbtide.torch.stats()["tensors_out"]
        with ebbtide.torch.offload(**settings):
            y = (x * 2).sin().sum()
        ebbtide.torch.synchronize()
        y.backward()
        moved.append(ebbtide.torch.stats()["tensors_out"] - before)
    assert moved[0] == moved[3] > 0
    assert moved[1] == moved[2] == 0


def test_bad_settings() -> None:
    for settings, text in (
        ({"tier": "disk"}, "disk"),
        ({"min_bytes": -1}, "negative"),
        ({"exclude": "blocks.*"}, "there are no layers here"),
        ({"spill_dir": "/nowhere/at/all"}, "/nowhere"),
    ):
        with pytest.raises(SettingError, match=text):
            ebbtide.torch.offload(**settings)
    again = ebbtide.torch.offload()
    with again, pytest.raises(PhaseError, match="entered already"), again:
        pass
    with again:
        pass
    assert_gone()


def test_without_gradients_and_in_checkpoints() -> None:
    x = torch.randn(64, 64, requires_grad=True)

    def work(x: torch.Tensor) -> torch.Tensor:
        with ebbtide.torch.offload(min_bytes=0):
            return (x.sin() * x.cos()).exp().sum()

    (want,) = torch.autograd.grad(work(x), x)
    before = ebbtide.torch.stats()["bytes_out"]
    with torch.no_grad():
        work(x)
    with pytest.warns(EbbtideWarning, match=r"put it around the checkpoint"):
        y = checkpoint(work, x, use_reentrant=False)
        (got,) = torch.autograd.grad(y, x)
    assert bits_equal(got, want)
    assert ebbtide.torch.stats()["bytes_out"] == before
    with ebbtide.torch.offload(min_bytes=0):
        y = checkpoint(torch.exp, x.sin(), use_reentrant=False).sum()
    assert bits_equal(torch.autograd.grad(y, x)[0], torch.autograd.grad(x.sin().exp().sum(), x)[0])


def test_c10_what_was_saved_before_an_exception_is_right() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    for error in (ValueError, KeyboardInterrupt):
        kept = []
        with pytest.raises(error), ebbtide.torch.offload():
            kept.append(x.sin().exp().sum())
            raise error
        (got,) = torch.autograd.grad(kept.pop(), x)
        assert bits_equal(got, torch.autograd.grad(x.sin().exp().sum(), x)[0])
    assert_gone()


def test_c20_func_grad_inside() -> None:
    with pytest.raises(SettingError, match="functional transform") as caught, ebbtide.torch.offload():
        torch.func.grad(lambda x: x.sin().sum())(torch.ones(3))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert_gone()


def test_w10_in_a_compiled_function() -> None:
    torch._dynamo.reset()
    x = torch.randn(64, 64, requires_grad=True)

    def work(x: torch.Tensor) -> torch.Tensor:
        with ebbtide.torch.offload(min_bytes=0):
            return x.sin().exp().sum()

    (want,) = torch.autograd.grad(work(x), x)
    compiled = torch.compile(work, backend="aot_eager")
    assert_right_or_refused(compiled, x, want)
    decorated = torch.compile(ebbtide.torch.offload(min_bytes=0)(lambda x: x.sin().exp().sum()), backend="aot_eager")
    assert_right_or_refused(decorated, x, want)
    plain = torch.compile(lambda x: x.sin().exp().sum(), backend="aot_eager")
    with ebbtide.torch.offload(min_bytes=0):
        y = plain(x)
    assert bits_equal(torch.autograd.grad(y, x)[0], want)
    torch._dynamo.reset()
    whole = torch.compile(work, backend="aot_eager", fullgraph=True)
    with pytest.raises(
        (SettingError, torch._dynamo.exc.TorchDynamoException), match=r"offload\(\) inside of a compiled"
    ):
        whole(x)


def assert_right_or_refused(function: Callable[..., torch.Tensor], x: torch.Tensor, want: torch.Tensor) -> None:
    try:
        y = function(x)
    except SettingError as error:
        assert "put it around the call" in str(error)
    else:
        assert bits_equal(torch.autograd.grad(y, x)[0], want)


def test_c24_threads() -> None:
    results: list[dict[str, torch.Tensor]] = []
    layers = [nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)]) for _ in range(3)]

    def work(own: nn.ModuleList) -> None:
        x = torch.ones(64, 64)
        for _ in range(10):
            own.zero_grad()
            y = x
            for layer in own:
                with ebbtide.torch.offload(min_bytes=0):
                    y = layer(y).sigmoid()
            y.sum().backward()
        results.append(result(own, torch.zeros(1)))
        own.zero_grad()
        y = x
        for layer in own:
            y = layer(y).sigmoid()
        y.sum().backward()
        results.append(result(own, torch.zeros(1)))

    threads = [threading.Thread(target=work, args=(own,)) for own in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    by_model = sorted(results, key=lambda found: found["0.weight"].sum().item())
    for one, other in zip(by_model[::2], by_model[1::2], strict=True):
        assert_same(one, other)
