"""The fake accelerator itself: that it computes, and that it reports every missing order, and nothing else."""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Callable, Iterator

import fake
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

fake.load()

DEVICE = torch.device("fake", 0)
SEEDS = range(20)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """Every test begins on a quiet device, and tells itself what it expects to be reported."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _quiet()
    yield
    _quiet()
    torch.set_num_threads(threads)


def _quiet() -> None:
    for index in range(2):
        torch.accelerator.synchronize(index)
    fake.set_capacity(None)
    fake.set_host_events(True)
    fake.set_seed(0)
    fake.set_delay(50)
    fake.clear_reports()


# A model.


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        weights = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
        weights = weights.masked_fill(mask[:length, :length], float("-inf")).softmax(-1)
        mixed: torch.Tensor = self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return mixed


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), mask)
        widened: torch.Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + widened


class Model(nn.Module):
    def __init__(self, vocabulary: int = 29, width: int = 16, layers: int = 2, length: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.recompute = False
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        mask = self.get_buffer("mask")
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.places(places)
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False) if self.recompute else block(x, mask)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


Packed = torch.Tensor | tuple[torch.Tensor, torch.Event]
Batch = tuple[torch.Tensor, torch.Tensor]


def _model(device: torch.device | str, recompute: bool = False) -> Model:
    torch.manual_seed(1)
    model = Model().to(device)
    model.recompute = recompute
    return model


def _batches(device: torch.device | str, count: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(29, (2, 13), generator=generator).to(device) for _ in range(count)]
    return [(batch[:, :-1], batch[:, 1:]) for batch in ids]


Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def _train(device: torch.device | str, optimizer: Optimizer = _adamw, recompute: bool = False) -> list[torch.Tensor]:
    """Losses and gradients of three steps, on the CPU."""
    model = _model(device, recompute)
    optim = optimizer(model)
    seen: list[torch.Tensor] = []
    for ids, targets in _batches(device):
        loss = model(ids, targets)
        loss.backward()
        seen.append(loss.detach().cpu())
        seen.extend(p.grad.cpu() for p in model.parameters() if p.grad is not None)
        optim.step()
        optim.zero_grad()
    seen.extend(p.detach().cpu() for p in model.parameters())
    return seen


def _same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


# It computes.


@pytest.mark.parametrize("optimizer", [_adamw, _sgd])
@pytest.mark.parametrize("recompute", [False, True])
def test_training_has_the_bits_of_the_cpu(optimizer: Optimizer, recompute: bool) -> None:
    want = _train("cpu", optimizer, recompute)
    assert _same(_train(DEVICE, optimizer, recompute), want)
    fake.set_seed(5)
    assert _same(_train(DEVICE, optimizer, recompute), want)
    assert fake.reports() == []


def test_training_leaves_no_memory_behind() -> None:
    gc.collect()
    before = torch.accelerator.memory_allocated()
    _train(DEVICE)
    gc.collect()
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() > before


def test_the_generic_interface() -> None:
    assert str(torch.accelerator.current_accelerator()) == "fake"
    assert torch.accelerator.device_count() == 2
    assert torch.accelerator.current_device_index() == 0
    with torch.accelerator.device_index(1):
        assert torch.empty(1, device="fake").device == torch.device("fake", 1)
    assert torch.empty(1, device="fake").device == DEVICE
    default = torch.accelerator.current_stream()
    side = torch.Stream(device=DEVICE)
    with side:
        assert torch.accelerator.current_stream() == side
    torch.accelerator.set_stream(side)
    assert torch.accelerator.current_stream() == side
    torch.accelerator.set_stream(default)
    assert torch.accelerator.current_stream() == default


def test_streams_are_late_and_events_tell() -> None:
    x = torch.ones(256, 256, device=DEVICE)
    early = torch.Event(DEVICE)
    assert early.query()
    fake.set_delay(3000)
    for _ in range(40):
        x = x * 1.0
    late = torch.Event(DEVICE, enable_timing=True)
    late.record()
    assert not late.query()
    late.synchronize()
    assert late.query()
    torch.accelerator.current_stream().synchronize()


def test_random_numbers_are_those_of_the_cpu_and_repeat() -> None:
    torch.manual_seed(3)
    want = [torch.randn(5), torch.rand(5)]
    torch.manual_seed(3)
    got = [torch.randn(5, device=DEVICE), torch.rand(5, device=DEVICE)]
    assert _same([x.cpu() for x in got], want)
    x = torch.ones(64, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(4)
    state = generator.get_state()
    first = torch.empty_like(x).bernoulli_(0.5, generator=generator)
    second = torch.empty_like(x).bernoulli_(0.5, generator=generator)
    generator.set_state(state)
    again = torch.empty_like(x).bernoulli_(0.5, generator=generator)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_dropout_repeats_by_its_seed_and_under_checkpoint() -> None:
    def grads(recompute: bool) -> torch.Tensor:
        torch.manual_seed(7)
        x = torch.ones(32, 32, device=DEVICE, requires_grad=True)

        def inner(y: torch.Tensor) -> torch.Tensor:
            return functional.dropout(y * y, 0.5).sin()

        z = checkpoint(inner, x, use_reentrant=False) if recompute else inner(x)
        (z * functional.dropout(x, 0.3)).sum().backward()
        assert x.grad is not None
        return x.grad.cpu()

    plain = grads(False)
    assert torch.equal(plain, grads(False))
    assert torch.equal(plain, grads(True))
    assert fake.reports() == []


def _attention(device: torch.device | str, mask: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 2, 8, 16, generator=generator).to(device).requires_grad_() for _ in range(3))
    bias = torch.randn(8, 8, generator=generator).to(device) if mask else None
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=not mask)
    out.square().sum().backward()
    return [x.detach().cpu() for x in (out, q.grad, k.grad, v.grad) if x is not None]


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_attention_has_the_bits_of_the_cpu(mask: bool, backend: SDPBackend) -> None:
    with sdpa_kernel(backend):
        assert _same(_attention(DEVICE, mask), _attention("cpu", mask))
    assert fake.reports() == []


def test_convolution_has_the_bits_of_the_cpu() -> None:
    torch.manual_seed(6)
    layers = (
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 5),
    )
    model = nn.Sequential(*layers)
    other = copy.deepcopy(model).to(DEVICE)
    x = torch.randn(2, 3, 8, 8)
    model(x).square().mean().backward()
    other(x.to(DEVICE)).square().mean().backward()
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        assert left.grad is not None
        assert right.grad is not None
        assert torch.equal(left.grad, right.grad.cpu())
    assert fake.reports() == []


def test_mixed_precision() -> None:
    layer = nn.Linear(8, 8).to(DEVICE)
    x = torch.ones(2, 8, device=DEVICE)
    with torch.autocast("fake", dtype=torch.bfloat16):
        y = checkpoint(lambda t: layer(t).softmax(-1), x, use_reentrant=False)
        assert layer(x).dtype == torch.bfloat16
        assert y.dtype == torch.float32
    y.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_an_operator_in_python_runs_on_the_stream() -> None:
    @torch.library.custom_op("fake_tests::twice", mutates_args=(), device_types="cpu")
    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 2)

    fake.set_delay(3000)
    x = torch.arange(4.0, device=DEVICE)
    for _ in range(8):
        x = twice(x)
    assert x.tolist() == [0.0, 256.0, 512.0, 768.0]


def test_saving_on_the_cpu_as_torch_does() -> None:
    torch.manual_seed(8)
    w = torch.randn(32, 32, device=DEVICE, requires_grad=True)
    ((w @ w).relu() @ w).sum().backward()
    assert w.grad is not None
    want, w.grad = w.grad, None
    with torch.autograd.graph.save_on_cpu(pin_memory=True, device_type="fake"):
        ((w @ w).relu() @ w).sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, want)
    assert fake.reports() == []


def test_operators_whose_results_depend_on_values() -> None:
    x = torch.tensor([3.0, -1.0, 0.0, 2.0])
    y = x.to(DEVICE)
    assert torch.equal(y[y > 0].cpu(), x[x > 0])
    assert torch.equal(torch.nonzero(y).cpu(), torch.nonzero(x))
    assert torch.equal(y[torch.tensor([2, 0], device=DEVICE)].cpu(), x[[2, 0]])
    assert y.sum().item() == 4.0
    assert torch.equal(y, y.clone())
    assert torch.equal(torch.unique(y).cpu(), torch.unique(x))
    y[y < 0] = 9.0
    assert y.tolist() == [3.0, 9.0, 0.0, 2.0]
    assert fake.reports() == []


def test_views_share_memory() -> None:
    x = torch.arange(24.0, device=DEVICE).view(4, 6)
    x[1:3].t().mul_(2)
    x.unfold(1, 2, 2)[0, 0] += 1
    want = torch.arange(24.0).view(4, 6)
    want[1:3].t().mul_(2)
    want.unfold(1, 2, 2)[0, 0] += 1
    assert torch.equal(x.cpu(), want)
    assert torch.equal(x.to(torch.float64).expand(2, 4, 6)[1].cpu(), want.double())
    other = torch.empty(0, device=DEVICE)
    other.set_(x.untyped_storage(), 6, (2, 3), (6, 1))
    assert torch.equal(other.cpu(), want[1:3, :3])
    assert "fake" in repr(x)


def test_foreach_and_results_in_lists() -> None:
    parts = [torch.full((3,), float(at), device=DEVICE) for at in range(4)]
    torch._foreach_mul_(parts, 2.0)
    assert torch.cat(torch._foreach_add(parts, 1.0)).tolist() == [1.0] * 3 + [3.0] * 3 + [5.0] * 3 + [7.0] * 3
    assert torch.stack(parts).unbind(0)[3].tolist() == [6.0] * 3


def test_out_arguments_are_resized() -> None:
    out = torch.empty(0, device=DEVICE)
    torch.add(torch.ones(3, 2, device=DEVICE), 1.0, out=out)
    assert out.tolist() == [[2.0, 2.0]] * 3


def test_devices_do_not_mix() -> None:
    x = torch.ones(2, device=DEVICE)
    with pytest.raises(RuntimeError, match="on fake:0 and on fake:1"):
        x + torch.ones(2, device="fake:1")
    with pytest.raises(RuntimeError, match="is on cpu"):
        x + torch.ones(2)
    assert torch.equal((x.to("fake:1") * 2).to("fake:0"), x + 1)
    assert fake.reports() == []


def test_an_error_on_a_stream_comes_when_somebody_waits() -> None:
    table = torch.ones(3, 2, device=DEVICE)
    functional.embedding(torch.tensor([7], device=DEVICE), table)
    with pytest.raises(RuntimeError, match="aten::index_select, when its turn came: index out of range"):
        torch.accelerator.synchronize()
    assert table.sum().item() == 6.0


def test_backward_on_a_worker_thread_uses_the_stream_of_forward() -> None:
    seen: list[tuple[int, object]] = []

    def note(grad: torch.Tensor) -> torch.Tensor:
        seen.append((threading.get_ident(), torch.accelerator.current_stream()))
        return grad * 1.0

    side = torch.Stream(device=DEVICE)
    x = torch.ones(8, device=DEVICE, requires_grad=True)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x * 3.0
        y.register_hook(note)
        z = (y * y).sum()
    z.backward()
    assert x.grad is not None
    torch.accelerator.current_stream().wait_stream(side)
    assert x.grad.tolist() == [18.0] * 8
    assert seen == [(seen[0][0], side)]
    assert seen[0][0] != threading.get_ident()
    assert fake.reports() == []


# Memory.


def test_freed_memory_is_handed_out_again_at_once() -> None:
    x = torch.ones(1000, device=DEVICE)
    at = x.data_ptr()
    del x
    y = torch.empty(900, device=DEVICE)
    assert y.data_ptr() == at
    assert y.isnan().all().item()
    assert fake.reports() == []


def test_a_block_recorded_on_a_stream_waits_for_it() -> None:
    side = torch.Stream(device=DEVICE)
    fake.set_delay(20000)
    x = torch.ones(1000, device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        for _ in range(8):
            z = x + 1
        x.record_stream(side)
    at = x.data_ptr()
    del x
    y = torch.empty(1000, device=DEVICE)
    assert y.data_ptr() != at
    side.synchronize()
    again = torch.zeros(1000, device=DEVICE)
    assert again.data_ptr() == at
    assert z.sum().item() == 2000.0
    assert fake.reports() == []


def test_an_emptied_storage() -> None:
    x = torch.arange(1000.0, device=DEVICE)
    view = x[10:20]
    storage = x.untyped_storage()
    before = torch.accelerator.memory_allocated()
    saved = x.cpu()
    storage.resize_(0)
    assert torch.accelerator.memory_allocated() == before - 4096
    with pytest.raises(RuntimeError, match="a storage that has only 0"):
        view + 1
    storage.resize_(4000)
    assert torch.accelerator.memory_allocated() == before
    x.copy_(saved)
    assert torch.equal(view.cpu(), saved[10:20])
    storage.resize_(8000)
    assert torch.equal(x.cpu(), saved)
    assert fake.reports() == []


def test_capacity_and_peaks() -> None:
    start = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    fake.set_capacity(start + 8192)
    x = torch.empty(1024, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2048, device=DEVICE)
    y = torch.empty(1024, device=DEVICE)
    assert fake.stats()["peak"] == torch.accelerator.max_memory_allocated() == start + 8192
    free, total = torch.accelerator.get_memory_info()
    assert (free, total) == (0, start + 8192)
    del x, y
    assert torch.accelerator.memory_allocated() == start


def test_pinned_memory_is_rounded_up_and_used_again() -> None:
    start = fake.stats()
    x = torch.empty(1025, dtype=torch.uint8, pin_memory=True)
    assert x.is_pinned()
    now = fake.stats()
    assert now["pinned"] - start["pinned"] == 2048
    assert now["pinned_requested"] - start["pinned_requested"] == 1025
    at = x.data_ptr()
    del x
    assert fake.stats()["pinned"] == start["pinned"]
    y = torch.arange(400, dtype=torch.float32).pin_memory()
    assert y.data_ptr() == at
    assert torch.equal(y, torch.arange(400, dtype=torch.float32))
    assert not torch.empty(3).is_pinned()


def test_pinned_memory_waits_for_the_copies_of_torch() -> None:
    fake.set_delay(20000)
    x = torch.ones(1000, device=DEVICE)
    pinned = torch.empty(1000, pin_memory=True)
    for _ in range(8):
        pinned.copy_(x, non_blocking=True)
    at = pinned.data_ptr()
    del pinned
    other = torch.empty(1000, pin_memory=True)
    assert other.data_ptr() != at
    torch.accelerator.synchronize()
    assert torch.empty(1000, pin_memory=True).data_ptr() == at
    assert fake.reports() == []


@pytest.mark.parametrize("kind", ["alloc", "pin", "copy", "kernel", "stream", "event", "wait", "sync"])
def test_chosen_calls_fail(kind: str) -> None:
    x = torch.ones(4, device=DEVICE)
    side = torch.Stream(device=DEVICE)
    event = torch.Event(DEVICE)
    event.record()
    calls: dict[str, Callable[[], object]] = {
        "alloc": lambda: torch.empty(4, device=DEVICE),
        "pin": lambda: torch.empty(4, pin_memory=True),
        "copy": lambda: x.copy_(torch.zeros(4)),
        "kernel": lambda: x.neg_(),
        "stream": lambda: torch.Stream(device=DEVICE),
        "event": event.record,
        "wait": lambda: side.wait_event(event),
        "sync": torch.accelerator.synchronize,
    }
    calls[kind]()
    fake.fail_next(kind, 2)
    calls[kind]()
    with pytest.raises(torch.OutOfMemoryError if kind == "alloc" else RuntimeError, match="made to fail"):
        calls[kind]()
    calls[kind]()
    fake.fail_next(kind)
    fake.fail_next(kind, 0)
    calls[kind]()


def test_there_is_no_other_kind_of_call() -> None:
    with pytest.raises(ValueError, match="no call is of the kind"):
        fake.fail_next("memory")


# Order.


class Swap:
    """Moves one tensor's storage out and back by side streams; each wait can be left out."""

    def __init__(self, seed: int) -> None:
        fake.set_seed(seed)
        fake.set_delay(300)
        self.compute = torch.accelerator.current_stream()
        self.out = torch.Stream(device=DEVICE)
        self.back = torch.Stream(device=DEVICE)
        self.x = torch.arange(2048.0, device=DEVICE)
        self.host = torch.empty(2048, pin_memory=True)
        torch.accelerator.synchronize()
        for _ in range(5):
            self.x = self.x * 2.0
        self.want = torch.arange(2048.0) * 32.0

    def offload(self, wait: bool = True) -> torch.Event:
        if wait:
            self.out.wait_stream(self.compute)
        with self.out:
            self.host.copy_(self.x, non_blocking=True)
            return self.out.record_event()

    def free(self, done: torch.Event | None) -> None:
        if done is not None:
            self.compute.wait_event(done)
        self.x.untyped_storage().resize_(0)

    def load(self, wait: bool = True) -> torch.Event:
        self.x.untyped_storage().resize_(8192)
        if wait:
            self.back.wait_stream(self.compute)
        with self.back:
            self.x.copy_(self.host, non_blocking=True)
            return self.back.record_event()

    def result(self, done: torch.Event | None) -> torch.Tensor:
        if done is not None:
            self.compute.wait_event(done)
        return (self.x + 0.0).cpu()


