"""How a process ends that uses ebbtide."""

from __future__ import annotations

import subprocess
import sys

FAILED_BACKWARD = """
import torch, ebbtide.torch

def fail(_):
    raise ValueError("planned")

a, b, c = (torch.randn(6, 6, requires_grad=True) for _ in range(3))
with ebbtide.torch.offload(tier="file", min_bytes=0):
    x, y, z = a.exp() * b, b.exp() * c, c.exp()
    loss = (x.sin() * y.cos() * z).exp().sum()
y.register_hook(fail)
try:
    loss.backward()
except ValueError:
    print("failed as planned")
"""


def test_c10_a_process_whose_backward_failed_ends_as_it_should() -> None:
    """Autograd keeps what a failed backward did not get to; with hooks, plain torch ends with a segmentation fault."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FAILED_BACKWARD], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, "failed as planned"), done.stderr
