"""Records of regions and groups (rows R and G of the catalogue)."""

from __future__ import annotations

from collections.abc import Iterator

import mindspore as ms
import pytest
from hand import bits, chained, fresh, held, moved, nbytes, random, saving, step, swapped, told, wire
from mindspore import Tensor, mint

import ebbtide.mindspore
from ebbtide import NoRoomError, PhaseError, SettingError
from ebbtide.mindspore import Region, Storage, SwapGroup, SwapManager, SwapTensor, _keepers


@pytest.fixture(autouse=True, params=["file", "host"])
def tier(request: pytest.FixtureRequest) -> Iterator[str]:
    fresh()
    ebbtide.mindspore.configure(tier=request.param)
    yield request.param
    fresh()
    ebbtide.mindspore.configure()


def region_of(*values: object) -> Region:
    region = Region()
    region["op"].extend(SwapTensor(value, f"value {n}") for n, value in enumerate(values))
    return region


def group_of(*values: object, name: str = "group") -> tuple[SwapGroup, list[SwapTensor]]:
    region = region_of(*values)
    group = SwapGroup(name)
    group.add(region)
    return group, list(region["op"])


def several(count: int) -> list[Tensor]:
    return [random(100, seed=seed) for seed in range(count)]


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
    one, two, three = (SwapTensor(random(3), name) for name in "123")
    region[7].append(one)
    region[3].append([("note", two), {"key": 5}])
    region[7].append(three)
    assert list(region.keys()) == ["never used", 7, 3]
    assert list(region.values()) == [[], [one, three], [[("note", two), {"key": 5}]]]
    assert list(region.iter_swap_tensors()) == [one, three, two]
    region.clear()
    assert (len(region), bool(region), list(region.iter_swap_tensors())) == (0, True, [])


def test_r2_a_region_moves_all_it_has_and_is_empty_after_the_load() -> None:
    values = several(3)
    expected = [bits(value) for value in values]
    region = region_of(*values, "a note")
    tensors = list(region["op"])
    region.launch_offload()
    assert [tensor.state for tensor in tensors] == ["d2h", "d2h", "d2h", "non_tensor"]
    region.wait_offload()
    assert [tensor.state for tensor in tensors[:3]] == ["host"] * 3
    assert len(region["op"]) == 4
    region.resize_device_storage()
    assert all(nbytes(tensor._value) == 400 for tensor in tensors[:3])
    region.launch_load()
    assert [tensor.state for tensor in tensors[:3]] == ["h2d"] * 3
    region.wait_load()
    assert len(region) == 0
    assert [bits(tensor.get_val()) for tensor in tensors[:3]] == expected
    region.release_cpu_buffers()
    assert held() == (0, 0)


def test_r2_aliases_are_protected_and_what_has_left_is_told() -> None:
    value = random(100)
    region = region_of(value, random(100))
    used, free = region["op"]
    assert region.protect_alias_storage_ptrs({_keepers.address(value)}) == 1
    send(region)
    assert (used.state, free.state) == ("device", "host")
    with told() as texts:
        region.launch_offload()
    assert len(texts) == 1
    assert "state host" in texts[0]
    fetch(region)


def test_r3_repeats_are_marked_against_what_was_seen() -> None:
    base = random(10)
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
    base = random(10)
    region = region_of(base)
    group = SwapGroup("later")
    group.add(region)
    region["new"].append([SwapTensor(base, "again")])
    (again,) = region["new"][0]
    assert again._duplicate
    region["new"] += [SwapTensor(base, "once more")]
    assert region["new"][1]._duplicate
    send(group)
    assert {tensor.state for tensor in region.iter_swap_tensors()} == {"host"}
    fetch(group)


def test_g1_repeats_are_told_once_for_a_group_and_name_it() -> None:
    found = []
    for _ in range(2):
        group, tensors = group_of(*[random(10)] * 3, name="g1 repeats")
        with told() as texts:
            send(group)
        fetch(group)
        assert len(tensors) == 3
        found.append(texts)
    assert [len(texts) for texts in found] == [1, 0]
    assert "g1 repeats" in found[0][0]
    assert "2 tensors" in found[0][0]


def test_g1_identities_end_with_the_load() -> None:
    group, (first,) = group_of(random(10))
    send(group)
    fetch(group)
    again = SwapTensor(first.get_val(), "same memory")
    region = Region()
    group.add(region)
    region[0].append(again)
    assert not again._duplicate
    send(group)
    fetch(group)


def test_g4_what_could_not_leave_is_there_after_a_failed_start(tier: str) -> None:
    if tier == "file":
        return
    ebbtide.mindspore.configure(tier="host", host_bytes=64 << 10)
    values = [random(100), random(1 << 20), random(100)]
    expected = [bits(value) for value in values]
    group, tensors = group_of(*values, name="layer 3")
    with pytest.raises(NoRoomError, match="layer 3"):
        group.launch_offload()
    assert [tensor.state for tensor in tensors[1:]] == ["device"] * 2
    group.wait_offload()
    fetch(group)
    assert [bits(tensor.get_val()) for tensor in tensors] == expected
    small, _ = group_of(random(100))
    send(small)
    fetch(small)


