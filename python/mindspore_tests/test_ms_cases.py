"""Faults seen in the field, on sessions: failing steps, changed tensors, shared storages, passes in flight, threads."""

from __future__ import annotations

import gc
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from cells import Chain, Does, Failing, Planned, Twice, Unused, doing, made_with_dropout, mixed
from checks import SMALL, all_tensors, array, assert_clean, bits, grad_of, plain, resident, stepped
from mindspore import Tensor, mint, nn, ops
from models import GPT, Size, batch, gradients_of, made

import ebbtide.mindspore
from ebbtide import ChangedError, CopyError, EbbtideError, EbbtideWarning, NoRoomError, PhaseError, SettingError, _stats
from ebbtide.mindspore import Session
from ebbtide.mindspore._bits import fingerprint
from ebbtide.mindspore._region import Region

ALL: Any = {"layers.*": "swap"}


def same_as_plain(cell: nn.Cell, *inputs: Tensor, policy: Any = ALL, steps: int = 2) -> Session:
    """Runs a cell plain and in a session, on the same weights."""
    grad = grad_of(lambda *given: cell(*given).sum(), cell)
    expected = bits(grad(*inputs))
    with ebbtide.mindspore.session(cell, policy, min_bytes=0) as s:
        for _ in range(steps):
            with s.step():
                found = bits(grad(*inputs))
            assert found == expected
        assert_clean(s)
    return s


# ---- C1, C2: storages


def two_views(x: Tensor, weight: Tensor) -> Tensor:
    y = x * weight
    return (y[:2] * y[:2]).sum() + (y[:4] * y[:4]).sum() + x


def chunks(x: Tensor, weight: Tensor) -> Tensor:
    q, k, v = ops.chunk(mint.matmul(x, weight), 3, -1)
    return mint.matmul(mint.matmul(q, k.permute((1, 0))), v) + x


def square_and_transposed(x: Tensor, weight: Tensor) -> Tensor:
    y = x * weight
    return mint.matmul(y, y.permute((1, 0))) + x


