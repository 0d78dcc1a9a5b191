"""What wrapping marks, and that nobody notices a wrapper (rows W7 and W8 of the catalogue)."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from hand_models import (
    assert_equal,
    held,
    one_thread,
    step,
    told,
    wire,
)
from session_models import Block
from torch import nn

from ebbtide.torch import (
    ActivationWrapper,
    CheckpointWrapper,
    SwapWrapper,
    checkpoint_wrapper,
    swap_wrapper,
)

ATEN = torch.ops.aten
Torchs = torch.utils.checkpoint.CheckpointPolicy


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with one_thread():
        yield


# ---- marks


class Act:
    """A callable of an instance."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Slotted:
    """Refuses marks."""

    __slots__ = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


def texts_of(wrap: Callable[[], object]) -> list[str]:
    with told() as texts:
        wrap()
    return texts


class Holder(nn.Module):
    def __init__(self, **held: Any) -> None:
        super().__init__()
        for name, value in held.items():
            setattr(self, name, value)


@pytest.mark.parametrize("wrap", [swap_wrapper, checkpoint_wrapper])
def test_w7_a_region_that_was_wrapped(wrap: Callable[..., nn.Module]) -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(relu))
    assert texts_of(lambda: wrap(model)) == []
    texts = texts_of(lambda: wrap(model))
    assert len(texts) == 4
    assert "Sequential is wrapped already" in texts[0]
    assert [("Linear" in text, "ReLU" in text) for text in texts[1:]].count((True, False)) == 1
    # Below something that was wrapped.
    texts = texts_of(lambda: wrap(relu))
    assert len(texts) == 1
    assert "ReLU" in texts[0]


def test_w7_modules_below_name_both_classes() -> None:
    inner = nn.Linear(2, 2)
    swap_wrapper(inner)
    texts = texts_of(lambda: swap_wrapper(Holder(part=inner)))
    assert len(texts) == 1
    assert "Holder" in texts[0]
    assert "Linear" in texts[0]
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
    partial = functools.partial(torch.add, alpha=2)
    assert texts_of(lambda: swap_wrapper(partial)) == []
    assert len(texts_of(lambda: swap_wrapper(partial))) == 1
    assert texts_of(lambda: swap_wrapper(Holder(_act=act))) == []


def test_w7_what_is_exempt() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x

    slotted = Slotted()
    for plain in (function, lambda x: x, torch.relu, nn.ReLU().forward, slotted):
        for _ in range(2):
            assert texts_of(lambda: swap_wrapper(plain)) == []  # noqa: B023
        for _ in range(2):
            assert texts_of(lambda: swap_wrapper(Holder(plain=plain))) == []  # noqa: B023
    holder = swap_wrapper(function)
    assert texts_of(lambda: swap_wrapper(holder)) == []
    assert texts_of(lambda: swap_wrapper(Holder(part=holder))) == []
    assert texts_of(lambda: swap_wrapper(Holder(part=holder))) == []


# ---- invisible