def _junk() -> torch.Tensor:
    """Takes memory that was freed last, and writes it."""
    return torch.full((2048,), -5.0, device=DEVICE)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_right_order_is_silent_and_right(seed: int) -> None:
    swap = Swap(seed)
    swap.free(swap.offload())
    junk = _junk()
    assert torch.equal(swap.result(swap.load()), swap.want)
    assert torch.equal(junk.cpu(), torch.full((2048,), -5.0))
    assert fake.reports() == []


def _only(kind: str, *parts: str) -> None:
    """There are reports of this kind, one of which names all parts."""
    found = fake.reports()
    assert any(text.startswith(kind) and all(part in text for part in parts) for text in found), found
    fake.clear_reports()


@pytest.mark.parametrize("seed", SEEDS)
def test_copy_out_that_does_not_wait_for_compute(seed: int) -> None:
    swap = Swap(seed)
    swap.offload(wait=False).synchronize()
    _only("race", "copy out on fake:0/", "reads bytes 0..8192 of device block", "aten::mul.Tensor on fake:0/0")


@pytest.mark.parametrize("seed", SEEDS)
def test_copy_in_that_does_not_wait_for_the_allocation(seed: int) -> None:
    swap = Swap(seed)
    swap.free(swap.offload())
    swap.result(swap.load(wait=False))
    _only("access before allocation", "copy in on fake:0/", "allocation of 8192 bytes on fake:0/0")