@pytest.mark.parametrize(
    ("function", "shape"),
    [(two_views, (8, 6)), (chunks, (6, 18)), (square_and_transposed, (6, 6))],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_c1_t13_views_of_one_storage(function: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    s = same_as_plain(doing(function, *shape), array(shape[0], 6, seed=3))
    assert s.stats()["tensors_out"] > 0


def with_table(x: Tensor, weight: Tensor, table: Tensor) -> Tensor:
    return x * table + ops.tanh(x * weight * table)


def test_c2_g6_a_table_that_all_layers_save_stays_for_its_user() -> None:
    table = array(64, 32, seed=5)
    before = table.asnumpy().copy()
    same_as_plain(doing(with_table, 64, 32, layers=12), array(64, 32), table)
    assert np.array_equal(table.asnumpy(), before)


def test_c2_what_the_user_holds_keeps_its_bytes() -> None:
    held: list[Tensor] = []

    def holding(x: Tensor, weight: Tensor) -> Tensor:
        y = ops.tanh(x * weight)
        held.append(y)
        return y * y

    cell = doing(holding, 64, 32)
    grad = grad_of(lambda x: cell(x).sum(), cell)
    expected = bits(grad(array(64, 32)))
    values = bits(held)
    held.clear()
    with ebbtide.mindspore.session(cell, ALL, min_bytes=0) as s:
        with s.step():
            assert bits(grad(array(64, 32))) == expected
        assert bits(held) == values


BY_NUMPY = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32"]
DTYPES: list[Any] = [*BY_NUMPY, "float64", "complex64", "complex128", ms.bfloat16]


def views_of(tensor: Tensor) -> list[Tensor]:
    """Views of a tensor of two dimensions: whole, with an offset, transposed, strided, of one element, of none."""
    with ms._no_grad():
        found = [tensor, tensor[2:5], tensor.permute((1, 0)), tensor[1:7].permute((1, 0)), tensor.view((2, 4, 6))]
        for offset, sizes, strides in ((1, (3, 2), (12, 3)), (4, (2, 3), (1, 1)), (0, (0, 6), (6, 1))):
            found.append(mint.empty((0,), dtype=tensor.dtype).set_(tensor.untyped_storage(), offset, sizes, strides))
        return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("together", [True, False], ids=["one group", "alone"])
def test_t16_t13_views_of_all_kinds_come_back(dtype: Any, together: bool) -> None:
    values = np.random.default_rng(0).normal(size=(8, 6)) * 50
    whole = Tensor(values.astype(dtype)) if isinstance(dtype, str) else Tensor(values.astype(np.float32)).astype(dtype)
    source = _stats.open_source()
    try:
        chosen = [views_of(whole)] if together else [[view] for view in views_of(whole)]
        for views in chosen:
            with Region(lambda: source.hub.open("views", 1), "views") as region:
                saved = [region._pack(view) for view in views]
            region.close()
            assert region.moved == sum(0 not in view.shape for view in views)
            if region.group is not None:
                region.group.start_offload()
                region.group.wait_offload()
            for view, each in zip(views, saved, strict=True):
                back = each.unpack()
                assert (back.shape, back.dtype, back.stride()) == (view.shape, view.dtype, view.stride())
                assert fingerprint([back]) == fingerprint([view])
                assert back.nbytes == 0 or back.untyped_storage().data_ptr() != view.untyped_storage().data_ptr()
    finally:
        _stats.retire(source, close=True)


# ---- C7: changes in place


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("policy", ["swap", "keep"])
def test_c7_t5_changed_in_place_after_it_was_saved(where: int, policy: str) -> None:
    change = [True]

    def changed(x: Tensor, weight: Tensor) -> Tensor:
        y = x * weight
        z = y * y
        if change[0]:
            with ms._no_grad():
                y.copy_(Tensor(np.full((4096,), 10, np.float32)))
        return z

    layers = [Does(mint.mul, 4096), Does(mint.mul, 4096), Does(mint.mul, 4096)]
    layers[where].function = changed
    cell = Chain(*layers)
    grad = grad_of(lambda x: cell(x).sum(), cell)
    x = array(4096)
    change[0] = False
    expected = bits(grad(x))
    change[0] = True
    with ebbtide.mindspore.session(
        cell, {"layers.*": "keep", f"layers.{where}": "swap"}, checksums=policy == "keep"
    ) as s:
        with pytest.raises(ChangedError, match="modified in place"), s.step():
            grad(x)
        change[0] = False
        with s.step():
            assert bits(grad(x)) == expected
        assert_clean(s)


@pytest.mark.parametrize("how", ["setitem", "storage"])
def test_c7_changes_that_mindspore_does_not_count_are_found_by_checksums(how: str) -> None:
    def changed(x: Tensor, weight: Tensor) -> Tensor:
        y = x * weight
        z = y * y
        with ms._no_grad():
            if how == "setitem":
                y[0] = 10.0
            else:
                y.untyped_storage().copy_(array(4096, seed=9).untyped_storage())
        return z

    cell = doing(changed, 4096)
    grad = grad_of(lambda x: cell(x).sum(), cell)
    with ebbtide.mindspore.session(cell, ALL, checksums=True) as s:
        with pytest.raises(ChangedError, match="which its version doesn't show"), s.step():
            grad(array(4096))
        assert_clean(s)


def test_checksums_change_no_bit() -> None:
    model = made(SMALL)
    with ebbtide.mindspore.session(model, checksums=True) as s:
        assert stepped(s, model) == plain()[0]
        assert s.stats()["bytes_out"] == 0


# ---- C8: recomputation


def test_c8_dropout_that_can_t_be_drawn_again_is_refused() -> None:
    size = Size(dropout=0.2)
    for model in (made(size), made_with_dropout(SMALL)):
        with ebbtide.mindspore.session(model, {"blocks.1": "recompute"}) as s:
            with pytest.raises(SettingError, match=r"blocks\.1 was recomputed and gave another output") as caught:
                stepped(s, model)
            assert "nn.Dropout" in str(caught.value) and caught.value.hint is not None
            model.set_train(False)
            expected = bits(gradients_of(model)(*batch(SMALL, 0)))
            assert stepped(s, model) == expected
            assert_clean(s)


# ---- C9: what backward never asks for


def test_c9_an_unused_branch_leaves_nothing() -> None:
    cell = Unused()
    grad = grad_of(lambda x: cell(x).sum(), cell)
    x = array(64, 32)
    expected = bits(grad(x))
    with ebbtide.mindspore.session(cell, ALL, min_bytes=0) as s:
        for number in range(40):
            with s.step():
                assert bits(grad(x)) == expected
            if number == 3:
                before = len(all_tensors())
        assert_clean(s)
        assert len(all_tensors()) <= before


def test_c9_a_frozen_tower_leaves_nothing() -> None:
    model = made(SMALL)
    for block in list(model.blocks)[:2]:
        for parameter in block.get_parameters():
            parameter.requires_grad = False
    for parameter in (*model.embed.get_parameters(), model.place):
        parameter.requires_grad = False
    grad = gradients_of(model)
    expected = bits(grad(*batch(SMALL, 0)))
    with ebbtide.mindspore.session(model, {"blocks.*": "swap"}, min_bytes=0) as s:
        for number in range(20):
            with s.step():
                assert bits(grad(*batch(SMALL, 0))) == expected
            if number == 3:
                before = len(all_tensors())
        assert_clean(s)
        assert len(all_tensors()) <= before


# ---- C10, C21: a step that fails


def failing_chain() -> tuple[Chain, Failing]:
    failing = Failing()
    layers = [Does(mixed, 32, 32, seed=number) for number in range(4)]
    return Chain(layers[0], layers[1], nn.SequentialCell([layers[2], failing]), layers[3]), failing


@pytest.mark.parametrize("policy", ["swap", "recompute"])
@pytest.mark.parametrize("where", ["forward", "backward", "hook", "after", "predicate"])
def test_c10_m7_after_a_failed_step_the_next_one_is_right(where: str, policy: Any) -> None:
    cell, failing = failing_chain()
    grad = grad_of(lambda x: cell(x).sum(), cell)
    x = array(64, 32)
    expected = bits(grad(x))
    asked = [where == "predicate"]

    def ask(_: Tensor) -> bool:
        if asked[0]:
            raise Planned("planned")
        return True

    def hook(*_: Any) -> None:
        raise Planned("planned")

    with ebbtide.mindspore.session(cell, {"layers.*": policy}, include=ask, min_bytes=0) as s:
        for _ in range(2):
            asked[0] = where == "predicate"
            failing.where = where
            handle = cell.layers[1].register_forward_pre_hook(hook) if where == "hook" else None
            if where != "predicate" or policy == "swap":
                with pytest.raises(Planned), s.step():
                    grad(x)
                    if where == "after":
                        raise Planned("planned")
            if handle is not None:
                handle.remove()
            failing.where, asked[0] = "", False
            assert_clean(s)
            with s.step():
                assert bits(grad(x)) == expected
            assert_clean(s)
        assert s.stats()["steps"] == 2


def test_c10_a_hundred_steps_with_an_exception_in_every_seventh() -> None:
    cell, failing = failing_chain()
    grad = grad_of(lambda x: cell(x).sum(), cell)
    x = array(4096, 32)
    expected = bits(grad(x))
    before, most = (0, 0), 16 << 20  # a step that fails has saved 6 MiB
    with ebbtide.mindspore.session(cell, ALL, min_bytes=0) as s:
        for number in range(100):
            if number % 7 == 6:
                failing.where = ("forward", "backward")[number % 2]
                with pytest.raises(Planned), s.step():
                    grad(x)
                failing.where = ""
                assert s.stats()["live_bytes"] == 0
                continue
            with s.step():
                assert bits(grad(x)) == expected
            if number == 14:
                before = len(all_tensors()), resident()
        assert_clean(s)
        assert len(all_tensors()) <= before[0] + 2 * 14
        assert resident() <= before[1] + most
        assert s.stats()["steps"] == 86


def test_c10_what_is_caught_inside_of_the_step() -> None:
    cell, failing = failing_chain()
    grad = grad_of(lambda x: cell(x).sum(), cell)
    x = array(64, 32)
    expected = bits(grad(x))
    with ebbtide.mindspore.session(cell, ALL, min_bytes=0) as s:
        with s.step():
            for where in ("forward", "backward"):
                failing.where = where
                with pytest.raises(Planned):
                    grad(x)
            failing.where = ""
            assert bits(grad(x)) == expected
        assert_clean(s)


def test_c10_c21_out_of_host_memory() -> None:
    model = made(SMALL)
    with ebbtide.mindspore.session(model, tier="host", host_bytes=1 << 14, min_bytes=0) as s:
        for _ in range(2):
            with pytest.raises(NoRoomError) as caught:
                stepped(s, model)
            assert caught.value.hint
            del caught
            gc.collect()
            assert_clean(s)
    assert bits([gradients_of(model)(*batch(SMALL, 0))]) == plain()[0]


def test_c21_a_spill_folder_that_vanishes(tmp_path: Path) -> None:
    folder = tmp_path / "spill"
    folder.mkdir()
    model = made(SMALL)
    with ebbtide.mindspore.session(model, spill_dir=folder, min_bytes=0) as s:
        folder.rmdir()
        with pytest.raises(EbbtideError, match="spill") as caught:
            stepped(s, model)
        assert caught.value.hint
        del caught
        folder.mkdir()
        assert stepped(s, model) == plain()[0]
        assert_clean(s)
    assert list(folder.iterdir()) == []


@pytest.mark.filterwarnings("ignore:a copy failed while a step was given up")
def test_c21_a_full_disk(tmp_path: Path) -> None:
    """Files of this process may not grow: the same as a disk without room, to who writes."""
    model = made(SMALL)
    with ebbtide.mindspore.session(model, spill_dir=tmp_path, min_bytes=0) as s:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, limits[1]))
        try:
            with pytest.raises((CopyError, NoRoomError)) as caught:
                stepped(s, model)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert caught.value.hint
        del caught
        assert_clean(s)
        assert stepped(s, model) == plain()[0]
        assert_clean(s)
    assert list(tmp_path.iterdir()) == []


