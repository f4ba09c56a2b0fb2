"""Buckets: flat runs of gradients in wire memory, so that one collective carries many parameters.

A parameter's gradient *is* a view of its bucket: the front writes it there, the communicator reduces it there and the
optimizer reads it there. Adding a gradient to a bucket is therefore counting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..codecs import Part
from ..comm import Communicator
from ..comm.base import Array, storage_of
from ..kernels import array_module

ALIGNMENT_BYTES = 256  # of every array, and every gradient in its bucket; vector loads of GPUs need it


class Parameter(Protocol):
    """A parameter, as the engine needs it."""

    @property
    def name(self) -> str | None:
        """Local. Its name, unique in its model."""

    @property
    def array(self) -> Array:
        """Local. Its values, of NumPy or CuPy, contiguous."""


class Bucket:
    """The gradients of some parameters in one wire array.

    Attributes:
        index: position in its layout.
        params: the parameters, in the order of their views.
        parts: where their gradients lie in `flat`.
        grads: their gradients, views of `flat` in the parameters' shapes.
        flat: wire memory, 1-D. Every gradient begins at a multiple of `ALIGNMENT_BYTES`; between them are zeros.
        label: short text for diagnostics.
    """

    def __init__(
        self, index: int, params: Sequence[Parameter], names: Sequence[str], memory: BucketMemory, prefix: str = ""
    ) -> None:
        """Collective: allocates wire memory.

        Args:
            index: see above.
            params: see above.
            names: names of `params`, unique in the model.
            memory: the memory of the bucket.
            prefix: of the label.
        """
        self.index = index
        self.params = tuple(params)
        self.label = f"{prefix}bucket {index}: {names[0]}"
        first = params[0].array
        unit = ALIGNMENT_BYTES // first.itemsize
        self.parts: list[Part] = []
        end = 0
        for param, name in zip(params, names, strict=True):
            offset = -(-end // unit) * unit
            self.parts.append(Part(name, offset, param.array.shape))
            end = offset + param.array.size
        self.flat: Array = memory.empty(end, first.dtype.name, xp=array_module(first))
        self.flat.fill(0)
        self.grads = [self.flat[p.offset : p.offset + p.size].reshape(p.shape) for p in self.parts]

    def name_of(self, element: int) -> str:
        """Local. Name of the parameter whose gradient holds the given element of `flat`."""
        return next(part.name for part in reversed(self.parts) if part.offset <= element)


class BucketMemory:
    """Arrays in wire memory, released all at once: a new layout of buckets reuses the memory of the last but one.

    Communicators keep wire memory for as long as they live. So it is divided anew here, and grows only where one needs
    more than every one before it. The memory of the last layout stays: a captured training step writes there
    once more before it is captured again.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._blocks: list[Array] = []  # of bytes
        self._last_blocks: list[Array] = []  # of the last layout
        self._used: list[int] = []  # bytes in use of each block
        self._cut_anew = False

    def clear(self) -> None:
        """Local, at the same steps on all ranks. Begin a new layout."""
        self._blocks, self._last_blocks = self._last_blocks, self._blocks
        self._used = [0] * len(self._blocks)
        self._cut_anew = bool(self._blocks)

    def empty(self, count: int, dtype: str, *, xp: Any) -> Array:
        """Collective. As `Communicator.empty`, in the existing memory if there is room."""
        storage = storage_of(dtype)
        if not count:
            return xp.empty(0, storage)
        n_bytes = count * storage.itemsize
        room = -(-n_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for index, block in enumerate(self._blocks):
            if self._used[index] + room <= block.size:
                break
        else:  # half as much as there is at a time, so that slowly growing sizes take few blocks
            index = len(self._blocks)
            spare = sum(block.size for block in self._blocks) // 2 if self._cut_anew else 0
            # every communicator moves int64
            self._blocks.append(self.communicator.empty(max(room, spare) // 8, "int64", xp=xp).view("uint8"))
            self._used.append(0)
        start = self._used[index]
        self._used[index] += room
        return self._blocks[index][start : start + n_bytes].view(storage)
