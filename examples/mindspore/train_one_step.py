"""ebbtide under `nn.TrainOneStepCell`, which runs forward, backward and the optimizer in one call.

    python train_one_step.py

trains a perceptron of many layers twice, without and with ebbtide, and prints the losses and what ebbtide did. The
losses have to be identical, else the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

import ebbtide.mindspore


class Block(nn.Cell):
    """A perceptron that is added to what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm((width,)), nn.Dense(width, 4 * width), nn.Dense(4 * width, width)

    def construct(self, x: Tensor) -> Tensor:
        """The sum."""
        return x + self.down(ops.gelu(self.up(self.norm(x))))


def train(swap: bool, args: argparse.Namespace) -> list[float]:
    """The loss of each step."""
    ms.set_seed(0)
    np.random.seed(0)
    model = nn.SequentialCell([*(Block(args.width) for _ in range(args.layers)), nn.Dense(args.width, 10)])
    loss = nn.WithLossCell(model, nn.CrossEntropyLoss())
    optimizer = nn.Momentum(model.trainable_params(), learning_rate=0.05, momentum=0.9)
    step = nn.TrainOneStepCell(loss, optimizer)
    step.set_train()
    session = ebbtide.mindspore.session(model, "swap") if swap else None
    random, losses = np.random.default_rng(0), []
    for _ in range(args.steps):
        x = Tensor(random.normal(size=(args.batch, args.width)).astype(np.float32))
        y = Tensor(random.integers(0, 10, args.batch).astype(np.int32))
        with session.step() if session else nullcontext():
            losses.append(float(step(x, y).asnumpy()))
    if session:
        print(session.report(), flush=True)
        session.close()
    return losses


def main() -> int:
    """Trains both ways; 1 if the losses differ."""
    parser = argparse.ArgumentParser(description="TrainOneStepCell, without and with ebbtide.")
    for name, default in (("layers", 6), ("width", 128), ("batch", 512), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    args = parser.parse_args()
    ms.set_deterministic(True)  # MindSpore itself would not come to the same losses twice
    plain, swapped = train(False, args), train(True, args)
    print(f"loss of the first step {plain[0]:.4f}, of the last {plain[-1]:.4f}")
    print(f"losses of {len(plain)} steps: {'identical, bit for bit' if plain == swapped else 'DIFFERENT'}")
    return 0 if plain == swapped else 1


if __name__ == "__main__":
    sys.exit(main())
