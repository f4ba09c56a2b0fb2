"""Data whose sum over ranks is known, and which tells the ranks apart: small integers, repeated with a prime period."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

PERIOD = 65521
LARGEST = 31
# How much an addition may round, relative to the sum. In the other types sums of the integers are exact.
_ROUNDING = {"bfloat16": 2.0**-7, "float16": 2.0**-10}


class Pattern:
    """The data of one rank, and the expected result.

    Args:
        dtype: key of `distopt.comm.base.DTYPES`; bfloat16 is stored in uint16.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, dtype: str, rank: int, world_size: int) -> None:
        self._dtype, self._rank = dtype, rank
        index = np.arange(PERIOD)
        self._parts = [1 + (index * (2 * r + 3) + 7 * r) % LARGEST for r in range(world_size)]
        self._sum = sum(self._parts[1:], self._parts[0])
        self._tolerance = world_size * _ROUNDING.get(dtype, 0.0)

    def fill(self, array: NDArray[Any]) -> None:
        """Write this rank's data into a flat array."""
        mine = self._stored(self._parts[self._rank])
        for start in range(0, array.size, PERIOD):
            piece = array[start : start + PERIOD]
            piece[...] = mine[: piece.size]

    def wrong(self, array: NDArray[Any], *, first: int = 0) -> int:
        """How many elements of `array`, a part of the sum from its element `first` on, differ from what is expected."""
        return self._count(array, np.roll(self._sum, -first), self._tolerance)

    def strange(self, array: NDArray[Any], rank: int) -> int:
        """How many elements of `array` differ from what `fill` writes on `rank`."""
        return self._count(array, self._parts[rank], 0.0)

    def _stored(self, integers: NDArray[Any]) -> NDArray[Any]:
        if self._dtype == "bfloat16":  # the upper half of a float32
            return (integers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return integers.astype(self._dtype)

    def _count(self, array: NDArray[Any], integers: NDArray[Any], tolerance: float) -> int:
        expected, count = _decoded(self._stored(integers)), 0
        for start in range(0, array.size, PERIOD):
            found = _decoded(array[start : start + PERIOD])
            wanted = expected[: found.size]
            count += int(np.count_nonzero(~(np.abs(found - wanted) <= tolerance * wanted)))
        return count


def _decoded(array: NDArray[Any]) -> NDArray[np.float64]:
    if array.dtype == np.uint16:  # bfloat16
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)
