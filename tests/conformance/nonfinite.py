"""Arrays in which NaN and infinity have been planted, and who is at fault."""

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from distopt.comm.base import Array

from .oracle import reduce_in_rank_order

# Elements: around what fits in a descriptor (4,096 bytes) and around chunks (8,192 bytes in the runs with small ones).
SIZES = (1, 2, 7, 31, 64, 511, 513, 1023, 1024, 1025, 2049, 4097, 40_001)

Plant: TypeAlias = "tuple[int, int, float]"  # rank, index, share of the largest number, or not a finite one


def _plants(n: int, count: int) -> Iterator[list[Plant]]:
    last, middle, end = n - 1, count // 2, count - 1
    yield []
    for bad in (np.nan, np.inf, -np.inf):
        for index in {0, 1 % count, middle | 1 if middle | 1 < count else 0, end}:
            yield [(last, index, bad)]
    yield [(rank, end, np.inf) for rank in range(n)]
    yield [(0, middle, np.inf), (last, middle, -np.inf)]
    yield [(0, end, np.nan), (last, middle, np.inf), (last, end, np.nan)]
    yield [(0, end, -np.inf), (last, count // 3, np.nan)]
    yield [(rank, end, 0.9) for rank in range(n)]  # overflows unless there is one rank
    yield [(rank, middle, 0.6 + 0.1 * rank) for rank in range(n)]
    yield [(0, middle, 0.8), (last, middle, -0.9)]  # cancels, and one rank alone is finite
    rng = np.random.default_rng([n, count])
    for _ in range(6):
        bad = [np.nan, np.inf, -np.inf, 0.7, -0.8, 0.9]
        yield [(int(rng.integers(n)), int(rng.integers(count)), bad[rng.integers(6)]) for _ in range(5)]


def planted(n: int, count: int, dtype: str) -> Iterator[list[Array]]:
    """Sets of inputs, in rank order."""
    largest = float(np.finfo(dtype).max)
    for plants in _plants(n, count):
        inputs = [np.linspace(q - 1, q + 1, count).astype(dtype) for q in range(n)]
        for rank, index, bad in plants:
            inputs[rank][index] = bad * largest if np.isfinite(bad) else bad
        yield inputs


def at_fault(inputs: list[Array], dtype: str) -> tuple[int, int] | None:
    """Rank and index, as `Work.nonfinite` has to say."""
    with np.errstate(all="ignore"):
        bad = np.flatnonzero(~np.isfinite(reduce_in_rank_order(inputs, dtype, "sum")))
    if bad.size == 0:
        return None
    column = np.array([array[bad[0]] for array in inputs])
    infinite = np.flatnonzero(~np.isfinite(column))
    rank = infinite[0] if infinite.size else np.argmax(np.abs(column))
    return int(rank), int(bad[0])
