"""The native module by itself: forks, threads, callbacks, what can't be used, pools, and the timeline."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from ebbtide import _native
from ebbtide.errors import ChangedError, CopyError, EbbtideError, NoRoomError, PhaseError, SettingError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["file", "host"])
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# Saving by hand.


def tensor(seed: int, count: int = 1000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator)


def pack(group: _native.Group, *tensors: torch.Tensor) -> list[Any]:
    packer = _native.Packer(group)
    return [packer(tensor) for tensor in tensors]


def away(hub: _native.Hub, *tensors: torch.Tensor, name: str = "layer", pass_: int = 1) -> tuple[Any, list[Any]]:
    """A group that has left."""
    group = hub.open(name, pass_)
    handles = pack(group, *tensors)
    group.start_offload()
    group.wait_offload()
    return group, handles


def step(hub: _native.Hub, number: int, layers: int = 4, count: int = 5000) -> torch.Tensor:
    """A training step of its own; returns the gradient."""
    x = tensor(number, count).requires_grad_()
    y, before = x, None
    for index in range(layers):
        group = hub.open(f"h.{index}", number)
        with saved_tensors_hooks(_native.Packer(group), _native.unpack):
            y = torch.sin(y) * torch.cos(y)
        group.start_offload()
        if before is not None:
            before.wait_offload()
        before = group
    y.sum().backward()
    assert x.grad is not None
    return x.grad


def plain(number: int, layers: int = 4, count: int = 5000) -> torch.Tensor:
    x = tensor(number, count).requires_grad_()
    y: torch.Tensor = x
    for _ in range(layers):
        y = torch.sin(y) * torch.cos(y)
    y.sum().backward()
    assert x.grad is not None
    return x.grad


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def nothing_left(hub: _native.Hub) -> None:
    gc.collect()
    hub.collect()
    stats = hub.stats()
    assert (stats["active_groups"], stats["bytes_held"], stats["live_bytes"]) == (0, 0, 0)


def spill_files() -> int:
    """Files without a name that are open."""
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum("(deleted)" in link for link in links)


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


# What autograd gets back.


def test_steps_are_those_of_torch(tier: str) -> None:
    hub = _native.Hub(tier=tier)
    for number in range(3):
        assert same(step(hub, number), plain(number))
        nothing_left(hub)
    assert hub.stats()["bytes_out"] > 0


# Forks (C25).


def child(run: Callable[[], object]) -> None:
    """Runs something in a forked child and waits; what it raises is shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads are running
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert ended[1] == 0


