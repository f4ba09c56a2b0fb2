"""States that another number of ranks has saved: what each of the new ranks gets of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import StateError
from .adapters import State

if TYPE_CHECKING:
    from ..files import Arrays
    from .adapters import Adapter


def merged(
    owns: Iterable[tuple[Arrays, dict[str, Any]]], adapters: Mapping[str, Adapter], rank: int, common: set[str]
) -> dict[str, State]:
    """The states that `rank`, of another number of ranks, gets from the states of each old rank.

    Args:
        owns: arrays of its own and notes of each old rank, in their order.
        adapters: of the objects, by name.
        rank: a new rank.
        common: names of the random generators that all new ranks have seeded equally.

    Raises:
        StateError: states differ between the old ranks, and have no mean.
    """
    merges: dict[str, _GeneratorState | _MeanOfRanks] = {}
    for name, adapter in adapters.items():
        merges[name] = _GeneratorState(rank, name in common) if adapter.random else _MeanOfRanks(adapter)
    for arrays, notes in owns:
        for name, state in by_adapter(adapters, {}, arrays, notes).items():
            with named(name):
                merges[name].add(state)
    results = {name: merge.result() for name, merge in merges.items()}
    return {name: state for name, state in results.items() if state is not None}


class _MeanOfRanks:
    """The mean of the states of one object over the ranks, added up in float64 and rounded once.

    Gradients are averaged, so the future contribution of an array of one rank, such as a residual, counts by its mean
    over the ranks. Every new rank gets that mean. Values that are equal on all ranks stay as they are.

    Args:
        adapter: of the object, which knows the types of its arrays.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._first: State | None = None
        self._sums: Arrays = {}
        self._differ: set[str] = set()
        self._count = 0

    def add(self, state: State) -> None:
        """Take the state of the next rank.

        Raises:
            StateError: notes or integers differ from those of another rank.
        """
        self._count += 1
        if self._first is None:
            self._first, self._sums = state, self._adapter.widened(state)
            return
        if (state.arrays.keys(), state.notes) != (self._first.arrays.keys(), self._first.notes):
            raise StateError("values differ from rank to rank that have no mean; use as many ranks again")
        numbers = self._adapter.widened(state)
        for key, array in state.arrays.items():
            if array.shape != self._first.arrays[key].shape:
                raise StateError(f"{key or 'an array'} has another shape on another rank; use as many ranks again")
            if not np.array_equal(array, self._first.arrays[key]):
                self._differ.add(key)
            if key in self._differ and key not in numbers:
                what = key or "an array"
                raise StateError(f"{what} of {array.dtype} differs from rank to rank; use as many ranks again")
        for key, array in numbers.items():
            self._sums[key] += array

    def result(self) -> State:
        """The mean of all states that were added."""
        assert self._first is not None
        first = self._first
        means = {key: self._adapter.narrowed(key, self._sums[key] / self._count, first) for key in self._differ}
        return State({**first.arrays, **means}, first.notes)


class _GeneratorState:
    """The state that a random generator gets on one rank.

    A rank resumes from its own state. Without one, its generator stays as the script has seeded it.

    Args:
        rank: a new rank.
        common: whether the new ranks have seeded the generator equally. If it was also the same on all old ranks, they
            all drew the same numbers from it, and the new ones do so again.
    """

    def __init__(self, rank: int, common: bool) -> None:
        self._rank, self._common = rank, common
        self._count = 0
        self._first: State | None = None
        self._own: State | None = None

    def add(self, state: State) -> None:
        """Take the state of the next rank."""
        self._first = self._first or state
        first = self._first.arrays
        same = state.arrays.keys() == first.keys() and all(
            np.array_equal(state.arrays[key], first[key]) for key in first
        )
        self._common = self._common and state.notes == self._first.notes and same
        if self._count == self._rank:
            self._own = state
        self._count += 1

    def result(self) -> State | None:
        """The state; None if the generator does not change."""
        return self._first if self._common else self._own


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Adds the name of the object to errors of the body."""
    try:
        yield
    except StateError as error:
        raise StateError(f"{name}: {error}") from None


def by_adapter(adapters: Mapping[str, Adapter], shared: Arrays, own: Arrays, notes: dict[str, Any]) -> dict[str, State]:
    """The states of each object, from arrays by "object/array" and notes by object."""
    arrays = {**shared, **own}
    return {name: State(under(name, arrays), notes.get(name, {})) for name in adapters}


def under(name: str, arrays: Arrays) -> Arrays:
    """The arrays of one object, by names of its own."""
    return {key.partition("/")[2]: array for key, array in arrays.items() if key.partition("/")[0] == name}
