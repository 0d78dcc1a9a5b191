"""Tensors that are swapped in place, together: regions and groups.

A `Region` (also called `Storage`) is a record of what one piece of code saved. A group moves regions
together, along with what `swap_wrapper` and its relatives gave to the same group. Knows no framework: a
front end makes its `SwapGroup` of the group here.

Access contract: that of `SwapTensor`: one thread at a time drives a region or a group.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, MutableMapping, MutableSet
from typing import Any, Protocol, SupportsIndex

from ebbtide._checks import check_group_name
from ebbtide._native import Group
from ebbtide._swapped import HOST, Identity, Swapped, Trip
from ebbtide.errors import SettingError

# ---- a region


class _Group(Protocol):
    """What a region tells the group it belongs to."""

    def _identify(self, tensor: Swapped) -> None: ...


class _Items(list[Any]):
    """The items of one key. Tells the region what arrives."""

    def __init__(self, arrived: Callable[[object], None]) -> None:
        super().__init__()
        self._tell = arrived

    def append(self, item: Any, /) -> None:
        super().append(item)
        self._tell(item)

    def insert(self, index: SupportsIndex, item: Any, /) -> None:
        super().insert(index, item)
        self._tell(item)

    def extend(self, items: Iterable[Any], /) -> None:
        for item in items:
            self.append(item)

    def __iadd__(self, items: Iterable[Any], /) -> _Items:  # type: ignore[misc]
        self.extend(items)
        return self


def swap_tensors_in(item: object) -> Iterator[Swapped]:
    """All `SwapTensor`s in lists, tuples and values of dicts, however deep, in order."""
    if isinstance(item, Swapped):
        yield item
    elif isinstance(item, (list, tuple)):
        for part in item:
            yield from swap_tensors_in(part)
    elif isinstance(item, dict):
        yield from swap_tensors_in(list(item.values()))


Seen = MutableMapping[Identity, Any] | MutableSet[Identity]


class Region:
    """What one piece of code saved: lists of items by key, nested as it likes.

    Items may be `SwapTensor`s or anything else. Order is the order of registration. `Storage` is the
    same class.

    Example:
        >>> region = Region()
        >>> region["attention"].append([SwapTensor(q, "attention"), "a note"])
        >>> group = SwapGroup("layer 0"); group.add(region)
    """

    def __init__(self) -> None:
        self._items: dict[Hashable, _Items] = {}
        self._group: weakref.ref[_Group] | None = None

    def __getitem__(self, key: Hashable) -> list[Any]:
        if key not in self._items:
            me = weakref.ref(self)
            self._items[key] = _Items(lambda item: _tell(me, item))
        return self._items[key]

    def __setitem__(self, key: Hashable, items: Iterable[Any]) -> None:
        fresh = list(items)
        self._items.pop(key, None)
        self[key].extend(fresh)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._items

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __bool__(self) -> bool:
        return True

    def keys(self) -> Iterable[Hashable]:
        """The keys, in the order of their first use."""
        return self._items.keys()

    def values(self) -> Iterable[list[Any]]:
        """The lists, in the order in which their keys were first used."""
        return self._items.values()

    def items(self) -> Iterable[tuple[Hashable, list[Any]]]:
        """Keys and lists."""
        return self._items.items()

    def clear(self) -> None:
        """Drops everything."""
        self._items.clear()

    def iter_swap_tensors(self) -> Iterator[Any]:
        """All `SwapTensor`s, however deep, in order."""
        for items in list(self._items.values()):
            yield from swap_tensors_in(list(items))

    def mark_duplicate_swaps(self, seen: Seen | None = None) -> int:
        """Marks what repeats an identity that was seen, here or before; returns how many.

        Args:
            seen: Identities so far, a dict or a set; those found here are added. None: start anew.
        """
        known: Seen = {} if seen is None else seen
        return sum(mark_if_repeated(tensor, known) for tensor in self.iter_swap_tensors())

    def protect_alias_storage_ptrs(self, storage_ptrs: Container[int]) -> int:
        """Keeps what shares one of these storages on the device; returns how many tensors do.

        Args:
            storage_ptrs: As for `SwapTensor.protect_if_aliases`.
        """
        return sum(tensor.protect_if_aliases(storage_ptrs) for tensor in self.iter_swap_tensors())

    def launch_offload(self, copy_stream: object | None = None) -> None:
        """Starts to copy all its tensors out. What has left already, or repeats another one, is passed by.

        Args:
            copy_stream: Stream of the device to copy on. None: the engine's own.

        Raises:
            ChangedError: A tensor was resized or modified since it was registered. Nothing was copied.
            SettingError: `copy_stream` is no stream of the device.
            NoRoomError: The tier has no room for them. All are on the device.
            CopyError: A copy could not be made. All are on the device.
        """
        trip = Trip("region")
        leaving = [tensor for tensor in self.iter_swap_tensors() if tensor._can_leave()]
        if not leaving:
            return
        try:
            trip.board(leaving, sole=False)
            trip.depart(copy_stream)
        except BaseException:
            trip.give_up()
            raise

    def wait_offload(self) -> None:
        """Finishes the offload: frees device memory. The record stays.

        Raises:
            ChangedError: A tensor was modified while it left: it stays on the device.
            CopyError: A copy failed: that tensor stays on the device.
            NoRoomError: The tier has no room for it: that tensor stays on the device.
        """
        for trip in self._trips("offloading"):
            trip.wait_offload()

    def resize_device_storage(self) -> None:
        """Gives storages that are away their size back, without content."""
        for tensor in self.iter_swap_tensors():
            if tensor.state == HOST:
                tensor.resize_device_storage()

    def launch_load(self, copy_stream: object | None = None) -> None:
        """Starts to bring all its tensors back.

        Args:
            copy_stream: Stream of the device to copy on. None: the engine's own.

        Raises:
            SettingError: `copy_stream` is no stream of the device.
            NoRoomError: The device has no room for them. It can be tried again.
            CopyError: A copy could not be started. It can be tried again.
        """
        for trip in self._trips("offloading", "away"):
            trip.start_load(copy_stream)

    def wait_load(self) -> None:
        """Finishes the load, gives host buffers back, and empties the record.

        Raises:
            CopyError: A copy failed. It can be tried again; the record stays.
        """
        for trip in self._trips("loading"):
            trip.wait_load()
        for tensor in self.iter_swap_tensors():
            tensor.wait_load()  # warns of what is still away
        self.clear()

    def _trips(self, *phases: str) -> list[Trip]:
        """The journeys of its tensors that are in one of these phases, each once."""
        trips = {id(tensor._trip): tensor._trip for tensor in self.iter_swap_tensors()}
        return [trip for trip in trips.values() if trip is not None and trip.phase in phases]

    def release_cpu_buffers(self) -> None:
        """Drops host copies that are not the only ones."""
        for tensor in self.iter_swap_tensors():
            tensor.release_cpu_buffer()

    def __repr__(self) -> str:
        count = sum(1 for _ in self.iter_swap_tensors())
        return f"Region({len(self._items)} keys, {count} tensors)"

    def _tell(self, item: object) -> None:
        group = None if self._group is None else self._group()
        if group is not None:
            for tensor in swap_tensors_in(item):
                group._identify(tensor)


Storage = Region


def _tell(region: weakref.ref[Region], item: object) -> None:
    """An item arrived at a region that may be gone already."""
    alive = region()
    if alive is not None:
        alive._tell(item)


def mark_if_repeated(tensor: Swapped, seen: Seen) -> bool:
    """Marks a tensor whose identity was seen before, else remembers it."""
    identity = tensor.dedup_key()
    if identity is None or tensor._duplicate:
        return False
    first = _first(identity, seen)
    if first is not None and first is not tensor:
        tensor.mark_duplicate_swap(first)
        return True
    if isinstance(seen, MutableMapping):
        seen[identity] = tensor
    else:
        seen.add(identity)
    return False


def _first(identity: Identity, seen: Seen) -> Swapped | None:
    """The tensor that came first with an identity."""
    if identity not in seen:
        return None
    if isinstance(seen, MutableMapping):
        known = seen[identity]
        if isinstance(known, Swapped):
            return known
    kept = next(known for known in seen if known == identity)
    return kept.owner() if isinstance(kept, Identity) else None


# ---- a group


class GroupOfRegions:
    """Regions that move together; a front end's `SwapGroup`."""

    def __init__(self, group_name: str) -> None:
        check_group_name(group_name)
        self.group_name = group_name
        self._regions: list[Region] = []
        self._seen: dict[Identity, Swapped] = {}
        self._trip = Trip(group_name)

    def __repr__(self) -> str:
        return f"SwapGroup({self.group_name!r}, {self.phase}, {len(self._regions)} regions)"

    @property
    def phase(self) -> str:
        """open, offloading, away, loading, home or closed."""
        return self._trip.phase

    @property
    def is_last_group(self) -> bool:
        """Whether its layer is the last of a declared chain."""
        return self._is_last(self.group_name)

    def add(self, storage: Region) -> None:
        """Adds a region. What arrives in it later belongs to the group as well, until it leaves.

        Raises:
            SettingError: It is no region.
        """
        if not isinstance(storage, Region):
            raise SettingError(f"a {type(storage).__name__} is no region", "put tensors into a Region and add that")
        storage._group = weakref.ref(self)
        self._regions.append(storage)
        for tensor in storage.iter_swap_tensors():
            self._identify(tensor)

    def protect_alias_tensors(self, tensors: object) -> int:
        """Keeps on the device what shares a storage with one of these; returns how many tensors do.

        Args:
            tensors: Tensors in any nesting of lists, tuples and dicts: a layer's outputs. Distributed
                ones count by their local shard; anything else is ignored.
        """
        keys, keep = self._shared(tensors)
        count = sum(region.protect_alias_storage_ptrs(keys) for region in self._regions)
        if keys and self._trip.group is not None:
            count = max(count, keep(self._trip.group))
        return count

    def launch_offload(self, copy_stream: object | None = None) -> None:
        """Starts to copy everything out.

        Args:
            copy_stream: Stream of the device to copy on. None: the engine's own.

        Raises:
            ChangedError: A tensor was resized or modified since it was registered. Nothing was copied.
            PhaseError: The group has left already; names group and phase.
            CopyError: A copy could not be made. Everything is on the device.
        """
        if self.phase == "open":
            for tensor in self._tensors():
                self._identify(tensor)
            leaving = [tensor for tensor in self._tensors() if tensor._can_leave()]
            self._trip.board(leaving, sole=True)
        self._trip.depart(copy_stream)

    def wait_offload(self) -> None:
        """Waits for the offload and frees the memory.

        Raises:
            PhaseError: It was never started, or was waited for already.
        """
        self._trip.wait_offload()

    def launch_load(self, copy_stream: object | None = None) -> None:
        """Starts to bring everything back; finishes an offload that is under way first.

        Args:
            copy_stream: Stream of the device to copy on. None: the engine's own.

        Raises:
            PhaseError: The group is not away.
        """
        self._trip.start_load(copy_stream)

    def wait_load(self) -> None:
        """Waits for the load, gives host buffers back, and drops all records.

        Raises:
            PhaseError: It was never started, or was waited for already.
        """
        self._trip.wait_load()
        self._drop_records()

    def release_cpu_buffers(self) -> None:
        """Drops host copies that are not the only ones."""
        for region in self._regions:
            region.release_cpu_buffers()

    # -- what the framework has

    @staticmethod
    def _is_last(group_name: str) -> bool:
        """As `SwapManager.is_last_group`."""
        raise NotImplementedError

    @staticmethod
    def _shared(tensors: object) -> tuple[set[int], Callable[[Group], int]]:
        """What tells the storages of tensors apart, and what keeps them in a group of the engine."""
        raise NotImplementedError

    # -- for the manager

    def _keep_users(self, tensors: Callable[[], object]) -> None:
        """As `protect_alias_tensors`; asks only if it has anything to protect."""
        if self._regions or self._trip.group is not None:
            self.protect_alias_tensors(tensors())

    def _tensors(self) -> Iterator[Swapped]:
        for region in self._regions:
            yield from region.iter_swap_tensors()

    def _identify(self, tensor: Swapped) -> None:
        mark_if_repeated(tensor, self._seen)

    def _native(self) -> Group:
        """The engine's group, for what is swapped by handle."""
        return self._trip.open()

    def _home(self) -> None:
        """Everything is home now, whatever the phase; records by name are dropped."""
        self._trip.need()
        self._drop_records()

    def _give_up(self) -> None:
        self._trip.give_up()
        self._drop_records()

    def _drop_records(self) -> None:
        for region in self._regions:
            region.clear()
            region._group = None
        self._regions.clear()
        self._seen.clear()
