"""Trainings that are swapped by hand, through wrappers, groups and single tensors: the bits of plain torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ebbtide.torch
from ebbtide.torch import CheckpointPolicy, SwapManager

from .bits import assert_same, tree_bits
from .inputs import seed_all
from .models import Block, Gpt, Mixture, adamw, loss_of, tokens
from .training import Trained, left, plain

Wire = Callable[[nn.ModuleList], None]
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No group is left from before or for what follows."""
    ebbtide.torch.reset()
    yield
    SwapManager().set_current_group_name(None)
    ebbtide.torch.reset()


def train(model: nn.Module, step: Any = None, count: int = 6) -> list[torch.Tensor]:
    """A short training."""
    optimizer, losses = adamw(model), []
    for number in range(count):
        optimizer.zero_grad()
        loss = loss_of(model, tokens(number, (16, 7)[number % 2]))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def wired(make: Callable[[], nn.Module], wire: Wire, training: Callable[..., Any] = train) -> Trained:
    """The training of a model whose blocks were wired by hand."""
    seed_all(3)
    model = make()
    blocks = model.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleList)
    wire(blocks)
    results = training(model)
    return Trained(left(model, results), ebbtide.torch.stats())


def chain(blocks: nn.ModuleList) -> None:
    """Declares the order of the layers, by which their groups leave and come home."""
    for first, second in zip(blocks, list(blocks)[1:], strict=False):
        SwapManager().set_forward_prefetch_layer(first, second)


def wrap(blocks: nn.ModuleList, wrapper: Callable[[nn.Module], nn.Module]) -> None:
    """Puts a wrapper around each block, and declares the order."""
    for number, block in enumerate(blocks):
        blocks[number] = wrapper(block)
    chain(blocks)


