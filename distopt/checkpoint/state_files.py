"""States of ranks as files in memory of their agent: those of a checkpoint, without checksums.

Ranks read a file only after its writer has ended. The agent reads it at any moment, to send it to another node; so the
word that makes a slot valid is cleared before the states are written, and set after them, in the order of a sequence
lock.
"""

from __future__ import annotations

import json
import os
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from .. import _core
from ..files import arrays_in, write_arrays
from ..launch.heal.state_slots import POST, STAYS, VALID, content_of
from .adapters import on_host
from .folder import MARK, OWN, SHARED, WRITER, under_prefix

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..files import Arrays
    from ..launch.heal.state_slots import SlotFiles


_BUFFER_BYTES = 1 << 16  # small arrays are written together


class Label(NamedTuple):
    """Names the states of one step. Of two labels, the larger one is newer.

    This holds between attempts, too: an attempt begins after a step on which all ranks had agreed.

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


class Held(NamedTuple):
    """The description of a file of states, by which ranks name them to each other.

    Attributes:
        label: of the states.
        writer: number of the rank, and how many ranks of its agent have a share.
        record: of own states after a step: see `distopt.checkpoint.records`; of a share, the interval of copies
            ("every").
        kind: "own" for the own states of a copy, "share" for its share of the others, "record", or "gift" for all
            shared arrays.
    """

    label: Label
    writer: tuple[int, int]
    record: Mapping[str, Any]
    kind: str

    @property
    def name(self) -> str:
        """Names own states, in whatever file they are."""
        kind = self.kind
        if "end" in self.record:
            kind = "end" if self.record["end"] else "ahead"
        return f"{kind} {self.label[:2]} {self.writer[0]}"

    @classmethod
    def of_json(cls, value: Sequence[Any]) -> Held:
        """The inverse of JSON."""
        label, writer, record, kind = value
        return cls(Label(*label), (writer[0], writer[1]), record, kind)


class States(NamedTuple):
    """The content of a file.

    Attributes:
        held: its description.
        arrays: by "object/array".
        notes: values of JSON, by object.
    """

    held: Held
    arrays: Arrays
    notes: dict[str, Any]

    @classmethod
    def read(cls, content: Any) -> States:
        """States with views of the arrays in the content of a file.

        Raises:
            StateError: it is not whole.
        """
        arrays, metadata = arrays_in(content, MARK, WRITER)
        stamp = json.loads(metadata["notes"])
        held = Held.of_json(stamp["held"])
        return cls(held, under_prefix(_prefix(held), arrays), stamp["notes"])

    def in_file(self) -> tuple[dict[str, Any], str]:
        """The arrays by their names in a file, and its notes."""
        prefix = _prefix(self.held)
        arrays = {prefix + key: array for key, array in self.arrays.items()}
        return arrays, json.dumps({"held": self.held, "notes": self.notes})

    def write(self, file: IO[bytes]) -> None:
        """Write them to a file."""
        arrays, stamp = self.in_file()
        write_arrays(file, arrays, MARK, stamp, on_host)


def _prefix(held: Held) -> str:
    return OWN if held.kind in ("own", "record") else SHARED


def valid_word(step: int, *, is_end: bool = False) -> int:
    """The word of a slot with states of this step; it tells the two records of a step apart."""
    return 2 * step + 1 + is_end


def copies(arrays: Arrays) -> Arrays:
    """Copies of views."""
    return {key: array.copy() for key, array in arrays.items()}


class StateSlot:
    """A slot of an agent.

    Attributes:
        held: descriptions of its files, if there are states.
    """

    def __init__(self, files: SlotFiles) -> None:
        self._words = files.words
        self._files = [os.fdopen(fd, "wb", _BUFFER_BYTES, closefd=False) for fd in (files.own, files.shared) if fd >= 0]
        self.held: list[Held] = []
        if files.is_valid:
            self.held = [States.read(self.content(i)).held for i in range(len(self._files))]

    @property
    def label(self) -> tuple[int, ...]:
        """The label of the states in it; (), without any."""
        return self.held[0].label if self.held else ()

    def clear(self) -> None:
        """Make the states in it invalid."""
        self.held = []
        self._words[VALID] = 0
        _core.fence()

    def write(self, *states: States, post: int = STAYS) -> None:
        """Write own states, and in a slot for copies a share of the others, in place of the earlier ones."""
        self.clear()
        for each, file in zip(states, self._files, strict=True):
            file.seek(0)
            each.write(file)
            file.truncate()
        own = states[0].held
        self.held = [each.held for each in states]
        self._words[POST] = post
        _core.fence()
        self._words[VALID] = valid_word(own.label.step, is_end=bool(own.record.get("end")))

    @property
    def post(self) -> int:
        """Whether the own states in it go to the next node; see `distopt.launch.heal.state_slots`."""
        return self._words[POST]

    def content(self, number: int = 0) -> memoryview:
        """The content of one of its files: 0 has own states, 1 the share."""
        return content_of(self._files[number].fileno())
