"""States of a rank as bytes in a slot of its agent; see `distopt.launch.heal.state_slots`.

A slot is read only after its writer has ended, so the order of writing needs no fence.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..launch.heal.state_slots import HEADER, SENT, STAYS
from .adapters import copy_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..files import Arrays

_ALIGNMENT = 64


class Label(NamedTuple):
    """Names the states of one step. The larger one is newer: an attempt begins with what all ranks had agreed on.

    Attributes:
        attempt: how many times the ranks had been started before.
        step: number of finished training steps.
        epoch: as the script gave it.
        world_size: number of ranks.
    """

    attempt: int
    step: int
    epoch: int
    world_size: int


class Kept(NamedTuple):
    """The states that a rank keeps of a step.

    Attributes:
        own: arrays of its own.
        shared: its share of the arrays that all ranks share.
        notes: values of JSON, by object.
        writer: number of the rank, and how many ranks of its agent have a share.
        record: of own states alone: see `distopt.checkpoint.records`; of a copy, the interval of copies ("every").
    """

    own: Arrays
    shared: Arrays
    notes: dict[str, Any]
    writer: tuple[int, int] = (0, 1)
    record: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def pack(self, label: Label) -> tuple[bytes, int, int]:
        """Local. The JSON that describes them, with their label; where the own arrays end, and all."""
        described = [[[key, a.dtype.str, a.shape] for key, a in group.items()] for group in self[:2]]
        content = {"label": label, "writer": self.writer, "arrays": described, "record": self.record}
        notes = ", ".join(f"{json.dumps(name)}: {text_of(note)}" for name, note in self.notes.items())
        text = f'{json.dumps(content)[:-1]}, "notes": {{{notes}}}}}'.encode()
        own, shared = (sum(aligned(array.nbytes) for array in group.values()) for group in self[:2])
        own += aligned(HEADER.size + len(text))
        return text, own, own + shared

    def write(self, buffer: Any, label: Label, text: bytes, own_end: int, post: int = STAYS) -> None:
        """Local. Write the JSON of `pack` and the arrays to a buffer of that size; the header validates them, last."""
        buffer[HEADER.size : HEADER.size + len(text)] = text
        write_arrays(buffer, aligned(HEADER.size + len(text)), [*self.own.values(), *self.shared.values()])
        done = label.step - (not self.record.get("end", True))
        valid = 2 * label.step + 1 + bool(self.record.get("end"))  # tells a step's two records apart
        HEADER.pack_into(buffer, 0, done, post, own_end, len(text), valid)

    def to_bytes(self, label: Label) -> bytes:
        """Local. The states and their label as bytes, to be sent."""
        text, own_end, n_bytes = self.pack(label)
        buffer = bytearray(n_bytes)
        self.write(buffer, label, text, own_end)
        return bytes(buffer)

    @classmethod
    def read(cls, buffer: Any) -> Kept:
        """Local. Copies of the states in a buffer; without shared ones if it ends with the rank's own."""
        content, begin = described(buffer)
        groups: list[Arrays] = [{}, {}]
        for group, names in zip(groups, content["arrays"], strict=True):
            sizes = (aligned(np.dtype(dtype).itemsize * math.prod(shape)) for _, dtype, shape in names)
            if begin + sum(sizes) <= len(buffer):  # not without the shared ones
                begin = read_arrays(buffer, begin, names, group)
        own, shared = groups
        return cls(own, shared, content["notes"], tuple(content["writer"]), content["record"])


class Text(str):
    """A value of JSON, in JSON."""

    __slots__ = ()


def text_of(value: Any) -> str:
    """Local. A value in JSON, or of `Text`."""
    return value if isinstance(value, Text) else json.dumps(value)


def aligned(n_bytes: int) -> int:
    """The next place for an array."""
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


def write_arrays(buffer: Any, begin: int, arrays: Sequence[Any]) -> None:
    """Local. Copy arrays of NumPy or CuPy to a buffer, one after another."""
    for array in arrays:
        if array.size:
            room = np.frombuffer(buffer, array.dtype, array.size, begin).reshape(array.shape)
            room[...] = array if isinstance(array, np.ndarray) else copy_of(array)
        begin += aligned(array.nbytes)


