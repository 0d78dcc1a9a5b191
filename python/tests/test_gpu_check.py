"""`scripts/gpu-check` runs through: on the CPU, on the fake accelerator, and where things are missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import ebbtide

TESTS = Path(__file__).resolve().parent
GPU_CHECK = TESTS.parents[1] / "scripts" / "gpu-check"
BLOCKS = ("plain", "save_on_cpu", "checkpoint", "swap_fit", "swap_all")
STAGES = ("machine", "exact", *(f"blocks-{mode}" for mode in BLOCKS), "failures")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is imported here, packed as `gpu-check` takes it."""
    package = Path(ebbtide.__file__).parent
    path = tmp_path_factory.mktemp("wheel") / "ebbtide-0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as packed:
        for file in package.rglob("*"):
            if "__pycache__" not in file.parts:
                packed.write(file, file.relative_to(package.parent))
    return path


def run(out: Path, *arguments: object, **more: str) -> tuple[str, dict[str, Any]]:
    """Its table, and what every stage wrote."""
    command = [sys.executable, str(GPU_CHECK), "--out", str(out), "--patience", "4", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OUT")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment | more, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}


def check(records: dict[str, Any]) -> None:
    """Every stage ran to its end and found nothing wrong."""
    assert set(records) == set(STAGES)
    for name, record in records.items():
        assert record["ended"] and not record["wrong"], (name, record)
    results = records["exact"]["results"]
    assert len(results) == 2
    assert all(text.startswith("identical") for ways in results.values() for text in ways.values()), results
    for mode in BLOCKS:
        assert records[f"blocks-{mode}"]["step_ms"] > 0
    assert records["blocks-swap_all"]["per_step"]["bytes_out"] > 0
    assert records["failures"]["steps"] == 20


@pytest.mark.timeout(900)
def test_small_on_the_cpu(tmp_path: Path, wheel: Path) -> None:
    table, records = run(tmp_path, "--cpu-small", "--wheel", wheel)
    check(records)
    assert "missing: machine: pinned memory" in table
    assert "swapped: all but the last" in table
    assert "memory flat" in table


@pytest.mark.timeout(900)
def test_small_on_the_fake_accelerator(tmp_path: Path, wheel: Path) -> None:
    (tmp_path / "back_end.py").write_text("import fake\n\nfake.load()\n")
    path = os.pathsep.join([str(TESTS), str(tmp_path)])
    _, records = run(tmp_path / "out", "--small", "--import", "back_end", "--wheel", wheel, PYTHONPATH=path)
    check(records)
    machine = records["machine"]
    assert machine["device"] == "fake:0"
    assert machine["copies"]["pinned"] and machine["layer"]["saved_bytes"] > 0
    # Nothing is missing there, so that everything that a GPU will run has been run.
    assert not [record["missing"] for record in records.values() if record["missing"]]


def test_without_an_accelerator_or_a_wheel(tmp_path: Path) -> None:
    nothing = tmp_path / "not-there.whl"
    table, records = run(tmp_path / "out", "--wheel", nothing, CUDA_VISIBLE_DEVICES="")
    assert set(records) == set(STAGES)
    assert "missing: machine: no accelerator" in table
    assert "missing: machine: ebbtide: the wheel can't be used" in table
    again = subprocess.run(
        [sys.executable, str(GPU_CHECK), "--table", str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    assert again.stdout == table


def test_what_is_wrong_fails_and_time_limits_end_a_stage(tmp_path: Path) -> None:
    # No time at all: every stage is stopped, which is not wrong.
    table, records = run(tmp_path, "--cpu-small", "--patience", "0.001")
    assert all("stopped at its time limit" in " ".join(record["missing"]) for record in records.values())
    assert "WRONG" not in table
    changed = records["exact"] | {"wrong": ["planted"]}
    (tmp_path / "exact.json").write_text(json.dumps(changed))
    shown = subprocess.run(
        [sys.executable, str(GPU_CHECK), "--table", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 1
    assert "WRONG: exact: planted" in shown.stdout
