"""Small models and comparisons that the tests of sessions share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ebbtide.torch import Session

WIDTH, LENGTH, BATCH = 32, 16, 4


class Block(nn.Module):
    """A transformer block with dropout."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        if table is not None:
            q, k = q * table, k * table
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(-2)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """Blocks between an embedding and a head. `table` makes every block save one shared tensor."""

    embed: nn.Embedding
    blocks: nn.ModuleList
    head: nn.Linear
    table: torch.Tensor | None

    def __init__(self, layers: int = 4, *, table: bool = False, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 50)
        self.register_buffer("table", torch.rand(LENGTH, WIDTH // 4) if table else None, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.table)
        return self.head(x)


class Chain(nn.Module):
    """Layers one after the other: whatever they are."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def tokens(seed: int = 0, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50, (BATCH, length), generator=generator)


def loss_of(model: nn.Module, seed: int = 0, length: int = LENGTH) -> torch.Tensor:
    given = tokens(seed, length)
    return functional.cross_entropy(model(given).flatten(0, 1), given.flatten())


def gpt(seed: int = 0, **settings: Any) -> Gpt:
    torch.manual_seed(seed)
    return Gpt(**settings)


def result(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Loss and gradients, for comparisons."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().clone(), **found}


def plain(model: nn.Module, run: Callable[[nn.Module], torch.Tensor] = loss_of) -> dict[str, torch.Tensor]:
    """One step of a copy of the model, without any session."""
    model = copy.deepcopy(model)
    torch.manual_seed(1)
    loss = run(model)
    loss.backward()
    return result(model, loss)


def stepped(
    s: Session, model: nn.Module, run: Callable[[nn.Module], torch.Tensor] = loss_of
) -> dict[str, torch.Tensor]:
    """One step through a session; gradients start empty."""
    model.zero_grad()
    torch.manual_seed(1)
    with s.step():
        loss = run(model)
    loss.backward()
    return result(model, loss)


def assert_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    """The same names, and the same bits under each."""
    assert one.keys() == other.keys()
    different = [name for name in one if not bits_equal(one[name], other[name])]
    assert not different, different


def bits_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(one, other)


def assert_clean(s: Session) -> None:
    """Nothing is in flight, nothing is in the tier, and no hooks are left on autograd's stack."""
    s._source.hub.collect()
    figures = s.stats()
    assert (figures["active_groups"], figures["bytes_held"]) == (0, 0)
    assert_no_hooks()


def assert_no_hooks() -> None:
    """Nobody's hooks are on autograd's stack of this thread; else PyTorch refuses to disable them."""
    with torch.autograd.graph.disable_saved_tensors_hooks("for a moment"):
        pass


def hooks_on(model: nn.Module) -> int:
    """How many hooks and replaced forwards are on a model."""
    modules = list(model.modules())
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)
    return hooks + sum("forward" in m.__dict__ for m in modules)


@contextmanager
def hooked(module: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    """A forward hook of the user's for the time of the `with`."""
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
