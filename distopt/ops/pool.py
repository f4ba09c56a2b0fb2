"""A cache of memory for arrays that come and go with every training step."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike, NDArray

__all__ = ["Pool"]

_ALIGNMENT = 64  # bytes: a cache line and the widest vector
_SMALL = 4096  # bytes: below, malloc is as quick
_KEPT = 4096  # calls of `empty` that a block survives without use


@dataclass
class _Block:
    memory: NDArray[np.uint8]
    offset: int  # of the first aligned byte
    last_use: int


def _references(blocks: list[_Block]) -> list[int]:
    return [sys.getrefcount(block.memory) for block in blocks]


# How a block looks that nobody else refers to. Measured, as interpreters differ in the references they take themselves.
_IDLE = _references([_Block(np.empty(0, np.uint8), 0, 0)])[0]


class Pool:
    """Hands out uninitialized arrays and takes their memory back when the last reference is gone.

    Every array or view made from a block refers to that block, so a block with no reference but the pool's own is
    idle. There is nothing to give back by hand, and nothing aliases a live array. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[int, list[_Block]] = {}  # by size in bytes
        self._clock = 0

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Return an uninitialized C-contiguous array, aligned to 64 bytes unless it is small. Local."""
        dtype = np.dtype(dtype)
        n_bytes = dtype.itemsize * (shape if isinstance(shape, int) else prod(shape))
        if n_bytes < _SMALL:
            return np.empty(shape, dtype)
        with self._lock:
            block = self._take(_ALIGNMENT + n_bytes)
            array: NDArray[Any] = np.ndarray(shape, dtype, block.memory, block.offset)
            return array

    @property
    def held_bytes(self) -> int:
        """Size of all blocks, idle or not."""
        with self._lock:
            return sum(size * len(blocks) for size, blocks in self._blocks.items())

    def _take(self, n_bytes: int) -> _Block:
        self._clock += 1
        size = 1 << (n_bytes - 1).bit_length() - 3  # classes of size, at most 1/4 apart
        size *= -(-n_bytes // size)
        blocks = self._blocks.setdefault(size, [])
        for block, references in zip(blocks, _references(blocks), strict=True):
            if references == _IDLE:
                block.last_use = self._clock
                return block
        self._drop_stale()
        memory = np.empty(size, np.uint8)
        block = _Block(memory, -memory.ctypes.data % _ALIGNMENT, self._clock)
        self._blocks.setdefault(size, []).append(block)
        return block

    def _drop_stale(self) -> None:
        oldest = self._clock - _KEPT
        for size, blocks in list(self._blocks.items()):
            in_use = _references(blocks)
            kept = [b for b, n in zip(blocks, in_use, strict=True) if n > _IDLE or b.last_use > oldest]
            if kept:
                self._blocks[size] = kept
            else:
                del self._blocks[size]