def test_g5_g8_waiting_for_what_was_not_started() -> None:
    group, _ = group_of(random(10), name="early")
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


def test_g6_c2_what_another_group_has_as_well_stays() -> None:
    table = random(100)
    one, (first,) = group_of(table, name="one")
    other, (second, alone) = group_of(table[:50], random(100, seed=1), name="other")
    one.launch_offload()
    send(other)
    one.wait_offload()
    assert [tensor.state for tensor in (first, second, alone)] == ["device", "device", "host"]
    fetch(other)
    fetch(one)
    assert bits(table) == bits(random(100))


def test_g6_inputs_outputs_parameters_and_buffers_of_a_layer_stay() -> None:
    manager, seen = SwapManager(), []
    model = wire(chained(3))
    table = random(16, 16, seed=5)
    first = model.layers[0]
    first.table = table
    inner = type(first).construct

    def construct(x: Tensor) -> Tensor:
        y = inner(first, x)
        region, name = Region(), manager.get_current_group_name()
        assert name is not None
        free = random(1000)
        values = [x, y[1:], first.table, first.up.weight, free]
        region[0].extend(SwapTensor(value, f"value {n}") for n, value in enumerate(values))
        seen.extend(region[0])
        manager.ensure_group(name).add(region)
        return y

    first.__dict__["construct"] = construct
    assert step(model) == step(chained(3))
    assert [tensor.state for tensor in seen] == ["device"] * 5
    assert moved() == (4000, 4000)


def test_g6_outputs_of_any_nesting() -> None:
    group, tensors = group_of(*several(4))
    outputs = {"a": [tensors[0].get_val()[2:]], "b": (tensors[2].get_val(), 3, None)}
    assert group.protect_alias_tensors(outputs) == 2
    send(group)
    assert [tensor.state for tensor in tensors] == ["device", "host", "device", "host"]
    assert group.protect_alias_tensors([tensors[1]._value]) == 1
    assert tensors[1].state == "device"
    fetch(group)


def test_g7_a_load_that_comes_too_early_finishes_the_offload() -> None:
    group, (tensor,) = group_of(random(100))
    expected = bits(tensor.get_val())
    group.launch_offload()
    group.launch_load()
    group.wait_load()
    assert bits(tensor.get_val()) == expected
    assert held() == (0, 0)


def test_g9_the_last_group_stays_unless_a_policy_names_it() -> None:
    reference = step(chained(2))
    assert step(wire(swapped(chained(2)))) == reference
    first = moved()[0]
    assert first > 0
    assert step(wire(swapped(chained(2), named=True))) == reference
    assert moved()[0] > 2 * first
    assert held() == (0, 0)


def test_g10_leaving_twice_is_an_error_that_changes_nothing() -> None:
    group, (tensor,) = group_of(random(100), name="twice")
    expected = bits(tensor.get_val())
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
    assert bits(tensor.get_val()) == expected


def test_g10_what_arrives_meanwhile_is_a_group_of_its_own() -> None:
    manager = SwapManager()
    first, second = region_of(random(100)), region_of(random(100))
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


@pytest.mark.parametrize("how", ["loaded", "aborted"])
def test_p3_everything_is_returned_once(how: str) -> None:
    manager = SwapManager()
    region = region_of(*several(3))
    tensors = list(region["op"])
    manager.ensure_group("p3")
    manager.add_storage("p3", region)
    manager.launch_offload("p3")
    manager.wait_offload("p3")
    if how == "loaded":
        manager.launch_load("p3")
        manager.wait_load("p3")
    else:
        manager.abort_group("p3")
    assert held() == (0, 0)
    assert [bits(tensor.get_val()) for tensor in tensors] == [bits(value) for value in several(3)]


def test_what_is_added_and_named() -> None:
    with pytest.raises(SettingError, match="Region"):
        SwapGroup("g").add([1])  # type: ignore[arg-type]
    for name in ("", 3):
        with pytest.raises(SettingError, match="no name of a group"):
            SwapGroup(name)  # type: ignore[arg-type]


def test_g8_named_and_saved_tensors_travel_together() -> None:
    manager = SwapManager()
    named = SwapTensor(random(1000), "named")
    region = Region()
    region[0].append(named)

    def run(x: Tensor) -> Tensor:
        with manager.group_context("both"):
            y = saving(lambda: mint.sum(mint.sin(mint.exp(x))))
        manager.add_storage("both", region)
        manager.launch_offload("both")
        manager.wait_offload("both")
        assert named.state == "host"
        return y

    x = random(1000)
    assert bits(ms.grad(run)(x)) == bits(ms.grad(lambda x: mint.sum(mint.sin(mint.exp(x))))(x))
    assert named.state == "device"
    assert bits(named.get_val()) == bits(random(1000))