def test_c26_interrupted_in_a_forward() -> None:
    model = made(SMALL)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with ebbtide.mindspore.session(model, min_bytes=0) as s:
        for cell in (model.blocks[1].norm2, model.blocks[1], model.head):
            handle = cell.register_forward_pre_hook(stop)
            with pytest.raises(KeyboardInterrupt):
                stepped(s, model)
            handle.remove()
            assert_clean(s)
            assert stepped(s, model) == plain()[0]


# ---- C11, C12: other passes


def test_c11_evaluation_between_steps_and_inside_of_them() -> None:
    model = made(SMALL)
    expected = plain(steps=3)
    with ebbtide.mindspore.session(model, min_bytes=0) as s:
        grad = gradients_of(model)
        for number in range(3):
            model(*batch(SMALL, 7))
            with s.step():
                model(*batch(SMALL, 8))
                found = bits(grad(*batch(SMALL, number)))
                with ms._no_grad():
                    model(*batch(SMALL, 9))
            assert found == expected[number]
        assert s.stats()["left_without_grad"] == 3 * 2 * 4
        assert_clean(s)


def test_c12_m10_a_layer_that_is_called_twice() -> None:
    s = same_as_plain(Twice(), array(64, 32))
    assert s.stats()["layer_calls"] == 2 * 4


