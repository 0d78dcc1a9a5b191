"""Small models that save what real ones save."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, WORDS, LENGTH, BATCH = 32, 4, 61, 16, 3


class Block(nn.Module):
    """A transformer block with dropout and an optional table for rotating queries and keys."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)
        self.dropout = dropout

    def forward(self, x: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        if table is not None:
            q, k = rotated(q, table), rotated(k, table)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(-2)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))


def rotary(length: int, width: int = WIDTH // HEADS) -> torch.Tensor:
    """Cosines and sines, shape (2, length, width)."""
    angles = torch.outer(torch.arange(length), 0.1 ** torch.arange(width))
    return torch.stack([angles.cos(), angles.sin()])


def rotated(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Queries or keys turned by the angles of a table."""
    cos, sin = table[:, : x.shape[-2]]
    return x * cos + torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1) * sin


class Gpt(nn.Module):
    """Blocks between an embedding and a head, which may be the same tensor; one rotary table for all blocks."""

    def __init__(self, layers: int = 3, *, tied: bool = False, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        table = rotary(tokens.shape[1]).to(x.dtype)
        for block in self.blocks:
            x = block(x, table)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Recurrent(nn.Module):
    """LSTMs one after the other, with an initial state that is learnt."""

    def __init__(self, layers: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(nn.LSTM(width, width, 2, batch_first=True, dropout=0.1) for _ in range(layers))
        self.state = nn.Parameter(torch.randn(2, 1, width))
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        state = self.state.expand(-1, x.shape[0], -1).contiguous()
        carried = (state, state)
        for block in self.blocks:
            x, carried = block(x, carried)
        logits: torch.Tensor = self.head(x)
        return logits


class Experts(nn.Module):
    """A feed-forward layer whose words go to one expert each; experts that get none save nothing."""

    def __init__(self, experts: int = 5, width: int = WIDTH) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = x.flatten(0, -2)
        weights, chosen = self.gate(words).softmax(-1).max(-1)
        mixed = torch.zeros_like(words)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().squeeze(-1)
            if mine.numel():
                mixed = mixed.index_add(0, mine, expert(words[mine]) * weights[mine, None])
        return x + mixed.view_as(x)


class Mixture(nn.Module):
    """Layers of experts. How many words each expert gets depends on the words."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Experts() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Branched(nn.Module):
    """A block with a branch whose result no loss depends on."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.used = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.unused = nn.Sequential(nn.Linear(width, 8 * width), nn.GELU(), nn.Linear(8 * width, width))
        self.aside: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aside = self.unused(x).sum()
        result: torch.Tensor = x + self.used(x)
        return result


class Tower(nn.Module):
    """Blocks whose first part is frozen, so that no gradient flows there."""

    def __init__(self, layers: int = 4, frozen: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Branched() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)
        for module in (self.embed, *self.blocks[:frozen]):
            module.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def tokens(seed: int, length: int = LENGTH, batch: int = BATCH) -> torch.Tensor:
    """Words of a batch, drawn from their own seed."""
    return torch.randint(0, WORDS, (batch, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the words themselves."""
    return functional.cross_entropy(model(words).flatten(0, 1).float(), words.flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all trainings here."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


class Stack(nn.Module):
    """Blocks of any kind between an embedding and a head."""

    def __init__(self, make: Callable[[], nn.Module], layers: int = 3, *, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.blocks = nn.ModuleList(make() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Image(nn.Module):
    """Convolutions over words and channels as an image, in a memory format; some modules work in place."""

    def __init__(self, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.memory_format = memory_format
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout2d(0.2)
        )
        self.back = nn.ConvTranspose2d(4, 1, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.unsqueeze(1).contiguous(memory_format=self.memory_format)
        hidden = functional.avg_pool2d(self.net(image), 2, ceil_mode=True)
        result: torch.Tensor = x + self.back(hidden).squeeze(1)[:, : x.shape[1], : x.shape[2]]
        return result


class Spectrum(nn.Module):
    """Mixes words by their spectrum, with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x, dim=-1) * self.weight
        mixed = torch.fft.irfft(spectrum.conj() * spectrum.abs().sigmoid(), n=WIDTH, dim=-1)
        return x + mixed.tanh()


class Checkpointed(nn.Module):
    """A feed-forward block whose inner part is computed again in backward."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.reentrant = reentrant

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(functional.silu(self.up(x)), 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.inner, self.norm(x), use_reentrant=self.reentrant)
        result: torch.Tensor = x + self.down(hidden)
        return result


class Around(Stack):
    """Checkpoints around every second block."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if number % 2 else block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def spectral() -> nn.Module:
    """Linear layers whose weights are computed in each forward; power iteration changes buffers in place."""
    norm, weight = nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(WIDTH, 2 * WIDTH)), nn.Softplus(), weight(nn.Linear(2 * WIDTH, WIDTH)))


def encoder() -> nn.Module:
    """Torch's own transformer layer."""
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
