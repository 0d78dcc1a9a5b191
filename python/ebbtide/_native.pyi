# Written by scripts/stubs from the built extension; a change belongs into crates/ebbtide-python.

"""
The engine of ebbtide for Python. Use it through `ebbtide.torch`.
"""

from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any, Final, SupportsIndex, final

from _typeshed import SupportsGetItem
from torch import Tensor

__all__ = [
    "VERSION",
    "Chain",
    "Gates",
    "Group",
    "Handle",
    "Hub",
    "Keep",
    "Packer",
    "Plan",
    "Pool",
    "Recording",
    "SavedTensor",
    "Trace",
    "check_budget",
    "check_plan",
    "return_freed_memory",
    "unpack",
]

VERSION: Final[str]
"""
Version of the package.
"""

@final
class Chain:
    """
    Which layer runs right after which.
    """
    def __new__(cls, /) -> Chain:
        """
        An empty chain.
        """
    def follow(self, /, first: str, second: str) -> str:
        """
        Declares that `second` runs right after `first`. Answers `new`, `known` or `itself` (nothing
        changed).

        Raises `SettingError` naming the three layers if one of the two has another neighbour already.
        """
    def group(self, /, layer: str) -> str | None:
        """
        The name of a layer's group.
        """
    def is_last(self, /, layer: str) -> bool:
        """
        Whether a declared layer has none behind it.
        """
    def is_last_group(self, /, group: str) -> bool:
        """
        Whether the layer of a group has none behind it.
        """
    def next(self, /, layer: str) -> str | None:
        """
        The layer behind this one.
        """
    def previous(self, /, layer: str) -> str | None:
        """
        The layer before this one.
        """
    def unlink(self, /, layer: str) -> None:
        """
        Takes a layer out; its neighbours become each other's.
        """

@final
class Gates:
    """
    One step under a plan. Operations are `F`, `R` and `B` of a layer, by its number.
    """
    def leaving(self, /, bytes: SupportsIndex) -> None:
        """
        So many bytes have begun to leave.
        """
    def left(self, /, bytes: SupportsIndex) -> None:
        """
        So many bytes that were leaving are free.
        """
    def loading(self, /, layer: SupportsIndex) -> None:
        """
        The load of a layer's group has started, for whatever reason.
        """
    def may_start(self, /) -> bool:
        """
        Whether the operation fits now. If not it waits for a group that is on its way out.
        """
    def next_load(self, /) -> int | None:
        """
        The next layer, from the last one back, whose group has not been loaded and may be now.
        """
    def reach(self, /, phase: str, layer: SupportsIndex) -> bool:
        """
        This operation comes next. False if it can't, since a later one was reached or there is no such layer:
        the step is another one than was planned.
        """

