"""The memory of a flight record: a ring of the last collectives of a rank, which other processes read at any moment.

To note an operation takes less than a microsecond: its place in the script is a code object and an offset there, and
nothing is formatted before it is written to a file.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from secrets import token_hex
from types import CodeType, FrameType
from typing import Any, NamedTuple

from .. import _core

# Kinds of operations, in the order of their codes in csrc/base/types.h, and their names in PyTorch's recorder. Its
# analysis takes no other names. `empty` is never noted.
KINDS = {name: name for name in ("barrier", "all_reduce", "reduce_scatter", "all_gather")}
KINDS |= {"all_gather_ragged": "all_gather_v", "broadcast": "broadcast", "empty": "", "all_to_all_ragged": "all_to_all"}
_CODES = {kind: code for code, kind in enumerate(KINDS)}
# PyTorch's names of element types, each at the place of its code in `comm.types.DTYPES`.
_DTYPES = ("Float", "Double", "Half", "BFloat16", "Int", "Long", "Char", "Byte", "Short", "Bool")
_BACKEND = "gloo"  # the analysis refuses the names of backends that are not PyTorch's
_VERSION = "2.10"  # of the format: PyTorch 2.13's

# A ring: a head; for each group, the number of its last operation plus 1, and the endings; the records; and texts, one
# JSON object a line. csrc/base/flight.h writes records and endings, too. A text is whole before its bytes are counted,
# and they are counted before a record or a group refers to it: the fences keep that order for readers on every
# processor. A record that is being written may be read half old.
_HEAD = struct.Struct("=32sqq")  # token; bytes of text; when another process last requested stacks
_HEAD_BYTES, _WORD, _END, _REQUESTED, _NOTED, _PROGRESS = 128, struct.Struct("=q"), 32, 40, 48, 64
# Words of the head, which `timeline` writes for `distopt run --watch`: steps and samples of training so far; ns of
# waits for other ranks, and since when this rank waits now, or 0; whether it copies states; whether it writes them.
STEPS, SAMPLES, WAITED, WAITS_SINCE, COPIES, SAVES = range(6)
_PAIR, _GROUP_HEAD_BYTES = struct.Struct("=qQ"), 16
_RECORD = struct.Struct("=qQQIHBBQ")  # time, number, count, text of label and place, group, kind, type, number of notes
_RECORD_BYTES, _pack = _RECORD.size, _RECORD.pack_into
MAX_GROUPS = 64
_TEXT_BYTES = 1 << 20
_LABELLED_BYTES = _TEXT_BYTES // 2  # texts beyond have no labels, whose number is not limited

_now = time.monotonic_ns
_OWN_FILES = str(Path(__file__).parents[1]) + os.sep


class _Inner(dict[str, bool]):
    """Whether a file belongs to this package or to PyTorch; a function would take twice as long."""

    def __missing__(self, file: str) -> bool:
        self[file] = file.startswith((_OWN_FILES, "<frozen")) or "/site-packages/torch/" in file
        return self[file]


_inner = _Inner()


class NotedOperation(NamedTuple):
    """An operation that a rank has started.

    Attributes:
        group: name of the group.
        ranks: those of the group, as numbers in the job.
        kind: a key of `KINDS`.
        number: of the operation in the group.
    """

    group: str
    ranks: list[int]
    kind: str
    number: int


class Ring:
    """The memory of one process.

    Attributes:
        about: how other processes open it: descriptor of its file, process, number of records, token.
        n_records: how many there are.
        records: where they begin.
        progress: words of the head, by the numbers above.
    """

    def __init__(self, fd: int, pid: int, n_records: int, token: str = "") -> None:
        """Map the ring that is open as `fd` in process `pid`; without a token, a new one of this process.

        Raises:
            OSError: the process has ended, or a limit has been reached.
            ValueError: that file is another.
        """
        self.n_records, self._n_texts = n_records, 0
        self.records = self.group_at(MAX_GROUPS)
        self.texts = self.records + n_records * _RECORD_BYTES
        self._path = Path(f"/proc/{pid}/fd/{fd}")
        self.places: dict[tuple[int, int, int, str], int] = {}  # texts, by code object, offset there, depth, and label
        self._codes: list[CodeType] = []  # in it: kept, so that no other code gets the same number
        if not token:
            os.truncate(fd, self.texts + _TEXT_BYTES)
        with self._path.open("r+b", buffering=0) as file:
            self.memory = mmap.mmap(file.fileno(), self.texts + _TEXT_BYTES)
            self._file = os.fstat(file.fileno())
        if not token:
            os.lseek(fd, 0, os.SEEK_END)  # where faulthandler appends stacks
            _HEAD.pack_into(self.memory, 0, token_hex(16).encode(), 0, 0)
        self.progress = memoryview(self.memory)[_PROGRESS:_HEAD_BYTES].cast("q")
        self._groups: list[dict[str, Any]] = []
        self.about = (fd, pid, n_records, self.head[0].decode())
        if token not in ("", self.about[3]):
            raise ValueError(f"{self._path} is not the flight record that it was")

    @property
    def head(self) -> tuple[bytes, int, int]:
        """Token, which tells this ring from others; bytes of text; time of the last request."""
        return _HEAD.unpack_from(self.memory)

    def add_text(self, content: dict[str, Any]) -> int:
        """Append a text; its number, or 0 if the memory is full."""
        end, line = self.head[1], json.dumps(content).encode() + b"\n"
        if end + len(line) > _TEXT_BYTES:
            return 0
        self.memory[self.texts + end : self.texts + end + len(line)] = line
        _core.fence()
        _WORD.pack_into(self.memory, _END, end + len(line))
        _core.fence()
        self._n_texts += 1
        return self._n_texts

    def learn(self, frame: FrameType, depth: int, label: str) -> int:
        """The number of the text with a label and the line of a script, `depth` frames above `caller`."""
        code = frame.f_code
        key = id(code), frame.f_lasti, depth, label if self.head[1] < _LABELLED_BYTES else ""
        if key not in self.places:
            self._codes.append(code)
            place = {"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno}
            self.places[key] = self.add_text({"label": key[3], "frames": [place]})
        return self.places[key]

    def request_stacks(self) -> bool:
        """Have another process append its stacks to its file, which takes it a moment; False if it has ended."""
        with contextlib.suppress(OSError):  # it has ended, and another process may have its number
            if os.path.samestat(self._path.stat(), self._file):
                _WORD.pack_into(self.memory, _REQUESTED, _now())
                os.kill(self.about[1], signal.SIGQUIT)
                return True
        return False

    def stacks(self) -> bytes:
        """The stacks in the file; nothing if the process has ended."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:  # it has ended
            file.seek(self.texts + _TEXT_BYTES)
            return file.read()
        return b""

    def numbers(self) -> dict[str, int]:
        """The number of the operation noted last in each group, by its name."""
        last = [_WORD.unpack_from(self.memory, self.group_at(index))[0] for index in range(MAX_GROUPS)]
        return {self._group(index)["name"]: number - 1 for index, number in enumerate(last) if number}

    def oldest(self, before: int) -> NotedOperation | None:
        """The first operation that has not ended of those noted before that time."""
        for at, number, _, _, index, code, _, place in sorted(self._noted(), key=lambda record: record[-1]):
            if place and at < before and self.ending(index, number)[1] <= number:
                group = self._group(index)
                return NotedOperation(group["name"], group["ranks"], [*KINDS][code], number)
        return None

    def _noted(self) -> Iterator[tuple[int, ...]]:
        return _RECORD.iter_unpack(self.memory[self.records : self.texts])

    def ending(self, index: int, number: int) -> tuple[int, int]:
        """When the last operation in the place of this one ended, and its number plus 1."""
        return _PAIR.unpack_from(self.memory, self.ending_at(index, number))

    def group_at(self, index: int) -> int:
        """Where the memory of a group begins."""
        return _HEAD_BYTES + index * (_GROUP_HEAD_BYTES + self.n_records * _PAIR.size)

    def ending_at(self, index: int, number: int) -> int:
        """Where the ending of an operation lies."""
        return self.group_at(index) + _GROUP_HEAD_BYTES + number % self.n_records * _PAIR.size

    def _read_texts(self) -> bytes:
        """The texts, of whatever has been read before among them."""
        _core.fence()
        end = self.head[1]
        _core.fence()
        return self.memory[self.texts : self.texts + end]

    def _group(self, index: int) -> dict[str, Any]:
        if index >= len(self._groups):
            lines = self._read_texts().splitlines()
            self._groups = [json.loads(line) for line in lines if b'"ranks"' in line]
        return self._groups[index]

    def read(self) -> dict[str, Any]:
        """The content in the format of PyTorch's recorder; and `rank`, `folder` and `answers`."""
        # Records before texts: the process may note more, and its records refer to texts.
        records = sorted(self._noted(), key=lambda record: record[-1])
        texts = [{"label": "", "frames": []}, *(json.loads(line) for line in self._read_texts().splitlines())]
        groups = [text for text in texts if "ranks" in text]
        return {
            "version": _VERSION,
            "pg_config": {group["name"]: {**group, "ranks": str(group["ranks"])} for group in groups},
            "entries": [
                self._entry(groups[one[4]], texts[one[3]], *one)
                for one in records
                if one[-1] and one[4] < len(groups) and one[3] < len(texts)
            ],
            **texts[1],
        }

    def _entry(self, group: dict[str, Any], text: dict[str, Any], *record: int) -> dict[str, Any]:
        at, number, count, _, index, code, dtype, place = record
        ended_at, ended = self.ending(index, number)
        epoch, kind, types = time.time_ns() - _now(), [*KINDS][code], [_DTYPES[dtype]]
        # The counts of ragged operations may differ between ranks, which the analysis would take for a fault.
        size, sent = len(group["ranks"]), 0 if kind.endswith("ragged") else count
        return {
            "record_id": place - 1,
            "process_group": (group["name"], group["desc"]),
            "collective_seq_id": number,
            "p2p_seq_id": 0,
            "is_p2p": False,
            "profiling_name": f"{_BACKEND}:{KINDS[kind]}",
            "time_created_ns": at + epoch,
            "time_discovered_completed_ns": ended_at + epoch if ended == number + 1 else None,
            "state": "completed" if ended > number else "started",
            "input_sizes": [[sent * size if kind == "reduce_scatter" else sent]],
            "output_sizes": [[sent * size if kind == "all_gather" else sent]],
            "input_dtypes": types,
            "output_dtypes": types,
            "count": count,
            **text,
        }


