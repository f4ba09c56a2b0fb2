"""States in memory that outlives the ranks: that of the agents of `distopt run --heal`.

A rank keeps there what it would write to the file of a checkpoint, with its share of the shared arrays among the ranks
of its agent; see `distopt.launch.run.slots`. Nobody reads a slot before its writer has ended, so the order of writing
needs no fence.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..launch.run.slots import HEADER, VARIABLE
from ..launch.watch.report import supervisor
from .folder import share_of
from .parts import State, copy_of

if TYPE_CHECKING:
    from ..files import Arrays
    from .load import Ranks
    from .parts import Part

_ALIGNMENT = 64
_COST = 0.01  # of the time of training, that copies may take
_MOST_STEPS = 1000  # between two copies


class Memory:
    """The slots of this rank, and of the other ranks of its agent.

    Args:
        place: number of this rank among those of the agent.
        fds: of the slots, two for each rank.
        ranks: all ranks of the job.
    """

    def __init__(self, place: int, fds: list[int], ranks: Ranks) -> None:
        self._slots = [_Slot(fd) for fd in fds]
        self._own = self._slots[2 * place : 2 * place + 2]
        self._place = place
        self._ranks = ranks
        self._n_copies = 0
        self._seconds = math.inf  # that a copy takes, the best so far
        self._since, self._steps = time.perf_counter(), 0  # the last agreement on:
        self._every = 1
        self._left = 1  # steps to the next copy

    @classmethod
    def of_agent(cls, ranks: Ranks) -> Memory | None:
        """Local. What this process has got, once; None if it has no such agent, or `ranks` are a part of the job."""
        place, _, fds = os.environ.pop(VARIABLE, "").partition(":")
        if not fds or os.environ.get("WORLD_SIZE") != str(ranks.topology.world_size):
            return None
        return cls(int(place), [int(fd) for fd in fds.split(",")], ranks)

    def agree(self) -> tuple[int, int] | None:
        """Collective. Step and epoch of the newest states that all ranks have. None if there are none."""
        kept = [slot.label for slot in self._own]
        gathered = [json.loads(each) for each in self._ranks.all_gather_bytes(json.dumps(kept).encode())]
        common = set.intersection(*({tuple(label) for label in labels if label} for labels in gathered))
        newest = max(common, default=None)
        for slot in self._own:
            if slot.label != newest:  # of steps that will be done anew
                slot.clear()
        return newest

    def read(self, label: tuple[int, int], parts: Mapping[str, Part]) -> dict[str, State]:
        """Local. The states of that step and epoch, by the names of `parts`."""
        states = {name: State({}, {}) for name in parts}
        for number, slot in enumerate(self._slots):
            if slot.label == label:
                own, shared, notes = slot.read()
                mine = number // 2 == self._place
                for key, array in {**shared, **(own if mine else {})}.items():
                    name, _, rest = key.partition("/")
                    states[name].arrays[rest] = array
                for name, note in notes.items() if mine else ():
                    states[name].notes.update(note)
        return states

    def due(self, step: int) -> bool:
        """Local, on all ranks. Count a finished step; whether states are to be kept after it."""
        if self._n_copies == 0 and self._ranks.topology.rank == 0:
            supervisor.say("stepped", step=step)
        self._steps += 1
        self._left -= 1
        return self._left <= 0

    def keep(self, step: int, epoch: int, parts: Mapping[str, Part]) -> None:
        """Collective for the 2nd, 4th, 8th ... time, else local. Keep the states after this step."""
        if any(slot.label == (step, epoch) for slot in self._own):
            return
        begin = time.perf_counter()
        own: Arrays = {}
        shared: Arrays = {}
        notes: dict[str, Any] = {}
        for name, part in parts.items():
            state = part.look()
            same = part.shared(state.arrays)
            for key, array in state.arrays.items():
                (shared if key in same else own)[f"{name}/{key}"] = array
            notes[name] = state.notes
        share = share_of(self._place, len(self._slots) // 2, {key: array.nbytes for key, array in shared.items()})
        older = min(self._own, key=lambda slot: slot.label or (-1, -1))
        older.write((step, epoch), own, {key: shared[key] for key in share}, notes)
        self._n_copies += 1
        now = time.perf_counter()
        self._seconds = min(self._seconds, now - begin)
        if self._n_copies & (self._n_copies - 1) == 0 and self._n_copies > 1:
            self._pace(now)
        if self._n_copies == 1:
            self._since, self._steps = now, 0
            if self._place == 0:
                supervisor.say("modules", names=list(sys.modules))
        self._left = self._every

    def _pace(self, now: float) -> None:
        """Collective. Agree on how often copies cost little enough."""
        own = [self._seconds, (now - self._since) / max(1, self._steps)]
        gathered = [json.loads(each) for each in self._ranks.all_gather_bytes(json.dumps(own).encode())]
        copy, step = max(copy for copy, _ in gathered), min(step for _, step in gathered)
        self._every = min(_MOST_STEPS, max(1, math.ceil(copy / (_COST * step))))
        self._since, self._steps = time.perf_counter(), 0


class _Slot:
    """One slot: a header, JSON, and the bytes of the arrays."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map: mmap.mmap | None = None
        self._told = self._look()
        self.label: tuple[int, int] | None = tuple(self._told["label"]) if self._told else None

    def _look(self) -> dict[str, Any]:
        size = os.fstat(self._fd).st_size
        if size:
            self._map = mmap.mmap(self._fd, size)
            valid, length = HEADER.unpack_from(self._map)
            if valid:
                told: dict[str, Any] = json.loads(self._map[HEADER.size : HEADER.size + length])
                return told
        return {}

    def clear(self) -> None:
        self.label = None
        if self._map is not None:
            HEADER.pack_into(self._map, 0, 0, 0)

    def write(self, label: tuple[int, int], own: Arrays, shared: Arrays, notes: Mapping[str, Any]) -> None:
        self.clear()
        arrays = [*own.values(), *shared.values()]
        ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays], dtype=int).tolist()
        described = [[key, array.dtype.str, array.shape] for key, array in (*own.items(), *shared.items())]
        told = {"label": label, "arrays": described, "ends": ends, "own": len(own), "notes": notes}
        text = json.dumps(told).encode()
        base = -(-(HEADER.size + len(text)) // _ALIGNMENT) * _ALIGNMENT
        size = base + (ends[-1] if ends else 0)
        if self._map is None or len(self._map) < size:
            os.ftruncate(self._fd, size)
            self._map = mmap.mmap(self._fd, size)
        self._map[HEADER.size : HEADER.size + len(text)] = text
        for array, begin in zip(arrays, [0, *ends], strict=False):
            room = np.frombuffer(self._map, array.dtype, array.size, base + begin).reshape(array.shape)
            room[...] = array if isinstance(array, np.ndarray) else copy_of(array)
        HEADER.pack_into(self._map, 0, label[0] + 1, len(text))
        self.label = label

    def read(self) -> tuple[Arrays, Arrays, dict[str, Any]]:
        """Local. Copies of the arrays that were the rank's own, of its share, and the notes."""
        told = self._look()
        assert self._map is not None
        _, length = HEADER.unpack_from(self._map)
        base = -(-(HEADER.size + length) // _ALIGNMENT) * _ALIGNMENT
        arrays = {}
        for (key, dtype, shape), begin in zip(told["arrays"], [0, *told["ends"]], strict=False):
            room = np.frombuffer(self._map, dtype, math.prod(shape), base + begin)
            arrays[key] = room.reshape(shape).copy()
        items = list(arrays.items())
        return dict(items[: told["own"]]), dict(items[told["own"] :]), told["notes"]