@final
class Group:
    """
    What one layer saved in one pass. Its tensors leave and come back together.

    The phases are `open`, `offloading`, `away`, `loading`, `home`, `closed`. A call that the phase does
    not allow raises `PhaseError` and changes nothing.
    """
    def __repr__(self, /) -> str: ...
    def add(
        self,
        /,
        tensor: Tensor,
        label: str,
        *,
        pack: bool = False,
        version: int | None = None,
        nbytes: int | None = None,
        sole: bool = True,
        references: int = 0,
        pool: Pool | None = None,
    ) -> SavedTensor:
        """
        Registers a storage to be moved in place: it is resized to zero when it is away, and every tensor of
        it is attached to the memory again that it gets when it comes back.

        It is only freed when it is proven that nothing else uses it: no other tensor, nothing that
        autograd keeps, and (unless `sole` is false) no reference of Python to this tensor but `references`,
        which the caller holds itself. `version` and `nbytes` are what the tensor was, if that was earlier
        than now. Its copy goes to a buffer of `pool`, if that is given.

        Raises `PhaseError` if the group is not open, `SettingError` for what can't be moved, and for a pool
        where the tier needs no host memory.
        """
    def close(self, /) -> None:
        """
        Forgets the group: waits for its copies, gives all buffers back. What is away then can't be had any
        more. Does nothing the second time.
        """
    def look_after(self, /, storage: Any, label: str, key: SupportsIndex) -> SavedTensor:
        """
        Registers a storage that an object looks after, which has these methods:

        * `facts()`: its size in bytes and its version, compared with those at this call;
        * `lend()`: the address of its memory, which stays until `vacate()`, `retract()` or the end of the group;
        * `vacate()`: its bytes are copied, the memory may go;
        * `allocate()`: the address of memory for its bytes;
        * `arrive()`: they are there, or its copy was called off before it left;
        * `retract()`: the memory that was allocated is not needed.

        They must not call the hub. `key` tells storages apart: one that another group has stays for both.

        Raises `PhaseError` if the group is not open.
        """
    def mark(self, /, tensor: Tensor, label: str, *, pool: Pool | None = None, pack: bool = True) -> SavedTensor:
        """
        Marks a storage to be swapped in this group, for a packer with `marked_only`: what autograd saved or
        will save of it in this region leaves, and its memory goes when its last owner goes. Its copy goes to a
        buffer of `pool`, if that is given.

        Raises `PhaseError` if the group is not open, `SettingError` as `add` does.
        """
    @property
    def name(self, /) -> str:
        """
        Its name.
        """
    def need(self, /) -> None:
        """
        Everything is home when this returns, whatever the phase. What was away and not on its way counts
        as a missed prefetch.

        Raises as `wait_load`.
        """
    def offload_done(self, /) -> bool:
        """
        Whether `wait_offload` would return at once.
        """
    @property
    def pass_(self, /) -> int:
        """
        The pass that it belongs to.
        """
    @property
    def phase(self, /) -> str:
        """
        The phase that it is in.
        """
    def prefetch(self, /) -> None:
        """
        Starts to load the groups that are expected after this one. A hint: what can't be started is loaded
        when it is asked for.
        """
    def protect(self, /, tensors: Iterable[Tensor]) -> int:
        """
        Keeps the storages of these tensors where they are: something outside of the group uses them. An
        offload under way is called off, what is away is brought back. Returns how many there were.

        Raises `CopyError` if one can't be brought back, `NotSavedError` if only a part of it was saved.
        """
    def protect_keys(self, /, keys: SupportsGetItem[int, SupportsIndex]) -> int:
        """
        Keeps the storages with these keys where they are, as `protect` does.

        Raises as `protect`.
        """
    def start_load(self, /, stream: object | None = None) -> None:
        """
        Starts to bring the group back.

        Raises `PhaseError` if it is not away, `NoRoomError` or `CopyError` if a load can't be started; it
        can be tried again.
        """
    def start_offload(self, /, stream: object | None = None) -> None:
        """
        Starts to copy out what the group has. On an accelerator the copies run on `stream`, or on a
        stream of the engine's own, behind what is queued on the current one.

        Raises `PhaseError` if the group is not open, `ChangedError` if a tensor in place was resized or
        modified since it was registered (nothing is copied then), `NoRoomError` or `CopyError` if a copy
        can't be started; what was not started is untouched.
        """
    @property
    def tensors(self, /) -> int:
        """
        Storages and spans that it has.
        """
    def wait_load(self, /) -> None:
        """
        Waits until the group is home. What was registered in place is forgotten then.

        Raises `PhaseError` if no load was started, `CopyError` for the first copy that failed (it can be
        tried again), `ChangedError` for a tensor in place that was modified since it was registered.
        """
    def wait_offload(self, /) -> None:
        """
        Lets the memory of the group go. Waits for the copies, on an accelerator without making the host
        wait.

        Raises `PhaseError` if no offload was started, `CopyError` or `NoRoomError` for the first copy that
        failed and `ChangedError` for a tensor in place that was modified meanwhile: these stay where they
        are.
        """

@final
class Handle:
    """
    Stands for one saved tensor. May be dropped on any thread, and need not ever be unpacked.
    """
    def __repr__(self, /) -> str: ...

