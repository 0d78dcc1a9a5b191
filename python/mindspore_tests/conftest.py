"""Settings of MindSpore under which a run can be repeated, and small operations don't wait for each other's threads."""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import pytest

ms.set_context(pynative_synchronize=True, deterministic="ON")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MindSpore writes what it could not compile into a folder of the current one."""
    monkeypatch.chdir(tmp_path)
