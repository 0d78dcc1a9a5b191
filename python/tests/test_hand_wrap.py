"""Wrappers, functions and policies for tensors (rows W1, W2, W5, W6, W10 and W11 of the catalogue)."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from hand_models import (
    assert_equal,
    double_exp,
    gradients,
    layers,
    moved,
    one_thread,
    sample,
    send,
    step,
    wire,
    wrapped,
)
from torch import nn

import ebbtide.torch
from ebbtide import ChangedError, EbbtideError, PhaseError, SettingError
from ebbtide.torch import (
    AsyncSaveOnCpu,
    CheckpointPolicy,
    SwapManager,
    SwapWrapper,
    async_save_on_cpu,
    base_check_fn,
    checkpoint,
    checkpoint_wrapper,
    create_selective_checkpoint_contexts,
    swap,
    swap_tensor_wrapper,
    swap_wrapper,
)

ATEN = torch.ops.aten
Torchs = torch.utils.checkpoint.CheckpointPolicy


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with one_thread():
        yield


# ---- policies


@pytest.mark.parametrize("answer", [CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_SAVE, True, None, "swap"])
@pytest.mark.parametrize("inside", [True, False])
def test_w1_an_answer_that_makes_no_sense_is_named(answer: object, inside: bool) -> None:
    with SwapManager().group_context("g" if inside else None), pytest.raises(SettingError) as caught:
        swap(double_exp, sample(), policy_fn=lambda _: answer)
    assert repr(answer) in str(caught.value)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_w1_the_policy_is_asked_once_about_each_tensor() -> None:
    asked: list[tuple[int, ...]] = []

    def policy(tensor: torch.Tensor) -> object:
        asked.append(tuple(tensor.shape))
        return Torchs.MUST_CPU_OFFLOAD if tensor.numel() > 10 else Torchs.MUST_SAVE

    linear = nn.Linear(32, 7)
    x = sample()
    with SwapManager().group_context("g"):
        y = swap(lambda t: linear(t.exp())[0, 0].exp().sum(), x, policy_fn=policy)
    # The result of exp for itself and for the linear layer, and the small one; no weights.
    # A linear layer may save its input as a matrix.
    assert sorted(map(math.prod, asked)) == [7, 2048, 2048]
    send("g")
    assert moved()[0] == 4 * 16 * 32 * 4
    y.backward()


def test_w1_values() -> None:
    names = ["MUST_SAVE", "PREFER_SAVE", "MUST_RECOMPUTE", "PREFER_RECOMPUTE", "MUST_SWAP"]
    assert list(CheckpointPolicy.__members__) == names


# ---- swap_wrapper


def test_w2_what_is_not_eligible_is_never_asked_about() -> None:
    asked: list[torch.Tensor] = []

    def policy(tensor: torch.Tensor) -> CheckpointPolicy:
        asked.append(tensor)
        return CheckpointPolicy.MUST_SWAP

    weight = nn.Parameter(torch.randn(32, 32))
    x = sample()
    with SwapManager().group_context("g"):
        y = swap(lambda t: (t @ weight.t() @ weight[:, :8]).sum() + t[:0].exp().sum(), x, policy_fn=policy)
    addresses = {tensor.untyped_storage().data_ptr() for tensor in asked}
    assert weight.untyped_storage().data_ptr() not in addresses
    assert all(tensor.numel() for tensor in asked)
    assert len(asked) == 2
    asked.clear()
    y.backward()


def test_w2_a_region_belongs_to_the_group_of_its_first_tensor() -> None:
    manager = SwapManager()

    def body(t: torch.Tensor) -> torch.Tensor:
        with manager.group_context("first"):
            t = t.exp()
        with manager.group_context("second"):
            return t.exp().sum()

    with manager.group_context("outer"):
        x = sample()
        y = swap(body, x)
        assert list(manager._groups) == ["first"]
        swap(lambda t: t.sum(), sample())  # saves nothing
    assert list(manager._groups) == ["first"]
    assert manager.ensure_group("first")._native().tensors == 2
    send("first")
    assert moved()[0] == 2 * x.numel() * 4
    y.backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().exp().sum(), x)[0])  # type: ignore[arg-type]


def test_w2_values_unpacked_once_and_again_and_packing_after_it() -> None:
    def run(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        x = sample()

        def body(t: torch.Tensor) -> torch.Tensor:
            first = t.exp()
            (inner,) = torch.autograd.grad(first.sum(), t, create_graph=True)
            return (first * inner.exp()).sum()

        y = call(body, x)
        y.backward(retain_graph=True)
        y.backward()
        return [y.detach(), x.grad]  # type: ignore[list-item]

    expected = run(lambda body, x: body(x))
    with SwapManager().group_context("g"):
        got = run(swap)
    assert_equal(got, expected)


def test_w2_keywords_and_names() -> None:
    def parameters(function: Callable[..., Any]) -> list[str]:
        return list(inspect.signature(function).parameters)

    common = ["policy_fn", "group_swap", "cpu_pool"]
    assert parameters(swap_wrapper) == ["module", *common]
    assert parameters(swap) == ["function", "args", *common, "kwargs"]
    assert parameters(async_save_on_cpu) == common
    assert parameters(AsyncSaveOnCpu) == common
    assert parameters(swap_tensor_wrapper) == ["target", "tag", "group_swap", "cpu_pool"]
    assert parameters(checkpoint_wrapper) == ["module", "checkpoint_kwargs"]
    assert parameters(checkpoint) == [
        *("function", "args", "swap_inputs", "policy_fn", "context_fn"),
        *("group_swap", "cpu_pool", "early_stop", "kwargs"),
    ]
    assert parameters(create_selective_checkpoint_contexts) == [
        *("policy_fn_or_list", "allow_cache_entry_mutation", "group_swap", "cpu_pool")
    ]


@pytest.mark.parametrize(
    "call",
    [
        lambda: swap_wrapper(3),  # type: ignore[arg-type]
        lambda: swap(3, sample()),  # type: ignore[arg-type]
        lambda: swap_tensor_wrapper(sample(), cpu_pool=3),
        lambda: swap_wrapper(nn.ReLU(), policy_fn="swap"),  # type: ignore[arg-type]
        lambda: swap_wrapper(nn.ReLU(), cpu_pool=3),
        lambda: AsyncSaveOnCpu(policy_fn=True),  # type: ignore[arg-type]
        lambda: checkpoint_wrapper(nn.ReLU(), swap_input=True),
        lambda: checkpoint(nn.ReLU(), torch.ones(3), policy_fn=3),  # type: ignore[arg-type]
        lambda: checkpoint(nn.ReLU(), torch.ones(3), policy_fn=[], context_fn=lambda: None),  # type: ignore[arg-type, return-value]
        lambda: checkpoint(nn.ReLU(), torch.ones(3), use_reentrant=True),
        lambda: create_selective_checkpoint_contexts([ATEN.mm]),
        lambda: create_selective_checkpoint_contexts([3]),
    ],
)
def test_w2_settings_that_are_wrong(call: Callable[[], object]) -> None:
    with pytest.raises(SettingError) as caught:
        call()
    assert caught.value.hint


def test_w2_base_check() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    assert base_check_fn(torch.ones(3))
    odd = [3, None, weight, weight.t(), weight[0], torch.empty(0), torch.eye(2).to_sparse()]
    assert not any(base_check_fn(value) for value in odd)
    assert base_check_fn(torch.ones(3)[:0])


def test_w2_a_region_is_labelled_with_group_and_shape() -> None:
    base = torch.randn(4, 5, requires_grad=True)
    with SwapManager().group_context("layer 7"):
        hidden = base * 1
        y = swap(lambda t: t.exp().sum(), hidden)
    hidden_exp = y  # keeps the graph
    SwapManager().launch_offload("layer 7")
    group = SwapManager()._newest("layer 7", ("offloading",))
    assert group is not None
    assert "layer 7" in repr(group._native())
    del hidden_exp


def test_w2_a_change_after_saving_is_noticed() -> None:
    x = sample()
    with SwapManager().group_context("g"):
        hidden = 2 * x
        y = swap(lambda t: (t * t).sum(), hidden)
    with torch.no_grad():
        hidden.add_(10)
    with pytest.raises(ChangedError):
        y.backward()


def test_c20_functional_transforms_say_what_to_do() -> None:
    x = sample()
    with SwapManager().group_context("g"):
        with pytest.raises(SettingError, match=r"torch.func") as caught:
            swap(lambda t: torch.func.grad(double_exp)(t).sum(), x)
        assert caught.value.hint
        with pytest.raises(SettingError, match=r"torch.func"):
            torch.func.grad(lambda t: swap(double_exp, t))(x.detach())
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


# ---- functions


def test_w5_functional() -> None:
    reference = step(layers(2))
    blocks = layers(2)

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with SwapManager().group_context("w5"):
                x = swap(self.blocks[0], x)
                y: torch.Tensor = checkpoint(self.blocks[1], x, swap_inputs=True)
                return y

    assert_equal(step(Functional()), reference)
    x = sample()
    assert torch.equal(swap(torch.add, x, x, alpha=2), x * 3)
    assert torch.equal(checkpoint(torch.add, x, x, alpha=2), x * 3)


def test_w6_a_callable_becomes_a_module_without_parameters() -> None:
    for wrap in (swap_wrapper, checkpoint_wrapper):
        module = wrap(lambda x, scale=1, *, shift: x * scale + shift)
        assert isinstance(module, nn.Module)
        assert list(module.parameters()) == []
        assert module.state_dict() == {}
        assert torch.equal(module(torch.ones(2), 3, shift=1), torch.full((2,), 4.0))
    assert isinstance(swap_wrapper(functools.partial(torch.add, alpha=2)), SwapWrapper)


# ---- graph capture, distributed tensors


def compiled(module: nn.Module) -> Any:
    torch.compiler.reset()
    return torch.compile(module, backend="aot_eager")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_w10_under_torch_compile() -> None:
    block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    # What torch.compile makes of the layer has its own bits; a wrapper that it meets runs as it is.
    references = {"inside": step(compiled(copy.deepcopy(block))), "around": step(block), "whole model": step(block)}
    manager = SwapManager()
    for how in ("around", "inside", "whole model"):
        torch.compiler.reset()
        if how == "inside":
            model: Any = swap_wrapper(torch.compile(copy.deepcopy(block), backend="aot_eager"))
        else:
            model = torch.compile(swap_wrapper(copy.deepcopy(block)), backend="aot_eager")
        if how == "whole model":
            model = torch.compile(nn.Sequential(swap_wrapper(copy.deepcopy(block)), nn.Identity()), backend="aot_eager")
        before = moved()[0]
        block.zero_grad()
        x = sample()
        with manager.group_context("compiled"):
            loss = model(x).square().mean()
        manager.launch_offload("compiled")
        manager.wait_offload("compiled")
        assert moved()[0] > before, how
        loss.backward()
        assert_equal(gradients(model, x, loss), references[how])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_w10_a_whole_graph_is_refused_with_what_to_do() -> None:
    torch.compiler.reset()
    module = torch.compile(swap_wrapper(nn.Linear(4, 4)), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"swap_wrapper\(torch.compile\(block\)\)"):
        module(torch.ones(2, 4, requires_grad=True))
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_w10_wired_layers_under_torch_compile() -> None:
    torch.compiler.reset()
    reference = step(layers(3))
    model = wire(wrapped(layers(3), swap_wrapper))
    assert_equal(step(compiled(model)), reference)
    assert moved()[0] > 0
    assert SwapManager().get_current_group_name() is None
    torch.compiler.reset()


def test_w11_distributed_tensors_move_by_their_local_shard(tmp_path: Any) -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("torch without distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def whole(tensor: torch.Tensor) -> Any:
            return DTensor.from_local(tensor, mesh, [Replicate()])

        from ebbtide.torch import Region, SwapGroup, SwapTensor

        region = Region()
        kept = whole(torch.randn(10)) * 1
        region[0].extend([SwapTensor(whole(torch.randn(10)) * 1, "gone"), SwapTensor(kept, "kept")])
        gone, stays = region[0]
        expected = gone.get_val().to_local().clone()
        assert (gone.state, gone._bytes) == ("device", 40)
        group = SwapGroup("mesh")
        group.add(region)
        group.launch_offload()
        group.wait_offload()
        assert (gone.state, stays.state) == ("host", "device")
        group.launch_load()
        group.wait_load()
        assert torch.equal(gone.get_val().to_local(), expected)

        region[1].append(SwapTensor(whole(torch.randn(10)), "aliased"))
        group.add(region)
        assert group.protect_alias_tensors([region[1][0].get_val()]) == 1

        local = torch.randn(8, 8, requires_grad=True)
        reference = torch.autograd.grad(double_exp(local), local)[0]
        with SwapManager().group_context("dtensor"):
            y = swap(lambda t: (whole(t).exp() * 2).exp().to_local().sum(), local)
        send("dtensor")
        assert moved()[0] > 0
        y.backward()
        assert torch.equal(local.grad, reference)  # type: ignore[arg-type]
    finally:
        distributed.destroy_process_group()


def test_errors_are_of_the_package() -> None:
    for kind in (SettingError, PhaseError, ChangedError):
        assert issubclass(kind, EbbtideError)
    assert ebbtide.torch.CheckpointPolicy is CheckpointPolicy