@final
class Hub:
    """
    One engine: a tier, its bounds, and the groups that are open in it. Opens a unit for each device whose
    tensors it is given.

    `tier` is `"file"` or `"host"`. Memory of the CPU goes to the file by default; that of an accelerator
    to pinned host memory first, and to the file when that is full (`"host"`: to host memory only).
    `spill_dir` is the folder of the file, `host_bytes` the bound of host memory in bytes, `prefetch` how
    many groups ahead of backward are loaded. With `timeline` what runs when is remembered, for
    `write_timeline`.

    Raises `SettingError` for a setting that can't be used.
    """
    def __new__(
        cls,
        /,
        *,
        tier: str | None = None,
        spill_dir: str | PathLike[str] | None = None,
        host_bytes: int | None = None,
        prefetch: int = 1,
        timeline: bool = False,
    ) -> Hub:
        """
        Checks the settings. Files and memory are opened with the first tensor, except the folder's.
        """
    def __repr__(self, /) -> str: ...
    def abandon(self, /, pass_: int | None = None) -> None:
        """
        Gives all groups up, or those of a pass: waits for their copies and gives everything back. Tensors
        that are away then can't be had any more; those on the device can.
        """
    @property
    def active_groups(self, /) -> int:
        """
        Number of groups that are open.
        """
    @property
    def capacity_bytes(self, /) -> int:
        """
        Bytes that the tier can hold: the free space of its folder, or the bound of host memory. 0: unknown.
        """
    def close(self, /) -> None:
        """
        Gives everything up and back. Does nothing the second time, nor in a forked child, where nothing is the
        child's to give back.
        """
    @property
    def closed(self, /) -> bool:
        """
        Whether it is closed.
        """
    def collect(self, /) -> None:
        """
        Acts on handles that were dropped meanwhile.
        """
    def mark_begin(self, /, name: str) -> int:
        """
        Something begins on this thread, such as the forward of a layer, for the timeline. Returns its number;
        0 without a timeline.
        """
    def mark_end(self, /, number: int) -> None:
        """
        What `mark_begin` gave this number ends now. Does nothing the second time, nor for 0.
        """
    def mark_give_up(self, /, number: int) -> None:
        """
        What `mark_begin` gave this number was given up, nobody knows when: it is not shown. Does nothing the
        second time, nor for 0.
        """
    def open(self, /, name: str, pass_: int) -> Group:
        """
        Opens a group for one layer in one pass. The same name may have any number of groups.

        Raises `PhaseError` if the hub is closed.
        """
    def pool(self, /, max_host_bytes: int) -> Pool:
        """
        A pool of at most `max_host_bytes` bytes of host memory, to take buffers from by hand, or for groups
        whose tensors go to host memory (`Group.add`).

        Raises `SettingError` for a bound of 0.
        """
    def shrink(self, /) -> int:
        """
        Gives host memory back that is not in use. Returns bytes.
        """
    def stats(self, /) -> dict[str, int | float]:
        """
        Totals since the hub was made, in bytes, tensors and milliseconds; `live_bytes`, `active_groups` and
        what the tiers hold are of now.
        """
    def synchronize(self, /) -> None:
        """
        Waits for all copies out and lets their memory go.

        Raises as `Group.wait_offload`, for the first that failed.
        """
    def take_warnings(self, /) -> list[str]:
        """
        What the engine noticed since the last call: one sentence each.
        """
    @property
    def tier(self, /) -> str:
        """
        The tier that was asked for.
        """
    def write_timeline(self, /, path: str | PathLike[str]) -> int:
        """
        Writes what ran when, as JSON for the trace viewers of Perfetto and Chrome: what was marked, waits,
        copies of the file tier, and how many bytes were on the device and away. The file is replaced as a
        whole. Returns the number of events.

        Raises `SettingError` if the hub was made without `timeline`, or the file can't be written.
        """

@final
class Keep:
    """
    Storages that never leave the device: those of parameters and buffers.
    """
    def __len__(self, /) -> int: ...
    def __new__(cls, /, tensors: Iterable[Tensor]) -> Keep:
        """
        The storages of these tensors, which must outlive this object.
        """

