"""A small GPT from scratch, trained in less than half of the memory.

    python gpt.py

trains it twice on its own source code, without and with ebbtide, and prints memory and time of both. It takes
a good minute on two cores. The losses have to be identical, else the exit status is 1. Needs ebbtide and torch;
what ebbtide asks for are two lines in `train`: the session and its step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from side_by_side import compare
from torch import nn
from torch.nn import functional as F

import ebbtide.torch


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm. `(batch, tokens, width)` in and out."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(-2)))
        return x + self.drop(self.feed(self.norm2(x)))


class GPT(nn.Module):
    """Bytes `(batch, tokens)` in, logits of the next byte out."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, args.width)
        self.place = nn.Parameter(torch.randn(args.tokens, args.width) * 0.02)
        self.blocks = nn.ModuleList(Block(args.width, args.width // 32, dropout=0.1) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits, `(batch, tokens, 256)`."""
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches(args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Random pieces of this file, one byte longer than what the model sees."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    for _ in range(args.steps):
        starts = torch.randint(len(text) - args.tokens, (args.batch,))
        yield torch.stack([text[start : start + args.tokens + 1] for start in starts.tolist()])


def train(swap: bool, args: argparse.Namespace) -> Iterator[float]:
    """Yields the loss of each step."""
    torch.manual_seed(0)
    model = GPT(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = ebbtide.torch.session(model, "swap") if swap else None
    for batch in batches(args):
        with session.step() if session else nullcontext():
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
    if session:
        print(session.report(), flush=True)


def main() -> int:
    """Trains both ways; 1 if the losses differ."""
    parser = argparse.ArgumentParser(description="A small GPT, trained without and with ebbtide.")
    for name, default in (("layers", 12), ("width", 256), ("tokens", 256), ("batch", 8), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    return 0 if compare(train, parser.parse_args()) else 1


if __name__ == "__main__":
    sys.exit(main())
