"""A small GPT from scratch, trained inside a budget.

    python gpt.py

trains it twice on its own source code, without and with ebbtide, and prints the losses and what ebbtide did. The
losses have to be identical, else the exit status is 1. Needs ebbtide and MindSpore; what ebbtide asks for are two
lines in `train`: the session and its step.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

import ebbtide.mindspore


class Block(nn.Cell):
    """Attention and a feed-forward network, each behind a norm. `(batch, tokens, width)` in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm((width,)), nn.LayerNorm((width,))
        self.qkv, self.out = nn.Dense(width, 3 * width), nn.Dense(width, width)
        self.up, self.down = nn.Dense(width, 4 * width), nn.Dense(4 * width, width)

    def construct(self, x: Tensor, mask: Tensor) -> Tensor:
        """The block's output; the mask is added to attention's scores."""
        batch, tokens, width = x.shape
        each = width // self.heads
        qkv = self.qkv(self.norm1(x)).view((batch, tokens, 3, self.heads, each)).permute((2, 0, 3, 1, 4))
        q, k, v = qkv[0], qkv[1], qkv[2]
        weights = ops.softmax(mint.matmul(q, k.permute((0, 1, 3, 2))) / math.sqrt(each) + mask, -1)
        x = x + self.out(mint.matmul(weights, v).permute((0, 2, 1, 3)).reshape((batch, tokens, width)))
        return x + self.down(ops.gelu(self.up(self.norm2(x))))


class GPT(nn.Cell):
    """Bytes `(batch, tokens)` in, the loss of the next byte out."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, args.width)
        self.place = Parameter(ops.zeros((args.tokens, args.width), ms.float32), name="place")
        self.blocks = nn.CellList([Block(args.width, args.width // 32) for _ in range(args.layers)])
        self.norm, self.head = nn.LayerNorm((args.width,)), nn.Dense(args.width, 256)
        self.mask = Tensor(np.triu(np.full((args.tokens, args.tokens), -1e9, np.float32), 1))

    def construct(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss."""
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x, self.mask)
        return ops.cross_entropy(self.head(self.norm(x)).view((-1, 256)), targets.view((-1,)))


def batches(args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Random pieces of this file: what the model sees, and the same one byte later."""
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    random = np.random.default_rng(0)
    for _ in range(args.steps):
        starts = random.integers(0, len(text) - args.tokens - 1, args.batch)
        piece = np.stack([text[start : start + args.tokens + 1] for start in starts])
        yield Tensor(np.ascontiguousarray(piece[:, :-1])), Tensor(np.ascontiguousarray(piece[:, 1:]))


def train(swap: bool, args: argparse.Namespace) -> Iterator[float]:
    """Yields the loss of each step."""
    ms.set_seed(0)
    np.random.seed(0)
    model = GPT(args)
    model.set_train()
    parameters = model.trainable_params()
    grad, optimizer = ms.value_and_grad(model, None, parameters), nn.Adam(parameters, learning_rate=1e-3)
    session = ebbtide.mindspore.session(model, memory=args.memory) if swap else None
    for tokens, targets in batches(args):
        with session.step() if session else nullcontext():
            loss, gradients = grad(tokens, targets)
        optimizer(gradients)
        yield float(loss.asnumpy())
    if session:
        print(session.report(), flush=True)
        session.close()


def main() -> int:
    """Trains both ways; 1 if the losses differ."""
    parser = argparse.ArgumentParser(description="A small GPT, trained without and with ebbtide.")
    for name, default in (("layers", 6), ("width", 128), ("tokens", 128), ("batch", 4), ("steps", 6)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--memory", default="40%", help="of what plain training needs; default 40%%")
    args = parser.parse_args()
    ms.set_deterministic(True)  # MindSpore itself would not come to the same losses twice
    plain, swapped = list(train(False, args)), list(train(True, args))
    print(f"loss of the first step {plain[0]:.4f}, of the last {plain[-1]:.4f}")
    same = plain == swapped
    print(f"losses of {len(plain)} steps: {'identical, bit for bit' if same else 'DIFFERENT'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