@final
class Packer:
    """
    A pack hook for one call of a piece of code: what autograd saves meanwhile is one region.

    Eligible is a dense tensor with memory that is no parameter, no view of one, in none of the storages
    to `keep`, and of at least `min_bytes` bytes. `decide` is asked once for each of them. The group is
    `group`, or what `find` answers when it is first needed. Everything else stays where it is, and is
    compared by version when it is unpacked, as torch does without hooks.

    Small storages share host buffers unless `pack` is false; those of `pool`, if that is given.

    `ahead` is the group of the region before this one: it starts to come back when the first of the
    tensors that stayed is unpacked. Copies go to buffers of `pool`, if that is given.
    """
    def __call__(self, /, tensor: Tensor) -> object:
        """
        Takes a saved tensor and returns what autograd is to keep instead. Nothing is copied or freed here:
        the operation that the tensor is saved for may not have run yet.
        """
    def __new__(
        cls,
        /,
        group: Group | None = None,
        *,
        find: Callable[[], Group | None] | None = None,
        keep: Keep | None = None,
        min_bytes: int = 0,
        decide: Callable[[Tensor], bool] | None = None,
        marked_only: bool = False,
        ahead: Group | None = None,
        pool: Pool | None = None,
        pack: bool = True,
    ) -> Packer:
        """
        A pack hook for the code that runs while it is installed.
        """
    @property
    def kept(self, /) -> int:
        """
        Tensors that stay where they are.
        """
    @property
    def tensors(self, /) -> int:
        """
        Tensors that went to the group.
        """

@final
class Plan:
    """
    What is done with each layer and each storage of a trace. `ebbtide.plan` 1.
    """
    def gates(self, /) -> Gates:
        """
        The gates of one step.
        """
    def json(self, /) -> str:
        """
        The text of its file.
        """
    def layers(self, /) -> list[tuple[str, bool, list[str]]]:
        """
        By layer: its name, whether it is recomputed, and the names of its storages that are swapped.
        """
    @staticmethod
    def make(trace: Trace, memory: SupportsIndex, only: str | None = None) -> Plan:
        """
        The fastest plan found that fits so many bytes. With `only` (`swap` or `recompute`) that which uses
        this alone.

        Raises `NoRoomError` if none fits: it names the least that one was found for.
        """
    @property
    def memory_bytes(self, /) -> int:
        """
        The budget that it was made for, in bytes.
        """
    @staticmethod
    def parse(trace: Trace, text: str) -> Plan:
        """
        Reads the text of a plan file, for a model of which this is a trace.

        Raises `SettingError` if it is none, or does not fit.
        """
    @property
    def predicted_peak_bytes(self, /) -> int:
        """
        The most bytes on the device at one moment.
        """
    @property
    def predicted_step_ms(self, /) -> float:
        """
        How long a step takes, in milliseconds.
        """

@final
class Pool:
    """
    Host memory with a bound, reused between copies; pinned where there is an accelerator.

    Any thread may use it.
    """
    def __repr__(self, /) -> str: ...
    def acquire(self, /, size: int) -> Tensor:
        """
        A tensor of `size` bytes on the CPU. If there is no room, what has been given back is used again, or
        waited for in the order in which it was given back.

        Raises `NoRoomError` if all is in use, with the bytes that were asked for, that are pooled, and the
        bound; `SettingError` for a size that is none.
        """
    @property
    def max_host_bytes(self, /) -> int:
        """
        The bound, in bytes. Buffers count with their whole size, up to an eighth more than was asked for.
        """
    def release(self, /, tensor: Tensor, event: object | None = None) -> None:
        """
        Gives back what `acquire` has returned. With an `event` (anything with `query()` and `synchronize()`)
        it is used again only when that has completed.

        Raises `EbbtideError` for a tensor that is not from this pool or was given back before, `SettingError`
        for what is no event.
        """
    def shrink(self, /) -> int:
        """
        Gives the memory back that is free. Returns bytes.
        """
    @property
    def total_allocated(self, /) -> int:
        """
        Bytes that are allocated now, handed out or not, by hand and for groups.
        """

