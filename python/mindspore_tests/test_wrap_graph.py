"""Wrappers in what MindSpore compiles: refused with what to use instead (row W10 of the catalogue)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import pytest
from covers import array
from mindspore import Tensor, nn

from ebbtide import SettingError
from ebbtide.mindspore import checkpoint, checkpoint_wrapper, swap, swap_wrapper

SCRIPT = Path(__file__).with_name("compiled_runs.py")
FUNCTIONS = ["through_swap_wrapper", "through_checkpoint_wrapper", "through_swap", "through_checkpoint"]
CONTEXTS = ["through_context", "through_class"]


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, list[str]]]:
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, run.stderr[-2000:]
    read: dict[str, dict[str, list[str]]] = json.loads(run.stdout[run.stdout.index('{"plain"') :])
    return read


def is_refused(outcome: list[str]) -> bool:
    return outcome[0] == "SettingError" and "ms.jit" in outcome[1] and "unwrap_cell(cell)" in outcome[1]


def test_w10_outside_of_what_is_compiled_all_of_them_run(found: dict[str, Any]) -> None:
    assert set(map(tuple, found["plain"].values())) == {("nothing", "")}


@pytest.mark.parametrize("how", ["ast", "strict", "bytecode"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_w10_inside_of_jit_it_is_refused(found: dict[str, Any], how: str, name: str) -> None:
    assert is_refused(found[how][name]), found[how][name]


@pytest.mark.parametrize("how", ["ast", "strict", "bytecode"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_w10_contexts_inside_of_jit_are_an_error(found: dict[str, Any], how: str, name: str) -> None:
    """By source MindSpore itself refuses to compile a `with` of theirs."""
    assert found[how][name][0] in (["TypeError", "SettingError"] if how != "bytecode" else ["SettingError"])


def test_w10_inside_of_a_trace_it_is_refused(found: dict[str, Any]) -> None:
    assert is_refused(found["trace"]["through_swap_wrapper"]), found["trace"]


def test_w10_in_graph_mode_it_is_refused(found: dict[str, Any]) -> None:
    names = ["SwapWrapper in a cell", "CheckpointWrapper in a cell", "SwapWrapper", "CheckpointWrapper"]
    assert list(found["graph"]) == names
    for outcome in found["graph"].values():
        assert is_refused(outcome), outcome
        assert "PyNative" in outcome[1]


class Jitted(nn.Cell):
    @ms.jit
    def construct(self, x: Tensor) -> Tensor:
        return x * 2


@ms.jit
def doubled(x: Tensor) -> Tensor:
    return x * 2


@ms.jit(capture_mode="bytecode")
def doubled_by_bytecode(x: Tensor) -> Tensor:
    return x * 2


@ms.jit(capture_mode="trace")
def doubled_by_trace(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("wrap", [swap_wrapper, checkpoint_wrapper])
@pytest.mark.parametrize("compiled", [Jitted(), doubled, doubled_by_bytecode, doubled_by_trace, ms.jit(nn.Dense(2, 2))])
def test_w10_what_is_compiled_is_refused_when_it_is_wrapped(wrap: Any, compiled: Any) -> None:
    with pytest.raises(SettingError, match=r"that ms\.jit compiles") as caught:
        wrap(compiled)
    assert caught.value.hint is not None
    assert "unwrap_cell(cell)" in caught.value.hint


def test_w10_so_is_a_cell_that_has_it_inside() -> None:
    for call in (
        swap_wrapper,
        checkpoint_wrapper,
        lambda cell: swap(cell, array(2)),
        lambda c: checkpoint(c, array(2)),
    ):
        with pytest.raises(SettingError, match="Jitted, which is in SequentialCell, that"):
            call(nn.SequentialCell(nn.Dense(2, 2), Jitted()))
