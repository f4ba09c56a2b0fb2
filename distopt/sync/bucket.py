"""Buckets: flat runs of gradients in wire memory, so that one collective carries many parameters.

A parameter's gradient *is* a view of its bucket: the front writes it there, the communicator reduces it there and the
optimizer reads it there. Adding a gradient to a bucket is therefore counting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..compress import Part
from ..kernels import array_module, kernels_of
from .memory import ALIGNMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..comm.base import Array
    from .memory import WireMemory

__all__ = ["Bucket", "Parameter"]


class Parameter(Protocol):
    """What the engine needs to know of a parameter.

    Attributes:
        name: unique in its model.
        array: its values, of NumPy or CuPy, contiguous.
    """

    name: str | None
    array: Array


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
        self, index: int, params: Sequence[Parameter], names: Sequence[str], memory: WireMemory, prefix: str = ""
    ) -> None:
        """Collective: allocates wire memory.

        Args:
            index: see above.
            params: see above.
            names: those of `params`, unique in the model.
            memory: what the bucket lies in.
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

    def first_nonfinite(self) -> int | None:
        """Local. Index of the first NaN or infinity in `flat`."""
        return kernels_of(self.flat).first_nonfinite(self.flat)