@pytest.mark.parametrize("seed", SEEDS)
def test_use_that_does_not_wait_for_the_copy_in(seed: int) -> None:
    swap = Swap(seed)
    swap.free(swap.offload())
    swap.load()
    swap.result(None)
    _only("race", "aten::add.Tensor on fake:0/0 reads", "copy in on fake:0/")


@pytest.mark.parametrize("seed", SEEDS)
def test_block_dropped_while_its_copy_is_queued(seed: int) -> None:
    swap = Swap(seed)
    swap.offload()
    swap.free(None)
    _junk()
    _only("freed in use", "free of 8192 bytes on fake:0/0", "copy out on fake:0/")


@pytest.mark.parametrize("seed", SEEDS)
def test_pinned_buffer_used_again_while_a_copy_reads_it(seed: int) -> None:
    swap = Swap(seed)
    swap.free(swap.offload())
    swap.load()
    other = torch.zeros(2048, device=DEVICE)
    swap.out.wait_stream(swap.compute)
    with swap.out:
        swap.host.copy_(other, non_blocking=True)
    torch.accelerator.synchronize()
    _only("race", "copy out on fake:0/", "writes bytes 0..8192 of pinned block", "copy in on fake:0/")


@pytest.mark.parametrize("seed", SEEDS)
def test_host_reads_before_the_copy_is_complete(seed: int) -> None:
    swap = Swap(seed)
    done = swap.offload()
    fake.host_read(swap.host[:16])
    _only("race", "read by the host reads bytes 0..64 of pinned block", "copy out on fake:0/")
    done.synchronize()
    fake.clear_reports()
    fake.host_read(swap.host)
    assert fake.reports() == []
    assert torch.equal(swap.host, swap.want)


