"""Records of regions, groups, and host memory pools (rows R, G and P of the catalogue)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hand_models import (
    assert_equal,
    figures,
    fresh,
    held,
    layers,
    moved,
    nbytes,
    sample,
    step,
    told,
    wire,
    wrapped,
)

import ebbtide.torch
from ebbtide import EbbtideError, NoRoomError, PhaseError, SettingError
from ebbtide.torch import (
    CheckpointPolicy,
    PinnedMemoryPool,
    Region,
    Storage,
    SwapGroup,
    SwapManager,
    SwapTensor,
    swap,
    swap_wrapper,
)


@pytest.fixture(autouse=True, params=["file", "host"])
def tier(request: pytest.FixtureRequest) -> Iterator[str]:
    fresh()
    ebbtide.torch.configure(tier=request.param)
    yield request.param
    fresh()
    ebbtide.torch.configure()


def region_of(*values: object) -> Region:
    region = Region()
    region["op"].extend(SwapTensor(value, f"value {n}") for n, value in enumerate(values))
    return region


def group_of(*values: object, name: str = "group") -> tuple[SwapGroup, list[SwapTensor]]:
    region = region_of(*values)
    group = SwapGroup(name)
    group.add(region)
    return group, list(region.iter_swap_tensors())


def send(group: SwapGroup | Region) -> None:
    group.launch_offload()
    group.wait_offload()


def fetch(group: SwapGroup | Region) -> None:
    group.launch_load()
    group.wait_load()


def test_r1_structure_and_order_are_preserved() -> None:
    assert Storage is Region
    region = Region()
    assert region["never used"] == []
    one, two, three = (SwapTensor(torch.ones(3), name) for name in "123")
    region[7].append(one)
    region[3].append([("note", two), {"key": 5}])
    region[7].append(three)
    assert list(region.keys()) == ["never used", 7, 3]
    assert list(region.values()) == [[], [one, three], [[("note", two), {"key": 5}]]]
    assert list(region.iter_swap_tensors()) == [one, three, two]
    region[7] = [three]
    assert region[7] == [three]
    region.clear()
    assert (len(region), bool(region), list(region.iter_swap_tensors())) == (0, True, [])


def test_r2_a_region_moves_all_it_has_and_is_empty_after_the_load() -> None:
    values = [torch.randn(50) for _ in range(3)]
    expected = [value.clone() for value in values]
    region = region_of(*values, "a note")
    tensors = list(region.iter_swap_tensors())
    del values
    region.launch_offload()
    assert [tensor.state for tensor in tensors] == ["d2h", "d2h", "d2h", "non_tensor"]
    region.wait_offload()
    assert [tensor.state for tensor in tensors[:3]] == ["host"] * 3
    assert len(region["op"]) == 4
    region.resize_device_storage()
    assert all(nbytes(tensor._value) == 200 for tensor in tensors[:3])
    region.launch_load()
    assert [tensor.state for tensor in tensors[:3]] == ["h2d"] * 3
    region.wait_load()
    assert len(region) == 0
    assert all(torch.equal(tensor.get_val(), value) for tensor, value in zip(tensors[:3], expected, strict=True))
    region.release_cpu_buffers()
    assert held() == (0, 0)


def test_r2_aliases_are_protected() -> None:
    value = torch.randn(50)
    region = region_of(value, torch.randn(50))
    used, free = region.iter_swap_tensors()
    assert region.protect_alias_storage_ptrs({value.untyped_storage().data_ptr()}) == 1
    send(region)
    assert (used.state, free.state) == ("device", "host")
    fetch(region)


def test_r2_what_has_left_already_is_told() -> None:
    region = region_of(torch.randn(50))
    send(region)
    with told() as texts:
        region.launch_offload()
    assert len(texts) == 1
    assert "state host" in texts[0]
    fetch(region)


def test_r3_repeats_are_marked_against_what_was_seen() -> None:
    base = torch.randn(10)
    first, second = region_of(base, base, 7), region_of(base, base[:5])
    seen: dict[object, object] = {}
    assert first.mark_duplicate_swaps(seen) == 1  # type: ignore[arg-type]
    assert second.mark_duplicate_swaps(seen) == 1  # type: ignore[arg-type]
    assert first.mark_duplicate_swaps(seen) == 0  # type: ignore[arg-type]
    keys = {key for tensor in first.iter_swap_tensors() if (key := tensor.dedup_key())}
    third, fourth = region_of(base), region_of(base + 1)
    assert third.mark_duplicate_swaps(keys) == 1
    assert fourth.mark_duplicate_swaps(keys) == 0


def test_r3_also_when_they_arrive_later() -> None:
    base = torch.randn(10)
    region = region_of(base)
    group = SwapGroup("later")
    group.add(region)
    region["new"].append([SwapTensor(base, "again")])
    (again,) = region["new"][0]
    assert again._duplicate
    region["new"] += [SwapTensor(base, "once more")]
    assert region["new"][1]._duplicate
    del base
    send(group)
    assert {tensor.state for tensor in region.iter_swap_tensors()} == {"host"}
    fetch(group)


def test_g1_repeats_are_told_once_for_a_group_and_name_it() -> None:
    found = []
    for _ in range(2):
        group, tensors = group_of(*[torch.randn(10)] * 3, name="g1 repeats")
        with told() as texts:
            send(group)
        fetch(group)
        assert len(tensors) == 3
        found.append(texts)
    assert [len(texts) for texts in found] == [1, 0]
    assert "g1 repeats" in found[0][0]
    assert "2 tensors" in found[0][0]


def test_g1_identities_end_with_the_load() -> None:
    group, (first,) = group_of(torch.randn(10))
    send(group)
    fetch(group)
    again = SwapTensor(first.get_val(), "same memory")
    region = Region()
    group.add(region)
    region[0].append(again)
    assert not again._duplicate
    send(group)
    fetch(group)


def test_g2_small_tensors_share_and_all_come_back() -> None:
    bases = [torch.randn(64) for _ in range(300)]
    bases += [torch.randint(0, 9, (64,)) for _ in range(100)] + [torch.randn(1 << 20)]
    expected = [base.clone() for base in bases]
    region = Region()
    for number, base in enumerate(bases):
        region[number].append(SwapTensor(base, "op", group_swap=True))
    region["part"].append(SwapTensor(torch.randn(100)[7:9], "part", group_swap=True))
    tensors = list(region.iter_swap_tensors())
    part = tensors[-1].get_val().clone()
    del bases, base
    group = SwapGroup("packed")
    group.add(region)
    send(group)
    assert {tensor.state for tensor in tensors} == {"host"}
    fetch(group)
    assert all(torch.equal(*pair) for pair in zip((t.get_val() for t in tensors), [*expected, part], strict=True))
    assert held() == (0, 0)


def test_g4_nothing_has_moved_after_a_failed_start(tier: str) -> None:
    if tier == "file":
        return  # `test_hand_bounds.py` fills a disk
    ebbtide.torch.configure(tier="host", host_bytes=64 << 10)
    values = [torch.randn(100), torch.randn(1 << 20), torch.randn(100)]
    expected = [value.clone() for value in values]
    group, tensors = group_of(*values, name="layer 3")
    del values
    with pytest.raises(NoRoomError, match="layer 3"):
        group.launch_offload()
    assert [tensor.state for tensor in tensors] == ["device"] * 3
    assert all(torch.equal(t.get_val(), value) for t, value in zip(tensors, expected, strict=True))
    small, _ = group_of(torch.randn(100))
    send(small)
    fetch(small)


def test_g5_g8_waiting_for_what_was_not_started() -> None:
    group, _ = group_of(torch.randn(10), name="early")
    for call in (group.wait_offload, group.wait_load):
        with pytest.raises(PhaseError, match="early"):
            call()
    group.launch_offload()
    with pytest.raises(PhaseError, match="early"):
        group.wait_load()
    group.wait_offload()
    with pytest.raises(PhaseError, match="early"):
        group.wait_offload()
    fetch(group)
    with pytest.raises(PhaseError, match="early"):
        group.wait_load()


def test_g6_what_others_use_is_not_emptied() -> None:
    mine, shared = torch.randn(100), torch.randn(100)
    graph = torch.randn(100, requires_grad=True)
    saved = graph.exp()
    loss = saved.sum()
    group, tensors = group_of(torch.randn(100), mine, shared[:50].detach(), saved)
    del saved
    send(group)
    assert [tensor.state for tensor in tensors] == ["host", "device", "device", "device"]
    loss.backward()
    assert torch.equal(graph.grad, graph.exp())  # type: ignore[arg-type]
    assert (mine + shared).isfinite().all()
    assert figures()["not_freed_tensors"] >= 3
    fetch(group)


def test_g6_outputs_of_any_nesting() -> None:
    group, tensors = group_of(*[torch.randn(10) for _ in range(4)])
    outputs = {"a": [tensors[0].get_val()[2:]], "b": (tensors[2].get_val(), 3, None)}
    assert group.protect_alias_tensors(outputs) == 2
    send(group)
    assert [tensor.state for tensor in tensors] == ["device", "host", "device", "host"]
    assert group.protect_alias_tensors([tensors[1]._value]) == 1
    assert tensors[1].state == "device"
    fetch(group)


def test_g7_a_load_that_comes_too_early_finishes_the_offload() -> None:
    group, (tensor,) = group_of(torch.randn(100))
    expected = tensor.get_val().clone()
    group.launch_offload()
    group.launch_load()
    group.wait_load()
    assert torch.equal(tensor.get_val(), expected)
    assert held() == (0, 0)


def test_g8_everything_is_given_back() -> None:
    group, tensors = group_of(*[torch.randn(100) for _ in range(5)])
    send(group)
    fetch(group)
    assert [tensor.state for tensor in tensors] == ["device"] * 5
    now = figures()
    assert (now["bytes_held"], now["host_in_use_bytes"], now["active_groups"]) == (0, 0, 0)


def test_g9_the_last_group_stays_unless_a_policy_names_it() -> None:
    reference = step(layers(2))
    model = wire(wrapped(layers(2), swap_wrapper))
    assert_equal(step(model), reference)
    first = moved()[0]
    assert first > 0
    model = wire(wrapped(layers(2), lambda layer: swap_wrapper(layer, lambda _: CheckpointPolicy.MUST_SWAP)))
    assert_equal(step(model), reference)
    assert moved()[0] == 3 * first
    assert held() == (0, 0)


def test_g10_leaving_twice_is_an_error_that_changes_nothing() -> None:
    group, (tensor,) = group_of(torch.randn(100), name="twice")
    expected = tensor.get_val().clone()
    group.launch_offload()
    with pytest.raises(PhaseError, match=r"twice.*offloading"):
        group.launch_offload()
    group.wait_offload()
    with pytest.raises(PhaseError, match=r"twice.*away"):
        group.launch_offload()
    group.launch_load()
    with pytest.raises(PhaseError, match=r"twice.*loading"):
        group.launch_load()
    group.wait_load()
    assert torch.equal(tensor.get_val(), expected)


def test_g10_what_arrives_meanwhile_is_a_group_of_its_own() -> None:
    manager = SwapManager()
    first, second = region_of(torch.randn(100)), region_of(torch.randn(100))
    manager.ensure_group("layer")
    manager.add_storage("layer", first)
    manager.launch_offload("layer")
    manager.add_storage("layer", second)
    assert manager.active_group_count() == 2
    manager.launch_offload("layer")
    for call in (manager.wait_offload, manager.launch_load, manager.wait_load):
        call("layer")
        call("layer")
    assert manager.active_group_count() == 0
    assert (len(first), len(second)) == (0, 0)


def test_p2_a_pool_has_a_bound() -> None:
    pool = PinnedMemoryPool(1 << 20)
    assert (pool.max_host_bytes, pool.total_allocated) == (1 << 20, 0)
    one = pool.acquire(600_000)
    assert (one.dtype, one.shape, one.device.type) == (torch.uint8, (600_000,), "cpu")
    one.fill_(7)
    with pytest.raises(NoRoomError, match="600000") as caught:
        pool.acquire(600_000)
    assert str(1 << 20) in str(caught.value)
    pool.release(one)
    two = pool.acquire(500_000)
    assert pool.total_allocated <= 1 << 20
    with pytest.raises(EbbtideError):
        pool.release(torch.zeros(10, dtype=torch.uint8))
    pool.release(two)
    with pytest.raises(EbbtideError):
        pool.release(two)


@pytest.mark.parametrize("size", [0, -1, 1.5, "1", True])
def test_p2_sizes(size: object) -> None:
    with pytest.raises(SettingError):
        PinnedMemoryPool(size)  # type: ignore[arg-type]
    with pytest.raises(SettingError):
        PinnedMemoryPool(100).acquire(size)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="cpu_pool"):
        SwapTensor(torch.ones(3), "op", cpu_pool=size)


def test_p2_copies_go_through_a_pool(tier: str) -> None:
    pool = PinnedMemoryPool(1 << 20)
    tensor = SwapTensor(torch.randn(1000), "op", cpu_pool=pool)
    expected = tensor.get_val().clone()
    if tier == "file":
        with pytest.raises(SettingError, match="pool"):
            tensor.async_offload()
        assert tensor.state == "device"
        return
    tensor.async_offload()
    tensor.wait_offload()
    assert pool.total_allocated >= 4000
    tensor.async_load()
    tensor.wait_load()
    assert torch.equal(tensor.get_val(), expected)
    x = sample()
    with SwapManager().group_context("pooled"):
        y = swap(lambda t: t.exp().sum(), x, cpu_pool=pool)
    SwapManager().launch_offload("pooled")
    SwapManager().wait_offload("pooled")
    y.backward()
    assert torch.equal(x.grad, x.exp())  # type: ignore[arg-type]


def test_p3_everything_is_returned_once() -> None:
    manager = SwapManager()
    for how in ("loaded", "aborted", "dropped"):
        region = region_of(*[torch.randn(100) for _ in range(3)])
        manager.ensure_group("p3")
        manager.add_storage("p3", region)
        manager.launch_offload("p3")
        manager.wait_offload("p3")
        if how == "loaded":
            manager.launch_load("p3")
            manager.wait_load("p3")
        else:
            manager.abort_group("p3")
        assert held() == (0, 0), how
        assert figures()["host_in_use_bytes"] == 0
