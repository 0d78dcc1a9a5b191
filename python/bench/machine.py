"""The same state machine in Python: the yardstick for what the engine's bookkeeping costs.

A fair one: a class with slots per tensor, buckets that are packed with one `torch.cat`, one copy of a bucket,
no hooks, no locks, no identities beyond a dictionary.
"""

from __future__ import annotations

import torch

BUCKET = 32 << 20


class Record:
    """One tensor: where it is, and what it was when it was registered."""

    __slots__ = ("bucket", "bytes", "kept", "label", "offset", "state", "storage", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, label: str) -> None:
        self.tensor = tensor
        self.label = label
        self.storage = tensor.untyped_storage()
        self.bytes = self.storage.nbytes()
        self.version = tensor._version
        self.state = "device"
        self.bucket = -1
        self.offset = 0
        self.kept = False

    def check(self) -> None:
        """Whether it is still what was registered."""
        if self.storage.nbytes() != self.bytes:
            raise RuntimeError(f"{self.label}: {self.storage.nbytes()} bytes, were {self.bytes}")
        if self.tensor._version != self.version:
            raise RuntimeError(f"{self.label}: version {self.tensor._version}, was {self.version}")

    def move(self, expected: str, to: str) -> None:
        """From one state to the next."""
        if self.state != expected:
            raise RuntimeError(f"{self.label}: state {self.state}, not {expected}")
        self.state = to


class Machine:
    """Offload, wait, load, wait for a list of tensors."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.records: list[Record] = []
        self.host: list[torch.Tensor] = []
        seen: dict[int, Record] = {}
        for number, tensor in enumerate(tensors):
            record = Record(tensor, f"tensor {number}")
            if record.storage._cdata not in seen:
                seen[record.storage._cdata] = record
                self.records.append(record)

    def start_offload(self) -> None:
        """Checks everything, then packs and copies bucket by bucket."""
        for record in self.records:
            record.check()
        bucket: list[Record] = []
        size = 0
        for record in self.records:
            if size + record.bytes > BUCKET:
                self._pack(bucket)
                bucket, size = [], 0
            bucket.append(record)
            size += record.bytes
        self._pack(bucket)

    def _pack(self, bucket: list[Record]) -> None:
        if not bucket:
            return
        offset = 0
        for record in bucket:
            record.move("device", "d2h")
            record.bucket, record.offset = len(self.host), offset
            offset += record.tensor.numel()
        self.host.append(torch.cat([record.tensor.view(-1) for record in bucket]))

    def wait_offload(self) -> None:
        """Frees what was copied."""
        for record in self.records:
            record.check()
            record.storage.resize_(0)
            record.move("d2h", "host")

    def start_load(self) -> None:
        """Gives memory back and fills it."""
        for record in self.records:
            record.storage.resize_(record.bytes)
            piece = self.host[record.bucket].narrow(0, record.offset, record.tensor.numel())
            torch.empty(0).set_(record.storage, 0, piece.shape, (1,)).copy_(piece)
            record.move("host", "h2d")

    def wait_load(self) -> None:
        """Drops the copies."""
        for record in self.records:
            record.check()
            record.move("h2d", "device")
        self.host.clear()
