"""The GPT that is trained."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a GPT. `explicit`: attention in single operations instead of PyTorch's fused one."""

    layers: int
    width: int
    heads: int
    dropout: float = 0.0
    explicit: bool = False
    vocabulary: int = 256


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm. `(batch, tokens, width)` in and out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.shape = shape
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.shape.heads, -1)).transpose(1, 2) for part in parts)
        mixed = self._explicit(q, k, v) if self.shape.explicit else self._fused(q, k, v)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(-2)))
        out: torch.Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return out

    def _fused(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def _explicit(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        weights: torch.Tensor = self.drop(scores.masked_fill(later, float("-inf")).softmax(-1))
        mixed: torch.Tensor = weights @ v
        return mixed


class GPT(nn.Module):
    """Tokens `(batch, tokens)` in, the loss of the next token out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy, in f32."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def build(shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32) -> GPT:
    """A GPT that is made on the device: large ones take long to make elsewhere."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return GPT(shape)
    finally:
        torch.set_default_dtype(before)


def tokens(batch: int, length: int, seed: int, device: torch.device) -> torch.Tensor:
    """Random tokens, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (batch, length), generator=generator).to(device)
