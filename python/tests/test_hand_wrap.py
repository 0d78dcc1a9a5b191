"""Wrappers, checkpoints and policies (rows W of the catalogue)."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import inspect
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from hand_models import (
    assert_equal,
    figures,
    fresh,
    gradients,
    held,
    layers,
    moved,
    sample,
    step,
    told,
    wire,
    wrapped,
)
from session_models import Block
from torch import nn

import ebbtide.torch
from ebbtide import ChangedError, EbbtideError, PhaseError, SettingError
from ebbtide.torch import (
    ActivationWrapper,
    AsyncSaveOnCpu,
    CheckpointPolicy,
    CheckpointWrapper,
    SwapManager,
    SwapWrapper,
    _wrap,
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
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    fresh()
    yield
    fresh()
    torch.set_num_threads(threads)


def send(name: str) -> None:
    manager = SwapManager()
    manager.launch_offload(name)
    manager.wait_offload(name)


def double_exp(x: torch.Tensor) -> torch.Tensor:
    return (x.exp() * 2).exp().sum()


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
    assert len(asked) == 3
    assert sorted(asked) == sorted([(4, 16, 32), (4, 16, 32), (7,)]) or (64, 32) in asked
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
        swap(body, sample())
        assert list(manager._groups) == ["first"]
        swap(lambda t: t.sum(), sample())
    assert list(manager._groups) in (["first"], [])


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


# ---- checkpoints


def test_w3_a_checkpoint_computes_again() -> None:
    runs = []

    class Counted(Block):
        def forward(self, x: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
            runs.append(1)
            return super().forward(x)

    reference = step(layers(3, Counted))
    runs.clear()
    assert_equal(step(wrapped(layers(3, Counted), checkpoint_wrapper)), reference)
    assert len(runs) == 6


@pytest.mark.parametrize("early_stop", [True, False])
def test_w3_inputs_are_swapped(early_stop: bool) -> None:
    reference = step(layers(4))
    model = wire(wrapped(layers(4), lambda layer: checkpoint_wrapper(layer, swap_inputs=True, early_stop=early_stop)))
    for _ in range(2):
        before = moved()[0]
        assert_equal(step(model), reference)
        assert moved()[0] - before == 3 * 4 * 16 * 32 * 4
    assert figures()["missed_prefetches"] == 0
    assert held() == (0, 0)


def test_w3_inputs_in_any_nesting_and_by_keyword() -> None:
    class Pair(NamedTuple):
        one: torch.Tensor
        two: torch.Tensor

    def function(pair: Pair, *, rest: dict[str, list[torch.Tensor]], scale: float) -> torch.Tensor:
        assert isinstance(pair, Pair)
        return (pair.one.exp() * pair.two * rest["x"][0] * scale).sum()

    def run(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        xs = [sample(seed) for seed in range(3)]
        hidden = [x * 1 for x in xs]
        y = call(function, Pair(hidden[0], hidden[1]), rest={"x": [hidden[2]]}, scale=0.5)
        del hidden
        if call is not plain:
            send("g")
        y.backward()
        return [y.detach(), *(x.grad for x in xs if x.grad is not None)]

    def plain(function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        return function(*args, **kwargs)

    expected = run(plain)
    with SwapManager().group_context("g"):
        got = run(functools.partial(checkpoint, swap_inputs=True))
    assert_equal(got, expected)
    assert moved() == (3 * 8192, 3 * 8192)
    assert figures()["not_freed_tensors"] == 0


def policy_of(table: Mapping[Any, object], otherwise: object = CheckpointPolicy.PREFER_RECOMPUTE) -> Any:
    return lambda context, operation, *args, **kwargs: table.get(operation, otherwise)


MIXED = {
    ATEN.addmm.default: CheckpointPolicy.MUST_SWAP,
    ATEN.gelu.default: CheckpointPolicy.MUST_SAVE,
    ATEN.native_layer_norm.default: Torchs.PREFER_SAVE,
}


@pytest.mark.parametrize("swap_inputs", [False, True])
def test_w3_a_policy_for_operations(swap_inputs: bool) -> None:
    reference = step(layers(4))
    model = wire(
        wrapped(
            layers(4),
            lambda layer: checkpoint_wrapper(layer, policy_fn=policy_of(MIXED), swap_inputs=swap_inputs),
        )
    )
    for _ in range(2):
        assert_equal(step(model), reference)
    assert moved()[0] > 0
    assert held() == (0, 0)


def test_w3_each_operation_is_saved_swapped_or_computed_again() -> None:
    runs: collections.Counter[str] = collections.Counter()

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            runs[str(func)] += 1
            return func(*args, **(kwargs or {}))

    table = {ATEN.exp.default: CheckpointPolicy.MUST_SAVE, ATEN.sin.default: CheckpointPolicy.MUST_SWAP}
    x = sample()
    with SwapManager().group_context("g"), Counting():  # type: ignore[no-untyped-call]
        y = checkpoint(lambda t: t.exp().sin().cos().sum(), x, policy_fn=policy_of(table))
        send("g")
        assert moved()[0] == x.numel() * 4
        y.backward()
    expected = torch.autograd.grad(x.exp().sin().cos().sum(), x)[0]
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
    forward = {"aten.exp.default": 1, "aten.sin.default": 1}
    assert runs["aten.exp.default"] == forward["aten.exp.default"]
    # Once in forward, once as the derivative of cos.
    assert runs["aten.sin.default"] == 2
    assert moved() == (x.numel() * 4,) * 2


def test_w3_a_second_backward_is_a_clear_error() -> None:
    x = sample()
    y = checkpoint(double_exp, x, policy_fn=[ATEN.exp.default])
    y.backward(retain_graph=True)
    with pytest.raises(PhaseError, match="second backward"):
        y.backward()
    z = checkpoint(double_exp, x)
    z.backward(retain_graph=True)
    z.backward()


def test_w3_a_saved_output_that_was_modified() -> None:
    def function(t: torch.Tensor) -> torch.Tensor:
        u = t * 2
        v = u.exp()
        u.add_(1)
        return (v * u).sum()

    x = sample()
    y = checkpoint(function, x, policy_fn=[ATEN.mul.Tensor])
    with pytest.raises(ChangedError, match="modified in place"):
        y.backward()
    expected = torch.autograd.grad(function(x), x)[0]
    for saved, allow in (([ATEN.exp.default], False), ([ATEN.mul.Tensor], True)):
        contexts = functools.partial(create_selective_checkpoint_contexts, saved, allow)
        checkpoint(function, x, context_fn=contexts).backward()
        assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
        x.grad = None


def test_w3_contexts_serve_pytorchs_own_checkpoint() -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, policy_of(MIXED))
    reference = step(layers(2))

    class Through(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)
            return y

    with SwapManager().group_context("g"):
        assert_equal(step(wrapped(layers(2), Through)), reference)


TURN = iter(range(1 << 30))
DROPOUTS = [
    policy_of({ATEN.native_dropout.default: CheckpointPolicy.MUST_SAVE}),
    policy_of({ATEN.bernoulli_.float: CheckpointPolicy.MUST_SAVE}),
    policy_of({ATEN.bernoulli.default: CheckpointPolicy.MUST_SWAP}),
    lambda context, operation, *args, **kwargs: "dropout" in str(operation) and next(TURN) % 2 == 0,
    lambda context, operation, *args, **kwargs: next(TURN) % 3 == 0,
    lambda context, operation, *args, **kwargs: True,
]


@pytest.mark.parametrize("policy", [None, *DROPOUTS])
def test_c8_recomputation_draws_the_same_numbers(policy: Any) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for p in (0.1, 0.5, 0.3):
            x = nn.functional.dropout(x, p).sin() * torch.rand_like(x)
            x = x + torch.bernoulli(x.detach().abs().clamp(max=1))
        return x.square().sum()

    def run(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        x = sample()
        torch.manual_seed(11)
        y = call(function, x * 1)
        torch.rand(7)
        y.backward()
        return [y.detach(), x.grad, torch.rand(3)]  # type: ignore[list-item]

    with SwapManager().group_context("g"):
        got = run(functools.partial(checkpoint, policy_fn=policy))
    assert_equal(got, run(lambda function, x: function(x)))


def test_c8_a_generator_of_the_users_own() -> None:
    def run(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)

        def function(x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = x * torch.empty_like(x).bernoulli_(0.5, generator=generator)
            return x.exp().sum()

        x = sample()
        y = call(function, x)
        y.backward()
        return [x.grad, torch.rand(3, generator=generator)]  # type: ignore[list-item]

    got = run(functools.partial(checkpoint, policy_fn=policy_of({})))
    assert_equal(got, run(lambda function, x: function(x)))


def test_w3_a_swap_inside_a_checkpoint_is_never_silently_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_wrap, "_warned_in_checkpoint", False)
    runs = []

    class Counted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return double_exp(x)

    module, x = swap_wrapper(Counted()), sample()
    expected = torch.autograd.grad(double_exp(x), x)[0]
    with SwapManager().group_context("g"), told() as texts:
        for reentrant in (False, True):
            runs.clear()
            y = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=reentrant)
            y.backward()
            assert len(runs) == 2
            assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
            x.grad = None
        runs.clear()
        checkpoint(lambda t: swap(Counted(), swap_tensor_wrapper(t)), x).backward()
        assert len(runs) == 2
    assert len(texts) == 1
    assert "checkpoint" in texts[0]


def test_w3_a_checkpoint_inside_a_swapped_region() -> None:
    reference = step(layers(3))
    model = wire(wrapped(wrapped(layers(3), checkpoint_wrapper), lambda m: swap_wrapper(lambda x: m(x))))
    names = [parameter for layer in model for parameter in layer.parameters()]
    assert names == []
    found = step(model)
    assert_equal(found[-2:], reference[-2:])


# ---- tensors by name


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


# ---- graph capture, distributed tensors


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_w10_under_torch_compile() -> None:
    block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    reference = step(block)
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
        assert len(gradients(model, x)) == len(reference) - 1
        for one, other in zip(gradients(model, x, loss), reference, strict=True):
            torch.testing.assert_close(one, other)


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
    compiled: Any = torch.compile(model, backend="aot_eager")
    got = step(compiled)
    for one, other in zip(got, reference, strict=True):
        torch.testing.assert_close(one, other)
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


def test_memory_is_flat_and_nothing_refers_to_graphs() -> None:
    import weakref

    class Watched(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(double_exp, x * 1, swap_inputs=True, policy_fn=policy_of(MIXED))

    module, graphs = swap_wrapper(Watched()), []
    with SwapManager().group_context("flat"):
        for _ in range(5):
            y = module(sample())
            graphs.append(weakref.ref(y))
            del y
    gc.collect()
    assert all(graph() is None for graph in graphs)
    SwapManager().abort_group("flat")
    assert held() == (0, 0)


def test_errors_are_of_the_package() -> None:
    for kind in (SettingError, PhaseError, ChangedError):
        assert issubclass(kind, EbbtideError)
    assert ebbtide.torch.CheckpointPolicy is CheckpointPolicy