def _script(frame: FrameType) -> tuple[FrameType, int]:
    """The innermost frame of a script among `frame`, the second above this one, and those above; its depth."""
    depth = 2
    while _inner[frame.f_code.co_filename] and (outer := frame.f_back) is not None:
        frame, depth = outer, depth + 1
    return frame, depth


class GroupRecord:
    """The operations of a communicator, which its ranks number alike.

    Attributes:
        name: equal on all ranks.
        ranks: their numbers in the job.
        rank: of this process in the job.
        count: of operations, where the communicator has no numbers of its own.
        layout: arguments of `record_in` of csrc.
    """

    def __init__(self, ring: Ring, index: int, name: str, ranks: Sequence[int], rank: int) -> None:
        self.name, self.ranks, self.rank = name, ranks, rank
        self.count = 0
        self._ring, self._index = ring, index
        at = ring.group_at(index)
        self.layout = ring.memory, _NOTED, ring.records, ring.n_records, at, index
        self._last = memoryview(ring.memory)[at : at + _WORD.size].cast("q")
        self._noted = memoryview(ring.memory)[_NOTED : _NOTED + _WORD.size].cast("q")
        self._depths = dict.fromkeys(KINDS, 2)  # of the script's frame below `note`, in the last operation of a kind

    def note(self, kind: str, dtype: int, count: int, label: str, number: int) -> None:
        """Note an operation that is about to start.

        Args:
            kind: a key of `KINDS`.
            dtype: a value of `comm.types.DTYPES`.
            count: elements.
            label: shown beside it.
            number: of the operation, equal on all ranks.
        """
        ring, text, place = self._ring, self.caller(kind, label), self._noted[0]
        offset = ring.records + place % ring.n_records * _RECORD_BYTES
        _pack(ring.memory, offset, _now(), number, count, text, self._index, _CODES[kind], dtype, place + 1)
        self._noted[0] = place + 1
        self._last[0] = number + 1

    def caller(self, kind: str, label: str) -> int:
        """The number of the text that says where the script calls an operation, and its label."""
        # By `sys._getframe`: a record names the script's line, and `inspect.stack` would take longer than a collective.
        # An operation of a kind is usually called at the same depth below the script: other frames are not looked at.
        ring, depth = self._ring, self._depths[kind]
        try:
            frame = sys._getframe(depth)
            return ring.places[id(frame.f_code), frame.f_lasti, depth, label]
        except (KeyError, ValueError):
            frame, self._depths[kind] = _script(sys._getframe(2))  # the caller is not the script
            return ring.learn(frame, self._depths[kind], label)

    @property
    def last(self) -> int:
        """The number of the operation noted last; -1 before the first."""
        return self._last[0] - 1

    def note_end(self, number: int) -> None:
        """Note that an operation has ended, where csrc does not."""
        _PAIR.pack_into(self._ring.memory, self._ring.ending_at(self._index, number), _now(), number + 1)

    def end_time(self, number: int, latest: float) -> float:
        """When an operation ended, in seconds of the monotonic clock; `latest` if that is unknown or later."""
        at, which = self._ring.ending(self._index, number)
        return min(at / 1e9, latest) if which == number + 1 else latest