@pytest.mark.parametrize("seed", SEEDS)
def test_load_that_does_not_wait_for_its_offload(seed: int) -> None:
    swap = Swap(seed)
    done = swap.offload()
    other = torch.empty(2048, device=DEVICE)
    swap.back.wait_stream(swap.compute)
    with swap.back:
        other.copy_(swap.host, non_blocking=True)
    _only("race", "copy in on fake:0/", "reads bytes 0..8192 of pinned block", "copy out on fake:0/")
    swap.compute.wait_event(done)
    torch.accelerator.synchronize()


@pytest.mark.parametrize("seed", SEEDS)
def test_pinned_memory_of_ones_own_freed_in_use(seed: int) -> None:
    fake.set_host_events(False)
    swap = Swap(seed)
    swap.offload()
    del swap.host
    _only("freed in use", "pinned free of 8192 bytes by the host", "copy out on fake:0/")


def test_copies_by_address() -> None:
    x = torch.arange(256.0, device=DEVICE)
    host = torch.empty(256, pin_memory=True)
    fake.copy_bytes(host.data_ptr(), x.data_ptr(), 1024)
    torch.accelerator.synchronize()
    assert torch.equal(host, torch.arange(256.0))
    with torch.Stream(device=DEVICE):
        fake.copy_bytes(x.data_ptr(), host.data_ptr(), 1024)
    assert fake.reports() == []
    x + 1
    _only("race", "aten::add.Tensor on fake:0/0 reads", "copy of bytes on fake:0/")


