"""The harness itself: silent about right ways, and it finds wrong ones."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from .bits import assert_same, bits, difference
from .inputs import choose, operators, rank, samples
from .runs import Case, cases, compare, run
from .ways import Copied, EarlySlot, InPlace, Plain, ShiftedSlot, StridelessSlot, Way

RIGHT: list[Way] = [Copied(), InPlace()]
WRONG: list[Way] = [Copied("strideless", StridelessSlot), Copied("shifted", ShiftedSlot)]


def named(name: str, dtype: torch.dtype = torch.float32) -> list[Any]:
    """All inputs of an operator."""
    return [one for op in operators() if op.full_name == name for one in samples(op, dtype)]


def case(function: Callable[..., Any], *args: Any, loose: bool = False) -> Case:
    """A case of our own."""
    return Case("case", function, args, {}, lambda output: output, 7, loose)


def verdicts(one: Case, ways: list[Way]) -> dict[str, str]:
    """Kind by way."""
    return {name: verdict.kind for name, verdict in compare(one, ways).items()}


def test_right_ways_are_silent() -> None:
    for name in ("mul", "nn.functional.rrelu", "linalg.solve", "cumprod", "nn.functional.batch_norm"):
        for one in named(name)[:8]:
            for loose in (False, True):
                for each in cases(one, loose) + cases(one, loose, strided=True):
                    assert set(verdicts(each, RIGHT).values()) == {"same"}, each.name


def test_forgotten_strides_are_found() -> None:
    x = torch.randn(4, 6).t().requires_grad_()
    assert verdicts(case(lambda x: x * x * 3, x), [*RIGHT, WRONG[0]])["strideless"] == "different"


def test_a_shifted_view_is_found() -> None:
    x = torch.randn(10)[3:].requires_grad_()
    assert verdicts(case(lambda x: x.sin(), x), [*RIGHT, WRONG[1]])["shifted"] == "different"


def test_copies_inside_the_pack_hook_are_found() -> None:
    """The noise of rrelu is packed before it is drawn."""
    early = Copied("early", EarlySlot)
    found = [verdicts(each, [early])["early"] for one in named("nn.functional.rrelu") for each in cases(one)]
    assert "different" in found


def test_an_unpack_in_the_wrong_order_is_found() -> None:
    class Swapped:
        name = "swapped"

        def region(self) -> Any:
            region = Copied().region()
            packed: list[Any] = []

            def pack(tensor: torch.Tensor) -> int:
                packed.append(tensor.detach())
                return len(packed) - 1

            region.hooks = lambda: saved_tensors_hooks(pack, lambda at: packed[at ^ 1])  # type: ignore[method-assign]
            return region

    x, y = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    assert verdicts(case(lambda x, y: x * y, x, y), [Swapped()]) == {"swapped": "different"}


def test_another_error_is_found() -> None:
    class Raising(Copied):
        def region(self) -> Any:
            region = Copied().region()

            def pack(tensor: torch.Tensor) -> None:
                raise ValueError("no")

            region.hooks = lambda: saved_tensors_hooks(pack, lambda packed: packed)  # type: ignore[method-assign]
            return region

    x = torch.randn(5, requires_grad=True)
    verdict = compare(case(lambda x: x.sin(), x), [Raising("raising")])["raising"]
    assert (verdict.kind, verdict.text) == ("different", "expected error None, got forward: ValueError: no")


def test_what_differs_by_itself_is_not_blamed_on_a_way() -> None:
    calls = iter(range(1000))

    def drifting(x: torch.Tensor) -> torch.Tensor:
        return x * next(calls)

    verdict = compare(case(drifting, torch.randn(3, requires_grad=True)), [Copied()])
    assert verdict["copied"].kind == "unsettled"


def test_what_differs_now_and_then_is_not_blamed_on_a_way() -> None:
    calls = iter(range(1000))

    def drifting(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + (next(calls) > 1))

    verdict = compare(case(drifting, torch.randn(3, requires_grad=True)), [Copied()])
    assert verdict["copied"].kind == "unsettled"


def test_loose_cases_leave_storages_to_the_graph() -> None:
    """Inputs and outputs that a caller holds stay in place; those that nobody holds are emptied."""
    x = torch.randn(50, requires_grad=True)
    held = run(case(lambda x: x.exp().sin(), x), InPlace())
    loose = run(case(lambda x: x.exp().sin(), x, loose=True), InPlace())
    assert (held.away, loose.away) == (1, 1), "the result of exp is the input of sin: one storage"
    assert run(case(lambda x: x.sin(), x), InPlace()).away == 0
    assert run(case(lambda x: x.sin(), x, loose=True), InPlace()).away == 1


def test_signs_of_zero_and_payloads_of_nan_count() -> None:
    minus, plus = torch.tensor([-0.0]), torch.tensor([0.0])
    assert difference(bits(minus), bits(plus)) is not None
    patterns = [0x7FC00000, 0x7FC00001, 0x7F800001, 0xFFC00000]
    raw = bytearray(b"".join(struct.pack("<I", pattern) for pattern in patterns))
    nans = torch.frombuffer(raw, dtype=torch.float32)
    assert bits(nans).data == bytes(raw)
    assert difference(bits(nans[:1]), bits(nans[1:2])) is not None


def test_strides_dtype_and_shape_count() -> None:
    x = torch.zeros(4, 4)
    for other in (x.t(), x.view(16), x.int(), x.double(), x[:3]):
        same = other.stride() == x.stride() and other.shape == x.shape and other.dtype == x.dtype
        assert (difference(bits(x), bits(other)) is None) is same


def test_conjugates_and_negatives_compare_by_value() -> None:
    x = torch.randn(3, dtype=torch.complex64)
    assert bits(x.conj()).data == bits(x.conj().resolve_conj()).data != bits(x).data
    assert bits(x.conj().imag).data == bits(-x.imag).data


def test_unusual_tensors_compare_by_their_parts() -> None:
    sparse = torch.eye(3).to_sparse()
    assert_same(sparse, sparse.clone())
    assert difference(bits(sparse), bits(sparse * 2)) is not None
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert difference(bits(nested), bits(nested * 2)) is not None
    assert difference(bits(torch.eye(3).to_sparse_csr()), bits(torch.eye(3).to_sparse_csc())) is None


def test_the_choice_is_fixed_and_covers_everything() -> None:
    names = [(op.full_name, one.dtype, one.index) for one in choose(2000) for op in [one.op]]
    assert len(names) == len(set(names)) == 2000
    assert rank("mul", torch.float32, 3) == rank("mul", torch.float32, 3) != rank("mul", torch.float32, 4)


def test_plain_runs_have_no_hooks() -> None:
    x = torch.randn(3, requires_grad=True)
    outcome = run(case(lambda x: x.sin(), x), Plain())
    assert outcome.away == 0 and outcome.error is None and len(outcome.grads) == 1


@pytest.mark.parametrize("loose", [False, True])
def test_arguments_are_copied_for_every_run(loose: bool) -> None:
    """An operator that modifies its argument (running statistics) does the same to each run's copy."""
    statistics = torch.zeros(3)

    def counting(x: torch.Tensor, statistics: torch.Tensor) -> torch.Tensor:
        statistics += 1
        return x * statistics

    each = case(counting, torch.randn(3, requires_grad=True), statistics, loose=loose)
    assert set(verdicts(each, RIGHT).values()) == {"same"}
    assert statistics.tolist() == [0, 0, 0]
