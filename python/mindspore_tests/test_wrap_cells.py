"""Wrappers that nobody notices, and warnings for what is wrapped twice (rows W7, W8 and W9 of the catalogue)."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from covers import array, cleanly, gradient, sample, step
from hand import Block, bits, chained, told, wire
from mindspore import Parameter, Tensor, mint, nn, ops

from ebbtide import PhaseError, SettingError
from ebbtide.mindspore import (
    ActivationWrapper,
    CheckpointWrapper,
    FuncCell,
    SwapWrapper,
    checkpoint_wrapper,
    session,
    swap_wrapper,
    unwrap_cell,
)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with cleanly():
        yield


# ---- marks


class Act:
    def __call__(self, x: Tensor) -> Tensor:
        return x


class Slotted:
    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        return x


def texts_of(wrap: Callable[[], object]) -> list[str]:
    with told() as texts:
        wrap()
    return texts


class Holder(nn.Cell):
    def __init__(self, **held: Any) -> None:
        super().__init__()
        for name, value in held.items():
            setattr(self, name, value)


@pytest.mark.parametrize("wrap", [swap_wrapper, checkpoint_wrapper])
def test_w7_a_region_that_was_wrapped(wrap: Callable[..., nn.Cell]) -> None:
    relu = nn.ReLU()
    model = nn.SequentialCell(nn.Dense(2, 2), nn.SequentialCell(relu))
    assert texts_of(lambda: wrap(model)) == []
    texts = texts_of(lambda: wrap(model))
    assert len(texts) == 4
    assert "SequentialCell is wrapped already" in texts[0]
    assert [("Dense" in text, "ReLU" in text) for text in texts[1:]].count((True, False)) == 1
    # Below something that was wrapped.
    texts = texts_of(lambda: wrap(relu))
    assert len(texts) == 1
    assert "ReLU" in texts[0]


def test_w7_two_cells_of_a_class_have_nothing_to_do_with_each_other() -> None:
    assert texts_of(lambda: [swap_wrapper(nn.Dense(2, 2)) for _ in range(2)]) == []
    assert texts_of(lambda: [swap_wrapper(nn.LayerNorm((2,))) for _ in range(2)]) == []


def test_w7_cells_below_name_both_classes() -> None:
    inner = nn.ReLU()
    swap_wrapper(inner)
    texts = texts_of(lambda: swap_wrapper(Holder(part=inner)))
    assert len(texts) == 1
    assert "Holder" in texts[0]
    assert "ReLU" in texts[0]
    texts = texts_of(lambda: swap_wrapper(Holder(part=swap_wrapper(Act()))))
    assert len(texts) == 1
    assert "Act" in texts[0]


def test_w7_callables_of_instances() -> None:
    act = Act()
    assert texts_of(lambda: swap_wrapper(Holder(act=act))) == []
    texts = texts_of(lambda: swap_wrapper(Holder(other=act)))
    assert len(texts) == 1
    assert "Act" in texts[0]
    assert len(texts_of(lambda: swap_wrapper(act))) == 1
    partial = functools.partial(mint.add, alpha=2)
    assert texts_of(lambda: swap_wrapper(partial)) == []
    assert len(texts_of(lambda: swap_wrapper(partial))) == 1
    assert texts_of(lambda: swap_wrapper(Holder(_act=act))) == []


def test_w7_what_is_exempt() -> None:
    def function(x: Tensor) -> Tensor:
        return x

    for plain in (function, lambda x: x, abs, nn.ReLU().construct, Slotted(), ops.ReLU()):
        for _ in range(2):
            assert texts_of(lambda: swap_wrapper(plain)) == []  # noqa: B023
        for _ in range(2):
            assert texts_of(lambda: swap_wrapper(Holder(plain=plain))) == []  # noqa: B023
    holder = swap_wrapper(function)
    assert texts_of(lambda: swap_wrapper(holder)) == []
    assert texts_of(lambda: swap_wrapper(Holder(part=holder))) == []
    assert texts_of(lambda: swap_wrapper(Holder(part=holder))) == []


# ---- invisible


class Rich(nn.Cell):
    """A cell with everything that a wrapper has to show."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((4,))
        self.blocks = nn.CellList([nn.Dense(4, 4), nn.Dense(4, 4)])
        self.scale = Parameter(Tensor(np.ones(4, np.float32)), name="scale")
        self.register_buffer("table", Tensor(np.arange(4.0, dtype=np.float32)))
        self.register_buffer("scratch", Tensor(np.zeros(2, np.float32)), persistent=False)
        self.note = "a note"

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> nn.Cell:
        return self.blocks[index]

    def construct(self, x: Tensor) -> Tensor:
        x = self.norm(x) * self.scale + self.table
        for block in self.blocks:
            x = ops.relu(block(x))
        return x


