"""Data whose sum over ranks is known exactly, however often it is summed in place, and which tells the ranks apart.

Rank r holds small integers that depend on r and on the index, repeated with a prime period. After k all-reduces in
place, every element is S * n**(k-1), where S is the sum over the n ranks. In floating types this is exact if n is a
power of two and S fits the mantissa, until the exponent overflows; in integer types, it is exact modulo their range.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

PERIOD = 65521
LARGEST = 31
# Exponent bits above 1, and the power of two by which the integers are scaled to use those below 1 as well.
_EXPONENT = {"float32": (127, 0), "float64": (1023, 0), "bfloat16": (127, 0), "float16": (15, -14)}
_MANTISSA = {"float32": 23, "float64": 52, "bfloat16": 7, "float16": 10}
_NO_LIMIT = 1000


def max_calls(dtype: str, world_size: int) -> int:
    """How often the pattern can be summed in place before it overflows."""
    if dtype not in _EXPONENT or world_size == 1:
        return _NO_LIMIT
    high, low = _EXPONENT[dtype]
    room = high - low - math.log2(LARGEST * world_size)
    return min(_NO_LIMIT, max(1, 1 + int(room / math.log2(world_size))))


class Pattern:
    """The data of one rank, and the expected result.

    Args:
        dtype: key of `distopt.comm.base.DTYPES`; bfloat16 is stored in uint16.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, dtype: str, rank: int, world_size: int) -> None:
        self._dtype = dtype
        self._world_size = world_size
        index = np.arange(PERIOD, dtype=np.int64)
        self._parts = [1 + (index * (2 * r + 3) + 7 * r) % LARGEST for r in range(world_size)]
        self._sum = sum(self._parts[1:], self._parts[0])
        power_of_two = world_size & (world_size - 1) == 0
        # The last partial sum of a call is n times a sum of n integers.
        self._exact = power_of_two and LARGEST * world_size**2 < 2 ** (_MANTISSA.get(dtype, 63) + 1)
        self._mine = self._encode(self._parts[rank], 1)

    def fill(self, array: NDArray[Any]) -> None:
        """Write this rank's data into a flat array."""
        for start in range(0, array.size, PERIOD):
            piece = array[start : start + PERIOD]
            piece[...] = self._mine[: piece.size]

    def wrong(self, array: NDArray[Any], calls: int, *, first: int = 0) -> int:
        """How many elements of `array` differ from the expected result of `calls` all-reduces in place.

        Args:
            array: the result, or a part of it.
            calls: number of all-reduces.
            first: index of the part's first element in the whole.
        """
        expected = self._encode(self._sum, self._world_size ** (calls - 1))
        return _count(array, np.roll(expected, -first), partial(self._differ, calls=calls))

    def strange(self, array: NDArray[Any], rank: int) -> int:
        """How many elements of `array` differ from what `fill` writes on `rank`."""
        return _count(array, self._encode(self._parts[rank], 1), np.not_equal)

    def _encode(self, integers: NDArray[np.int64], factor: int) -> NDArray[Any]:
        if self._dtype not in _EXPONENT:
            wrapped = integers.astype(np.uint64) * np.uint64(factor % 2**64)
            return np.asarray(wrapped, self._dtype)
        values: NDArray[np.float64] = np.ldexp(integers.astype(np.float64) * float(factor), _EXPONENT[self._dtype][1])
        if self._dtype == "bfloat16":  # the upper half of a float32
            bits: NDArray[np.uint32] = values.astype(np.float32).view(np.uint32)
            return np.asarray(bits >> 16, np.uint16)
        return np.asarray(values, self._dtype)

    def _differ(self, found: NDArray[Any], expected: NDArray[Any], calls: int) -> NDArray[np.bool_]:
        if self._dtype not in _EXPONENT or self._exact:
            return np.asarray(found != expected)
        # Each addition of a call may round.
        tolerance = calls * self._world_size * 2.0 ** -_MANTISSA[self._dtype]
        reference = _decode(expected)
        return ~(np.abs(_decode(found) - reference) <= tolerance * reference)


def _count(array: NDArray[Any], expected: NDArray[Any], differ: Callable[..., NDArray[np.bool_]]) -> int:
    """How many elements of `array` differ from `expected`, repeated."""
    count = 0
    for start in range(0, array.size, PERIOD):
        piece = array[start : start + PERIOD]
        count += int(np.count_nonzero(differ(piece, expected[: piece.size])))
    return count


def _decode(array: NDArray[Any]) -> NDArray[np.float64]:
    if array.dtype == np.uint16:  # bfloat16
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)
