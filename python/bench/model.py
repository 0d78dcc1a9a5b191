"""A small GPT, and the ways to train it."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True)
class Size:
    """Layers, width, heads, tokens of a sequence, sequences of a batch, entries of the vocabulary."""

    layers: int = 12
    width: int = 512
    heads: int = 8
    tokens: int = 512
    batch: int = 4
    vocabulary: int = 256


class Block(nn.Module):
    """A layer: attention and a feed-forward network, each behind a norm. `(batch, tokens, width)` in and out."""

    def __init__(self, size: Size, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = size.heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.proj = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        split = (batch, tokens, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.proj(a.transpose(1, 2).reshape(x.shape)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class GPT(nn.Module):
    """Tokens `(batch, tokens)` in, the loss of the next token out."""

    def __init__(self, size: Size, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.place = nn.Embedding(size.tokens, size.width)
        self.blocks = nn.ModuleList(Block(size, dropout) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy."""
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