class Parent(nn.Cell):
    def __init__(self, inner: nn.Cell) -> None:
        super().__init__()
        self.first = nn.Dense(4, 4)
        self.inner = inner

    def construct(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x))


def both(wrap: Callable[[nn.Cell], nn.Cell], nested: bool) -> tuple[nn.Cell, nn.Cell]:
    """The same weights, plain and covered."""
    plain: nn.Cell = Rich()
    covered = wrap(copy.deepcopy(plain))
    return (Parent(plain), Parent(covered)) if nested else (plain, covered)


def names(cell: nn.Cell) -> dict[str, list[str]]:
    return {
        "parameters": [name for name, _ in cell.parameters_and_names()],
        "own": [name for name, _ in cell.parameters_and_names(expand=False)],
        "kept": [parameter.name for parameter in cell.get_parameters()],
        "trained": [parameter.name for parameter in cell.trainable_params()],
        "dict": list(cell.parameters_dict()),
        "buffers": [name for name, _ in cell.named_buffers()],
        "all buffers": [name for name, _ in cell.named_buffers(remove_duplicate=False)],
        "cells": [name for name, _ in cell.cells_and_names()],
        "children": list(cell.name_cells()),
        "state": list(cell.state_dict()),
    }


def fill(cell: nn.Cell, seed: int) -> None:
    for number, parameter in enumerate(cell.get_parameters()):
        parameter.set_data(array(*parameter.shape, seed=seed + number))


def content(cell: nn.Cell) -> list[bytes]:
    return [bits(parameter) for parameter in cell.get_parameters()]


WRAPS = [swap_wrapper, checkpoint_wrapper, ActivationWrapper, lambda cell: checkpoint_wrapper(swap_wrapper(cell))]
quiet = pytest.mark.filterwarnings("ignore:.*wrapped already.*")