def test_copy_of_memory_that_was_given_back() -> None:
    x = torch.zeros(256, device=DEVICE)
    host = torch.empty(256, pin_memory=True)
    at = x.data_ptr()
    del x
    fake.copy_bytes(host.data_ptr(), at, 1024)
    _only("use after free", "copy of bytes on fake:0/0", "given back by #", "free of 1024 bytes on fake:0/0")


@pytest.mark.parametrize("seed", SEEDS)
def test_host_writes_while_a_copy_reads(seed: int) -> None:
    swap = Swap(seed)
    swap.free(swap.offload())
    done = swap.load()
    fake.host_write(swap.host)
    _only("race", "write by the host writes bytes 0..8192 of pinned block", "copy in on fake:0/")
    done.synchronize()


def test_values_are_wrong_where_a_wait_is_missing() -> None:
    """Not on every seed, since threads race, but the delays make it common."""
    wrong = 0
    for seed in SEEDS:
        swap = Swap(seed)
        fake.set_delay(3000)
        swap.offload(wait=False).synchronize()
        wrong += not torch.equal(swap.host, swap.want)
    assert wrong > 0


def test_a_query_that_says_yes_orders_the_host() -> None:
    swap = Swap(1)
    done = swap.offload()
    while not done.query():
        time.sleep(0.001)
    fake.host_write(swap.host)
    assert fake.reports() == []


