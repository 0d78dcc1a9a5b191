"""Tensors by name, from inside of a layer (row W4 of the catalogue)."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from hand_models import (
    figures,
    moved,
    one_thread,
    sample,
    send,
    told,
    wire,
)
from torch import nn

from ebbtide.torch import (
    SwapManager,
    _defaults,
    _wrap,
    swap_tensor_wrapper,
)

ATEN = torch.ops.aten
Torchs = torch.utils.checkpoint.CheckpointPolicy


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with one_thread():
        yield


class Pair(NamedTuple):
    """A named tuple of tensors."""

    left: torch.Tensor
    right: torch.Tensor


class Deep(dict[str, Any]):
    """A dict of a class of its own, with something on it."""

    note = "none"


def trees(x: torch.Tensor) -> list[Any]:
    default = collections.defaultdict(list, {"a": [x]})
    deep = Deep(a=x)
    deep.note = "kept"
    return [
        x,
        [x, (x, 3), {"k": x}],
        Pair(x, x),
        default,
        collections.Counter({"a": 1}),
        collections.OrderedDict(b=x),
        deep,
        torch.return_types.max((x, x)),
        None,
        "text",
    ]


def leaves_of(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in leaves_of(value)]
    if isinstance(tree, (list, tuple)):
        return [leaf for value in tree for leaf in leaves_of(value)]
    return [tree]


def test_w4_leaves_are_the_same_objects_and_containers_keep_their_type() -> None:
    x = torch.ones(3)
    with SwapManager().group_context("g"):
        for tree in trees(x):
            got = swap_tensor_wrapper(tree, "tag")
            assert type(got) is type(tree)
            pairs = zip(leaves_of(got), leaves_of(tree), strict=True)
            assert all(one is other for one, other in pairs)
        default: collections.defaultdict[str, Any] = collections.defaultdict(list, a=x)
        assert swap_tensor_wrapper(default).default_factory is list
        deep = Deep(a=x)
        deep.note = "kept"
        assert swap_tensor_wrapper(deep).note == "kept"


def test_w4_outside_of_any_group_it_is_told_with_the_tag() -> None:
    tree = {"a": torch.ones(3)}
    with told() as texts:
        assert swap_tensor_wrapper(tree, "attention") is tree
    assert len(texts) == 1
    assert "attention" in texts[0]


def test_w4_in_the_last_group_the_very_object_comes_back_silently() -> None:
    seen = []

    class Names(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tree = [x]
            seen.append(swap_tensor_wrapper(tree) is tree)
            return x * 2

    model = wire(nn.Sequential(Names(), Names()))
    with told() as texts:
        model(sample())
    assert seen == [False, True]
    assert texts == []


def test_w4_nothing_eligible_makes_no_region() -> None:
    with SwapManager().group_context("g"):
        swap_tensor_wrapper([3, nn.Parameter(torch.ones(3)), torch.empty(0)])
    assert SwapManager().active_group_count() == 0


@pytest.mark.parametrize("before", [True, False])
def test_w4_tensors_named_before_or_after_they_were_saved(before: bool) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        hidden = x * 2
        if before:
            hidden = swap_tensor_wrapper(hidden)
        y = hidden.square()
        if not before:
            swap_tensor_wrapper(hidden)
        del hidden
        return y.exp().sum()

    x, name = sample(), f"named {before}"
    out = []
    for _ in range(3):
        with SwapManager().group_context(name):
            y = run(x)
        send(name)
        out.append(figures()["tensors_out"])
        y.backward()
        expected = torch.autograd.grad((x * 2).square().exp().sum(), x)[0]
        assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
        x.grad = None
    # The result of exp was saved as well, but not named. Nothing was watched before the first name.
    assert out == [0, 1, 2]
    assert moved() == (2 * x.numel() * 4,) * 2
    assert figures()["not_freed_tensors"] == 0


def test_w4_a_torch_that_hides_its_hooks_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.8 nobody can say whether somebody else's hooks apply."""
    monkeypatch.setattr(_wrap, "_warned_of_old_torch", False)
    monkeypatch.setattr(_defaults, "hooks_can_be_seen", lambda: False)
    x = sample()
    with SwapManager().group_context("old"), told() as texts:
        for _ in range(2):
            tree = [x * 2]
            got = swap_tensor_wrapper(tree, "tag")
            assert got[0] is tree[0]
            got[0].square().sum().backward()
    assert len(texts) == 1
    assert "2.8" in texts[0]
    assert "swap_wrapper" in texts[0]
    assert (SwapManager().active_group_count(), moved()) == (0, (0, 0))
