"""C7: what is changed in place after it was saved raises as in plain torch, or gives the gradient of what was saved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ebbtide
import ebbtide.torch
from ebbtide import _native

from .bits import assert_same, bits
from .models import Gpt, loss_of, tokens
from .regions import Context
from .training import ALL

MOMENTS = ("before", "under way", "after")
SIZES = (16, 1 << 20)

Change = Callable[[torch.Tensor], object]
CHANGES: dict[str, Change] = {
    "add_": lambda y: y.add_(10),
    "through a view": lambda y: y[3:5].mul_(2),
    "through a view of a view": lambda y: y.view(4, -1)[1][1:].zero_(),
    "through an alias": lambda y: y.detach().add_(1),
    "copy_": lambda y: y.copy_(torch.ones_like(y)),
    "set item": lambda y: y.__setitem__(0, 7.0),
    "out=": lambda y: torch.add(y.detach(), 1, out=y.detach()),
    "random": lambda y: y.uniform_(),
    "resize_": lambda y: y.detach().resize_(y.numel() // 2).fill_(3.0),
}


REGIONS: tuple[Context, ...] = (contextlib.nullcontext, lambda: ebbtide.torch.offload(tier="file", min_bytes=0))
"""Plain, and swapped."""


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Leaves of the graph may be modified."""
    with torch.no_grad():
        yield


def gradient(
    change: Change, moment: str, size: int, tier: str | None
) -> tuple[torch.Tensor | None, RuntimeError | None]:
    """C7's case: `y = 2x; z = y * y`, then a change of y. The gradient or the error; plain torch without a tier."""
    torch.manual_seed(2)
    x = torch.randn(size, requires_grad=True)
    hub = _native.Hub(tier=tier) if tier is not None else None
    try:
        return _gradient(change, moment, x, hub), None
    except RuntimeError as error:
        return None, error
    finally:
        if hub is not None:
            hub.close()


def _gradient(change: Change, moment: str, x: torch.Tensor, hub: _native.Hub | None) -> torch.Tensor:
    if hub is None:
        y = 2 * x
        z = y * y
        with quietly():
            change(y)
        return torch.autograd.grad(z.sum(), x)[0]
    group = hub.open("c7", 1)
    with torch.autograd.graph.saved_tensors_hooks(_native.Packer(group), _native.unpack):
        y = 2 * x
        z = y * y
    _move_and_change(group, change, moment, y)
    return torch.autograd.grad(z.sum(), x)[0]


def _move_and_change(group: _native.Group, change: Change, moment: str, y: torch.Tensor) -> None:
    """Changes the tensor before its copy starts, while it is under way, or when it is complete."""
    if moment == "before":
        with quietly():
            change(y)
    group.start_offload()
    if moment == "under way":
        with quietly():
            change(y)
    group.wait_offload()
    if moment == "after":
        with quietly():
            change(y)


def unchanged(size: int) -> torch.Tensor:
    """The gradient of what was saved."""
    grad, error = gradient(lambda y: None, "after", size, None)
    assert grad is not None and error is None
    return grad


