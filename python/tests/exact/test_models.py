"""Whole trainings: losses, gradients, parameters and generators are those of plain torch, bit for bit."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide.torch

from .bits import assert_same
from .models import (
    Around,
    Block,
    Checkpointed,
    Gpt,
    Image,
    Mixture,
    Recurrent,
    Spectrum,
    Stack,
    Tower,
    adamw,
    encoder,
    loss_of,
    spectral,
    tokens,
)
from .training import ALL, Step, Trained, check, plain, swapped

MIXED = {"blocks.*": "swap", "blocks.1": "recompute"}


def steps(
    count: int, *, lengths: tuple[int, ...] = (16,), inside: bool = True, loss: Callable[..., Any] = loss_of
) -> Callable[[nn.Module, Step], list[torch.Tensor]]:
    """A training of `count` steps, backward inside the step or after it."""

    def training(model: nn.Module, step: Step) -> list[torch.Tensor]:
        optimizer, losses = adamw(model), []
        for number in range(count):
            optimizer.zero_grad()
            with step():
                value = loss(model, tokens(number, lengths[number % len(lengths)]))
                if inside:
                    value.backward()
            if not inside:
                value.backward()
            optimizer.step()
            losses.append(value.detach())
        return losses

    return training


@pytest.mark.parametrize("tier", ["file", "host"])
@pytest.mark.parametrize("policy", ["swap", ALL, MIXED], ids=["swap", "all", "mixed"])
def test_c8_gpt_with_dropout_and_adamw(policy: Any, tier: str) -> None:
    stats = check(Gpt, steps(20), policy, tier=tier, enough=400)
    assert stats["bytes_held"] == stats["active_groups"] == 0


def test_gpt_with_backward_after_the_step() -> None:
    check(Gpt, steps(5, inside=False))


def test_gpt_with_large_pages_only() -> None:
    """The default size limit: small tensors stay, large ones go."""
    stats = check(Gpt, steps(3), min_bytes=4096, enough=10)
    assert stats["tensors_kept"] > 0


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_m12_any_depth_of_prefetch(prefetch: int) -> None:
    check(functools.partial(Gpt, 4), steps(4), prefetch=prefetch)


def test_little_host_memory(tmp_path: Path) -> None:
    check(Gpt, steps(4), spill_dir=str(tmp_path), host_bytes=1 << 20)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cached", [True, False])
def test_autocast(cached: bool) -> None:
    """The cache of autocast keeps casts of weights, which several layers save."""

    def loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            return loss_of(model, words)

    check(Gpt, steps(8, loss=loss))


def test_autocast_inside_of_blocks() -> None:
    def make() -> nn.Module:
        model = Gpt()
        for block in model.blocks:
            block.forward = torch.autocast("cpu", torch.bfloat16)(block.forward)
        return model

    check(make, steps(4))


@pytest.mark.parametrize("policy", [ALL, MIXED], ids=["all", "mixed"])
def test_low_precision_model(policy: Any) -> None:
    check(lambda: Gpt().to(torch.bfloat16), steps(4), policy)


@pytest.mark.parametrize("late", [False, True], ids=["backward at once", "four in flight"])
def test_c12_gradient_accumulation(late: bool) -> None:
    def training(model: nn.Module, step: Step) -> list[torch.Tensor]:
        optimizer, losses = adamw(model), []
        for number in range(4):
            optimizer.zero_grad()
            pending = []
            for micro in range(4):
                with step():
                    loss = loss_of(model, tokens(4 * number + micro)) / 4
                    losses.append(loss.detach())
                    if not late:
                        loss.backward()
                pending.append(loss)
            while late and pending:
                pending.pop(0 if number % 2 else -1).backward()
            optimizer.step()
        return losses

    check(Gpt, training, enough=400)


def test_c12_four_micro_batches_in_one_step() -> None:
    """Each layer is called four times before the first backward."""

    def training(model: nn.Module, step: Step) -> list[torch.Tensor]:
        optimizer, losses = adamw(model), []
        for number in range(4):
            optimizer.zero_grad()
            with step():
                parts = [loss_of(model, tokens(4 * number + micro)) / 4 for micro in range(4)]
                for part in parts:
                    part.backward()
            losses += [part.detach() for part in parts]
            optimizer.step()
        return losses

    check(Gpt, training, enough=400)


def test_weight_tying() -> None:
    check(functools.partial(Gpt, tied=True), steps(6))


def test_one_block_used_by_all_layers() -> None:
    def make() -> nn.Module:
        model = Gpt(3)
        model.blocks = nn.ModuleList([model.blocks[0]] * 3)
        return model

    check(make, steps(4))


def test_c2_a_rotary_table_shared_by_all_layers() -> None:
    """The table of the model's own making is saved by every layer, and the caller's table stays what it was."""
    kept: list[torch.Tensor] = []

    def training(model: nn.Module, step: Step) -> list[torch.Tensor]:
        handle = model.get_submodule("blocks.0").register_forward_pre_hook(lambda _, args: kept.append(args[1]))
        losses = steps(4)(model, step)
        handle.remove()
        tables = list(kept)
        kept.clear()
        return losses + tables

    check(functools.partial(Gpt, 4), training, "swap")


def test_lstm() -> None:
    check(Recurrent, steps(6))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "encoder": encoder,
    "convolutions": Image,
    "channels last": functools.partial(Image, torch.channels_last),
    "spectrum": Spectrum,
    "spectral norm": spectral,
    "checkpoint inside": Checkpointed,
    "reentrant checkpoint inside": functools.partial(Checkpointed, reentrant=True),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_other_kinds(name: str) -> None:
    check(functools.partial(Stack, BLOCKS[name]), steps(4, lengths=(16, 9)), enough=20)


@pytest.mark.parametrize("policy", [ALL, "swap"], ids=["all", "swap"])
def test_checkpoints_around_blocks(policy: Any) -> None:
    check(functools.partial(Around, Checkpointed, 4), steps(4), policy, enough=10)


def test_sparse_gradients() -> None:
    def training(model: nn.Module, step: Step) -> list[torch.Tensor]:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for number in range(4):
            optimizer.zero_grad()
            with step():
                loss = loss_of(model, tokens(number))
                loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    check(functools.partial(Stack, Checkpointed, sparse=True), training, enough=10)


def test_c23_mixture_of_experts_with_another_load_each_step() -> None:
    counts: list[int] = []

    def training(model: nn.Module, step: Step) -> list[torch.Tensor]:
        handle = model.get_submodule("blocks.1.experts.0").register_forward_hook(
            lambda *args: counts.append(args[2].shape[0])
        )
        losses = steps(8, lengths=(16, 3, 1, 11))(model, step)
        handle.remove()
        return losses

    check(Mixture, training)
    assert len(set(counts)) > 2, "the load was meant to change"


def test_c23_variable_length() -> None:
    check(Gpt, steps(8, lengths=(16, 5, 31, 1, 8)))


def test_c11_evaluation_in_between() -> None:
    def training(model: nn.Module, step: Step) -> list[torch.Tensor]:
        optimizer, losses = adamw(model), []

        def evaluate() -> None:
            model.eval()
            with torch.no_grad():
                losses.append(loss_of(model, tokens(99)))
            model.train()

        for number in range(5):
            optimizer.zero_grad()
            with step():
                evaluate()
                loss = loss_of(model, tokens(number))
                evaluate()
            evaluate()
            with step():
                evaluate()
            loss.backward()
            evaluate()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    check(Gpt, training)


def test_c11_evaluation_with_gradients_and_inference_mode() -> None:
    def training(model: nn.Module, step: Step) -> list[torch.Tensor]:
        losses = []
        for number in range(3):
            with step():
                loss = loss_of(model, tokens(number))
                losses.append(loss_of(model, tokens(50)).detach())  # a graph that is dropped at once
            with torch.inference_mode():
                losses.append(loss_of(model, tokens(51)).clone())
            loss.backward()
            losses.append(loss.detach())
        return losses

    check(Gpt, training)


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_c9_frozen_tower_and_unused_branch_stay_flat() -> None:
    """100 steps: what backward never asks for is let go of at once, in the tier and in memory."""
    check(Tower, steps(5), enough=20)
    model = Tower()
    words = tokens(0, 32, 8)
    held, sizes = set(), []
    with ebbtide.torch.session(model, ALL, tier="file", min_bytes=0) as session:
        for number in range(100):
            with session.step():
                loss_of(model, words).backward()
            if number >= 5:
                held.add((session.stats()["bytes_held"], session.stats()["active_groups"]))
                sizes.append(resident())
        moved = session.stats()["bytes_out"]
    assert len(held) == 1, f"kept by the tier: {held}"
    assert sizes[-1] - sizes[15] < moved / 100, (sizes[15], sizes[-1], moved)  # what one step moves


def in_threads(runs: list[Callable[[], Trained]]) -> list[Trained]:
    """All runs at once."""
    results: dict[int, Trained] = {}
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            results[number] = runs[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return [results[number] for number in range(len(runs))]


def seeded(kind: Callable[..., nn.Module], seed: int) -> Callable[[], nn.Module]:
    """A model made beforehand, since threads share the generator; fresh at each call."""
    torch.manual_seed(seed)
    state = kind().state_dict()

    def make() -> nn.Module:
        model = kind()
        model.load_state_dict(state)
        return model

    return make


def test_c24_two_models_in_two_threads() -> None:
    makes = [seeded(functools.partial(Gpt, dropout=0.0), 1), seeded(Mixture, 2)]
    trainings = [steps(10, lengths=(16, 5)), steps(10, inside=False)]
    pairs = list(zip(makes, trainings, strict=True))
    expected = [plain(make, training) for make, training in pairs]
    got = in_threads([functools.partial(swapped, make, training) for make, training in pairs])
    for one, other in zip(expected, got, strict=True):
        assert set(one.unlike(other)) <= {"generator"}, "threads share the generator"
        assert other.stats["tensors_out"] > 50


def test_c24_two_models_interleaved_in_one_thread() -> None:
    makes = [seeded(functools.partial(Gpt, dropout=0.0), 1), seeded(Mixture, 2)]
    expected = [plain(make, steps(4)) for make in makes]
    models = [make() for make in makes]
    optimizers = [adamw(model) for model in models]
    with contextlib.ExitStack() as stack:
        sessions = [
            stack.enter_context(ebbtide.torch.session(model, ALL, tier="file", min_bytes=0)) for model in models
        ]
        for number in range(4):
            losses = []
            for model, session in zip(models, sessions, strict=True):
                model.zero_grad()
                with session.step():
                    losses.append(loss_of(model, tokens(number)))
            for loss in losses:
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
    for model, one in zip(models, expected, strict=True):
        got = {name: parameter.detach() for name, parameter in model.named_parameters()}
        for name, value in got.items():
            assert_same([one.bits[name][0]], [value], name)


class Small(nn.Module):
    """A block that compiles fast."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(self.up(x).sin().exp())
        return result


def compiled(kind: Callable[[], nn.Module], backend: str) -> Callable[[], nn.Module]:
    """A model whose blocks are compiled."""

    def make() -> nn.Module:
        torch._dynamo.reset()
        model = Gpt(0)
        made: Any = [torch.compile(kind(), backend=backend) for _ in range(3)]
        model.blocks = nn.ModuleList(made)
        return model

    return make


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_w10_compiled_blocks(backend: str) -> None:
    check(compiled(Block, backend), steps(3), enough=20)


def test_w10_compiled_blocks_with_other_lengths() -> None:
    check(compiled(Small, "aot_eager"), steps(5, lengths=(16, 9, 5)), enough=10)


@pytest.mark.timeout(600)
@pytest.mark.skipif(not os.environ.get("EBBTIDE_LONG"), reason="minutes of C++ compilation; scripts/long runs it")
def test_w10_compiled_blocks_by_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that the C++ compiler makes."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    check(compiled(Small, "inductor"), steps(2), enough=4)
