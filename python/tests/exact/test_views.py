"""Views of every sort, every dtype and unusual tensors come back as they were (T13, T16, C1)."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from .bits import Bits, bits, differences
from .regions import IN_PLACE, Context, Regions, keep, same

Maker = Callable[[], Sequence[torch.Tensor]]


def facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a tensor is besides its bits."""
    return type(tensor), tensor.layout, tensor.device, tensor.is_conj(), tensor.is_neg()


def there_and_back(make: Maker, regions: Regions) -> tuple[int, int]:
    """Saves what `make` makes, lets go of it, and compares what comes back; tensors and bytes that left."""
    tensors, before = make(), (regions.moved(), regions.bytes_moved())
    expected = [(bits(tensor), facts(tensor)) for tensor in tensors]
    seen: list[tuple[Bits, tuple[Any, ...]]] = []
    with regions.region():
        result = keep(lambda *back: seen.extend((bits(tensor), facts(tensor)) for tensor in back), *tensors)
        del tensors
    result.backward()
    assert differences([one for one, _ in expected], [one for one, _ in seen]) is None
    assert [other for _, other in expected] == [other for _, other in seen]
    return regions.moved() - before[0], regions.bytes_moved() - before[1]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random values."""
    return torch.randn(*shape, dtype=dtype)


def _slices() -> list[torch.Tensor]:
    x = numbers(8, 5)
    return [x[:2], x[:4]]


def _same_start_other_shape() -> list[torch.Tensor]:
    x = numbers(5)
    return [x[:3], x[:5], x[:1], x.view(5, 1)]


def _chunks() -> list[torch.Tensor]:
    return list(numbers(4, 6, 24).chunk(3, -1))


def _square_and_transpose() -> list[torch.Tensor]:
    x = numbers(7, 7)
    return [x, x.t()]


def _overlapping() -> list[torch.Tensor]:
    x = numbers(40)
    return [x.unfold(0, 8, 3), x.as_strided((5, 5), (2, 3), 4), x[1:], x[:-1]]


def _stepped() -> list[torch.Tensor]:
    x = numbers(20, 9)
    return [x[::2], x[1::2], x[:, ::4], x[3:7, 2:5].t(), x.flip(0)]


def _offset() -> list[torch.Tensor]:
    return [numbers(100)[37:], numbers(10, 10)[3, 4:]]


def _no_dimensions() -> list[torch.Tensor]:
    x = numbers(6)
    return [torch.tensor(2.5), x[3], x[0], x.sum()]


def _empty_views() -> list[torch.Tensor]:
    x = numbers(6, 4)
    return [x[2:2], x[:, :0], x[6:], torch.empty(0), torch.empty(3, 0, 5), x]


def _permuted() -> list[torch.Tensor]:
    x = numbers(2, 3, 4, 5)
    return [x.permute(3, 1, 0, 2), x.to(memory_format=torch.channels_last), x.movedim(0, -1)]


def _odd_strides() -> list[torch.Tensor]:
    return [
        torch.empty_strided((3, 1, 2), (2, 77, 1)).fill_(1.5),
        torch.empty_strided((1,), (6,)).fill_(2.5),
        torch.empty_strided((4, 4), (9, 2)).fill_(3.5),
    ]


def _other_dtypes_of_one_storage() -> list[torch.Tensor]:
    x = numbers(16)
    return [x, x.view(torch.int32), x.view(torch.uint8)[3:9], x.view(torch.float64), x.view(torch.bfloat16)[1:]]


def _complex_views() -> list[torch.Tensor]:
    z = numbers(5, 4, dtype=torch.complex64)
    return [z.real, z.imag, torch.view_as_real(z), z.conj(), z.conj().imag, z.mH, z[1:].conj().t(), z]


def _negated() -> list[torch.Tensor]:
    z = numbers(6, dtype=torch.complex128)
    return [z.conj().imag, torch._neg_view(numbers(4)), torch._neg_view(z).conj()]


MAKERS = {
    "slices": _slices,
    "same start": _same_start_other_shape,
    "q, k and v": _chunks,
    "square and transpose": _square_and_transpose,
    "overlapping": _overlapping,
    "steps": _stepped,
    "offsets": _offset,
    "no dimensions": _no_dimensions,
    "empty views": _empty_views,
    "permuted": _permuted,
    "odd strides": _odd_strides,
    "other dtypes": _other_dtypes_of_one_storage,
    "complex": _complex_views,
    "negated": _negated,
}


@pytest.mark.parametrize("name", MAKERS)
def test_t13_t16_c1_views(name: str, regions: Regions) -> None:
    there_and_back(MAKERS[name], regions)


@pytest.mark.parametrize("name", MAKERS)
def test_t13_views_saved_one_by_one(name: str, regions: Regions) -> None:
    """Each view by an operator of its own, in either order."""
    for order in (1, -1):
        with regions.region():
            tensors = MAKERS[name]()[::order]
            expected = [bits(tensor) for tensor in tensors]
            seen: dict[int, Bits] = {}
            results = [keep(remember(seen, number), tensor) for number, tensor in enumerate(tensors)]
            del tensors
        for result in results:
            result.backward()
        assert differences(expected, [seen[number] for number in range(len(expected))]) is None


def test_t13_overlapping_views_are_saved_once(regions: Regions) -> None:
    for make, storage in ((_slices, 8 * 5 * 4), (_chunks, 4 * 6 * 24 * 4), (_square_and_transpose, 7 * 7 * 4)):
        _, moved = there_and_back(make, regions)
        assert 0 < moved <= storage


def test_t16_a_broadcast_view_moves_its_real_bytes(regions: Regions) -> None:
    _, moved = there_and_back(lambda: [numbers(1, 8).expand(1000, 8)], regions)
    assert moved == 32
    _, moved = there_and_back(lambda: [torch.tensor(1.5).expand(50, 60), numbers(3, 1, 2).expand(3, 7, 2)], regions)
    assert moved == 4 + 24


@pytest.mark.parametrize("seed", range(8))
def test_t13_random_views(seed: int, regions: Regions) -> None:
    """Any mix of views over a few storages, saved by any number of operators in any order."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(12):
        storages = [numbers(draw.randint(1, 60)) for _ in range(draw.randint(1, 3))]
        views = [random_view(draw.choice(storages), draw) for _ in range(draw.randint(1, 9))]
        expected = [bits(view) for view in views]
        seen: dict[int, Bits] = {}
        with regions.region():
            results = [keep(remember(seen, number), view) for number, view in enumerate(views)]
            if draw.random() < 0.7:
                views.clear()
            if draw.random() < 0.7:
                storages.clear()
        draw.shuffle(results)
        for result in results:
            result.backward()
        assert differences(expected, [seen[number] for number in range(len(expected))]) is None


