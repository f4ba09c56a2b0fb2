"""The states of the ranks that saved a checkpoint, for a job of another size.

Gradients are averaged, so what an array of one rank, such as a residual, has yet to contribute counts by its mean over
the ranks. Every new rank gets that mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import StateError
from .parts import State

if TYPE_CHECKING:
    from ..files import Arrays


class Mean:
    """The mean of the states of one object over the ranks, added up in float64 and rounded once.

    What is equal on all ranks stays as it is.
    """

    def __init__(self) -> None:
        self._first: State | None = None
        self._sums: Arrays = {}
        self._differ: set[str] = set()
        self._count = 0

    def add(self, state: State) -> None:
        """Local. Take the state of the next rank.

        Raises:
            StateError: notes or integers differ from those of another rank.
        """
        self._count += 1
        if self._first is None:
            self._first, self._sums = state, {key: array.astype(np.float64) for key, array in state.arrays.items()}
            return
        if (state.arrays.keys(), state.notes) != (self._first.arrays.keys(), self._first.notes):
            raise StateError("values differ from rank to rank that have no mean; use as many ranks again")
        for key, array in state.arrays.items():
            if array.shape != self._first.arrays[key].shape:
                raise StateError(f"{key or 'an array'} has another shape on another rank; use as many ranks again")
            self._sums[key] += array
            if np.array_equal(array, self._first.arrays[key]):
                continue
            if array.dtype.kind != "f":
                what = key or "an array"
                raise StateError(f"{what} of {array.dtype} differs from rank to rank; use as many ranks again")
            self._differ.add(key)

    def result(self) -> State:
        """Local. The mean of all states that were added."""
        assert self._first is not None
        means = {key: self._sums[key] / self._count for key in self._differ}
        arrays = self._first.arrays
        return State(
            {**arrays, **{key: mean.astype(arrays[key].dtype) for key, mean in means.items()}}, self._first.notes
        )


class Stream:
    """The state that a random generator gets on one rank.

    A rank goes on from its own state. Where it had none, its generator stays as the script has seeded it.

    Args:
        rank: a new rank.
        common: whether the new ranks have seeded the generator alike. If it was also the same on all old ranks, they
            all drew the same numbers from it, and the new ones do so again.
    """

    def __init__(self, rank: int, common: bool) -> None:
        self._rank, self._common = rank, common
        self._count = 0
        self._first: State | None = None
        self._own: State | None = None

    def add(self, state: State) -> None:
        """Local. Take the state of the next rank."""
        self._first = self._first or state
        same = (np.array_equal(array, self._first.arrays[key]) for key, array in state.arrays.items())
        self._common = self._common and state.notes == self._first.notes and all(same)
        if self._count == self._rank:
            self._own = state
        self._count += 1

    def result(self) -> State | None:
        """Local. The state; None if the generator stays as it is."""
        return self._first if self._common else self._own
