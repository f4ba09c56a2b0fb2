"""A rank's own states after each step, such as random generators and buffers: small, and written in slots in turns.

If the others have done a step before a rank is lost, the job resumes after that step, and needs the rank's own states
there. The others cannot finish a step before that rank has ended its forward pass. So own states are written twice in
each step: after the forward pass the states that it changes, and at the end of the step all. A rank compares the two
records. The objects that were equal in both are taken from the first record in the next step, if the second is missing.
Other objects, such as schedules, are taken from a rank that has done the step, if they were equal on all ranks before.

A rank updates parameters only when the records of the node before have come to its own node: if they do not, since the
agent there is lost, the step before stays whole here (`Arrivals`).
"""

from __future__ import annotations

import json
import time
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from ..launch.heal.state_slots import N_RECORDS, STAYS
from .adapters import State, on_host
from .state_files import Held, Label, States, StateSlot, valid_word

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .adapters import Adapter

MOST_BYTES = 1 << 20  # most bytes of own states that are written in each step
_LOSS_SECONDS = 6.0  # then the loss of a silent agent has been noticed, on a busy machine, too
_WAITING_COST = 0.01  # the share of training time that waits for records may take
_POLL_SECONDS = 0.0002


class Records:
    """Writes the own states of this rank.

    Args:
        slots: of this rank.
        rank: its number.

    Attributes:
        fits: whether the states are small enough to be written.
        post: whether they go to the next node; see `distopt.launch.heal.state_slots`.
    """

    def __init__(self, slots: Sequence[StateSlot], rank: int) -> None:
        self.fits = True
        self._slots = slots
        self._rank = rank
        self.post = STAYS
        self._ahead: dict[str, int] = {}  # checksums after the forward pass of this step
        self._before: dict[str, int] = {}  # at the end of the last step
        self._moved: list[str] = []  # objects that a forward pass may change
        self._right: list[str] = []  # objects that had not changed between the two in the last step
        self._last: dict[str, tuple[dict[str, Any], int]] = {}  # notes of objects, and their checksums

    def write(self, label: Label, adapters: Mapping[str, Adapter], *, is_end: bool) -> None:
        """Write own states at the end of a step; or after its forward pass, those that this may change."""
        if not self.fits:
            return
        if is_end:
            own = {name: adapter.own() for name, adapter in adapters.items()}
            self._moved = [name for name, state in own.items() if adapters[name].random or not state.notes]
        else:
            own = {name: adapters[name].own() for name in self._moved}
        if sum(array.nbytes for state in own.values() for array in state.arrays.values()) > MOST_BYTES:
            self.fits = False
            return
        checksums = {name: self._checksum(name, state) for name, state in own.items()}
        record = {"end": is_end, "checksums": checksums, "before": self._before, "right": self._right}
        arrays = {f"{name}/{key}": array for name, state in own.items() for key, array in state.arrays.items()}
        notes = {name: state.notes for name, state in own.items() if state.notes}
        held = Held(label, (self._rank, 1), record, "record")
        self._slots[label.step % len(self._slots)].write(States(held, arrays, notes), post=self.post)
        if is_end:
            self._right = [name for name in checksums if self._ahead.get(name) == checksums[name]]
            self._before, self._ahead = checksums, {}
        else:
            self._ahead = checksums

    def checksums(self, adapters: Mapping[str, Adapter]) -> dict[str, int]:
        """Checksums of the own states as they are."""
        return {name: self._checksum(name, adapter.own()) for name, adapter in adapters.items()}

    def _checksum(self, name: str, state: State) -> int:
        last = self._last.get(name)
        if last is None or last[0] != state.notes:
            last = self._last[name] = state.notes, zlib.crc32(json.dumps(state.notes).encode())
        checksum = last[1]
        for key, array in sorted(state.arrays.items()):
            checksum = zlib.crc32(np.ascontiguousarray(on_host(array)).data, zlib.crc32(key.encode(), checksum))
        return checksum


class Arrivals:
    """The records of the node before that have come to the agent of this node.

    Args:
        words: see `distopt.launch.heal.state_slots.StateFds.arrivals`.
    """

    def __init__(self, words: memoryview[int]) -> None:
        self._words = words
        self._begin = time.monotonic()
        self._waited = 0.0

    def wait(self, step: int, n_ranks: int, is_over: Callable[[], bool]) -> None:
        """Wait until those of a step's forward pass have come, of all `n_ranks` ranks there.

        They normally have, since the gradients came later. The wait ends when `is_over`, when the loss of the agent has
        been noticed, and at once where waits have taken more than 1 % of the time, as with a slow link.
        """
        places = range(step % N_RECORDS, N_RECORDS * n_ranks, N_RECORDS)
        slots = [slot for slot in places if slot < len(self._words)]
        begin = now = time.monotonic()
        if self._waited > _WAITING_COST * (begin - self._begin):
            return
        while any(self._words[slot] < valid_word(step) for slot in slots) and not is_over():
            if now > begin + _LOSS_SECONDS:
                break
            time.sleep(_POLL_SECONDS)
            now = time.monotonic()
        self._waited += now - begin