def remember(seen: dict[int, Bits], number: int) -> Callable[[torch.Tensor], None]:
    """Notes the bits of a tensor under a number."""

    def look(tensor: torch.Tensor) -> None:
        seen[number] = bits(tensor)

    return look


def random_view(base: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """A view with any offset, sizes and strides that fit, perhaps of another dtype."""
    offset = draw.randrange(base.numel())
    left = base.numel() - 1 - offset
    shape, stride = [], []
    for _ in range(draw.randint(0, 3)):
        step = draw.randint(0, 4)
        size = draw.randint(0, 1 + (min(left // step, 5) if step else 5))
        left -= step * max(0, size - 1)
        shape.append(size)
        stride.append(step)
    view = base.as_strided(shape, stride, offset)
    return view.view(torch.int32) if draw.random() < 0.2 else view


def _dtypes() -> list[torch.dtype]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted((dtype for dtype in found if _makes(dtype)), key=str)


def _makes(dtype: torch.dtype) -> bool:
    """Whether plain tensors of this dtype can be made at all."""
    try:
        torch.empty(4, dtype=dtype).detach().clone()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def any_bytes(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Elements of arbitrary bits: every NaN payload, denormal and sign is as likely as any other."""
    tensor = torch.empty(count, dtype=dtype)
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    flat.random_(0, 2 if dtype is torch.bool else 256)
    return tensor


def storage_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of the storage: for dtypes that have no copy of their own."""
    return bytes(tensor.untyped_storage().tolist())


@pytest.mark.parametrize("dtype", _dtypes(), ids=str)
def test_t16_every_dtype(dtype: torch.dtype, regions: Regions) -> None:
    x = any_bytes(dtype, 64)
    expected, seen = storage_bytes(x), []
    with regions.region():
        result = keep(lambda back: seen.append((storage_bytes(back), back.dtype, back.shape)), x)
        del x
    moved = regions.bytes_moved()
    result.backward()
    assert seen == [(expected, dtype, torch.Size([64]))]
    assert moved > 0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.bool, torch.complex64])
def test_t16_views_of_small_dtypes(dtype: torch.dtype, regions: Regions) -> None:
    def make() -> list[torch.Tensor]:
        x = any_bytes(dtype, 63)
        return [x[1:8], x.view(7, 9).t(), x[5], x[::3], x[:1].expand(4, 1)]

    there_and_back(make, regions)


def test_dtypes_that_matter_are_covered() -> None:
    wanted = {torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.bool, torch.complex32}
    assert wanted | {torch.complex128, torch.int8, torch.uint8, torch.int64, torch.uint16} <= set(_dtypes())


# ---- what is not swapped passes through


def _sparse() -> list[torch.Tensor]:
    eye = torch.eye(4)
    uncoalesced = torch.sparse_coo_tensor(torch.tensor([[1, 1, 2]]), torch.tensor([1.0, 2.0, 3.0]), (4,))
    return [eye.to_sparse(), uncoalesced, eye.to_sparse_csr(), eye.to_sparse_csc(), eye.to_sparse_bsr((2, 2))]


def _jagged() -> list[torch.Tensor]:
    parts = [numbers(2, 3), numbers(4, 3)]
    return [torch.nested.nested_tensor(parts, layout=torch.jagged)]


def _meta() -> list[torch.Tensor]:
    return [torch.empty(3, 4, device="meta"), torch.empty_strided((2, 2), (1, 5), device="meta")]


def _quantized() -> list[torch.Tensor]:
    x = numbers(6, 4)
    return [
        torch.quantize_per_tensor(x, 0.1, 2, torch.qint8),
        torch.quantize_per_channel(x, torch.rand(4) + 0.1, torch.zeros(4), 1, torch.quint8),
    ]


UNUSUAL = {"sparse": _sparse, "jagged": _jagged, "meta": _meta, "quantized": _quantized}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_tensors_pass_through(name: str, regions: Regions) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        there_and_back(UNUSUAL[name], regions)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_of_operators(layout: torch.layout, regions: Regions) -> None:
    def compute(region: Context) -> Any:
        parts = [numbers(2, 3).requires_grad_(), numbers(4, 3).requires_grad_()]
        with warnings.catch_warnings(), region():
            warnings.simplefilter("ignore")
            x = torch.nested.as_nested_tensor(parts, layout=layout)
            y = (x * x).sin() * x
        torch.stack([part.sum() for part in y.unbind()]).sum().backward()
        return [part.grad for part in parts]

    same(compute, regions, enough=0)


def test_unusual_and_usual_tensors_together(regions: Regions) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        moved, _ = there_and_back(lambda: [numbers(5), *_sparse(), numbers(3, 3).t(), *_meta(), numbers(2)], regions)
    assert moved == 3


def test_quantized_parameters_survive(regions: Regions) -> None:
    seen = []
    x = _quantized()[0]
    with regions.region():
        result = keep(lambda back: seen.append((back.q_scale(), back.q_zero_point(), back.qscheme())), x)
    result.backward()
    assert seen == [(x.q_scale(), x.q_zero_point(), x.qscheme())]


class Tagged(torch.Tensor):
    """A subclass without data of its own."""


def test_subclasses_stay_subclasses(regions: Regions) -> None:
    x = numbers(4, 4).as_subclass(Tagged)
    expected, seen = bits(x.as_subclass(torch.Tensor)), []

    def look(back: torch.Tensor) -> None:
        seen.append((type(back), bits(back.as_subclass(torch.Tensor))))

    with regions.region():
        result = keep(look, x)
    result.backward()
    assert seen == [(Tagged, expected)]


def test_subclasses_made_of_tensors(regions: Regions) -> None:
    """Two tensors in one, as those of distributed or quantized training are."""
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    a, b = numbers(4, 6), numbers(4, 6)
    expected, seen = [bits(a.t()), bits(b.t())], []

    def look(back: Any) -> None:
        seen.extend([type(back) is two, bits(back.a), bits(back.b)])

    with regions.region():
        result = keep(look, two(a, b).t())
        del a, b
    result.backward()
    assert seen == [True, *expected]


def test_gradients_through_a_subclass(regions: Regions) -> None:
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor

    def gradient(swap: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = two(numbers(5), numbers(5)).requires_grad_()
        if swap:
            with regions.region():
                y = (x * x).sin().exp()
        else:
            y = (x * x).sin().exp()
        y.sum().backward()
        assert x.grad is not None
        return [x.grad.a, x.grad.b]

    assert differences([bits(t) for t in gradient(False)], [bits(t) for t in gradient(True)]) is None


def test_fake_tensors_pass_through(regions: Regions) -> None:
    mode = pytest.importorskip("torch._subclasses.fake_tensor").FakeTensorMode()
    with mode, regions.region():
        x = torch.empty(4, 4, requires_grad=True)
        y = (x * x).exp().sum()
    with mode:
        y.backward()
    assert x.grad is not None and x.grad.shape == (4, 4)


def test_parameters_and_their_views_stay(regions: Regions) -> None:
    weight = nn.Parameter(numbers(6, 6))
    seen: list[int] = []
    before = regions.moved()
    with regions.region():
        result = keep(
            lambda *back: seen.extend(b.untyped_storage().data_ptr() for b in back), weight, weight.t(), weight[1:]
        )
    result.backward()
    if regions.kind != IN_PLACE:  # there the test itself registers tensors
        assert regions.moved() == before
    assert set(seen) == {weight.untyped_storage().data_ptr()}


def test_the_same_tensor_saved_many_times(regions: Regions) -> None:
    def make() -> list[torch.Tensor]:
        x = numbers(30)
        return [x, x, x.view(5, 6), x, x.detach(), x.view(30)]

    _, moved = there_and_back(make, regions)
    assert moved == 120


def test_storages_larger_than_their_views(regions: Regions) -> None:
    """A small view keeps a large storage alive; what is needed comes back, whatever moves."""
    there_and_back(lambda: [numbers(100_000)[99_990:]], regions)
    there_and_back(lambda: [x[:1] for x in itertools.repeat(numbers(5000), 3)], regions)


def test_resized_storages(regions: Regions) -> None:
    def make() -> list[torch.Tensor]:
        x = numbers(10)
        x.untyped_storage().resize_(400)
        y = numbers(50)
        y.resize_(4)
        return [x, y]

    there_and_back(make, regions)


def test_memory_that_is_not_torch_s_own(regions: Regions) -> None:
    """Storages over foreign memory can't be resized."""
    data = bytearray(range(256))
    there_and_back(lambda: [torch.frombuffer(data, dtype=torch.uint8), torch.from_numpy(numbers(9).numpy())], regions)


def test_a_large_tensor(regions: Regions) -> None:
    there_and_back(lambda: [numbers(3_000_017), numbers(1000, 1001).t()], regions)
