"""The examples run, at reduced size, and so does the Python code in README.md and docs/mindspore.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ebbtide
import ebbtide.mindspore

ROOT = Path(__file__).resolve().parents[2]
FENCED = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GIVEN = {
    "README.md": "",
    "docs/mindspore.md": """
import numpy as np
from mindspore import Tensor, nn, ops

class MyModel(nn.Cell):
    def __init__(self):
        super().__init__()
        self.blocks = nn.CellList([nn.SequentialCell([nn.Dense(64, 64), nn.GELU()]) for _ in range(3)])
        self.head = nn.Dense(64, 5)

    def construct(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

data = [(Tensor(np.ones((32, 64), np.float32)), Tensor(np.ones(32, np.int32))) for _ in range(2)]
loss_of = ops.cross_entropy
""",
}


def run(*command: str) -> str:
    """What a program prints, run as its users run it."""
    path = os.pathsep.join([str(Path(ebbtide.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "GLOG_v": "3"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, check=False, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ebbtide session of" in done.stdout
    assert "moved out      0 B" not in done.stdout
    return done.stdout


@pytest.mark.parametrize("text", GIVEN)
def test_python_in(text: str, tmp_path: Path) -> None:
    found = [piece for piece in FENCED.findall((ROOT / text).read_text()) if "mindspore" in piece]
    assert len(found) == 1, "a piece of code came or went"
    script = tmp_path / "script.py"
    script.write_text(f"{GIVEN[text]}{found[0]}\nassert session.stats()['bytes_out'] > 0\n")
    run(str(script))


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("gpt.py", "--layers 3 --width 64 --tokens 64 --batch 2 --steps 4"),
        ("train_one_step.py", "--layers 3 --width 64 --batch 64 --steps 3"),
    ],
)
def test_examples(script: str, arguments: str) -> None:
    printed = run(str(ROOT / "examples" / "mindspore" / script), *arguments.split())
    assert "steps: identical, bit for bit" in printed


def test_names_exist() -> None:
    for text in GIVEN:
        for name in re.findall(r"ebbtide\.mindspore\.(\w+)", (ROOT / text).read_text()):
            assert hasattr(ebbtide.mindspore, name), f"{text}: ebbtide.mindspore.{name}"
