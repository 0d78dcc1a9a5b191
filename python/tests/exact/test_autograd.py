"""What autograd can do besides one forward and one backward: under swap it gives the bits of plain torch."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ebbtide
import ebbtide.torch

from .regions import IN_PLACE, Context, Regions, same

Grads = list[torch.Tensor | None]


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A random leaf that wants a gradient."""
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def mlp(width: int = 8) -> nn.Sequential:
    """A small network with dropout."""
    return nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, width), nn.Tanh())


# ---- graphs that run more than once


def test_a_retained_graph_runs_three_times(regions: Regions) -> None:
    def compute(region: Context) -> Any:
        net, x = mlp(), leaf(5, 8)
        with region():
            loss = (net(x) ** 2).sum()
        found: Grads = []
        for retain in (True, True, False):
            loss.backward(retain_graph=retain)
            found += [x.grad.clone() if x.grad is not None else None]
        return [*found, *(p.grad for p in net.parameters())]

    same(compute, regions, enough=3)


def test_a_graph_that_was_freed_says_so(regions: Regions) -> None:
    x = leaf(5)
    with regions.region():
        loss = x.exp().sin().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_in_parts(regions: Regions) -> None:
    """`torch.autograd.grad` towards some inputs, then towards others, over parts of one graph."""

    def compute(region: Context) -> Any:
        a, b, c = leaf(4, 4), leaf(4, 4), leaf(4)
        with region():
            h = (a @ b).sigmoid()
            y, z = (h * c).exp(), h.pow(3)
        found = [*torch.autograd.grad(z.sum(), [b], retain_graph=True)]
        found += torch.autograd.grad(y.sum(), [h, c], retain_graph=True)
        found += torch.autograd.grad(y.mean() + z.prod(), [a, c], retain_graph=True)
        found += torch.autograd.grad(h.sum(), [a, c], allow_unused=True)
        return [g for g in found if g is not None]

    same(compute, regions, enough=3)


def test_two_losses_over_one_graph(regions: Regions) -> None:
    def compute(region: Context) -> Any:
        net, x = mlp(), leaf(3, 8)
        with region():
            h = net(x)
            first, second = h.exp().sum(), h.abs().log1p().sum()
        first.backward(retain_graph=True)
        second.backward()
        return [x.grad, *(p.grad for p in net.parameters())]

    same(compute, regions, enough=4)


def test_regions_that_feed_each_other_in_odd_orders(regions: Regions) -> None:
    def compute(region: Context) -> Any:
        x = leaf(6)
        with region():
            a = x.sin()
        with region():
            b = (a * x).exp()
        with region():
            c = a.cos() * b
        found = [*torch.autograd.grad(a.sum(), x, retain_graph=True)]
        found += torch.autograd.grad(c.sum(), x, retain_graph=True)
        found += torch.autograd.grad(b.sum(), x)
        return found

    same(compute, regions, enough=3)


# ---- gradients of gradients


def penalty(net: nn.Module, x: torch.Tensor, region: Context, around_backward: bool) -> Grads:
    """A gradient penalty: the loss depends on a gradient."""
    with region():
        y = net(x)
    with region() if around_backward else contextlib.nullcontext():
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = (g.norm() - 1) ** 2 + y.mean()
    loss.backward()
    return [g.detach(), x.grad, *(p.grad for p in net.parameters())]


@pytest.mark.parametrize("around_backward", [False, True])
def test_gradient_penalty(around_backward: bool, regions: Regions) -> None:
    same(lambda region: penalty(mlp(), leaf(4, 8), region, around_backward), regions, enough=4)


