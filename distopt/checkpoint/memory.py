"""States in the memory of the agents of `distopt run --heal`, which outlives the ranks.

A rank keeps there the states that it would write to the file of a checkpoint: its own, and of the shared arrays a share
among the ranks of its agent. So every node has all shared arrays. From time to time, a rank also sends copies of its
own states to the next node, in case its node is lost; that slot stays until newer copies have arrived. See
`distopt.launch.heal.slots`. A slot is read only after its writer has ended, so the order of writing needs no fence.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..launch.end_together.report import supervisor
from ..launch.heal.slots import HEADER, VARIABLE, slots_in
from .adapters import copy_of, look_at
from .folder import share_of

if TYPE_CHECKING:
    from ..files import Arrays
    from .adapters import Adapter, Ranks

_ALIGNMENT = 64
_COST = 0.008  # the share of training time that copies may take
_MOST_STEPS = 1000  # most steps between two copies
_FAR_EVERY = 32  # one copy of this number also goes to another node, which takes far longer
_FIRST_PACE = 8  # copies before the interval is first set by their cost; the first into each slot meet fresh memory
_MOST_FAR_BYTES = 1 << 20  # most bytes of a rank's own states for a copy on another node


class Kept(NamedTuple):
    """The states that a rank keeps after a step.

    Attributes:
        own: arrays of its own.
        shared: its share of the arrays that all ranks share.
        far: by the number of a rank of the node before, the bytes of such an object with that rank's own.
        notes: values of JSON, by object.
    """

    own: Arrays
    shared: Arrays
    far: Arrays
    notes: dict[str, Any]

    def pack(self, label: tuple[int, int]) -> tuple[bytes, int]:
        """Local. The JSON that describes them, of that step and epoch, and the bytes that all take."""
        described = [[[key, a.dtype.str, a.shape] for key, a in group.items()] for group in self[:3]]
        text = json.dumps({"label": label, "arrays": described, "notes": self.notes}).encode()
        sizes = (_aligned(array.nbytes) for group in self[:3] for array in group.values())
        return text, _aligned(HEADER.size + len(text)) + sum(sizes)

    def write(self, buffer: Any, label: tuple[int, int], text: bytes) -> None:
        """Local. Write the JSON of `pack` and the arrays to a buffer of that size; the header validates them, last."""
        buffer[HEADER.size : HEADER.size + len(text)] = text
        begin = _aligned(HEADER.size + len(text))
        for group in self[:3]:
            for array in group.values():
                room = np.frombuffer(buffer, array.dtype, array.size, begin).reshape(array.shape)
                room[...] = array if isinstance(array, np.ndarray) else copy_of(array)
                begin += _aligned(array.nbytes)
        HEADER.pack_into(buffer, 0, label[0], len(text), label[0] + 1)

    def to_bytes(self, label: tuple[int, int]) -> bytes:
        """Local. All in one piece, to be sent."""
        text, n_bytes = self.pack(label)
        buffer = bytearray(n_bytes)
        self.write(buffer, label, text)
        return bytes(buffer)

    @classmethod
    def read(cls, buffer: Any) -> Kept:
        """Local. Copies of the states in a buffer."""
        content, begin = _described(buffer)
        groups: list[Arrays] = []
        for described in content["arrays"]:
            groups.append({})
            for key, dtype, shape in described:
                array = np.frombuffer(buffer, dtype, math.prod(shape), begin).reshape(shape).copy()
                groups[-1][key] = array
                begin += _aligned(array.nbytes)
        own, shared, far = groups
        return cls(own, shared, far, content["notes"])


class Memory:
    """The slots of this rank, and of the other ranks of its agent.

    Args:
        place: number of this rank among the ranks of the agent.
        n_ranks: number of these.
        fds: of their slots.
        ranks: all ranks of the job.
        node: names the node of the agent.
    """

    def __init__(self, place: int, n_ranks: int, fds: list[int], ranks: Ranks, node: str) -> None:
        self._slots = [_StateSlot(fd) for fd in fds]
        self._n_slots = len(fds) // n_ranks  # of each rank
        self._own = self._slots[self._n_slots * place :][: self._n_slots]
        self._place, self._n_ranks = place, n_ranks
        self._ranks = ranks
        self._rank = ranks.topology.rank
        self._node = node
        self._nodes: list[str] = []  # of all ranks
        self._missing: set[int] = set()  # ranks whose agents have lost what they kept
        self._far: list[int] = []  # ranks whose states this one keeps copies of
        self._sends = False  # whether there are such copies
        self._spread: _StateSlot | None = None  # the slot with the newest states
        self._is_new = True  # no step has been done by this process
        self._n_copies = 0
        self._seconds = 0.0  # that copies have taken since
        self._since, self._steps = time.perf_counter(), 0  # the last agreement on:
        self._every = self._left = 1  # steps to the next copy

    @classmethod
    def of_agent(cls, ranks: Ranks) -> Memory | None:
        """Local. The slots of this process, at the first call; None without such an agent, or if `ranks` lack some."""
        fds = slots_in(os.environ)
        os.environ.pop(VARIABLE, None)
        if not fds or os.environ.get("WORLD_SIZE") != str(ranks.topology.world_size):
            return None
        place, n_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        return cls(place, n_ranks, fds, ranks, os.environ["GROUP_RANK"])

    def agree(self) -> tuple[int, int] | None:
        """Collective. Step and epoch of the newest states that exist for every rank; None without such states.

        This rank's states of later steps are dropped: those steps will be repeated.
        """
        valid = [slot for slot in self._own if slot.label]
        far = [(number, slot.label) for slot in valid for number in slot.far]
        kept = [self._node, [slot.label for slot in valid], far]
        gathered = [json.loads(each) for each in self._ranks.all_gather_bytes(json.dumps(kept).encode())]
        self._nodes = [node for node, _, _ in gathered]
        self._far = self._neighbours()
        self._sends = len(set(self._nodes)) > 1
        newest = None
        for label in sorted({tuple(label) for _, labels, _ in gathered for label in labels}):
            missing = {rank for rank, (_, labels, _) in enumerate(gathered) if list(label) not in labels}
            copies = {number for _, _, far in gathered for number, of in far if tuple(of) == label}
            if missing <= copies and {self._nodes[rank] for rank in missing} != set(self._nodes):
                newest, self._missing = label, missing
        for slot in self._own:
            if newest is None or slot.label > newest:
                slot.clear()
        self._spread = max((slot for slot in self._own if slot.far), key=lambda slot: slot.label, default=None)
        return newest

    def read(self, label: tuple[int, int]) -> tuple[Arrays, Arrays, dict[str, Any]]:
        """Collective. Of that step and epoch: the shared arrays, this rank's own, and its notes."""
        found = {number // self._n_slots: slot.read() for number, slot in enumerate(self._slots) if slot.label == label}
        mine = found.get(self._place)
        shared: Arrays = {}
        if self._missing:
            shared, mine = self._fetch(label, mine)
        assert mine is not None
        for kept in found.values():
            shared |= kept.shared
        return shared, mine.own, mine.notes

    def due(self, step: int) -> bool:
        """Local, on all ranks. Count a finished step; return whether states are to be kept after it."""
        if self._is_new and self._rank == 0:
            supervisor.say("stepped", step=step)
        self._is_new = False
        for slot in self._own:
            slot.count(step)
        self._steps += 1
        self._left -= 1
        return self._left <= 0

    def keep(self, step: int, epoch: int, adapters: Mapping[str, Adapter]) -> None:
        """Local, at times collective: on all ranks. Keep the states after this step."""
        label = step, epoch
        if any(slot.label == label for slot in self._own):
            return
        begin = time.perf_counter()
        states = look_at(adapters)
        share = share_of(self._place, self._n_ranks, states.shared)
        kept = Kept(states.own, {}, {}, states.notes)
        spreads = self._sends and self._n_copies % _FAR_EVERY == 0
        far = self._exchange(kept.to_bytes(label)) if spreads else {}
        slot = min((slot for slot in self._own if slot is not self._spread), key=lambda slot: slot.label)
        slot.write(label, kept._replace(shared=share, far=far))
        if spreads:
            self._spread = slot if self._sends else None
        self._n_copies += 1
        self._left = self._every
        self._seconds += time.perf_counter() - begin
        if self._n_copies == 1 and self._place == 0:
            mpi4py: Any = sys.modules.get("mpi4py")
            hidden = "mpi4py.MPI" if mpi4py is not None and mpi4py.rc.initialize else ""  # it may start MPI
            supervisor.say("modules", names=[name for name in sys.modules if name != hidden])
        if self._n_copies & (self._n_copies - 1) == 0:
            if self._n_copies >= _FIRST_PACE:
                self._pace()
            self._since, self._steps, self._seconds = time.perf_counter(), 0, 0.0

    def _pace(self) -> None:
        """Collective. Agree on the interval of copies from the cost of the last half of them."""
        step = (time.perf_counter() - self._since) / max(1, self._steps)
        gathered = self._ranks.all_gather_bytes(json.dumps([self._seconds / (self._n_copies // 2), step]).encode())
        copies, steps = zip(*map(json.loads, gathered), strict=True)
        self._every = self._left = min(_MOST_STEPS, max(1, math.ceil(max(copies) / (_COST * min(steps)))))

    # -- between nodes -------------------------------------------------------------------------------------------------
    def _neighbours(self) -> list[int]:
        """The ranks of the previous node that this rank keeps copies for."""
        order = sorted(set(self._nodes))
        before = order[order.index(self._node) - 1]
        here, there = (
            [rank for rank, node in enumerate(self._nodes) if node == which] for which in (self._node, before)
        )
        return [rank for i, rank in enumerate(there) if here[i % len(here)] == self._rank]

    def _exchange(self, mine: bytes) -> Arrays:
        """Collective. The copies for the node before; no more of them if a rank has large states of its own."""
        gathered = self._ranks.all_gather_bytes(mine if len(mine) <= _MOST_FAR_BYTES else b"")
        self._sends = all(gathered)
        return {str(rank): np.frombuffer(gathered[rank], np.uint8) for rank in self._far} if self._sends else {}

    def _fetch(self, label: tuple[int, int], mine: Kept | None) -> tuple[Arrays, Kept | None]:
        """Collective. Send states to ranks whose agents have lost them; the shared arrays and this rank's states."""
        missing = {self._nodes[rank] for rank in self._missing}
        donor = next(node for node in sorted(set(self._nodes)) if node not in missing)
        given = Kept({}, {}, {}, {})
        if mine is not None:
            shared = mine.shared if self._node == donor else {}
            far = {rank: copy for rank, copy in mine.far.items() if int(rank) in self._missing}
            given = Kept({}, shared, far, {})
        gathered = [Kept.read(each) for each in self._ranks.all_gather_bytes(given.to_bytes(label))]
        if self._rank in self._missing:
            mine = Kept.read(next(each.far[str(self._rank)] for each in gathered if str(self._rank) in each.far).data)
        return {key: array for each in gathered for key, array in each.shared.items()}, mine


class _StateSlot:
    """The slot of an agent that keeps the states of this rank; see `distopt.launch.heal.slots`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, 0) if os.fstat(fd).st_size else None
        self.label: tuple[int, ...] = ()  # of its states, if there are any
        self.far: list[int] = []
        if self._map is not None and HEADER.unpack_from(self._map)[2]:
            content, _ = _described(self._map)
            self.label = tuple(content["label"])
            self.far = [int(key) for key, _, _ in content["arrays"][2]]

    def clear(self) -> None:
        self.label, self.far = (), []
        if self._map is not None:
            HEADER.pack_into(self._map, 0, 0, 0, 0)

    def write(self, label: tuple[int, int], kept: Kept) -> None:
        self.clear()
        text, n_bytes = kept.pack(label)
        if self._map is None or len(self._map) < n_bytes:
            os.ftruncate(self._fd, n_bytes)
            self._map = mmap.mmap(self._fd, n_bytes)
        kept.write(self._map, label, text)
        self.label = label

    def count(self, step: int) -> None:
        if self._map is not None:
            struct.pack_into("<Q", self._map, 0, step)  # the first of the header

    def read(self) -> Kept:
        return Kept.read(self._map)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


def _described(buffer: Any) -> tuple[dict[str, Any], int]:
    """The JSON, and where the arrays begin."""
    _, length, _ = HEADER.unpack_from(buffer)
    content: dict[str, Any] = json.loads(bytes(buffer[HEADER.size : HEADER.size + length]))
    return content, _aligned(HEADER.size + length)
