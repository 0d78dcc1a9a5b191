"""A GPT whose attention is written out, on random tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops


@dataclasses.dataclass(frozen=True)
class Size:
    """How large it is."""

    layers: int = 4
    width: int = 32
    heads: int = 4
    length: int = 16
    batch: int = 2
    vocabulary: int = 64
    dropout: float = 0.0


LARGE = Size(layers=12, width=256, heads=8, length=256, batch=4, vocabulary=256)


class Block(nn.Cell):
    """Attention and a perceptron, each added to what comes in."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.norm1, self.norm2 = nn.LayerNorm((size.width,)), nn.LayerNorm((size.width,))
        self.qkv = nn.Dense(size.width, 3 * size.width)
        self.out = nn.Dense(size.width, size.width)
        self.up = nn.Dense(size.width, 4 * size.width)
        self.down = nn.Dense(4 * size.width, size.width)
        self.drop = nn.Dropout(p=size.dropout)

    def construct(self, x: Tensor, mask: Tensor) -> Tensor:
        """A tensor of (batch, length, width) in and out; the mask is added to attention's scores."""
        batch, length, width = x.shape
        heads = self.size.heads
        qkv = self.qkv(self.norm1(x)).view((batch, length, 3, heads, width // heads)).permute((2, 0, 3, 1, 4))
        q, k, v = qkv[0], qkv[1], qkv[2]
        scores = mint.matmul(q, k.permute((0, 1, 3, 2))) / math.sqrt(width // heads) + mask
        weights = self.drop(ops.softmax(scores, -1))
        mixed = mint.matmul(weights, v).permute((0, 2, 1, 3)).reshape((batch, length, width))
        x = x + self.drop(self.out(mixed))
        return x + self.drop(self.down(ops.gelu(self.up(self.norm2(x)))))


class GPT(nn.Cell):
    """Tokens in, the loss out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.place = Parameter(Tensor(np.zeros((size.length, size.width), np.float32)), name="place")
        self.blocks = nn.CellList([Block(size) for _ in range(size.layers)])
        self.norm = nn.LayerNorm((size.width,))
        self.head = nn.Dense(size.width, size.vocabulary)
        self.mask = Tensor(np.triu(np.full((size.length, size.length), -1e9, np.float32), 1))

    def construct(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy of the next token."""
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x, self.mask)
        logits = self.head(self.norm(x))
        return ops.cross_entropy(logits.view((-1, self.size.vocabulary)), targets.view((-1,)))


def made(size: Size, seed: int = 0) -> GPT:
    """The same model each time."""
    ms.set_seed(seed)
    model = GPT(size)
    random = np.random.default_rng(seed)
    for parameter in model.get_parameters():
        shape = parameter.shape
        scale = 0.05 if len(shape) > 1 else 0.0
        values = random.normal(size=shape).astype(np.float32) * scale
        if parameter.name.endswith("gamma"):
            values += 1
        parameter.set_data(Tensor(values))
    model.set_train()
    return model


def batch(size: Size, number: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step."""
    random = np.random.default_rng(number)
    shape = (size.batch, size.length)
    tokens, targets = (random.integers(0, size.vocabulary, shape).astype(np.int32) for _ in range(2))
    return Tensor(tokens), Tensor(targets)


Gradients = Callable[..., Any]


def gradients_of(model: GPT) -> Gradients:
    """A function of a batch that returns the loss and all gradients."""
    return ms.value_and_grad(model, None, list(model.trainable_params()))