def test_third_derivatives(regions: Regions) -> None:
    def compute(region: Context) -> Any:
        x = leaf(5, dtype=torch.float64)
        with region():
            y = (x.exp() * x.sin()).sum()
        found = []
        for _ in range(3):
            with region():
                (g,) = torch.autograd.grad(y, x, create_graph=True)
                y = (g * g).sum()
            found.append(g.detach())
        return found

    same(compute, regions, enough=4)


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "outputs": lambda x, y: (x.exp() * y.tanh()).sigmoid(),
    "matmul": lambda x, y: (x @ y.t()).softmax(-1),
    "norm": lambda x, y: functional.layer_norm(x * y, (3,)),
    "views": lambda x, y: torch.cat([x[:1] * y[1:], x[1:].t().reshape(1, 3) / (y[:1] ** 2 + 1)]),
    "in place": lambda x, y: (x * 2).mul_(y).exp_() + x.square().add_(y),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradcheck_and_gradgradcheck(name: str, regions: Regions) -> None:
    """Torch's own numerical checks, with what is saved swapped in every call."""
    x, y = leaf(2, 3, dtype=torch.float64), leaf(2, 3, dtype=torch.float64)

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with regions.region():
            return FUNCTIONS[name](x, y)

    assert torch.autograd.gradcheck(function, (x, y))
    assert torch.autograd.gradgradcheck(function, (x, y))
    assert regions.moved() > 0 or regions.kind == IN_PLACE


def test_hessians(regions: Regions) -> None:
    def compute(region: Context) -> Any:
        def function(x: torch.Tensor) -> torch.Tensor:
            with region():
                return (x.sin() * x.flip(0).exp()).prod()

        x = torch.randn(4)
        return [torch.autograd.functional.hessian(function, x), torch.autograd.functional.jacobian(function, x)]

    same(compute, regions, enough=3)


# ---- hooks, functions of one's own


def test_hooks_on_tensors_and_nodes(regions: Regions) -> None:
    def compute(region: Context) -> Any:
        net, x, seen = mlp(), leaf(3, 8), []
        with region():
            h = net[:2](x)
            h.retain_grad()
            h.register_hook(lambda grad: grad * 2 + h.detach())
            y = net[2:](h).exp()
            y.register_hook(lambda grad: seen.append(grad.clone()))
            assert y.grad_fn is not None
            y.grad_fn.register_prehook(lambda grads: tuple(3 * grad for grad in grads))
        next(net.parameters()).register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        y.sum().backward()
        return [*seen, h.grad, x.grad, *(p.grad for p in net.parameters())]

    same(compute, regions, enough=4)


def test_hooks_that_run_backward(regions: Regions) -> None:
    """A hook during backward starts another backward, which unpacks too."""

    def compute(region: Context) -> Any:
        x, w = leaf(5), leaf(5)
        found: list[torch.Tensor] = []
        with region():
            side = (w.exp() * w).sum()
        with region():
            y = x.sin() * x
            y.register_hook(lambda grad: found.extend(torch.autograd.grad(side, w)))
            z = y.exp()
        z.sum().backward()
        return [*found, x.grad]

    same(compute, regions, enough=3)


class Odd(torch.autograd.Function):
    """Saves an input, an output, something in between and nothing; one output has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        between, result, where = x.detach() * 3, x * y, x > 0
        ctx.save_for_backward(x, None, between, result, where)
        ctx.mark_non_differentiable(where)
        return result, where

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, none, between, result, where = ctx.saved_tensors
        again = ctx.saved_tensors
        assert none is None and torch.equal(again[2], between)
        return grads[0] * between + result * where, grads[0] * x


class Doubling(torch.autograd.Function):
    """Modifies its argument in place and saves it afterwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2).exp_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (result,) = ctx.saved_tensors
        return 2 * grads[0] * result


def test_functions_of_one_s_own(regions: Regions) -> None:
    def compute(region: Context) -> Any:
        x, y = leaf(4, 4), leaf(4, 4)
        with region():
            result, where = Odd.apply(x.sin(), y)
            result = Doubling.apply(result.clone())
        assert not where.requires_grad
        result.sum().backward()
        return [result, where, x.grad, y.grad]

    same(compute, regions, enough=4)


def test_functions_whose_backward_has_a_gradient(regions: Regions) -> None:
    def compute(region: Context) -> Any:
        x, y = leaf(4, dtype=torch.float64), leaf(4, dtype=torch.float64)
        with region():
            result, _ = Odd.apply(x.sin(), y)
        (g,) = torch.autograd.grad(result.sum(), x, create_graph=True)
        g.sum().backward()
        return [g.detach(), x.grad, y.grad]

    same(compute, regions, enough=3)


