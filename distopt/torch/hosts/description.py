"""The description of a collective. Ranks of different hosts compare descriptions before they use each other's data."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass
from typing import Any

from ...errors import Call

CALL_BYTES = 248  # size of a packed description


@dataclass(slots=True)
class Description:
    """A collective as this rank has called it.

    Attributes:
        kind, count, dtype, op, label, root: see `distopt.errors.Call`.
        number: its place in the order of operations.
        deadline: on the clock of `time.monotonic`.
        n_bytes: bytes of the data that it moves; part of the tag of their messages.
    """

    kind: str
    count: int
    dtype: str
    op: Any
    label: str
    root: int = 0
    number: int = 0
    deadline: float = 0.0
    n_bytes: int = 0

    @property
    def within(self) -> str:
        """Local. The label of the collectives inside the host that this one is made of."""
        return f"{self.kind} {self.count:,} {self.label}".rstrip()

    def left(self) -> float:
        """Local. Seconds until the deadline."""
        return max(0.0, self.deadline - time.monotonic())

    def tag(self, phase: int = 0) -> int:
        """Local. The tag of its data in one of two phases, 0 or 1."""
        return (self.number & 0x3FFF) << 16 | 2 * (1 + self.n_bytes % 0x7FFE) + phase

    def packed(self) -> bytes:
        """Local. The part that must be equal on all ranks, in `CALL_BYTES` bytes."""
        label = f"{zlib.crc32(self.label.encode())}|{self.label[:31]}"  # cut off; the checksum compares the whole
        text = f"{self.kind}|{self.count}|{self.dtype}|{self.op}|{self.root}|{self.number}|{label}"
        return text.encode().ljust(CALL_BYTES)

    @classmethod
    def unpacked(cls, packed: bytes) -> Description:
        """Local. The description that `packed` has made, on another rank."""
        kind, count, dtype, op, root, number, _, label = packed.decode().rstrip().split("|", 7)
        return cls(kind, int(count), dtype, op, label, int(root), int(number))

    def describe(self) -> str:
        """Local. The collective in the words of csrc/host/describe.cpp."""
        text = f"{self.kind} #{self.number:,}"
        if not self.kind.endswith("ragged"):
            text += f" of {self.count:,} {self.dtype}"
        if self.op:
            text += f", {self.op}"
        if self.kind == "broadcast":
            text += f" from rank {self.root}"
        return f"{text} ({self.label})" if self.label else text

    def of_rank(self, rank: int) -> Call:
        """Local. The description as the call of rank `rank`, for errors."""
        return Call(rank, self.kind, self.number, self.count, self.dtype, self.op, self.root, self.label)
