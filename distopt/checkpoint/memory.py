"""States in the memory of the agents of `distopt run --heal`, which outlives the ranks.

- Copies: from time to time, a rank keeps the states that it would write to the file of a checkpoint: its own, and of
  the shared arrays a share among the ranks of its agent. So every node has all shared arrays. The agent sends the own
  states to the next node, in case that this one is lost.
- Records: after each step, a rank also keeps its own states, if they are small; the agent sends them, too. See
  `records`.
- Live states: when another rank is lost, the ranks of each agent give their shared arrays; see `live`.

Ranks that start again agree on the newest step for which all states can be put together; see `plan`.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import arrays_in, write_arrays
from ..launch.end_together.report import supervisor
from ..launch.heal.modules import installed_modules
from ..launch.heal.state_slots import SENT, STAYS, TO_SEND, VARIABLE, StateFds, parts_of
from ..launch.launchers.distopt_run import DISTOPT_RUN
from .adapters import LABEL, exchanged, snapshot_of
from .folder import MARK, OWN, SHARED, WRITER, share_of, under_prefix
from .live import Gifts, LiveStates
from .plan import Plan, own_states
from .records import MOST_BYTES, Arrivals, Records
from .state_files import Held, Label, States, StateSlot, copies

if TYPE_CHECKING:
    from ..files import Arrays
    from .adapters import Adapter, Ranks, Snapshot

_COST = 0.008  # the share of training time that copies may take
_RECORD_COST = 0.01  # and records, without which copies count
_RECORDS_SEEN = 32
_TRIALS = 3  # records that are written where none are, to learn what they would cost
_MOST_STEPS = 1000  # most steps between two copies
_PIECE_BYTES = 1 << 26  # that each rank gives at a time
_FIRST_PACE = 8  # copies before the interval is first set by their cost; the first into each slot meet fresh memory


class Memory:
    """The slots of this rank, and of the other ranks of its agent.

    Args:
        place: number of this rank among the ranks of the agent.
        n_ranks: number of ranks of the agent.
        fds: descriptors of the agent's files.
        ranks: all ranks of the job.
        node: names the node of the agent.
        attempt: how many times the ranks have been started before.
        in_shards: whether all ranks have the same states, since the number of ranks does not matter.
    """

    def __init__(
        self,
        place: int,
        n_ranks: int,
        fds: StateFds,
        ranks: Ranks,
        node: str,
        attempt: int = 0,
        *,
        in_shards: bool = False,
    ) -> None:
        self._rank = ranks.topology.rank
        places = fds.places()
        slots = [[StateSlot(files) for files in (*each.copies, *each.records)] for each in places]
        self._done = places[place].done
        self._copies = slots[place][: len(places[place].copies)]
        self._records = Records(slots[place][len(self._copies) :], self._rank)
        self._slots = [slot for each in slots for slot in each]
        # One rank looks after each place, also after those of ranks that this agent no longer starts.
        mine = [place, *(i for i in range(len(places)) if i != place and i % n_ranks == place)]
        self._held = [slot for i in mine for slot in slots[i]]
        self._counts = [places[i].done for i in mine]
        self._arrivals = Arrivals(fds.arrivals())
        self._n_before = 0  # ranks of the node whose own states come to this one
        self._gifts = Gifts(fds.gifts)
        self._live = LiveStates(self._gifts, place, n_ranks, fds.asks)
        self._before = fds.before
        self._place, self._n_ranks = place, n_ranks
        self._ranks = ranks
        self._node, self._attempt = node, attempt
        self._in_shards = in_shards
        self._nodes: list[str] = []  # of all ranks
        self._plan: Plan | None = None
        self._sends = False  # whether own states go to another node
        self._is_large = False  # whether own states of any rank are too large to be sent with each copy
        self._under_way: StateSlot | None = None  # with large own states that the agent sends
        self._safe: StateSlot | None = None  # with large own states that have been sent, on all nodes
        self._adapters: Mapping[str, Adapter] = {}
        self._resumed_every = 0  # the interval of copies, if the job has resumed from one
        self._first_step, self._has_reported = 0, False  # first step of this process; whether the agent knows of it
        self._step = 0
        self._writes_records = True
        self._noted: dict[str, int] = {}
        self._n_copies = 0
        self._seconds = 0.0  # that copies have taken since
        self._record_seconds: deque[float] = deque(maxlen=_RECORDS_SEEN)  # that each of the last records has taken
        self._since, self._steps = time.perf_counter(), 0  # the last agreement on:
        self._every = self._left = 1  # steps to the next copy
        self._own_bytes = 0  # of the last one

    @classmethod
    def of_agent(cls, ranks: Ranks, *, in_shards: bool = False) -> Memory | None:
        """The slots of this process, at the first call; None without such an agent, or if `ranks` lack some."""
        fds = StateFds.of_env(os.environ)
        os.environ.pop(VARIABLE, None)
        if fds is None or os.environ.get(DISTOPT_RUN.size) != str(ranks.topology.world_size):
            return None
        place, n_ranks = int(os.environ[DISTOPT_RUN.local_rank]), int(os.environ[DISTOPT_RUN.local_size])
        attempt = DISTOPT_RUN.attempt(os.environ)
        return cls(place, n_ranks, fds, ranks, os.environ[DISTOPT_RUN.node], attempt, in_shards=in_shards)

    # -- resuming ------------------------------------------------------------------------------------------------------
    def agree(self) -> Label | None:
        """Collective. The label of the newest states that exist of every rank then; None without such states.

        Newer states are dropped: those steps will be repeated.
        """
        own = [held for slot in self._held for held in slot.held]
        if self._place == 0:
            own += self._gifts.held(self._rank)
            own += [States.read(part).held for part in parts_of(self._before)]
        gathered = exchanged(self._ranks, [self._node, own])
        self._nodes = [node for node, _ in gathered]
        order = list(dict.fromkeys(self._nodes))
        self._sends = len(order) > 1
        self._n_before = self._nodes.count(order[order.index(self._node) - 1])
        self._records.post = TO_SEND if self._sends else STAYS
        held = [[Held.of_json(each) for each in those] for _, those in gathered]
        labels = {each.label for those in held for each in those if each.label.epoch >= 0}
        newest = None
        for label in sorted(labels, reverse=True):
            plan = Plan(label, held, self._nodes, in_shards=self._in_shards)
            if plan.is_possible:
                newest, self._plan = label, plan
                self._resumed_every = plan.every
                break
        for slot in self._held:
            if newest is None or slot.label > newest:
                slot.clear()
        for done in self._counts:
            done[0] = min(done[0], newest.step if newest is not None else 0)
        return newest

    def read(self, label: Label) -> tuple[Arrays, list[tuple[Arrays, dict[str, Any]]]]:
        """Collective. The states of the label agreed on: shared arrays, and own arrays with their notes.

        If the job had as many ranks then, the own states are those of this rank; else those of every rank of then.
        """
        assert self._plan is not None
        plan, world_size = self._plan, self._ranks.topology.world_size
        of_rank = [plan.wanted if label.world_size != world_size else [plan.wanted[rank]] for rank in range(world_size)]
        contents = dict(self._contents())
        shared, notes = self._read_shared(label, plan)
        absent = {
            name
            for node, wanted in zip(self._nodes, of_rank, strict=True)
            for each in wanted
            for name in each.names
            if node not in {self._nodes[owner] for owner in plan.owners[name]}
        }
        lacks = any(node not in plan.whole for node in self._nodes)
        if absent or lacks:
            mine = [name for name in absent if min(plan.owners[name]) == self._rank]
            given: dict[str, Any] = {OWN + name: np.frombuffer(contents[name], np.uint8) for name in mine}
            text = ""
            if lacks and self._rank == self._nodes.index(min(plan.gifts or plan.whole)):
                given |= {SHARED + key: array for key, array in shared.items()}
                text = json.dumps(notes)
            file = io.BytesIO()
            write_arrays(file, given, MARK, text)
            for payload in self._gathered(file.getbuffer()):
                views, metadata = arrays_in(payload, MARK, WRITER)
                contents |= {name: view.data for name, view in under_prefix(OWN, views).items()}
                if "notes" in metadata and not shared:
                    shared, notes = copies(under_prefix(SHARED, views)), json.loads(metadata["notes"])
        owns = [own_states(wanted, contents, notes) for wanted in of_rank[self._rank]]
        exchanged(self._ranks, None)  # no rank writes before all have read
        return shared, owns

    def _gathered(self, payload: memoryview) -> list[memoryview]:
        """Collective. The payload of every rank, in pieces: PyTorch pads each of them to the longest."""
        gathered = [memoryview(bytearray(size)) for size in exchanged(self._ranks, len(payload))]
        for at in range(0, max(map(len, gathered)), _PIECE_BYTES):
            pieces = self._ranks.all_gather_bytes(bytes(payload[at : at + _PIECE_BYTES]), label=LABEL)
            for whole, piece in zip(gathered, pieces, strict=True):
                whole[at : at + len(piece)] = piece
        return gathered

    def _contents(self) -> Iterator[tuple[str, Any]]:
        """The own states that the agent has, by their names."""
        for part in parts_of(self._before):
            yield States.read(part).held.name, part
        for slot in self._slots:
            if slot.held:
                yield slot.held[0].name, slot.content()

    def _read_shared(self, label: Label, plan: Plan) -> tuple[Arrays, dict[str, Any]]:
        """Shared arrays, and notes of objects that have some, as far as the agent has all of them."""
        if self._node in plan.gifts and (found := self._gifts.read(label)) is not None:
            return found
        shared: Arrays = {}
        notes: dict[str, Any] = {}
        if self._node in plan.whole:
            for slot in self._slots:
                if slot.label == label and len(slot.held) > 1:
                    states = States.read(slot.content(1))
                    shared |= copies(states.arrays)
                    notes |= states.notes
        return shared, notes

    # -- steps ---------------------------------------------------------------------------------------------------------
    def start(self, adapters: Mapping[str, Adapter], step: int, epoch: int) -> None:
        """Training begins after this step: begin to write records, and to wait for requests."""
        self._adapters, self._step = adapters, step
        self._done[0] = step
        if step:
            self._record(step, epoch, is_end=True)
        self._live.start(adapters)

    def before_update(self) -> None:
        """An optimizer is about to change shared arrays."""
        if self._sends and self._writes_records and self._records.fits and not self._in_shards:
            self._arrivals.wait(self._step + 1, self._n_before, lambda: self._live.is_given)
        self._live.close()

    def after_forward(self) -> None:
        """A forward pass has ended, perhaps the last one of this step."""
        if self._writes_records and not self._in_shards and not self._live.is_given:
            self._record(self._step + 1, -1, is_end=False)

    def finish(self, step: int, epoch: int) -> None:
        """Local, on all ranks. A step is done, and the job could resume from its end."""
        self._step = self._done[0] = step
        if not self._live.is_given:
            if self._writes_records:
                self._record(step, epoch, is_end=True)
            self._live.reopen(self._label(step, epoch))

    def note_own(self) -> None:
        """Note the own states, for `is_own_as_noted`."""
        does = self._writes_records and self._records.fits
        self._noted = self._records.checksums(self._adapters) if does else {}

    def is_own_as_noted(self) -> bool:
        """Whether the own states are as they were at `note_own`."""
        return bool(self._noted) and self._records.checksums(self._adapters) == self._noted

    def _record(self, step: int, epoch: int, *, is_end: bool) -> None:
        begin = time.thread_time()
        self._records.write(self._label(step, epoch), self._adapters, is_end=is_end)
        if self._sends:
            supervisor.send("kept")
        self._record_seconds.append(time.thread_time() - begin)

    def _label(self, step: int, epoch: int) -> Label:
        return Label(self._attempt, step, epoch, self._ranks.topology.world_size)

    def due(self, step: int) -> bool:
        """Local, on all ranks. Count a finished step; return whether states are to be kept after it."""
        if not self._first_step:
            self._first_step = step
        elif not self._has_reported:
            self._report_step()
        self._done[0] = step
        self._steps += 1
        self._left -= 1
        return self._left <= 0

    def keep(self, step: int, epoch: int, adapters: Mapping[str, Adapter]) -> None:
        """On all ranks; at times collective, else local. Keep the states after this step."""
        label = self._label(step, epoch)
        if any(slot.label == label for slot in self._copies):
            return
        if self._n_copies & (self._n_copies - 1) == 0:
            if self._n_copies >= _FIRST_PACE:
                self._pace(step, epoch)
            self._since, self._steps, self._seconds = time.perf_counter(), 0, 0.0
        begin = time.perf_counter()
        states, sharing = _apart(adapters)
        self._live.note(sharing, sum(array.nbytes for array in states.shared.values()))
        share = share_of(self._place, self._n_ranks, states.shared)
        self._own_bytes = sum(array.nbytes for array in states.own.values())
        post = TO_SEND if self._sends and self._may_send() else STAYS
        slot = self._free_slot()
        writer = self._rank, self._n_ranks
        notes = {name: note for name, note in states.notes.items() if name in sharing and self._place == 0}
        slot.write(
            States(Held(label, writer, {}, "own"), states.own, states.notes),
            States(Held(label, writer, {"every": self._every}, "share"), share, notes),
            post=post,
        )
        if post == TO_SEND:
            self._under_way = slot
            supervisor.send("kept")
        if not self._has_reported and self._first_step:
            self._report_step()
        self._n_copies += 1
        self._left = self._every
        self._seconds += time.perf_counter() - begin
        if self._n_copies == 1 and self._place == 0:
            self._gifts.forget(label)
            _report_modules()

    def _free_slot(self) -> StateSlot:
        """The oldest copy that is not needed: all but the newest, or large own states that are or will be sent."""
        pinned = [self._safe, self._under_way] if self._is_large else [max(self._copies, key=lambda slot: slot.label)]
        return min((slot for slot in self._copies if slot not in pinned), key=lambda slot: slot.label)

    def _report_step(self) -> None:
        """Report that a step is done and kept: from now on, nodes that have come may end the ranks."""
        self._has_reported = True
        if self._rank == 0:
            supervisor.send("stepped", step=self._first_step, every=self._resumed_every)

    def _may_send(self) -> bool:
        """Collective if own states are large. Whether this copy is to be sent: the last one that was has arrived."""
        if not self._is_large:
            return True
        if not all(exchanged(self._ranks, self._under_way is None or self._under_way.post == SENT)):
            return False
        self._safe = self._under_way
        return True

    def _pace(self, step: int, epoch: int) -> None:
        """Collective. Agree on the interval of copies from the cost of the last half of them, and whether to record."""
        seconds = (time.perf_counter() - self._since) / max(1, self._steps)
        if not self._writes_records and not self._live.is_given:  # perhaps the last ones met a busy moment
            self._record_seconds.clear()
            for _ in range(_TRIALS):
                self._record(step, epoch, is_end=True)
        record = 2 * median(self._record_seconds or [0.0])  # there are two in each step; the first ones import modules
        own = [self._seconds / (self._n_copies // 2), seconds, record, self._own_bytes]
        copies, steps, records, sizes = zip(*exchanged(self._ranks, own), strict=True)
        self._every = self._left = min(_MOST_STEPS, max(1, math.ceil(max(copies) / (_COST * min(steps)))))
        self._writes_records = max(records) <= _RECORD_COST * min(steps)
        self._is_large = self._sends and max(sizes) > MOST_BYTES

    def close(self) -> None:
        """Training has ended: give no live states from now on."""
        self._live.end()


def _apart(adapters: Mapping[str, Adapter]) -> tuple[Snapshot, set[str]]:
    """The states, and the names of objects with shared arrays. Arrays that live states lack are own ones."""
    states = snapshot_of(adapters)
    sharing = {key.partition("/")[0] for key in states.shared}
    for key in [f"{name}/{key}" for name in sharing for key in adapters[name].own().arrays]:
        if key in states.shared:
            states.own[key] = states.shared.pop(key)
    return states, sharing


def _report_modules() -> None:
    """Report the modules that the agent may import for ranks that start again, before they start."""
    mpi4py: Any = sys.modules.get("mpi4py")
    hidden = "mpi4py.MPI" if mpi4py is not None and mpi4py.rc.initialize else ""  # it may start MPI
    supervisor.send("modules", names=[name for name in installed_modules() if name != hidden])