@pytest.mark.parametrize("tier", ["file", "host"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", CHANGES)
def test_c7_never_another_gradient(name: str, moment: str, size: int, tier: str) -> None:
    _, error = gradient(CHANGES[name], moment, size, None)
    assert error is not None, "plain torch raises"
    grad, error = gradient(CHANGES[name], moment, size, tier)
    if error is not None:
        assert grad is None
        assert isinstance(error, ebbtide.ChangedError), repr(error)
        return
    assert moment != "before", "no copy can hold what was saved"
    assert grad is not None
    assert_same(unchanged(size), grad, "the gradient of what was saved")


@pytest.mark.parametrize("moment", MOMENTS)
def test_c7_the_base_of_a_view(moment: str) -> None:
    """A view was saved, its base is changed, outside of the view's own elements."""

    def run(hub: _native.Hub | None) -> torch.Tensor:
        torch.manual_seed(2)
        x = torch.randn(100, requires_grad=True)
        base = torch.randn(100)
        group = hub.open("c7", 1) if hub is not None else None
        hooks = _native.Packer(group) if group is not None else lambda tensor: tensor.detach()
        unpack = _native.unpack if group is not None else lambda tensor: tensor
        with torch.autograd.graph.saved_tensors_hooks(hooks, unpack) if group else contextlib.nullcontext():
            z = base[:10] * x[:10]
        if group is not None:
            _move_and_change(group, lambda base: base[50:].zero_(), moment, base)
        else:
            base[50:].zero_()
        return torch.autograd.grad(z.sum(), x)[0]

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(None)
    hub = _native.Hub(tier="file")
    torch.manual_seed(2)
    torch.randn(100)
    expected = torch.zeros(100)
    expected[:10] = torch.randn(100)[:10]
    try:
        assert_same(expected, run(hub))
    except ebbtide.ChangedError:
        pass
    finally:
        hub.close()


def kept(how: str) -> Any:
    """A region in which the tensor of the test is not swapped."""
    if how == "small":
        return ebbtide.torch.offload(tier="file", min_bytes=1 << 30)
    if how == "excluded":
        return ebbtide.torch.offload(tier="file", min_bytes=0, exclude=lambda tensor: True)
    return ebbtide.torch.offload(tier="file", min_bytes=0)


@pytest.mark.parametrize("how", ["small", "excluded"])
@pytest.mark.parametrize("name", CHANGES)
def test_c7_tensors_that_stay_raise_as_well(name: str, how: str) -> None:
    x = torch.randn(64, requires_grad=True)
    with kept(how):
        y = 2 * x
        z = y * y
    with quietly():
        CHANGES[name](y)
    with pytest.raises(ebbtide.ChangedError):
        z.sum().backward()


@pytest.mark.parametrize("how", ["small", "excluded", "swapped"])
def test_c7_a_weight_that_is_updated_between_forward_and_backward(how: str) -> None:
    layer = nn.Linear(30, 30)
    x = torch.randn(4, 30, requires_grad=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    (layer(x) ** 2).sum().backward()
    with kept(how):
        loss = (layer(x) ** 2).sum()
    optimizer.step()
    with pytest.raises(ebbtide.ChangedError):
        loss.backward()


@pytest.mark.parametrize("policy", [ALL, "swap", "keep"], ids=["all", "swap", "keep"])
def test_c7_an_optimizer_between_forward_and_backward_of_a_session(policy: Any) -> None:
    """Plain torch raises; so does a session, and its next step is right."""
    torch.manual_seed(0)
    model = Gpt(2, dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, tokens(0)).backward()
    with ebbtide.torch.session(model, policy, tier="file", min_bytes=0) as session:
        with session.step():
            loss = loss_of(model, tokens(1))
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"modified|changed|in place|inplace"):
            loss.backward()
        del loss
        model.zero_grad()
        loss_of(model, tokens(2)).backward()
        expected = [bits(p.grad) for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        with session.step():
            loss_of(model, tokens(2)).backward()
        assert_same(expected, [p.grad for p in model.parameters()])


def test_c7_changes_that_plain_torch_allows() -> None:
    """Of what backward does not read, or of what was never saved."""
    for name, change in CHANGES.items():
        if name == "resize_":
            continue  # resizes what backward's shapes come from
        grads = []
        for region in REGIONS:
            torch.manual_seed(1)
            x = torch.randn(64, requires_grad=True)
            with region():
                y = x.sin() + 1
                z = x.exp() * 3
            with quietly():
                change(y)
            z.sum().backward()
            grads.append(x.grad)
        assert_same(grads[0], grads[1], name)


def test_c7_a_retained_graph_after_a_change() -> None:
    """The first backward is right, the second one raises or is the same again."""
    x = torch.randn(64, requires_grad=True)
    with ebbtide.torch.offload(tier="file", min_bytes=0):
        y = 2 * x
        z = (y * y).sum()
    (first,) = torch.autograd.grad(z, x, retain_graph=True)
    with quietly():
        y.add_(1)
    try:
        (second,) = torch.autograd.grad(z, x)
    except ebbtide.ChangedError:
        return
    assert_same(first, second)


def test_writes_without_a_version_between_two_forwards() -> None:
    """`.data`, numpy and others write without telling autograd: each graph reads what was there in its forward."""
    grads = []
    for region in REGIONS:
        buffer = np.ones(500, dtype=np.float32)
        x = torch.from_numpy(buffer).requires_grad_()
        alive: list[torch.Tensor] = []
        found: list[torch.Tensor] = []
        for number in range(3):
            buffer[:] = number + 1
            with region():
                y = (x * x).sum()
            ebbtide.torch.synchronize()
            alive.append(y)
            found += torch.autograd.grad(y, x, retain_graph=True)
        grads.append(found)
    assert_same(grads[0], grads[1])


def test_c7_in_place_registration() -> None:
    """T5: a tensor that is registered and then changed or resized is an error before anything is copied."""
    hub = _native.Hub(tier="file")
    changes: tuple[Change, ...] = (lambda t: t.add_(1), lambda t: t.untyped_storage().resize_(8))
    for change in changes:
        group = hub.open("t5", 1)
        first, second = torch.randn(10), torch.randn(20)
        group.add(first, "first", sole=False)
        group.add(second, "second", sole=False)
        change(second)
        with pytest.raises(ebbtide.ChangedError, match="second"):
            group.start_offload()
        assert first.untyped_storage().nbytes() == 40
        group.close()
    assert hub.stats()["bytes_out"] == 0
    hub.close()


def test_c7_the_error_names_what_happened() -> None:
    grad, error = gradient(CHANGES["add_"], "before", 16, "file")
    assert grad is None and isinstance(error, ebbtide.ChangedError)
    assert "c7" in str(error) and error.hint