def micro(model: GPT, numbers: range, s: Session | None) -> list[bytes]:
    """Losses and gradients of several passes, all of which are in flight before any backward."""

    def forward() -> Tensor:
        loss = Tensor(np.float32(0))
        for number in numbers:
            if s is None:
                loss = loss + model(*batch(SMALL, number))
            else:
                with s.step():
                    loss = loss + model(*batch(SMALL, number))
        return loss

    return bits(grad_of(forward, model)())


def test_c12_m10_micro_batches_in_flight() -> None:
    expected = micro(made(SMALL), range(4), None)
    model = made(SMALL)
    with ebbtide.mindspore.session(model, min_bytes=0) as s:
        for _ in range(2):
            assert micro(model, range(4), s) == expected
        assert s.stats()["steps"] == 8
        with s.step():  # one more settles what was in flight
            pass
        assert_clean(s)


def test_c12_several_backwards_in_one_step() -> None:
    model = made(SMALL)
    expected = plain(steps=3)
    with ebbtide.mindspore.session(model, min_bytes=0) as s:
        grad = gradients_of(model)
        with s.step():
            found = [bits(grad(*batch(SMALL, number))) for number in range(3)]
        assert found == expected
        assert_clean(s)


def test_m5_layers_inside_of_a_checkpoint_are_left_to_it() -> None:
    def run(model: GPT, reentrant: bool) -> Callable[..., Any]:
        def forward(tokens: Tensor, targets: Tensor) -> Tensor:
            x = model.embed(tokens) + model.place
            for block in model.blocks:
                x = ms.recompute(block, x, model.mask, use_reentrant=reentrant)
            logits = model.head(model.norm(x))
            return ops.cross_entropy(logits.view((-1, SMALL.vocabulary)), targets.view((-1,)))

        return grad_of(forward, model)

    for reentrant in (False, True):
        expected = bits(run(made(SMALL), reentrant)(*batch(SMALL, 0)))
        model = made(SMALL)
        with ebbtide.mindspore.session(model, min_bytes=0) as s:
            with pytest.warns(EbbtideWarning, match=r"runs inside of ms\.recompute"), s.step():
                found = bits(run(model, reentrant)(*batch(SMALL, 0)))
            assert found == expected
            assert s.stats()["bytes_out"] == 0
            assert "ran inside of ms.recompute" in s.report()
            assert_clean(s)