# ---- operators that save in unusual ways


def test_noise_that_is_drawn_after_it_was_packed(regions: Regions) -> None:
    """rrelu packs its noise before it is drawn."""

    def compute(region: Context) -> Any:
        x = leaf(4000)
        with region():
            y = functional.rrelu(x, training=True)
            z = torch.rrelu_(x * 2, 0.1, 0.9, True)
            d = functional.dropout(x, 0.4) + functional.alpha_dropout(x, 0.2)
        (y.sum() + z.exp().sum() + d.sum()).backward()
        return [y, z, x.grad]

    same(compute, regions, enough=3)


def test_one_tensor_used_many_times(regions: Regions) -> None:
    def compute(region: Context) -> Any:
        x = leaf(6, 6)
        with region():
            h = x.exp()
            y = h * h + h @ h.t() + h.sin() * h.t() + h[:3].repeat(2, 1) * h
        y.sum().backward()
        return [y, x.grad]

    same(compute, regions, enough=1)


def test_results_that_outlive_their_storage_s_first_use(regions: Regions) -> None:
    """In-place operators that plain torch allows: what was saved is what came after."""

    def compute(region: Context) -> Any:
        x = leaf(50)
        with region():
            y = (x * 1.5).relu_().add(1).mul_(x).sqrt_().neg()
            z = torch.zeros(50)
            z[10:20] = x[10:20].exp()
            z = z.clone().index_put_((torch.tensor([3]),), x[3] * x[4])
        (y.sum() + (z * x).sum()).backward()
        return [y, z, x.grad]

    same(compute, regions, enough=2)


def test_batch_norm_and_its_statistics(regions: Regions) -> None:
    def compute(region: Context) -> Any:
        net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        x = leaf(2, 2, 10, 10)
        with region():
            y = net(x)
        y.square().sum().backward()
        return [y, x.grad, *(p.grad for p in net.parameters()), *net.buffers()]

    same(compute, regions, enough=3)


# ---- checkpoints


class Counted(nn.Module):
    """Counts how often it runs."""

    def __init__(self, context: Context = contextlib.nullcontext) -> None:
        super().__init__()
        self.net = mlp()
        self.context = context
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        with self.context():
            y: torch.Tensor = self.net(x)
            return y


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_of_regions(reentrant: bool, regions: Regions) -> None:
    """The checkpoint's input is swapped, what is inside of it is computed again."""

    def compute(region: Context) -> Any:
        net, x = Counted(), leaf(4, 8)
        with region():
            y = checkpoint(net, x * 2, use_reentrant=reentrant).exp()
        y.sum().backward()
        assert net.count == 2
        return [y, x.grad, *(p.grad for p in net.parameters())]

    same(compute, regions, enough=1)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("tier", ["file", "host"])
def test_regions_inside_of_checkpoints(reentrant: bool, tier: str) -> None:
    """Never silently no checkpoint: it stays one and a warning says that nothing is swapped, or gradients are right."""

    def compute(context: Context) -> list[Any]:
        torch.manual_seed(4)
        net, x = Counted(context), leaf(4, 8)
        y = checkpoint(net, x * 2, use_reentrant=reentrant).exp()
        y.sum().backward()
        assert net.count == 2, "the checkpoint computes again"
        return [y, x.grad, *(p.grad for p in net.parameters())]

    expected = compute(contextlib.nullcontext)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = compute(lambda: ebbtide.torch.offload(tier=tier, min_bytes=0))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    said = [str(w.message) for w in caught if isinstance(w.message, ebbtide.EbbtideWarning)]
    assert any("checkpoint" in text for text in said) or reentrant, said


