"""What only a look at the memory, the hooks or the figures shows: results are right also where it is missed.

Each finds a mistake of `planted.txt` that the other tests of its row let through.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hand_models import assert_equal, figures, held, layers, one_thread, sample, step, wire, wrapped
from session_models import (
    Block,
    Chain,
    assert_clean,
    assert_no_hooks,
    assert_same,
    gpt,
    hooked,
    loss_of,
    plain,
    stepped,
)
from torch import nn

import ebbtide.torch
from ebbtide.torch import Region, SwapGroup, SwapTensor, swap_wrapper


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with one_thread():
        yield


def swapped() -> nn.Sequential:
    return wire(wrapped(layers(4), swap_wrapper))


def test_t13_a_longer_view_is_no_repeat_of_a_shorter_one() -> None:
    base = torch.randn(100)
    expected = base.clone()
    region = Region()
    region[0].extend(SwapTensor(view, "op") for view in (base[:3], base[:100], base[:5]))
    group = SwapGroup("views")
    group.add(region)
    del base
    assert ["not a duplicate" in repr(tensor) for tensor in region[0]] == [True] * 3
    group.launch_offload()
    group.wait_offload()
    group.launch_load()
    tensors = list(region[0])
    group.wait_load()
    for tensor, count in zip(tensors, (3, 100, 5), strict=True):
        assert torch.equal(tensor.get_val(), expected[:count])


def test_m4_hooks_of_a_session_end_with_an_exception() -> None:
    def fail(*_: object) -> None:
        raise ValueError("in the second layer")

    model = gpt()
    with ebbtide.torch.session(model) as s:
        with s.step():
            with hooked(model.get_submodule("blocks.1.drop"), fail), pytest.raises(ValueError, match="second"):
                loss_of(model)
            assert_no_hooks()  # those of the layer are gone at once, not only when the step ends
        assert_clean(s)


class Fails(torch.autograd.Function):
    """Has no backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("in backward")


def tensors_out(model: nn.Sequential) -> float:
    """How many tensors leave in a step."""
    before = figures()["tensors_out"]
    step(model)
    return figures()["tensors_out"] - before


def test_m5_layers_leave_again_after_a_failed_backward() -> None:
    model = swapped()
    expected = tensors_out(model)
    assert expected > 0
    with pytest.raises(ValueError, match="in backward"):
        model[2:](Fails.apply(model[:2](sample()))).sum().backward()
    assert tensors_out(model) == expected
    assert held() == (0, 0)


def test_m10_every_pass_in_flight_leaves() -> None:
    model = swapped()
    one = tensors_out(model)
    before = figures()["tensors_out"]
    losses = [model(sample(number)).sum() for number in range(4)]
    assert figures()["tensors_out"] - before == 4 * one
    assert held()[1] == 4 * 3
    for loss in losses:
        loss.backward()
    assert held() == (0, 0)


def test_c11_an_evaluation_does_not_hide_the_group_to_load() -> None:
    model = swapped()
    reference = step(layers(4))
    assert_equal(step(model), reference)
    before = figures()["missed_prefetches"]
    loss = model(sample()).sum()
    with torch.no_grad():
        model(sample(9))
    loss.backward()
    assert figures()["missed_prefetches"] == before


def test_c12_each_call_of_a_layer_is_loaded_ahead() -> None:
    torch.manual_seed(0)
    block = Block()
    model = Chain(block, Block(), block, block, Block())

    def run(model: nn.Module) -> torch.Tensor:
        return model(torch.ones(2, 16, 32)).square().mean()

    expected, missed = plain(model, run), []
    with ebbtide.torch.session(model, {"layers.*": "swap"}) as s:
        for _ in range(4):
            assert_same(stepped(s, model, run), expected)
            missed.append(s.stats()["missed_prefetches"])
        assert_clean(s)
    # The first group of a backward has nobody before it.
    assert missed[3] - missed[2] <= 1


def test_w8_names_that_begin_alike_are_apart() -> None:
    model = gpt(layers=12)
    with ebbtide.torch.session(model, {"blocks.1": "swap"}, layers="blocks.*.up") as s:
        assert [name for name in s.policy if "blocks.1" in name] == ["blocks.1", "blocks.10.up", "blocks.11.up"]