def by_operation(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Swaps matrix products, saves norms, computes the rest again."""
    if operation in (aten.addmm.default, aten.mm.default, aten.bmm.default):
        return CheckpointPolicy.MUST_SWAP
    if operation is aten.native_layer_norm.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def by_size(tensor: torch.Tensor) -> CheckpointPolicy:
    """Swaps what is not tiny."""
    return CheckpointPolicy.MUST_SWAP if tensor.numel() > 100 else CheckpointPolicy.MUST_SAVE


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "swap": ebbtide.torch.swap_wrapper,
    "swap, packed": functools.partial(ebbtide.torch.swap_wrapper, group_swap=True),
    "swap by size": functools.partial(ebbtide.torch.swap_wrapper, policy_fn=by_size),
    "checkpoint with inputs swapped": functools.partial(ebbtide.torch.checkpoint_wrapper, swap_inputs=True),
    "selective": functools.partial(ebbtide.torch.checkpoint_wrapper, policy_fn=by_operation),
    "selective with inputs swapped": functools.partial(
        ebbtide.torch.checkpoint_wrapper, policy_fn=by_operation, swap_inputs=True, group_swap=True
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_blocks_in_a_chain(name: str) -> None:
    expected = plain(functools.partial(Gpt, 4), train)
    got = wired(functools.partial(Gpt, 4), functools.partial(wrap, wrapper=WRAPPERS[name]))
    assert expected.unlike(got) == {}
    assert got.stats["tensors_out"] >= 18, got.stats
    assert got.stats["active_groups"] == got.stats["bytes_held"] == 0, got.stats


@pytest.mark.parametrize("name", ["swap", "selective"])
def test_c23_wrapped_experts(name: str) -> None:
    expected = plain(Mixture, train)
    got = wired(Mixture, functools.partial(wrap, wrapper=WRAPPERS[name]))
    assert expected.unlike(got) == {}
    assert got.stats["tensors_out"] >= 12, got.stats


def test_blocks_that_alternate() -> None:
    """Swapped, recomputed, selective and kept layers in one chain."""

    def wire(blocks: nn.ModuleList) -> None:
        for number, name in enumerate(("swap", "checkpoint with inputs swapped", "selective")):
            blocks[number] = WRAPPERS[name](blocks[number])
        chain(blocks)

    expected = plain(functools.partial(Gpt, 5), train)
    got = wired(functools.partial(Gpt, 5), wire)
    assert expected.unlike(got) == {}
    assert got.stats["tensors_out"] > 0


class Named(Block):
    """Swaps its hidden layer by name."""

    def forward(self, x: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        hidden = ebbtide.torch.swap_tensor_wrapper({"up": self.up(self.norm2(x))}, "up")["up"]
        x = x + self.down(hidden.sigmoid() * hidden)
        (q, k) = ebbtide.torch.swap_tensor_wrapper(tuple(self.qkv(self.norm1(x)).chunk(3, -1)[:2]))
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ x
        return x + self.drop(self.out(mixed))


def test_tensors_swapped_by_name() -> None:
    def make() -> nn.Module:
        model = Gpt(1)
        model.blocks = nn.ModuleList(Named() for _ in range(4))
        return model

    expected = plain(make, train)
    got = wired(make, chain)
    assert expected.unlike(got) == {}
    assert got.stats["tensors_out"] >= 12, got.stats


def test_m2_groups_driven_by_name() -> None:
    """As a pipeline schedule does: two passes in flight, no hooks."""

    def compute(swap: bool) -> list[Any]:
        seed_all(9)
        block, manager = Block(), SwapManager()
        losses, inputs = [], [torch.randn(2, 5, 32, requires_grad=True) for _ in range(2)]
        for number, x in enumerate(inputs):
            if not swap:
                losses.append(block(x).square().sum())
                continue
            with manager.group_context(f"stage {number}"), ebbtide.torch.async_save_on_cpu():
                losses.append(block(x).square().sum())
            manager.launch_offload(f"stage {number}")
        for number, loss in enumerate(losses):
            if swap:
                manager.wait_offload(f"stage {number}")
                manager.launch_load(f"stage {number}")
                manager.wait_load(f"stage {number}")
            loss.backward()
        return [*losses, *(x.grad for x in inputs), *(p.grad for p in block.parameters())]

    assert_same(compute(False), compute(True))
    assert ebbtide.torch.stats()["tensors_out"] >= 10


def test_m2_groups_by_name_whose_tensors_were_dropped() -> None:
    """A schedule can't know that nobody needs them any more."""
    manager, x = SwapManager(), torch.randn(50, requires_grad=True)
    with manager.group_context("dropped"), ebbtide.torch.async_save_on_cpu():
        y = x.exp() * x
    del y
    manager.launch_offload("dropped")
    manager.wait_offload("dropped")
    manager.launch_load("dropped")
    manager.wait_load("dropped")
    assert ebbtide.torch.stats()["active_groups"] == 0


def test_functions_swapped_in_a_group() -> None:
    def compute(swap: bool) -> list[Any]:
        seed_all(9)
        block, x, manager = Block(), torch.randn(2, 5, 32, requires_grad=True), SwapManager()
        with manager.group_context("one"):
            if swap:
                y = ebbtide.torch.swap(block, x * 2)
                y = ebbtide.torch.checkpoint(block, y, swap_inputs=True)
                y = ebbtide.torch.checkpoint(block, y, policy_fn=by_operation)
            else:
                y = block(block(block(x * 2)))
        loss = y.square().sum()
        del y
        if swap:
            manager.launch_offload("one")
            manager.wait_offload("one")
        loss.backward()
        return [loss, x.grad, *(p.grad for p in block.parameters()), torch.get_rng_state()]

    assert_same(compute(False), compute(True))
    assert ebbtide.torch.stats()["tensors_out"] >= 8


@pytest.mark.parametrize("own", [False, True], ids=["torch's checkpoint", "our checkpoint"])
@pytest.mark.parametrize("group", [False, True], ids=["no group", "group"])
def test_selective_contexts(own: bool, group: bool) -> None:
    """Swapped, saved and recomputed operations in one region, under torch's own checkpoint and under ours."""
    contexts = functools.partial(ebbtide.torch.create_selective_checkpoint_contexts, by_operation)
    counts = [0]

    def counted(block: nn.Module, x: torch.Tensor) -> Any:
        counts[0] += 1
        return block(x)

    def compute(swap: bool) -> list[Any]:
        seed_all(9)
        block, x, manager = Block(), torch.randn(2, 5, 32, requires_grad=True), SwapManager()
        with manager.group_context("one" if swap and group else None):
            if not swap:
                y = block(x * 2)
            elif own:
                y = ebbtide.torch.checkpoint(counted, block, x * 2, context_fn=contexts)
            else:
                y = torch_checkpoint(counted, block, x * 2, use_reentrant=False, context_fn=contexts)
        if swap and group:
            manager.launch_offload("one")
            manager.wait_offload("one")
        y.square().sum().backward()
        return [y, x.grad, *(p.grad for p in block.parameters()), torch.get_rng_state()]

    assert_same(compute(False), compute(True))
    assert counts == [2], "it is a checkpoint"
    moved = ebbtide.torch.stats()["tensors_out"]
    assert moved >= 3 if group else moved == 0


def test_tensors_in_place() -> None:
    """Single tensors there and back, storages emptied meanwhile; views that are taken later see the values."""
    seed_all(1)
    x, y = torch.randn(50, 8).t(), torch.randn(20, dtype=torch.float64)
    expected = tree_bits([x, y, x[3:, ::2]])
    tensors = [ebbtide.torch.SwapTensor(x, "x"), ebbtide.torch.SwapTensor(y, "y")]
    for tensor in tensors:
        tensor.async_offload()
    for tensor in tensors:
        tensor.wait_offload()
    assert [tensor.state for tensor in tensors] == ["host", "host"]
    assert x.untyped_storage().nbytes() == y.untyped_storage().nbytes() == 0
    for tensor in tensors:
        tensor.resize_device_storage()
        tensor.async_load()
        tensor.wait_load()
    assert [tensor.state for tensor in tensors] == ["device", "device"]
    assert_same(list(expected), [x, y, x[3:, ::2]])


def test_tensors_in_place_that_somebody_else_uses() -> None:
    """A view that is not ours may be read at any time: the storage stays."""
    x = torch.randn(50)
    view, expected = x[10:], tree_bits([x, x[10:]])
    tensor = ebbtide.torch.SwapTensor(x, "x")
    tensor.async_offload()
    tensor.wait_offload()
    assert_same(list(expected), [x, view])
    assert tensor.state == "device"
