"""Wire memory that changes hands: a new layout of buckets lies where the one before it lay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..comm.base import storage_of

if TYPE_CHECKING:
    from ..comm import Communicator
    from ..comm.base import Array

__all__ = ["ALIGNMENT_BYTES", "WireMemory"]

ALIGNMENT_BYTES = 256  # of every array, and of every gradient in its bucket: what cuDNN and vector loads of GPUs want


class WireMemory:
    """Arrays in wire memory, given back all at once.

    Communicators keep wire memory for as long as they live. So it is cut anew here, and grows only where a layout needs
    more than every one before it.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._blocks: list[Array] = []  # of bytes
        self._used: list[int] = []  # bytes in use of each block
        self._cut_anew = False

    def clear(self) -> None:
        """Local, alike on all ranks. Take all arrays back; nothing may use them any more."""
        self._used = [0] * len(self._used)
        self._cut_anew = True

    def empty(self, count: int, dtype: str, *, xp: Any) -> Array:
        """Collective. As `Communicator.empty`, in the memory at hand if there is room."""
        storage = storage_of(dtype)
        if not count:
            return xp.empty(0, storage)
        n_bytes = count * storage.itemsize
        room = -(-n_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for index, block in enumerate(self._blocks):
            if self._used[index] + room <= block.size:
                break
        else:  # at once half as much as there is, so that sizes which grow slowly take few blocks
            index = len(self._blocks)
            spare = sum(block.size for block in self._blocks) // 2 if self._cut_anew else 0
            self._blocks.append(self._communicator.empty(max(room, spare), "uint8", xp=xp))
            self._used.append(0)
        start = self._used[index]
        self._used[index] += room
        return self._blocks[index][start : start + n_bytes].view(storage)
