"""Cases C10 and C12, row W10: what once went wrong around steps of a session."""

from __future__ import annotations

import mindspore as ms
import pytest
from mindspore import Tensor
from models import Size, batch, gradients_of, made

import ebbtide.mindspore
from ebbtide import SettingError

SIZE = Size(layers=3)


def test_c10_an_exception_outside_of_steps_leaves_later_ones_right() -> None:
    model = made(SIZE)
    grad = gradients_of(model)

    def fails(*_: Tensor) -> Tensor:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        ms.value_and_grad(fails, None, list(model.trainable_params()))(*batch(SIZE, 0))
    with ebbtide.mindspore.session(model, memory="100%", min_bytes=0) as s:
        for number in range(4):
            with s.step():
                grad(*batch(SIZE, number))
            assert s.stats()["live_bytes"] == 0
        assert s.plan() is not None


def test_c12_a_layer_that_stands_twice_gets_a_plan() -> None:
    model = made(SIZE)
    model.blocks[2] = model.blocks[1]
    grad = ms.value_and_grad(model, None, [model.place])
    with ebbtide.mindspore.session(model, memory="100%", min_bytes=0) as s:
        for number in range(4):
            with s.step():
                grad(*batch(SIZE, number))
        assert s.plan() is not None


def test_w10_a_layer_with_mindspore_s_own_recomputation_is_refused() -> None:
    model = made(SIZE)
    model.blocks[1].recompute()
    with pytest.raises(SettingError, match=r"blocks\.1 was told to recompute"):
        ebbtide.mindspore.session(model)