class Rich(nn.Module):
    """A module with everything that a wrapper has to show."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.note = "a note"

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> nn.Module:
        return self.blocks[index]

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x) * self.scale + self.table
        for block in self.blocks:
            x = block(x).relu()
        return x


def parent(inner: nn.Module) -> nn.Module:
    return nn.Sequential(collections.OrderedDict(first=nn.Linear(4, 4), inner=inner))


WRAPS = [swap_wrapper, checkpoint_wrapper, ActivationWrapper, lambda m: checkpoint_wrapper(swap_wrapper(m))]


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.filterwarnings("ignore:.*wrapped already.*")
def test_w8_names_and_state_dicts_are_those_of_the_module(wrap: Callable[..., nn.Module], nested: bool) -> None:
    torch.manual_seed(0)
    plain: nn.Module = Rich()
    covered = wrap(copy.deepcopy(plain))
    if nested:
        plain, covered = parent(plain), parent(covered)
        covered.first.load_state_dict(plain.first.state_dict())  # type: ignore[union-attr]

    def names(module: nn.Module) -> list[list[str]]:
        kinds = (module.named_parameters, module.named_buffers, module.named_children)
        return [[name for name, _ in kind()] for kind in kinds]

    assert names(covered) == names(plain)
    assert {name for name, _ in covered.named_modules()} == {name for name, _ in plain.named_modules()}
    twice = [name for name, _ in covered.named_parameters(remove_duplicate=False)]
    assert twice == [name for name, _ in plain.named_parameters(remove_duplicate=False)]
    one: Any = covered.state_dict()
    other: Any = plain.state_dict()
    assert list(one) == list(other)
    assert one._metadata == other._metadata
    for key in other:
        assert one[key] == other[key] if "extra" in key else torch.equal(one[key], other[key])
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1)
    assert str(covered.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    plain.load_state_dict(covered.state_dict())
    with pytest.raises(RuntimeError, match="wrong"):
        covered.load_state_dict({**plain.state_dict(), "wrong": torch.ones(1)})
    x = torch.randn(6, 4)
    assert torch.equal(covered(x), plain(x))


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.filterwarnings("ignore:.*wrapped already.*")
def test_w8_attributes_and_indexing(wrap: Callable[..., Any]) -> None:
    rich = Rich()
    covered = wrap(rich)
    assert covered.note == "a note"
    assert covered.scale is rich.scale
    assert covered.blocks is rich.blocks
    assert (len(covered), covered[1], bool(covered)) == (2, rich.blocks[1], True)
    assert bool(wrap(nn.ReLU()))
    covered.note = "changed"
    assert rich.note == "changed"
    covered.scale = nn.Parameter(torch.zeros(4))
    assert rich.scale is covered.scale
    covered.blocks[0] = nn.Identity()
    covered.own = 3
    assert covered.own == 3
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'"):
        _ = covered.nothing
    assert not hasattr(covered, "nothing")
    assert {"note", "scale", "forward"} <= set(dir(covered))
    covered.eval()
    assert (covered.training, rich.training, rich.norm.training) == (False, False, False)
    covered.train()
    assert (covered.training, rich.training, rich.norm.training) == (True, True, True)
    rich.eval()
    assert not covered.training
    covered.double()
    assert rich.scale.dtype is torch.float64
    assert rich in list(covered.modules())
    visited: list[nn.Module] = []
    covered.apply(visited.append)
    assert rich in visited
    assert covered in visited
    covered.requires_grad_(False)
    assert not rich.scale.requires_grad


def test_w8_copies_and_pickles() -> None:
    model = wire(nn.Sequential(swap_wrapper(Block()), checkpoint_wrapper(Block(), swap_inputs=True), Block()))
    reference = step(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    first: Any = model[0]
    for other in (copy.deepcopy(model), loaded):
        assert isinstance(other[0], SwapWrapper)
        assert isinstance(other[1], CheckpointWrapper)
        covered: Any = other[0]
        assert covered.norm1.weight is covered._inner.norm1.weight
        assert covered.norm1.weight is not first.norm1.weight
        with told() as texts:
            assert_equal(step(other), reference)
        assert all("group" in text for text in texts)
    assert held() == (0, 0)


def test_w8_a_wrapper_inside_a_wrapper_shows_the_innermost() -> None:
    inner = Block()
    swap_once = swap_wrapper(inner)
    with told():
        twice = checkpoint_wrapper(swap_once)
    assert twice.norm1 is inner.norm1
    assert list(twice.state_dict()) == list(inner.state_dict())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_w8_under_distributed_checkpointing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.accelerator.is_available():  # it asks any device for streams as CUDA has them
        device = torch.get_device_module()
        monkeypatch.setattr(device, "current_stream", torch.accelerator.current_stream, raising=False)
        monkeypatch.setattr(device, "stream", contextlib.nullcontext, raising=False)
    from torch.distributed.checkpoint import state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    plain, covered = parent(Rich()), parent(swap_wrapper(Rich()))
    content = state_dict.get_model_state_dict(plain)
    assert list(content) == list(state_dict.get_model_state_dict(covered))
    save(content, checkpoint_id=str(tmp_path), no_dist=True)
    found = state_dict.get_model_state_dict(covered)
    load(found, checkpoint_id=str(tmp_path), no_dist=True)
    state_dict.set_model_state_dict(covered, found)
    for one, other in zip(plain.parameters(), covered.parameters(), strict=True):
        assert torch.equal(one, other)
    optimizers = [torch.optim.SGD(module.parameters(), momentum=0.9) for module in (plain, covered)]
    for module, optimizer in zip((plain, covered), optimizers, strict=True):
        module(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    states = [state_dict.get_optimizer_state_dict(*pair) for pair in zip((plain, covered), optimizers, strict=True)]
    assert list(states[0]["state"]) == list(states[1]["state"])