def read_arrays(buffer: Any, begin: int, names: Sequence[Any], arrays: Arrays) -> int:
    """Local. Add copies of the arrays in a buffer, with these names, types and shapes; where they end."""
    for key, dtype, shape in names:
        count = math.prod(shape)
        flat = np.frombuffer(buffer, dtype, count, begin) if count else np.empty(0, dtype)
        arrays[key] = flat.reshape(shape).copy()
        begin += aligned(arrays[key].nbytes)
    return begin


def described(buffer: Any) -> tuple[dict[str, Any], int]:
    """Local. The JSON of states in a buffer, and where the arrays begin."""
    _, _, _, length, _ = HEADER.unpack_from(buffer)
    content: dict[str, Any] = json.loads(bytes(buffer[HEADER.size : HEADER.size + length]))
    return content, aligned(HEADER.size + length)


class Held(NamedTuple):
    """States that a rank looks after, as it describes them to the others.

    Attributes:
        label: of the states.
        writer: see `Kept`; of a gift, the rank that describes it.
        record: see `Kept`.
        kind: "copy", "part" for the own states of one, "record", or "gift" for all shared arrays.
    """

    label: Label
    writer: tuple[int, int]
    record: dict[str, Any]
    kind: str

    @property
    def name(self) -> str:
        """Names own states, whether they are in a copy or alone."""
        kind = "part" if self.kind == "copy" else self.kind
        if "end" in self.record:
            kind = "end" if self.record["end"] else "ahead"
        return f"{kind} {self.label[:2]} {self.writer[0]}"

    @classmethod
    def of_json(cls, value: Sequence[Any]) -> Held:
        """Local. The inverse of JSON."""
        label, writer, record, kind = value
        return cls(Label(*label), (writer[0], writer[1]), record, kind)


def held_of(content: dict[str, Any], kind: str) -> Held:
    """Local. A description of states, from their JSON; `kind` is that of states without a record."""
    number, n_shares = content["writer"]
    record = content["record"]
    return Held(Label(*content["label"]), (number, n_shares), record, "record" if "end" in record else kind)


class StateSlot:
    """A slot of an agent.

    Attributes:
        label: of the states in it; (), without any.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, 0) if os.fstat(fd).st_size else None
        self.label: tuple[int, ...] = ()
        self._content: dict[str, Any] = {}
        if self._map is not None and HEADER.unpack_from(self._map)[4]:
            self._content, _ = described(self._map)
            self.label = Label(*self._content["label"])

    def held(self) -> Held:
        """Local. A description of the states in it, if there are any."""
        return held_of(self._content, "copy")

    def clear(self) -> None:
        """Local. Make the states in it invalid."""
        self.label = ()
        if self._map is not None:
            HEADER.pack_into(self._map, 0, 0, 0, 0, 0, 0)

    def write(self, label: Label, kept: Kept, post: int = STAYS) -> None:
        """Local. Write states in place of the earlier ones; memory grows as they need it."""
        self.label = ()
        text, own_end, n_bytes = kept.pack(label)
        if self._map is None or len(self._map) < n_bytes:
            os.ftruncate(self._fd, n_bytes)
            self._map = mmap.mmap(self._fd, n_bytes)
        struct.pack_into("<Q", self._map, HEADER.size - 8, 0)  # invalid; the newest step that was done stays
        kept.write(self._map, label, text, own_end, post)
        self.label = label
        self._content = {"label": label, "writer": kept.writer, "record": kept.record}

    def count(self, step: int) -> None:
        """Local. Note the newest step that this rank has done; without effect before the first `write`."""
        if self._map is not None:
            struct.pack_into("<Q", self._map, 0, step)  # the first of the header

    @property
    def is_sent(self) -> bool:
        """Local. Whether the agent has sent the own states in it to the next node."""
        return self._map is not None and HEADER.unpack_from(self._map)[1] == SENT

    def content(self) -> memoryview:
        """Local. The states in it."""
        assert self._map is not None
        return memoryview(self._map)
