"""Tensors that layers name from inside of their forward (row W4 of the catalogue)."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
import pytest
from covers import BYTES, array, cleanly, gradient, sample, step
from hand import WIDTH, chained, figures, held, moved, send, told, wire
from mindspore import Parameter, Tensor, mint, nn, ops

from ebbtide import ChangedError
from ebbtide.mindspore import SwapManager, swap, swap_tensor_wrapper


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with cleanly():
        yield


class Pair(NamedTuple):
    one: Any
    two: Any


class Deep(collections.OrderedDict[str, Any]):
    note = ""


def trees(x: Tensor) -> list[Any]:
    deep = Deep(a=[x, (x, 3)])
    default: collections.defaultdict[str, Any] = collections.defaultdict(list, a=x)
    counter = collections.Counter({"a": 1})
    return [
        x,
        [x, [x]],
        (x,),
        {"a": {"b": x}},
        Pair(x, x),
        default,
        counter,
        collections.OrderedDict(b=x),
        deep,
        None,
        "t",
    ]


def leaves_of(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in leaves_of(value)]
    if isinstance(tree, (list, tuple)):
        return [leaf for value in tree for leaf in leaves_of(value)]
    return [tree]


def test_w4_leaves_are_the_same_objects_and_containers_keep_their_type() -> None:
    x = array(3)
    with SwapManager().group_context("g"):
        for tree in trees(x):
            got = swap_tensor_wrapper(tree, "tag")
            assert type(got) is type(tree)
            assert all(one is other for one, other in zip(leaves_of(got), leaves_of(tree), strict=True))
        default: collections.defaultdict[str, Any] = collections.defaultdict(list, a=x)
        assert swap_tensor_wrapper(default).default_factory is list
        deep = Deep(a=x)
        deep.note = "kept"
        assert swap_tensor_wrapper(deep).note == "kept"


def test_w4_outside_of_any_group_it_is_told_with_the_tag() -> None:
    tree = {"a": array(3)}
    with told() as texts:
        assert swap_tensor_wrapper(tree, "attention") is tree
    assert len(texts) == 1
    assert "attention" in texts[0]


def test_w4_in_the_last_group_the_very_object_comes_back_silently() -> None:
    seen = []

    class Names(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            tree = [x]
            seen.append(swap_tensor_wrapper(tree) is tree)
            return x * 2

    model = wire(chained(2, Names))
    with told() as texts:
        step(model)
    assert seen == [False, True]
    assert texts == []


def test_w4_nothing_eligible_makes_no_region() -> None:
    weight = Parameter(array(3), name="weight")

    def run(x: Tensor) -> Tensor:
        with SwapManager().group_context("g"):
            swap_tensor_wrapper([3, weight, mint.empty((0,))])
            return ops.exp(x).sum()

    for _ in range(2):
        gradient(run, sample(), no_group)
    assert moved() == (0, 0)


def no_group() -> None:
    assert SwapManager().active_group_count() == 0


@pytest.mark.parametrize("before", [True, False])
def test_w4_tensors_named_before_or_after_they_were_saved(before: bool) -> None:
    def body(x: Tensor, name: Any) -> Tensor:
        hidden = ops.exp(x * 0.1)
        if before:
            hidden = name(hidden)
        y = hidden * hidden
        if not before:
            name(hidden)
        return ops.exp(y).sum()

    def run(x: Tensor) -> Tensor:
        with SwapManager().group_context("named"):
            return body(x, lambda tensor: swap_tensor_wrapper(tensor, "hidden"))

    expected = gradient(lambda x: body(x, lambda tensor: tensor), sample())
    out = []
    for turn in range(3):
        # Nothing was watched before the first name.
        got = gradient(run, sample(), (lambda: send("named")) if turn else no_group)
        assert got == expected
        out.append(moved()[0])
    # The result of the second exp was saved as well, but not named.
    assert out == [0, BYTES, 2 * BYTES]
    assert moved()[1] == 2 * BYTES


class Naming(nn.Cell):
    """A perceptron that names what lies between its layers."""

    named = True

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Dense(WIDTH, 2 * WIDTH), nn.Dense(2 * WIDTH, WIDTH)

    def construct(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.named:
            hidden = swap_tensor_wrapper(hidden, "up")
        return x + self.down(ops.gelu(hidden))


def test_w4_layers_that_name_their_tensors() -> None:
    plain = chained(4, Naming)
    for layer in plain.layers:
        layer.named = False
    reference = step(plain)
    model = wire(chained(4, Naming))
    out = []
    for _ in range(3):
        assert step(model) == reference
        out.append(moved()[0])
    assert figures()["missed_prefetches"] == 0
    assert held() == (0, 0)
    # In the first pass a layer is watched from its first name on, and gelu saves what was named.
    assert out == [number * 3 * 2 * BYTES for number in (1, 2, 3)]


def test_w4_what_else_uses_the_tensor_keeps_it() -> None:
    kept: list[Tensor] = []

    def run(x: Tensor) -> Tensor:
        with SwapManager().group_context("named"):
            hidden = swap_tensor_wrapper(ops.exp(x * 0.1))
            kept.append(hidden)
            return (hidden * hidden).sum()

    def look() -> None:
        send("named")
        assert np.array_equal(kept[-1].asnumpy(), ops.exp(sample() * 0.1).asnumpy())

    expected = gradient(lambda x: (ops.exp(x * 0.1) * ops.exp(x * 0.1)).sum(), sample())[0]
    for turn in range(2):
        assert gradient(run, sample(), look if turn else no_group)[0] == expected
    assert moved()[0] > 0


def test_w4_the_tag_is_in_the_message() -> None:
    def run(x: Tensor) -> Tensor:
        with SwapManager().group_context("named"):
            return ops.exp(swap_tensor_wrapper(ops.exp(x * 0.1), "attention")).sum()

    def lose() -> None:
        send("named")
        SwapManager().abort_group("named")

    gradient(run, sample())
    with pytest.raises(Exception, match="attention"):
        gradient(run, sample(), lose)


def test_w4_a_change_of_a_named_tensor_is_noticed() -> None:
    def run(x: Tensor) -> Tensor:
        with SwapManager().group_context("named"):
            hidden = swap_tensor_wrapper(ops.exp(x * 0.1), "hidden")
            y = (hidden * hidden).sum()
            with ms._no_grad():
                hidden.copy_(array(8, WIDTH, seed=7))
            return y

    for turn in range(2):
        with pytest.raises((ChangedError, RuntimeError)):
            gradient(run, sample(), (lambda: send("named")) if turn else no_group)


def test_w4_inside_a_swapped_region_that_region_decides() -> None:
    def run(x: Tensor) -> Tensor:
        with SwapManager().group_context("g"):
            return swap(lambda t: ops.exp(swap_tensor_wrapper(ops.exp(t * 0.1))).sum(), x)

    expected = gradient(lambda x: ops.exp(ops.exp(x * 0.1)).sum(), sample())
    for number in (1, 2):
        assert gradient(run, sample(), lambda: send("g")) == expected
        assert moved()[0] == number * 2 * BYTES


def test_w4_hooks_of_somebody_else_are_not_hidden() -> None:
    def body(x: Tensor) -> Tensor:
        with SwapManager().group_context("named"):
            return ops.exp(swap_tensor_wrapper(ops.exp(x * 0.1))).sum()

    def run(x: Tensor) -> Tensor:
        with SwapManager().group_context("outer"):
            # What arrives first says which group is current.
            return swap(lambda t: body(ops.exp(t) * 0.1), x)

    expected = gradient(lambda x: ops.exp(ops.exp(ops.exp(x) * 0.1 * 0.1)).sum(), sample())
    for number in (1, 2, 3):
        assert gradient(run, sample(), lambda: send("outer")) == expected
        assert moved()[0] == number * 3 * BYTES


def test_w4_a_layer_that_fails_after_naming_leaves_nothing() -> None:
    fail = [True]

    class Failing(Naming):
        def construct(self, x: Tensor) -> Tensor:
            y = super().construct(x)
            if fail[0]:
                raise ValueError("after it")
            return y

    plain = chained(2, Naming)
    for layer in plain.layers:
        layer.named = False
    model = wire(chained(2, Failing))
    for _ in range(3):
        fail[0] = True
        with pytest.raises(ValueError, match="after it"):
            step(model)
        assert SwapManager().get_current_group_name() is None
        fail[0] = False
        assert step(model) == step(plain)
    assert held() == (0, 0)