@quiet
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("nested", [False, True])
def test_w8_names_and_state_dicts_are_those_of_the_cell(wrap: Callable[..., nn.Cell], nested: bool) -> None:
    plain, covered = both(wrap, nested)
    assert names(covered) == names(plain)
    fill(plain, 1)
    assert str(covered.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    assert content(covered) == content(plain)
    fill(covered, 20)
    plain.load_state_dict(covered.state_dict())
    assert content(covered) == content(plain)
    with pytest.raises(RuntimeError, match="wrong"):
        covered.load_state_dict({**plain.state_dict(), "wrong": array(1)})
    x = array(6, 4)
    assert bits(covered(x)) == bits(plain(x))


@quiet
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("nested", [False, True])
def test_w8_checkpoint_files_both_ways(wrap: Callable[..., nn.Cell], nested: bool, tmp_path: Path) -> None:
    plain, covered = both(wrap, nested)
    for number, (one, other) in enumerate([(plain, covered), (covered, plain)]):
        fill(one, 100 * number + 1)
        file = str(tmp_path / f"{number}.ckpt")
        ms.save_checkpoint(one, file)
        missing, unexpected = ms.load_param_into_net(other, ms.load_checkpoint(file), strict_load=True)
        assert (missing, unexpected) == ([], [])
        assert content(other) == content(one)


@quiet
@pytest.mark.parametrize("wrap", WRAPS)
def test_w8_attributes_and_indexing(wrap: Callable[..., Any]) -> None:
    rich = Rich()
    covered = wrap(rich)
    assert covered.note == "a note"
    assert covered.scale is rich.scale
    assert covered.blocks is rich.blocks
    assert covered.table is rich.table
    assert (len(covered), covered[1], bool(covered)) == (2, rich.blocks[1], True)
    assert list(covered) == list(rich.blocks)
    assert not wrap(nn.CellList())
    covered.note = "changed"
    assert rich.note == "changed"
    covered.own = 3
    assert rich.own == 3
    del covered.own
    assert not hasattr(rich, "own")
    covered.scale = Tensor(np.zeros(4, np.float32))
    assert rich.scale.asnumpy().sum() == 0
    covered.second = nn.Dense(4, 4)
    assert rich.second is covered.second
    covered.blocks[0] = nn.Dense(4, 4)
    assert covered.blocks[0] is rich.blocks[0]
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'"):
        _ = covered.nothing
    assert not hasattr(covered, "nothing")
    assert set(dir(rich)) <= set(dir(covered))


@quiet
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("nested", [False, True])
def test_w8_flags_reach_the_cell_inside(wrap: Callable[..., Any], nested: bool) -> None:
    rich = Rich()
    covered = wrap(rich)
    outer = Parent(covered) if nested else covered
    outer.set_train()
    assert (covered.training, rich.training, rich.norm.training, rich.phase) == (True, True, True, "train")
    outer.set_train(False)
    assert (covered.training, rich.training, rich.norm.training) == (False, False, False)
    rich.set_train()
    assert covered.training
    assert outer.to_float(ms.float16) is outer
    assert rich.mixed_precision_type is not None
    assert rich.blocks[0].mixed_precision_type is not None
    assert covered(array(2, 4)).dtype == Rich().to_float(ms.float16)(array(2, 4)).dtype == ms.float16
    outer.add_flags_recursive(mine=True)
    assert rich.get_flags()["mine"]
    assert rich.norm.get_flags()["mine"]
    visited: list[nn.Cell] = []
    outer.apply(visited.append)
    assert visited.count(rich) == 1


@quiet
@pytest.mark.parametrize("wrap", WRAPS)
def test_w8_deleting_and_inserting_in_a_wrapped_list(wrap: Callable[..., Any]) -> None:
    cells = nn.CellList([nn.Dense(2, 2) for _ in range(3)])
    covered = wrap(cells)
    second = cells[1]
    del covered[0]
    assert (len(covered), covered[0]) == (2, second)
    assert [name for name, _ in covered.cells_and_names()] == ["", "0", "1"]
    covered.append(nn.Dense(2, 2))
    assert len(cells) == 3


@quiet
@pytest.mark.parametrize("wrap", WRAPS)
def test_w8_the_wrapper_takes_the_place_of_the_cell_without_new_names(wrap: Callable[..., Any]) -> None:
    model, plain = chained(3), chained(3)
    before = [parameter.name for parameter in plain.get_parameters()]
    for number, layer in enumerate(list(model.layers)):
        model.layers[number] = wrap(layer)
    assert [parameter.name for parameter in model.get_parameters()] == before
    inside = unwrap_cell(model.layers[1])
    inside.up = wrap(inside.up)
    assert [parameter.name for parameter in model.get_parameters()] == before
    assert all(parameter.is_init == other.is_init for parameter, other in zip(*parameters(model, plain), strict=True))


def parameters(*models: nn.Cell) -> list[list[Parameter]]:
    return [list(model.get_parameters()) for model in models]


class One(nn.Cell):
    """A parameter under a name of one's own."""

    def __init__(self, name: str, child: nn.Cell | None = None) -> None:
        super().__init__()
        self.weight = Parameter(array(2), name=name)
        if child is not None:
            self.attn = child


@pytest.mark.parametrize(
    ("remembered", "prefix", "expected"),
    [
        ("weight", "attn.", "attn.weight"),
        ("attn.weight", "attn.", "attn.weight"),
        ("blocks.0.attn.weight", "attn.", "blocks.0.attn.weight"),
        # On whole parts, and where the parent hangs it: these have the letters, not the place.
        ("xattn.weight", "attn.", "attn.weight"),
        ("blocks.xattn.weight", "attn.", "attn.weight"),
        ("attn.other.weight", "attn.", "attn.weight"),
        ("attn.weights", "attn.", "attn.weight"),
        ("attn.weight", "tn.", "tn.weight"),
        ("blocks.0.attn.weight", "", "weight"),
    ],
)
def test_w8_renaming_by_a_parent(remembered: str, prefix: str, expected: str) -> None:
    covered = swap_wrapper(One(remembered))
    parameter = covered.weight
    was_init = parameter.is_init = True
    covered.update_parameters_name(prefix)
    assert parameter.name == expected
    # What changed under a prefix is not initialised, as with a bare cell.
    assert parameter.is_init is (was_init if expected == remembered or not prefix else False)
    # And remembered.
    covered.update_parameters_name(prefix)
    assert parameter.name == expected


def test_w8_a_cell_in_a_cell_of_the_same_name_keeps_its_prefix() -> None:
    inner = One("weight")
    outer = One("weight", child=inner)
    assert inner.weight.name == "attn.weight"
    covered = swap_wrapper(outer)
    parent = nn.Cell()
    parent.attn = covered
    assert [parameter.name for parameter in parent.get_parameters()] == ["attn.weight", "attn.attn.weight"]
    # Hung there once more nothing changes.
    parent.attn = covered
    assert [parameter.name for parameter in parent.get_parameters()] == ["attn.weight", "attn.attn.weight"]


def test_w8_a_name_that_was_changed_by_others_is_the_one_that_counts() -> None:
    covered = swap_wrapper(One("weight"))
    parent = nn.Cell()
    parent.attn = covered
    nn.CellList([nn.Dense(2, 2), parent])
    assert covered.weight.name == "1.attn.weight"
    parent.attn = covered
    assert covered.weight.name == "1.attn.weight"


def test_w8_unwrapping_gives_the_innermost_bare_cell() -> None:
    block = Block()
    with told():
        covered = ActivationWrapper(checkpoint_wrapper(swap_wrapper(block)))
    assert unwrap_cell(covered) is block
    assert unwrap_cell(block) is block
    assert covered.up is block.up
    assert isinstance(unwrap_cell(swap_wrapper(ops.exp)), FuncCell)
    with pytest.raises(SettingError):
        unwrap_cell(3)


def test_w8_copies_and_pickles() -> None:
    model = chained(3)
    reference = step(chained(3))
    model.layers[0], model.layers[1] = swap_wrapper(model.layers[0]), checkpoint_wrapper(model.layers[1])
    wire(model)
    covered = copy.deepcopy(model)
    assert isinstance(covered.layers[0], SwapWrapper)
    assert isinstance(covered.layers[1], CheckpointWrapper)
    first = covered.layers[0]
    assert first.up.weight is unwrap_cell(first).up.weight
    assert first.up.weight is not model.layers[0].up.weight
    with told():  # the copy is in no chain
        assert step(covered) == reference
    loaded = pickle.load(io.BytesIO(pickle.dumps(swap_wrapper(Attributes()))))
    assert isinstance(loaded, SwapWrapper)
    assert loaded.note == "kept"


class Attributes(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.note = "kept"


def test_w8_hooks_of_both_run_once() -> None:
    block = Block()
    covered = swap_wrapper(block)
    seen: list[str] = []
    covered.register_forward_hook(lambda *_: seen.append("wrapper"))
    block.register_forward_hook(lambda *_: seen.append("cell"))
    covered.register_forward_pre_hook(lambda *_: seen.append("before"))
    covered(sample())
    assert seen == ["before", "cell", "wrapper"]


def test_w8_a_wrapped_cell_at_the_top_is_trained_as_the_bare_one() -> None:
    """What MindSpore makes a step of: a function of cells, and cells that it has made itself."""

    def train(wrap: Callable[[nn.Cell], nn.Cell]) -> list[bytes]:
        model = chained(2)
        net = wrap(model)
        loss = nn.WithLossCell(net, nn.MSELoss())
        one = nn.TrainOneStepCell(loss, nn.SGD(net.trainable_params(), learning_rate=0.1))
        one.set_train()
        losses = [one(sample(), sample(5)) for _ in range(3)]
        return [bits(tensor) for tensor in (*losses, *model.get_parameters())]

    with told():
        assert train(swap_wrapper) == train(lambda cell: cell)
        assert train(checkpoint_wrapper) == train(lambda cell: cell)


def test_w8_second_derivatives_are_right_or_an_error() -> None:
    def second(function: Callable[[Tensor], Tensor]) -> list[bytes]:
        first = ms.grad(lambda x: ops.exp(function(x) * 0.1).sum())
        return gradient(lambda x: (first(x) * x).sum(), sample())

    block = Block()
    reference = second(block)
    with told():
        assert second(ActivationWrapper(block)) == reference
        assert second(checkpoint_wrapper(block)) == reference
        for wrap in (swap_wrapper, lambda block: checkpoint_wrapper(block, swap_inputs=True)):
            with pytest.raises(PhaseError, match="second derivatives"):
                second(wrap(block))
        assert second(block) == reference


@pytest.mark.parametrize("wrapped", [range(4), range(1), range(3, 4)])
def test_w8_a_session_sees_the_layers_inside(wrapped: range) -> None:
    model = chained(4)
    for number in wrapped:
        model.layers[number] = ActivationWrapper(model.layers[number])
    reference = step(chained(4))
    with session(model, "swap", min_bytes=1) as opened:
        assert list(opened.policy.values()) == ["swap"] * 3 + ["keep"]
        with opened.step():
            assert step(model) == reference
        assert opened.stats()["bytes_out"] > 0


# ---- while MindSpore constructs a cell


def test_w9_attributes_before_the_base_class_is_constructed() -> None:
    class Early(ActivationWrapper):
        def __init__(self, cell: nn.Cell) -> None:
            assert not hasattr(self, "bprop")
            assert not hasattr(self, "_cells")
            with pytest.raises(AttributeError):
                _ = self.note
            super().__init__(cell)
            assert self.note == "a note"

    Early(Rich())
    made: nn.Cell = SwapWrapper.__new__(SwapWrapper)
    assert not hasattr(made, "anything")
    assert not hasattr(made, "_params")


def test_w9_a_cell_with_a_backward_of_its_own() -> None:
    class Own(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return x * 2

        def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
            return (dout * 7,)

    with told():
        assert gradient(lambda x: swap_wrapper(Own())(x).sum(), sample()) == gradient(
            lambda x: Own()(x).sum(), sample()
        )