def test_disjoint_ranges_need_no_order() -> None:
    x = torch.zeros(1024, device=DEVICE)
    side = torch.Stream(device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    x[:512].fill_(1)
    with side:
        x[512:].fill_(2)
    assert fake.reports() == []
    with side:
        x[511:].fill_(2)
    _only("race", "aten::fill_.Scalar on fake:0/", "bytes 2044..2048")


def test_a_report_is_made_when_the_work_is_queued() -> None:
    fake.set_delay(20000)
    x = torch.ones(64, device=DEVICE)
    with torch.Stream(device=DEVICE):
        x + 1
    assert len(fake.reports()) == 1
    torch.accelerator.synchronize()
    assert len(fake.reports()) == 1


def test_a_trace_names_the_calls_of_a_report() -> None:
    fake.trace(True)
    x = torch.ones(64, device=DEVICE)
    with torch.Stream(device=DEVICE):
        x + 1
    text = fake.reports()[0]
    calls = fake.traced()
    fake.trace(False)
    assert sum(f"{call.split(' ')[0]} " in text for call in calls) == 2


def test_hooks_move_saved_tensors_by_side_streams() -> None:
    """A small engine: packs by a copy on a side stream, unpacks by another, with all waits in place."""
    want = _train("cpu")
    out, back = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    parked: list[tuple[torch.Tensor, torch.Event]] = []

    def pack(tensor: torch.Tensor) -> Packed:
        if isinstance(tensor, nn.Parameter) or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            return tensor.detach()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        out.wait_stream(torch.accelerator.current_stream())
        with out:
            host.copy_(tensor.detach(), non_blocking=True)
            done = out.record_event()
        # Freed no earlier than the copy: a block goes back when the compute stream has waited for it.
        parked.append((tensor.detach(), done))
        while len(parked) > 2:
            torch.accelerator.current_stream().wait_event(parked[0][1])
            parked.pop(0)
        return host, done

    def unpack(packed: Packed) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        host, done = packed
        compute = torch.accelerator.current_stream()
        tensor = torch.empty(host.shape, dtype=host.dtype, device=DEVICE)
        back.wait_event(done)
        back.wait_stream(compute)
        with back:
            tensor.copy_(host, non_blocking=True)
        compute.wait_stream(back)
        return tensor

    for seed in range(3):
        fake.set_seed(seed)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            got = _train(DEVICE)
        for _, done in parked:
            torch.accelerator.current_stream().wait_event(done)
        parked.clear()
        assert fake.reports() == []
        assert _same(got, want)
