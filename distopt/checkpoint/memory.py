"""States in the memory of the agents of `distopt run --heal`, which outlives the ranks.

A rank keeps there the states that it would write to the file of a checkpoint: its own, and of the shared arrays a share
among the ranks of its agent. So every node has all shared arrays. From time to time, a rank also sends copies of its
own states to the next node, in case its node is lost; that slot stays until newer copies have arrived. See
`distopt.launch.heal.state_slots`. A slot is read only after its writer has ended, so the order of writing needs no
fence.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..launch.end_together.report import supervisor
from ..launch.heal.modules import installed_modules
from ..launch.heal.state_slots import HEADER, VARIABLE, state_slots_in
from ..launch.launchers.distopt_run import DISTOPT_RUN
from .adapters import LABEL, copy_of, exchanged, snapshot_of
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
    """The states that a rank keeps after a step.

    Attributes:
        own: arrays of its own.
        shared: its share of the arrays that all ranks share.
        far: by the number of a rank of the node before, the bytes of such an object with that rank's own.
        notes: values of JSON, by object.
        writer: number of the rank, and how many ranks of its agent have a share.
    """

    own: Arrays
    shared: Arrays
    far: Arrays
    notes: dict[str, Any]
    writer: tuple[int, int] = (0, 1)

    def pack(self, label: Label) -> tuple[bytes, int]:
        """Local. The JSON that describes them, with their label, and the bytes that all take."""
        described = [[[key, a.dtype.str, a.shape] for key, a in group.items()] for group in self[:3]]
        content = {"label": label, "writer": self.writer, "arrays": described, "notes": self.notes}
        text = json.dumps(content).encode()
        sizes = (_aligned(array.nbytes) for group in self[:3] for array in group.values())
        return text, _aligned(HEADER.size + len(text)) + sum(sizes)

    def write(self, buffer: Any, label: Label, text: bytes) -> None:
        """Local. Write the JSON of `pack` and the arrays to a buffer of that size; the header validates them, last."""
        buffer[HEADER.size : HEADER.size + len(text)] = text
        begin = _aligned(HEADER.size + len(text))
        for group in self[:3]:
            for array in group.values():
                room = np.frombuffer(buffer, array.dtype, array.size, begin).reshape(array.shape)
                room[...] = array if isinstance(array, np.ndarray) else copy_of(array)
                begin += _aligned(array.nbytes)
        HEADER.pack_into(buffer, 0, label.step, len(text), label.step + 1)

    def to_bytes(self, label: Label) -> bytes:
        """Local. The states and their label as bytes, to be sent."""
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
        return cls(own, shared, far, content["notes"], tuple(content["writer"]))


class Memory:
    """The slots of this rank, and of the other ranks of its agent.

    Args:
        place: number of this rank among the ranks of the agent.
        n_ranks: number of ranks of the agent.
        fds: descriptors of all slots of the agent.
        ranks: all ranks of the job.
        node: names the node of the agent.
        attempt: how many times the ranks have been started before.
    """

    def __init__(self, place: int, n_ranks: int, fds: list[int], ranks: Ranks, node: str, attempt: int = 0) -> None:
        self._slots = [_StateSlot(fd) for fd in fds]
        self._n_slots = len(fds) // n_ranks  # of each rank
        self._own = self._slots[self._n_slots * place :][: self._n_slots]
        # With those of ranks that this agent no longer starts: each slot is looked after by one rank.
        self._held = [slot for i, slot in enumerate(self._slots) if i // self._n_slots % n_ranks == place]
        self._place, self._n_ranks = place, n_ranks
        self._ranks = ranks
        self._rank = ranks.topology.rank
        self._node, self._attempt = node, attempt
        self._nodes: list[str] = []  # of all ranks
        self._givers: dict[int, int] = {}  # for each rank that has kept states, the rank that has them now
        self._donor = ""  # a node with all shared arrays
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
        fds = state_slots_in(os.environ)
        os.environ.pop(VARIABLE, None)
        if not fds or os.environ.get(DISTOPT_RUN.size) != str(ranks.topology.world_size):
            return None
        place, n_ranks = int(os.environ[DISTOPT_RUN.local_rank]), int(os.environ[DISTOPT_RUN.local_size])
        return cls(place, n_ranks, fds, ranks, os.environ[DISTOPT_RUN.node], DISTOPT_RUN.attempt(os.environ))

    def agree(self) -> Label | None:
        """Collective. The label of the newest states that exist of every rank then; None without such states.

        Newer states are dropped: those steps will be repeated.
        """
        kept = [self._node, [[slot.label, *slot.writer, slot.far] for slot in self._held if slot.label]]
        gathered = exchanged(self._ranks, kept)
        self._nodes = [node for node, _ in gathered]
        self._far = self._neighbours()
        self._sends = len(set(self._nodes)) > 1
        newest = None
        for label in sorted({Label(*slot[0]) for _, slots in gathered for slot in slots}):
            found = [(rank, slot) for rank, (_, slots) in enumerate(gathered) for slot in slots if slot[0] == [*label]]
            writers = {slot[1]: rank for rank, slot in found}
            givers = {number: rank for rank, slot in found for number in slot[3]} | writers
            shares = Counter((self._nodes[rank], slot[2]) for rank, slot in found)
            whole = [node for (node, n_shares), count in shares.items() if count == n_shares]
            if whole and givers.keys() == set(range(label.world_size)):
                newest, self._givers, self._donor = label, givers, min(whole)
        for slot in self._held:
            if newest is None or slot.label > newest:
                slot.clear()
        self._spread = max((slot for slot in self._own if slot.far), key=lambda slot: slot.label, default=None)
        return newest

    def read(self, label: Label) -> tuple[Arrays, list[tuple[Arrays, dict[str, Any]]]]:
        """Collective. Of the label agreed on: the shared arrays; and a rank's own, with its notes.

        The latter are this rank's if there were as many ranks, else those of each rank then.
        """
        found = [slot.read() for slot in self._slots if slot.label == label]
        shared = {key: array for kept in found for key, array in kept.shared.items()}
        of_ranks = {kept.writer[0]: kept for kept in found}
        resized = label.world_size != self._ranks.topology.world_size
        absent = [number for number, giver in self._givers.items() if resized or giver != number]
        if absent:
            shared = self._fetch(label, of_ranks, absent)
        numbers = range(label.world_size) if resized else [self._rank]
        return shared, [(of_ranks[number].own, of_ranks[number].notes) for number in numbers]

    def due(self, step: int) -> bool:
        """Local, on all ranks. Count a finished step; return whether states are to be kept after it."""
        if self._is_new and self._rank == 0:
            supervisor.send("stepped", step=step)
        self._is_new = False
        for slot in self._own:
            slot.count(step)
        self._steps += 1
        self._left -= 1
        return self._left <= 0

    def keep(self, step: int, epoch: int, adapters: Mapping[str, Adapter]) -> None:
        """On all ranks; at times collective, else local. Keep the states after this step."""
        label = Label(self._attempt, step, epoch, self._ranks.topology.world_size)
        if any(slot.label == label for slot in self._own):
            return
        begin = time.perf_counter()
        states = snapshot_of(adapters)
        share = share_of(self._place, self._n_ranks, states.shared)
        kept = Kept(states.own, {}, {}, states.notes, (self._rank, self._n_ranks))
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
            supervisor.send("modules", names=[name for name in installed_modules() if name != hidden])
        if self._n_copies & (self._n_copies - 1) == 0:
            if self._n_copies >= _FIRST_PACE:
                self._pace()
            self._since, self._steps, self._seconds = time.perf_counter(), 0, 0.0

    def _pace(self) -> None:
        """Collective. Agree on the interval of copies from the cost of the last half of them."""
        step = (time.perf_counter() - self._since) / max(1, self._steps)
        copies, steps = zip(*exchanged(self._ranks, [self._seconds / (self._n_copies // 2), step]), strict=True)
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
        gathered = self._ranks.all_gather_bytes(mine if len(mine) <= _MOST_FAR_BYTES else b"", label=LABEL)
        self._sends = all(gathered)
        return {str(rank): np.frombuffer(gathered[rank], np.uint8) for rank in self._far} if self._sends else {}

    def _fetch(self, label: Label, of_ranks: dict[int, Kept], wanted: Iterable[int]) -> Arrays:
        """Collective. Exchange states that other agents have; return the shared arrays, and add to `of_ranks`.

        Args:
            label: of the states.
            of_ranks: what each rank has kept, as far as the agent has it.
            wanted: the ranks whose own states others need.
        """
        given = Kept({}, {}, {}, {})
        for kept in [slot.read() for slot in self._held if slot.label == label]:
            given.shared.update(kept.shared if self._node == self._donor else {})
            own = Kept(kept.own, {}, {}, kept.notes, kept.writer).to_bytes(label)
            for number, copy in {**kept.far, str(kept.writer[0]): np.frombuffer(own, np.uint8)}.items():
                if int(number) in wanted and self._givers[int(number)] == self._rank:
                    given.far[number] = copy
        payloads = self._ranks.all_gather_bytes(given.to_bytes(label), label=LABEL)
        gathered = [Kept.read(each) for each in payloads]
        of_ranks.update({int(number): Kept.read(copy.data) for each in gathered for number, copy in each.far.items()})
        return {key: array for each in gathered for key, array in each.shared.items()}


class _StateSlot:
    """The slot of an agent that keeps the states of this rank; see `distopt.launch.heal.state_slots`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, 0) if os.fstat(fd).st_size else None
        self.label: tuple[int, ...] = ()  # of its states, if there are any
        self.writer: tuple[int, ...] = ()
        self.far: list[int] = []
        if self._map is not None and HEADER.unpack_from(self._map)[2]:
            content, _ = _described(self._map)
            self.label, self.writer = Label(*content["label"]), tuple(content["writer"])
            self.far = [int(key) for key, _, _ in content["arrays"][2]]

    def clear(self) -> None:
        """Local. Make the states in it invalid."""
        self.label, self.far = (), []
        if self._map is not None:
            HEADER.pack_into(self._map, 0, 0, 0, 0)

    def write(self, label: Label, kept: Kept) -> None:
        """Local. Write states in place of the earlier ones; memory grows as they need it."""
        self.clear()
        text, n_bytes = kept.pack(label)
        if self._map is None or len(self._map) < n_bytes:
            os.ftruncate(self._fd, n_bytes)
            self._map = mmap.mmap(self._fd, n_bytes)
        kept.write(self._map, label, text)
        self.label, self.writer = label, kept.writer

    def count(self, step: int) -> None:
        """Local. Note the newest step that this rank has done; without effect before the first `write`."""
        if self._map is not None:
            struct.pack_into("<Q", self._map, 0, step)  # the first of the header

    def read(self) -> Kept:
        """Local. Copies of the states in it."""
        return Kept.read(self._map)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


def _described(buffer: Any) -> tuple[dict[str, Any], int]:
    """The JSON, and where the arrays begin."""
    _, length, _ = HEADER.unpack_from(buffer)
    content: dict[str, Any] = json.loads(bytes(buffer[HEADER.size : HEADER.size + length]))
    return content, _aligned(HEADER.size + length)