@final
class Recording:
    """
    Collects a `Trace`.
    """
    def __new__(cls, /, source: str, static_bytes: SupportsIndex, created_unix_s: SupportsIndex) -> Recording:
        """
        A step of this program, with so many bytes on the device all the time.
        """
    def finish(self, /) -> Trace:
        """
        The trace.

        Raises `SettingError` if what was recorded makes no sense.
        """
    def fixed(self, /, ns: SupportsIndex) -> None:
        """
        Nanoseconds of a step outside of its layers.
        """
    def layer(
        self,
        /,
        name: str,
        forward_ns: SupportsIndex,
        backward_ns: SupportsIndex,
        forward_temp_bytes: SupportsIndex,
        backward_temp_bytes: SupportsIndex,
        storages: SupportsGetItem[int, tuple[str, SupportsIndex, str]],
        why_not: str | None,
    ) -> None:
        """
        The next layer: nanoseconds of its forward and backward, bytes that they need besides, and what it
        saves as `(name, bytes, kind)`. The kinds are `inner` (made again if the layer is), `fixed` (not),
        `output` (the next layer saves it) and `passed` (the next layer reads it, its backward does not).
        """
    def tier(
        self,
        /,
        name: str,
        capacity: SupportsIndex,
        out_per_s: SupportsIndex,
        in_per_s: SupportsIndex,
        latency_ns: SupportsIndex,
    ) -> None:
        """
        The tier, as measured: what it holds (0: unknown), bytes a second out and in, nanoseconds a transfer.
        """

@final
class SavedTensor:
    """
    One tensor of a group.
    """
    def describe(self, /) -> str:
        """
        One line for debugging.
        """
    def readable(self, /) -> None:
        """
        Raises an error that names the state unless the value may be read now.
        """
    @property
    def registered(self, /) -> str:
        """
        `new`, `duplicate` (exactly these bytes are in the group already), `merged` (other bytes of the
        storage are) or `shared` (another group has the storage: it stays on the device for both).
        """
    @property
    def state(self, /) -> str:
        """
        `device`, `d2h`, `host` (in whatever tier) or `h2d`.
        """
    @property
    def tier(self, /) -> str:
        """
        The same, with the name of the tier instead of `host`; `gone` if the group was given up while it was
        away.
        """

@final
class Trace:
    """
    A step of a model as it was recorded: what each layer takes and saves. `ebbtide.trace` 1.
    """
    def budget(self, /, memory: str) -> int:
        """
        A budget in bytes, of a text such as `1.5GiB` or `40%`. Percents are of what plain training needs
        above what is always there.

        Raises `SettingError` for any other text.
        """
    def json(self, /) -> str:
        """
        The text of its file.
        """
    @staticmethod
    def parse(text: str) -> Trace:
        """
        Reads the text of a trace file.

        Raises `SettingError` if it is none.
        """
    def range(self, /) -> tuple[int, int, int, int]:
        """
        Bytes that make a difference as a budget: those always there, the least that a plan was found for,
        what keeping everything takes, and what plain training takes.
        """

def check_budget(memory: str) -> None:
    """
    Checks a budget before there is a trace.

    Raises `SettingError` for a text that is none.
    """

def check_plan(text: str) -> None:
    """
    Checks a plan's text before there is a trace.

    Raises `SettingError` if it is none.
    """

def return_freed_memory() -> bool:
    """
    Makes the C library give large freed blocks back at once, for the rest of the process. By default it
    raises its threshold with every large block that is freed, up to 32 MiB, and keeps blocks below it; the
    memory of swapped tensors would then stay with the process.

    Returns whether the C library can do it (glibc).
    """

def unpack(packed: object) -> Tensor:
    """
    The tensor that a pack hook was given: the same sizes, strides, type and bits. Loads the group of
    the tensor, all of it, if it is away, and starts to load the group expected next.

    Raises `ChangedError` where the tensor was modified in place after it was saved (as torch does
    without hooks), `CopyError` if a copy failed, `PhaseError` if its step was given up.
    """