def test_checkpoints_around_and_inside(regions: Regions) -> None:
    """A checkpoint in a checkpoint, in a region, next to swapped operators."""

    def compute(region: Context) -> Any:
        inner, x = Counted(), leaf(4, 8)

        def outer(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(inner, x.sin(), use_reentrant=False)
            return y.cos()

        with region():
            y = checkpoint(outer, x.exp(), use_reentrant=False) * x.tanh()
        y.sum().backward()
        return [y, x.grad, *(p.grad for p in inner.parameters())]

    same(compute, regions, enough=2)


def _save_matmuls() -> Any:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default, torch.ops.aten.mm.default])


def test_torch_s_selective_checkpoint_in_a_region(regions: Regions) -> None:
    def compute(region: Context) -> Any:
        net, x = Counted(), leaf(4, 8)
        with region():
            y = checkpoint(net, x * 2, use_reentrant=False, context_fn=_save_matmuls).exp()
        y.sum().backward()
        assert net.count == 2
        return [y, x.grad, *(p.grad for p in net.parameters())]

    same(compute, regions, enough=1)


# ---- other hooks, threads, graphs that are dropped


def test_regions_in_regions(regions: Regions) -> None:
    def compute(region: Context) -> Any:
        x = leaf(20)
        with region():
            a = x.exp()
            with region():
                b = a.sin() * a
            c = b.cos() * a
        c.sum().backward()
        return [c, x.grad]

    same(compute, regions, enough=2)


def test_other_hooks_inside_and_outside(regions: Regions) -> None:
    def compute(region: Context) -> Any:
        x = leaf(20)
        with saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
            a = x.exp()
            with region():
                b = a.sin() * a
                with save_on_cpu():
                    b = b.tanh()
            c = b.square()
        c.sum().backward()
        return [c, x.grad]

    same(compute, regions, enough=1)


def test_forward_and_backward_in_different_threads(regions: Regions) -> None:
    def compute(region: Context) -> Any:
        x, made = leaf(300), []

        def forward() -> None:
            with region():
                made.append((x.exp() * x).sin().sum())

        for function in (forward, lambda: made[0].backward()):
            thread = threading.Thread(target=function)
            thread.start()
            thread.join()
        return [made[0], x.grad]

    same(compute, regions, enough=2)


def test_backwards_at_once_over_one_graph(regions: Regions) -> None:
    """Several threads run backward over shared parts of a graph."""

    def compute(region: Context) -> Any:
        x, found = leaf(500), [None] * 4
        with region():
            h = (x.exp() * x).sin()
            losses = [(h * h).sum(), h.cos().sum(), (h.tanh() * h).sum(), h.square().sum()]

        def backward(number: int) -> None:
            found[number] = torch.autograd.grad(losses[number], x, retain_graph=True)[0]  # type: ignore[call-overload]

        threads = [threading.Thread(target=backward, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    same(compute, regions, enough=3)


def test_c9_graphs_that_are_dropped_leave_nothing(regions: Regions) -> None:
    for _ in range(5):
        x = leaf(1000)
        with regions.region():
            y = x.exp().sin() * x
        z = y.cos().sum()
        del y, z
    if regions.kind.startswith("offload"):
        assert_nothing_left()


@pytest.mark.parametrize("backward", [False, True])
def test_c9_graphs_that_are_dropped_inside_leave_nothing(backward: bool) -> None:
    """All of what a region saved is gone before it ends."""
    x = leaf(100)
    for _ in range(5):
        with ebbtide.torch.offload(tier="file", min_bytes=0):
            y = x.softmax(-1)
            if backward:
                y.sum().backward()
            del y
    assert_nothing_left()


def assert_nothing_left() -> None:
    """Neither groups nor bytes, on the device or in a tier."""
    gc.collect()
    ebbtide.torch.synchronize()
    stats = ebbtide.torch.stats()
    assert stats["active_groups"] == stats["live_bytes"] == stats["bytes_held"] == 0, stats


def test_handles_dropped_on_another_thread(regions: Regions) -> None:
    def compute(region: Context) -> Any:
        x = leaf(1000)
        with region():
            kept = [x.exp().sin() * x for _ in range(20)]
        thread = threading.Thread(target=kept.clear)
        with region():
            y = x.cos().exp()
        thread.start()
        y.sum().backward()
        thread.join()
        return [x.grad]

    same(compute, regions, enough=10)
