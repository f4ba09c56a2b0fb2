"""A cache of memory for arrays that every training step allocates and frees."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_ALIGNMENT = 64  # bytes: a cache line and the widest vector
_SMALL = 4096  # bytes; malloc is as fast for smaller arrays
_KEPT = 4096  # an unused block is freed after this number of calls of `empty`


@dataclass
class _Block:
    memory: NDArray[np.uint8]
    offset: int  # of the first aligned byte
    last_use: int


def _find_idle(blocks: list[_Block], idle: int) -> _Block | None:
    for block in blocks:
        if sys.getrefcount(block.memory) <= idle:
            return block
    return None


# The reference count of the memory of a block without users. Measured, because interpreters differ in the references
# that they take themselves.
_IDLE = next(n for n in count() if _find_idle([_Block(np.empty(0, np.uint8), 0, 0)], n))


@lru_cache(maxsize=1024)
def _sizes(shape: int | tuple[int, ...], dtype: DTypeLike) -> tuple[int, int]:
    """Bytes of an array, and of the block for it: classes of size, at most 1/4 apart."""
    n_bytes = np.dtype(dtype).itemsize * (shape if isinstance(shape, int) else prod(shape))
    step = 1 << max((_ALIGNMENT + n_bytes - 1).bit_length() - 3, 0)
    return n_bytes, step * -(-(_ALIGNMENT + n_bytes) // step)


class Pool:
    """Hands out uninitialized arrays and takes their memory back when the last reference is gone.

    Every array or view made from a block refers to that block, so a block with no reference but the pool's own is
    idle. Nothing needs to be returned explicitly, and nothing aliases a live array. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[int, list[_Block]] = {}  # by size in bytes
        self._clock = 0

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Return an uninitialized C-contiguous array, aligned to 64 bytes unless it is small."""
        n_bytes, block_bytes = _sizes(shape, dtype)  # type: ignore[arg-type]  # dtypes can be hashed
        if n_bytes < _SMALL:
            return np.empty(shape, dtype)
        with self._lock:
            block = self._take(block_bytes)
            array: NDArray[Any] = np.ndarray(shape, dtype, block.memory, block.offset)
            return array

    def _take(self, n_bytes: int) -> _Block:
        self._clock += 1
        block = _find_idle(self._blocks.get(n_bytes, []), _IDLE)
        if block is None:
            self._drop_stale()
            memory = np.empty(n_bytes, np.uint8)
            block = _Block(memory, -memory.ctypes.data % _ALIGNMENT, 0)
            self._blocks.setdefault(n_bytes, []).append(block)
        block.last_use = self._clock
        return block

    def _drop_stale(self) -> None:
        oldest = self._clock - _KEPT
        for size, blocks in list(self._blocks.items()):
            kept = [b for b in blocks if b.last_use > oldest or not _find_idle([b], _IDLE)]
            if kept:
                self._blocks[size] = kept
            else:
                del self._blocks[size]


empty = Pool().empty
