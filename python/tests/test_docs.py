"""The Python code in README.md and docs/torch.md runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ebbtide
import ebbtide.torch

ROOT = Path(__file__).resolve().parents[2]
FENCED = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# For each text what its reader has already; what is run after each piece of code is to come through.
GIVEN = {
    "README.md": ("", ["assert ebbtide.torch.stats()['bytes_out'] > 0"]),
    "docs/torch.md": (
        """
import torch
from torch import nn

class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

data = [(torch.randn(32, 64), torch.randint(5, (32,))) for _ in range(2)]
loss_of = nn.functional.cross_entropy
encoder, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(32, 64)
head = lambda h: h.square().mean()
""",
        [
            "assert session.stats()['steps'] == 2 and session.stats()['bytes_out'] > 0",
            "assert ebbtide.torch.stats()['bytes_out'] > session.stats()['bytes_out']",
        ],
    ),
}


def pieces(text: str) -> list[str]:
    """The pieces of Python code in one of the texts. Those for MindSpore run in python/mindspore_tests."""
    return [piece for piece in FENCED.findall((ROOT / text).read_text()) if "mindspore" not in piece]


@pytest.mark.parametrize("text", GIVEN)
def test_python_in(text: str, tmp_path: Path) -> None:
    given, checks = GIVEN[text]
    found = pieces(text)
    assert len(found) == len(checks), "a piece of code came or went: say here what is to come out of it"
    script = tmp_path / "script.py"
    script.write_text(given + "".join(f"{piece}\n{check}\n" for piece, check in zip(found, checks, strict=True)))
    path = os.pathsep.join([str(Path(ebbtide.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ebbtide session of" in done.stdout
    assert "moved out      0 B" not in done.stdout


def test_names_of_the_interface_by_hand() -> None:
    """What docs/torch.md and the texts around it name as `ebbtide.torch.…` exists."""
    for text in ("README.md", "docs/torch.md", "ARCHITECTURE.md"):
        for name in re.findall(r"ebbtide\.torch\.(\w+)", (ROOT / text).read_text()):
            assert hasattr(ebbtide.torch, name), f"{text}: ebbtide.torch.{name}"
    by_hand = (ROOT / "docs/torch.md").read_text().split("## By hand")[1].split("## Errors")[0]
    named = set(re.findall(r"`([A-Za-z_]+)`", by_hand)) - {"torch"}
    assert named <= set(ebbtide.torch.__all__), named - set(ebbtide.torch.__all__)


@pytest.mark.parametrize("text", ["README.md", "docs/torch.md", "docs/mindspore.md", "docs/gpu.md", "docs/figures.md"])
def test_links_lead_somewhere(text: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", (ROOT / text).read_text()):
        assert (ROOT / text).parent.joinpath(target).exists(), f"{text}: {target}"