# ---- C24: several at once


def test_c24_two_models_in_turns() -> None:
    expected = plain(steps=3)
    one, other = made(SMALL), made(SMALL)
    with ebbtide.mindspore.session(one, min_bytes=0) as first, ebbtide.mindspore.session(other, "recompute") as second:
        for number in range(3):
            assert stepped(first, one, number=number) == expected[number]
            with first.step():  # the steps of two sessions may be inside of each other
                assert stepped(second, other, number=number) == expected[number]
        assert_clean(first)


def test_c24_a_step_does_nothing_to_other_threads() -> None:
    expected = plain()[0]
    model = made(SMALL)
    found: list[Any] = []
    with ebbtide.mindspore.session(model, min_bytes=0) as s:
        with s.step():
            thread = threading.Thread(target=lambda: found.append(bits(gradients_of(model)(*batch(SMALL, 0)))))
            thread.start()
            thread.join()
        assert s.stats()["layer_calls"] == 0
    assert found == [expected]


def test_c24_two_threads_with_a_session_each() -> None:
    expected = plain(steps=3)
    found: dict[int, list[Any]] = {0: [], 1: []}
    lock = threading.Lock()  # MindSpore records for one thread at a time

    def train(which: int) -> None:
        model = made(SMALL)
        with ebbtide.mindspore.session(model, min_bytes=0) as s:
            for number in range(3):
                with lock:
                    found[which].append(stepped(s, model, number=number))

    threads = [threading.Thread(target=train, args=(which,)) for which in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: expected, 1: expected}


def test_reset_gives_up_what_is_in_flight_and_sessions_go_on() -> None:
    model = made(SMALL)
    with ebbtide.mindspore.session(model, min_bytes=0) as s:

        def forward(*given: Tensor) -> Tensor:
            loss = model(*given)
            ebbtide.mindspore.synchronize()
            ebbtide.mindspore.reset()
            return loss

        with pytest.raises(PhaseError, match="given up"), s.step():
            grad_of(forward, model)(*batch(SMALL, 0))
        assert stepped(s, model) == plain()[0]
        assert_clean(s)