def test_c25_a_forked_child_is_refused_and_touches_nothing(tier: str) -> None:
    hub = _native.Hub(tier=tier)
    kept = [tensor(seed, MIB // 4) for seed in range(4)]
    group, handles = away(hub, *[x.clone() for x in kept])
    flying = hub.open("flying", 1)
    handles += pack(flying, *[x.clone() for x in kept])
    flying.start_offload()
    pool = hub.pool(4 * MIB)
    buffer = pool.acquire(MIB)
    parent = os.getpid()

    def in_child() -> None:
        calls: list[Callable[[], object]] = [
            lambda: _native.unpack(handles[0]),
            lambda: _native.unpack(handles[-1]),
            lambda: hub.open("another", 1),
            lambda: hub.stats(),
            lambda: hub.synchronize(),
            lambda: hub.abandon(),
            lambda: hub.shrink(),
            lambda: group.need(),
            lambda: group.close(),
            lambda: flying.wait_offload(),
            lambda: pool.acquire(MIB),
            lambda: pool.release(buffer),
        ]
        for call in calls:
            with pytest.raises(PhaseError, match=f"belongs to process {parent}, this is process {os.getpid()}"):
                call()
        hub.close()
        handles.clear()
        gc.collect()
        own = _native.Hub(tier=tier)
        assert same(step(own, 7), plain(7))
        own.close()

    child(in_child)
    flying.wait_offload()
    for handle, expected in zip(handles, kept + kept, strict=True):
        assert same(_native.unpack(handle), expected)
    pool.release(buffer)
    assert pool.total_allocated == MIB
    del handle
    handles.clear()
    nothing_left(hub)


def test_c25_a_child_may_drop_everything(tier: str) -> None:
    everything: list[object] = []
    hub = _native.Hub(tier=tier)
    x = tensor(1, MIB)
    group, handles = away(hub, x.clone())
    everything += [hub, group, *handles]
    del hub, group

    def in_child() -> None:
        everything.clear()
        handles.clear()
        gc.collect()

    child(in_child)
    assert same(_native.unpack(handles[0]), x)


def test_c25_forks_while_copies_run_change_nothing() -> None:
    hub = _native.Hub(tier="file")
    for number in range(10):
        x = tensor(number, 2 * MIB)
        group = hub.open("layer", number)
        handles = pack(group, x.clone())
        group.start_offload()
        child(lambda: None)
        group.wait_offload()
        assert same(_native.unpack(handles[0]), x)
        del handles
    nothing_left(hub)


# The end of the process.

SCRIPT = """
import os, sys, torch
sys.path[:0] = {path!r}
from ebbtide import _native
hub = _native.Hub(tier={tier!r}, timeline=True)
x = torch.randn(1 << 22)
expected = x.clone()
group = hub.open("layer", 1)
handle = _native.Packer(group)(x)
del x
group.start_offload()
{then}
"""


def run(tier: str, then: str) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(path=sys.path, tier=tier, then=then)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)


FORK = "pid = os.fork(); pid and os.waitpid(pid, 0)[1] == 0 and _native.unpack(handle)"


@pytest.mark.parametrize(
    ("tier", "then"),
    [
        ("file", ""),
        ("file", "group.wait_offload(); group.start_load()"),
        ("file", "hub.close()"),
        ("file", "del hub, group"),
        ("file", FORK),
        ("host", "group.wait_offload()"),
        ("host", FORK),
    ],
)
def test_a_process_may_end_at_any_moment(tier: str, then: str) -> None:
    ended = run(tier, then)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "Error" not in ended.stderr and "panicked" not in ended.stderr, ended.stderr


# Threads and callbacks.


def test_handles_may_be_dropped_on_other_threads(tier: str) -> None:
    hub = _native.Hub(tier=tier)
    queue: list[Any] = []
    over = threading.Event()

    def drop() -> None:
        while not over.is_set() or queue:
            if queue:
                queue.pop()
            else:
                time.sleep(0.0005)

    droppers = [threading.Thread(target=drop) for _ in range(2)]
    for thread in droppers:
        thread.start()
    for number in range(200):
        group, handles = away(hub, tensor(1), tensor(2), pass_=number)
        queue.extend(handles)
        del group, handles
    over.set()
    for thread in droppers:
        thread.join()
    nothing_left(hub)


def test_c24_two_hubs_in_two_threads(tier: str) -> None:
    hubs = [_native.Hub(tier=tier) for _ in range(2)]
    wrong: list[object] = []

    def train(index: int) -> None:
        try:
            for number in range(20):
                seed = 100 * index + number
                if not same(step(hubs[index], seed), plain(seed)):
                    wrong.append(seed)
        except BaseException as error:
            wrong.append(error)

    workers = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    for hub in hubs:
        nothing_left(hub)


def test_one_hub_in_two_threads(tier: str) -> None:
    hub = _native.Hub(tier=tier)
    wrong: list[object] = []

    def train(index: int) -> None:
        try:
            for number in range(20):
                seed = 100 * index + number
                if not same(step(hub, seed), plain(seed)):
                    wrong.append(seed)
        except BaseException as error:
            wrong.append(error)

    workers = [threading.Thread(target=train, args=(index,)) for index in range(1, 3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    nothing_left(hub)


def test_calling_back_into_an_engine_at_work_is_an_error() -> None:
    hub = _native.Hub(tier="host")

    class Nosy(torch.Tensor):
        def untyped_storage(self) -> Any:
            return (hub.stats(), super().untyped_storage())[1]

    x = tensor(1).as_subclass(Nosy)
    group = hub.open("layer", 1)
    with pytest.raises(PhaseError, match="at work in this very thread"):
        group.add(x, "x", sole=False)
    group.close()
    assert same(step(hub, 1), plain(1))
    nothing_left(hub)


# Lifetimes.


def test_closing_with_copies_in_flight(tier: str) -> None:
    files, before = spill_files(), threads()
    hub = _native.Hub(tier=tier)
    x = tensor(1, 8 * MIB)
    group = hub.open("layer", 1)
    flying = pack(group, x.clone())
    gone, handles = away(hub, tensor(2, MIB), name="gone")
    group.start_offload()
    hub.close()
    hub.close()
    assert (group.phase, gone.phase) == ("closed", "closed")
    # What had not left is still there; what had is lost, and says so.
    assert same(_native.unpack(flying[0]), x)
    with pytest.raises(PhaseError, match="given up"):
        _native.unpack(handles[0])
    for call in (lambda: hub.open("layer", 1), lambda: group.start_load()):
        with pytest.raises(PhaseError):
            call()
    assert (spill_files(), threads()) == (files, before)


def test_a_hub_that_is_dropped_lives_on_with_its_handles(tier: str) -> None:
    files, before = spill_files(), threads()
    hub = _native.Hub(tier=tier)
    x, y = tensor(1), tensor(2)
    group, handles = away(hub, x.clone(), y.clone())
    del hub, group
    assert same(_native.unpack(handles[0]), x)
    handles.pop(0)
    assert same(_native.unpack(handles[0]), y)
    del handles
    gc.collect()
    assert (spill_files(), threads()) == (files, before)


def test_cycles_of_python_objects_are_collected() -> None:
    files, before = spill_files(), threads()

    class Node:
        def __init__(self) -> None:
            self.myself = self
            self.hub = _native.Hub(tier="file")
            self.packer = _native.Packer(find=self.find, decide=self.decide)
            self.group, self.handles = away(self.hub, tensor(1, MIB))
            self.small = pack(self.hub.open("empty", 1), torch.empty(0))

        def find(self) -> _native.Group:
            return self.group

        def decide(self, _: torch.Tensor) -> bool:
            return True

    node = Node()
    alive = weakref.ref(node)
    del node
    gc.collect()
    assert alive() is None
    assert (spill_files(), threads()) == (files, before)


def test_ten_thousand_groups(tier: str) -> None:
    hub = _native.Hub(tier=tier)
    began = time.perf_counter()
    held = [away(hub, tensor(1, 16), name=f"h.{index % 50}", pass_=index // 50) for index in range(10_000)]
    assert hub.active_groups == 10_000
    assert hub.stats()["live_bytes"] == 0
    for _, handles in held[:10]:
        assert same(_native.unpack(handles[0]), tensor(1, 16))
    assert hub.stats()["missed_prefetches"] <= 10
    del handles
    held.clear()
    nothing_left(hub)
    assert time.perf_counter() - began < 60


# Folders and disks (C21).


def test_c21_a_folder_that_cannot_be_used_is_a_setting_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (tmp_path / "nowhere", file, Path("/proc")):
        with pytest.raises(SettingError, match=f"can't use {folder}") as caught:
            _native.Hub(tier="file", spill_dir=folder)
        assert caught.value.hint is not None


def test_c21_a_folder_that_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "spill"
    folder.mkdir()
    hub = _native.Hub(tier="file", spill_dir=folder)
    folder.rmdir()
    x = tensor(1)
    group = hub.open("layer", 1)
    handles = pack(group, x.clone())
    with pytest.raises(SettingError, match="doesn't exist"):
        group.start_offload()
    assert same(_native.unpack(handles[0]), x)
    group.close()
    folder.mkdir()
    assert same(step(hub, 1), plain(1))
    # The file has no name: from now on the folder does not matter.
    shutil.rmtree(folder)
    assert same(step(hub, 2), plain(2))
    del handles
    nothing_left(hub)


FULL = """
import resource
hub.close()
hub = _native.Hub(tier="file", spill_dir={folder!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
import test_native
from ebbtide.errors import CopyError
x = test_native.tensor(1, 1 << 20)
group = hub.open("layer", 1)
handles = test_native.pack(group, x.clone())
try:
    group.start_offload()
    group.wait_offload()
except CopyError as error:
    print(error, "|", error.__cause__)
assert test_native.same(_native.unpack(handles[0]), x)
del handles, group
assert test_native.same(test_native.step(hub, 1), test_native.plain(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert test_native.same(test_native.step(hub, 2, count=1 << 20), test_native.plain(2, count=1 << 20))
test_native.nothing_left(hub)
"""


def test_c21_a_full_disk_is_a_copy_error_and_the_next_step_is_right(tmp_path: Path) -> None:
    ended = run("file", FULL.format(folder=str(tmp_path)))
    assert ended.returncode == 0, ended.stderr
    assert "offload of layer [1048576] (4194304 bytes" in ended.stdout, ended.stdout
    assert "ulimit -f" in ended.stdout, ended.stdout


def test_no_room_in_host_memory_leaves_the_rest_and_the_next_step_is_right() -> None:
    hub = _native.Hub(tier="host", host_bytes=MIB)
    x = tensor(1, MIB)
    group = hub.open("layer", 1)
    handles = pack(group, x.clone())
    with pytest.raises(NoRoomError, match="bound"):
        group.start_offload()
    assert same(_native.unpack(handles[0]), x)
    group.close()
    del handles
    assert same(step(hub, 1), plain(1))
    nothing_left(hub)


# Pools (P2, P3).


class Later:
    """An event that completes when it is told to, or waited for."""

    def __init__(self) -> None:
        self.done = False
        self.waited = 0

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waited += 1
        self.done = True


@pytest.fixture
def hub() -> _native.Hub:
    return _native.Hub()


def test_p2_a_pool_has_a_hard_bound(hub: _native.Hub) -> None:
    pool = hub.pool(3 * MIB)
    assert (pool.max_host_bytes, pool.total_allocated) == (3 * MIB, 0)
    buffers = [pool.acquire(MIB) for _ in range(3)]
    for buffer in buffers:
        assert (buffer.dtype, buffer.shape, buffer.device.type) == (torch.uint8, (MIB,), "cpu")
        assert buffer.data_ptr() % 64 == 0
        assert buffer.is_pinned() == torch.accelerator.is_available()
        buffer.fill_(7)
    assert pool.total_allocated == 3 * MIB
    with pytest.raises(NoRoomError, match=f"512 bytes requested, {3 * MIB} of {3 * MIB} bytes pooled") as caught:
        pool.acquire(500)
    assert caught.value.hint is not None
    pool.release(buffers.pop())
    assert pool.total_allocated == 3 * MIB
    pool.release(pool.acquire(500))
    assert pool.shrink() > 0
    assert pool.total_allocated == 2 * MIB


def test_p2_a_buffer_is_used_again_when_its_event_has_completed(hub: _native.Hub) -> None:
    pool = hub.pool(2 * MIB)
    first, second = pool.acquire(MIB), pool.acquire(MIB)
    addresses = first.data_ptr(), second.data_ptr()
    early, late = Later(), Later()
    pool.release(first, early)
    pool.release(second, late)
    early.done = True
    assert pool.acquire(MIB).data_ptr() == addresses[0], "finished ones are found when one is asked for"
    assert (early.waited, late.waited) == (0, 0)
    assert pool.acquire(MIB).data_ptr() == addresses[1], "the next is waited for"
    assert (early.waited, late.waited) == (0, 1)
    with pytest.raises(NoRoomError):
        pool.acquire(1)


def test_p2_room_is_waited_for_in_the_order_of_release(hub: _native.Hub) -> None:
    pool = hub.pool(2 * MIB)
    buffers = [pool.acquire(MIB), pool.acquire(MIB)]
    events = [Later(), Later()]
    for buffer, event in zip(buffers, events, strict=True):
        pool.release(buffer, event)
    pool.acquire(MIB)
    assert [event.waited for event in events] == [1, 0]


def test_p2_what_is_not_handed_out_cannot_be_given_back(hub: _native.Hub) -> None:
    pool, other = hub.pool(MIB), hub.pool(MIB)
    buffer = pool.acquire(1000)
    for wrong in (torch.empty(1000, dtype=torch.uint8), other.acquire(1000), buffer[:], buffer.view(torch.int8)):
        with pytest.raises(EbbtideError, match="not from this pool"):
            pool.release(wrong)
    with pytest.raises(SettingError, match="the event is a str"):
        pool.release(buffer, "soon")
    pool.release(buffer)
    again = pool.acquire(1000)
    with pytest.raises(EbbtideError, match="given back before"):
        pool.release(buffer)
    assert again.data_ptr() == buffer.data_ptr()
    pool.release(again)


def test_p2_sizes_that_are_none(hub: _native.Hub) -> None:
    with pytest.raises(SettingError):
        hub.pool(0)
    pool = hub.pool(MIB)
    for size in (0, -1):
        with pytest.raises(SettingError, match=f"{size} bytes"):
            pool.acquire(size)
    with pytest.raises(NoRoomError):
        pool.acquire((1 << 63) - 1)
    assert pool.total_allocated == 0


def test_p2_an_event_that_fails_or_calls_back(hub: _native.Hub) -> None:
    pool = hub.pool(MIB)

    class Broken(Later):
        def synchronize(self) -> None:
            raise RuntimeError("device lost")

    buffer = pool.acquire(MIB)
    pool.release(buffer, Broken())
    with pytest.raises(EbbtideError, match="can't wait for the last copy") as caught:
        pool.acquire(MIB)
    assert "device lost" in str(getattr(caught.value.__cause__, "__cause__", None))

    class Nosy(Later):
        said = ""

        def query(self) -> bool:
            with pytest.raises(PhaseError, match="at work in this very thread"):
                pool.acquire(1)
            self.said = "refused"
            return True

    pool, nosy = hub.pool(MIB), Nosy()
    pool.release(pool.acquire(MIB), nosy)
    pool.acquire(MIB)
    assert nosy.said == "refused"


def test_p2_a_pool_waits_for_what_is_pending_when_it_is_dropped(hub: _native.Hub) -> None:
    event = Later()
    pool = hub.pool(MIB)
    pool.release(pool.acquire(MIB), event)
    del pool
    gc.collect()
    assert event.waited == 1


def test_p1_a_pool_serves_any_thread(hub: _native.Hub) -> None:
    pool = hub.pool(MIB)
    wrong: list[BaseException] = []

    def use() -> None:
        try:
            for size in range(1, 200):
                pool.release(pool.acquire(size * 64), Later())
        except BaseException as error:
            wrong.append(error)

    users = [threading.Thread(target=use) for _ in range(4)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert not wrong
    assert pool.total_allocated <= MIB


def named(group: _native.Group, x: torch.Tensor, pool: _native.Pool) -> _native.SavedTensor:
    return group.add(x, "x", sole=False, pool=pool)


def test_p2_groups_and_hands_share_the_bound_of_a_pool() -> None:
    hub = _native.Hub(tier="host")
    pool = hub.pool(4 * MIB)
    pool.release(pool.acquire(4 * MIB))
    assert pool.total_allocated == 4 * MIB
    x = tensor(1, MIB // 2)
    expected = x.clone()
    group = hub.open("layer", 1)
    saved = named(group, x, pool)
    group.start_offload()
    assert pool.total_allocated == 2 * MIB, "what was free by hand made room"
    group.wait_offload()
    assert (saved.state, x.untyped_storage().nbytes()) == ("host", 0)
    buffer = pool.acquire(2 * MIB)
    with pytest.raises(NoRoomError, match=f"{4 * MIB} of {4 * MIB} bytes pooled"):
        pool.acquire(1)
    group.need()
    assert torch.equal(x, expected)
    pool.release(buffer)
    assert pool.acquire(4 * MIB).numel() == 4 * MIB, "what was free with the engine made room"
    assert pool.total_allocated == 4 * MIB


def test_p2_a_full_pool_refuses_a_group() -> None:
    hub = _native.Hub(tier="host")
    pool = hub.pool(2 * MIB)
    buffer = pool.acquire(MIB)
    x = tensor(1, MIB // 2)
    expected = x.clone()
    group = hub.open("layer", 1)
    named(group, x, pool)
    with pytest.raises(NoRoomError, match="explicit pool") as caught:
        group.start_offload()
    assert f"{2 * MIB} bytes requested, {MIB} of {2 * MIB} bytes pooled" in str(caught.value.__cause__)
    assert torch.equal(x, expected)
    group.close()
    pool.release(buffer)
    group = hub.open("layer", 2)
    named(group, x, pool)
    group.start_offload()
    group.wait_offload()
    assert x.untyped_storage().nbytes() == 0
    group.need()
    assert torch.equal(x, expected)


def test_p2_a_pool_outlives_hubs_and_hubs_outlive_pools() -> None:
    pool = _native.Hub(tier="host").pool(4 * MIB)
    for number in range(3):
        hub = _native.Hub(tier="host")
        x = tensor(number, MIB // 4)
        expected = x.clone()
        group = hub.open("layer", 1)
        named(group, x, pool)
        group.start_offload()
        group.wait_offload()
        assert pool.total_allocated == MIB
        if number == 2:
            del pool
        group.need()
        assert torch.equal(x, expected)
        hub.close()
        if number < 2:
            assert pool.total_allocated == 0


def test_p2_what_autograd_saves_may_go_to_a_pool() -> None:
    hub = _native.Hub(tier="host")
    pool = hub.pool(4 * MIB)
    x, y = tensor(1, MIB // 4), tensor(2, MIB // 4)
    group = hub.open("layer", 1)
    handles = [_native.Packer(group, pool=pool)(x.clone())]
    marked = y.clone()
    saved = group.mark(marked, "y", pool=pool)
    handles += [_native.Packer(group, marked_only=True)(marked), _native.Packer(group)(tensor(3, MIB // 4))]
    del marked
    group.start_offload()
    group.wait_offload()
    assert (saved.state, pool.total_allocated) == ("host", 2 * MIB)
    assert same(_native.unpack(handles[0]), x)
    assert same(_native.unpack(handles[1]), y)
    handles.clear()
    nothing_left(hub)
    assert pool.shrink() == 2 * MIB


def test_c17_a_pool_without_effect_is_a_setting_error() -> None:
    hub = _native.Hub(tier="file")
    pool = hub.pool(MIB)
    pool.release(pool.acquire(1000))
    group = hub.open("layer", 1)
    x = tensor(1)
    uses: list[Callable[[], object]] = [
        lambda: named(group, x, pool),
        lambda: group.mark(x, "x", pool=pool),
        lambda: _native.Packer(group, pool=pool)(x),
    ]
    for use in uses:
        with pytest.raises(SettingError, match="a pool has no effect"):
            use()
    group.close()
    nothing_left(hub)


# The file tier lends torch's memory.


def test_t5_a_change_while_a_storage_in_place_is_copied_is_found() -> None:
    hub = _native.Hub(tier="file")
    x = tensor(1, 4 * MIB)
    group = hub.open("layer", 1)
    saved = group.add(x, "x", sole=False)
    group.start_offload()
    assert saved.state == "d2h"
    x.fill_(3)
    with pytest.raises(ChangedError, match="version was"):
        group.wait_offload()
    assert saved.state == "device"
    assert bool((x == 3).all())
    group.close()
    nothing_left(hub)


UNREADABLE = """
hub.close()
hub = _native.Hub(tier="file", spill_dir={folder!r})
import test_native
from ebbtide.errors import CopyError
x = test_native.tensor(1, 1 << 20)
group = hub.open("layer", 1)
saved = group.add(x, "x", sole=False)
group.start_offload()
group.wait_offload()
assert x.untyped_storage().nbytes() == 0
[spill] = [f for f in os.listdir("/proc/self/fd") if "(deleted)" in os.path.realpath("/proc/self/fd/" + f)]
os.truncate("/proc/self/fd/" + spill, 0)
for _ in range(2):
    try:
        group.need()
    except CopyError as error:
        print(error)
    assert (saved.state, x.untyped_storage().nbytes()) == ("host", 0)
group.close()
"""


def test_t10_a_load_that_fails_leaves_a_storage_in_place_empty(tmp_path: Path) -> None:
    """Its content would be no value that anybody ever wrote."""
    ended = run("file", UNREADABLE.format(folder=str(tmp_path)))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("load of x") == 2, ended.stdout


# The timeline.


def events(path: Path) -> list[dict[str, Any]]:
    written: list[dict[str, Any]] = json.loads(path.read_text())
    return written


def test_the_timeline_shows_layers_waits_copies_and_bytes(tmp_path: Path) -> None:
    hub = _native.Hub(tier="file", spill_dir=tmp_path, timeline=True)
    for number in range(2):
        mark = hub.mark_begin(f'step {number} "forward"')
        assert mark > 0
        step(hub, number, count=MIB)
        hub.mark_end(mark)
        hub.mark_end(mark)
    hub.mark_begin("never ends")
    path = tmp_path / "timeline.json"
    path.write_text("old")
    count = hub.write_timeline(path)
    found = events(path)
    assert count == sum(event["ph"] in "XC" for event in found)
    rows = {event["args"]["name"]: event["tid"] for event in found if event["name"] == "thread_name"}
    assert {"compute", "waits", "offload 0", "load 0"} <= set(rows)
    of_row = {row: [e for e in found if e["ph"] == "X" and e["tid"] == tid] for row, tid in rows.items()}
    assert [event["name"] for event in of_row["compute"]] == ['step 0 "forward"', 'step 1 "forward"']
    copies = [event for row in rows for event in of_row[row] if row.startswith(("offload", "load"))]
    # Nobody has waited for the last layer: backward wants it at once.
    assert {"h.0", "h.1", "h.2"} <= {event["name"] for event in copies}
    # All clocks have one zero: copies lie within the steps.
    first, last = of_row["compute"]
    for event in copies:
        assert first["ts"] <= event["ts"] and event["ts"] + event["dur"] <= last["ts"] + last["dur"]
    counters = {name: [e["args"]["bytes"] for e in found if e["ph"] == "C" and e["name"] == name] for name in BYTES}
    assert max(counters["live bytes"]) >= 8 * MIB and max(counters["bytes away"]) >= 8 * MIB
    assert counters["bytes away"][-1] == 0
    assert list(tmp_path.iterdir()) == [path]


BYTES = ("live bytes", "bytes away")


def test_a_timeline_that_cannot_be_written(tmp_path: Path) -> None:
    without = _native.Hub()
    assert without.mark_begin("layer") == 0
    without.mark_end(0)
    with pytest.raises(SettingError, match="there is no timeline") as caught:
        without.write_timeline(tmp_path / "timeline.json")
    assert "timeline=True" in str(caught.value.hint)
    hub = _native.Hub(timeline=True)
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in (tmp_path / "nowhere" / "timeline.json", folder):
        with pytest.raises(SettingError, match=f"can't write the timeline to {path}"):
            hub.write_timeline(path)
    assert list(tmp_path.iterdir()) == [folder] and not list(folder.iterdir())
    assert hub.write_timeline(str(tmp_path / "empty.json")) == 0
    assert len(events(tmp_path / "empty.json")) == 1


assert CopyError is not None  # raised in the scripts above
