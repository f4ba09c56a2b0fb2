"""Digests of arrays: equal for equal bits, and almost surely different for others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import array_module, kernels_of
from .base import Array

# The raw output of a bit generator is the same in all versions of NumPy.
_WEIGHTS = np.random.PCG64(20).random_raw(4096)
_BLOCK_ROWS = 256  # whose products, 8 MiB, are in memory at once


def digests(arrays: Sequence[Array]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A number for each array, uint64 [n], that is the same wherever it is computed.

    The bits are taken as words of 32 bits or, in smaller types, of one element. A row of words gives the sum of its
    products with fixed random weights of 64 bits, modulo 2**64; the sums of all rows are words again, until one is
    left. Two rows have equal sums with a probability of 2**-32 (multiply-shift hashing of vectors: Thorup, arXiv
    1504.06804, section 3.3). Words are narrower than weights: the highest bits of two words of 64 bits
    would cancel, and a change of sign with them.

    Args:
        arrays: of NumPy or CuPy, contiguous, on one device.
    """
    if not arrays:
        return np.empty(0, np.uint64)
    xp = array_module(arrays[0])
    weights = xp.asarray(_WEIGHTS)
    found = xp.concatenate([_digest(xp, array, weights) for array in arrays])
    on_host: np.ndarray[Any, np.dtype[np.uint64]] = kernels_of(found).to_host(found)
    return on_host


def _digest(xp: Any, array: Array, weights: Array) -> Array:
    sums = _sums(xp, array.reshape(-1).view(f"u{min(array.itemsize, 4)}"), weights)
    while sums.size > 1:
        sums = _sums(xp, sums.view(np.uint32), weights)
    return sums


def _sums(xp: Any, words: Array, weights: Array) -> Array:
    """The sum of each row of words times weights. The last row may be shorter; without words, it is the only row."""
    whole = words.size // weights.size
    rows, rest = words[: whole * weights.size].reshape(whole, weights.size), words[whole * weights.size :]
    blocks = [rows[start : start + _BLOCK_ROWS] for start in range(0, whole, _BLOCK_ROWS)]
    if rest.size or not whole:
        blocks.append(rest[None])
    return xp.concatenate([(block * weights[: block.shape[1]]).sum(axis=1) for block in blocks])
