"""The plan by which ranks resume when they start again: which states in the memory of agents become each rank's."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from .state_files import Held, Label, States, copies

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..files import Arrays


class Plan:
    """Where the states of a label are, and how the ranks put them together.

    Args:
        label: of the states.
        held: what each rank describes.
        nodes: the node of each rank.
        in_shards: see `wanted_of`.

    Attributes:
        wanted: how to make the own states of each old rank; empty if that is not possible.
        whole: nodes that have all shared arrays.
        gifts: those that have them as live states.
        every: the interval of copies, if only these have the shared arrays; else 0.
        owners: for each description of own states, the ranks that have them.
    """

    def __init__(self, label: Label, held: list[list[Held]], nodes: list[str], *, in_shards: bool) -> None:
        found = [(rank, each) for rank, those in enumerate(held) for each in those]
        of_label = [(rank, each) for rank, each in found if each.label == label]
        self.gifts = {nodes[rank] for rank, each in of_label if each.kind == "gift"}
        shares = Counter((nodes[rank], each.writer[1]) for rank, each in of_label if each.kind == "share")
        self.whole = self.gifts | {node for (node, n_shares), count in shares.items() if count == n_shares}
        intervals = [each.record["every"] for _, each in of_label if each.kind == "share" and not self.gifts]
        self.every = max(intervals, default=0)
        self.owners: dict[str, list[int]] = {}
        for rank, each in found:
            self.owners.setdefault(each.name, []).append(rank)
        own = {each.writer[0]: each for _, each in of_label if each.kind == "own"}
        records = [each for _, each in found if each.kind == "record"]
        self.wanted = wanted_of(label, own, records, in_shards=in_shards) or []

    @property
    def is_possible(self) -> bool:
        """Whether all states can be had."""
        return bool(self.whole and self.wanted)


class Wanted(NamedTuple):
    """The states that make the own states of a rank.

    Attributes:
        own: describes a copy or a record of the rank's own, if there is one.
        other: describes a record of another rank, for the objects that `own` lacks.
    """

    own: Held | None
    other: Held | None = None

    @property
    def names(self) -> list[str]:
        """The names of the files with these states."""
        return [each.name for each in self if each is not None]


def wanted_of(
    label: Label, own_copies: Mapping[int, Held], records: Iterable[Held], *, in_shards: bool
) -> list[Wanted] | None:
    """How to make the own states of each rank after a step; None if that is not possible.

    Args:
        label: of the step.
        own_copies: by rank, copies of that step.
        records: all that there are.
        in_shards: whether own states do not depend on the rank.
    """
    found = [each for each in records if _key(each.label) == _key(label)]
    ends = {each.writer[0]: each for each in found if each.record["end"]}
    ahead = {each.writer[0]: each for each in found if not each.record["end"]}
    before = {number: each.record["before"] for number, each in {**ahead, **ends}.items()}
    wanted = []
    for number in range(label.world_size):
        if own := own_copies.get(number, ends.get(number)):
            wanted.append(Wanted(own))
            continue
        if not ends:
            return None
        other = ends[min(ends)]
        if in_shards:
            wanted.append(Wanted(None, other))
            continue
        if number not in ahead or len(before) < label.world_size:
            return None
        for name in other.record["checksums"].keys() - _right(ahead[number].record):
            if len({each.get(name) for each in before.values()}) > 1:
                return None
            if len({each.record["checksums"].get(name) for each in ends.values()}) > 1:
                return None
        wanted.append(Wanted(ahead[number], other))
    return wanted


def _key(label: Label) -> tuple[int, int, int]:
    """The label without its epoch, which is not known before the end of a step."""
    return label.attempt, label.step, label.world_size


def _right(record: Mapping[str, Any]) -> set[str]:
    """The objects of a record after a forward pass that stand for those at the end of the step."""
    right: list[str] = record["right"]
    return {name for name in right if name in record["checksums"]}


def assembled(own: States | None, other: States | None) -> tuple[Arrays, dict[str, Any]]:
    """The own arrays and notes of a rank, from the records of `Wanted`."""
    arrays: Arrays = {}
    notes: dict[str, Any] = {}
    taken: set[str] = set()
    if own is not None:
        record = own.held.record
        taken = set(record["checksums"]) if record["end"] else _right(record)
    for states in (own, other):
        if states is not None:
            names = taken if states is own else states.held.record["checksums"].keys() - taken
            arrays.update({key: array for key, array in states.arrays.items() if key.partition("/")[0] in names})
            notes.update({name: note for name, note in states.notes.items() if name in names})
    return arrays, notes


def own_states(wanted: Wanted, contents: Mapping[str, Any], notes: dict[str, Any]) -> tuple[Arrays, dict[str, Any]]:
    """Own arrays and notes of a rank; `notes` are those of objects with shared arrays."""
    first, other = (None if held is None else States.read(contents[held.name]) for held in wanted)
    if first is not None and first.held.kind == "own":
        arrays, own_notes = first.arrays, first.notes
    else:
        arrays, own_notes = assembled(first, other)
        own_notes = {**notes, **own_notes}
    return copies(arrays), own_notes
