"""The base of operations with weights: memory for the gradients that a kernel writes."""

from __future__ import annotations

from typing import ClassVar

from ..core.array import Array
from ..core.operation import Arrays, Operation
from ..kernels import kernels_of


class Weighted(Operation):
    """An operation on (x, w) or (x, w, b) whose kernel writes dw and db into memory that it is given.

    Attributes:
        at_once: whether the kernel needs memory for both, even if only one is wanted.
    """

    at_once: ClassVar[bool] = False

    def gradient_memory(self, into: Arrays) -> list[Array]:
        """Memory for the gradient of each input but the first, parameter or not; None where no gradient is wanted."""
        assert self.inputs is not None
        empty = kernels_of(self.inputs[0].array).empty
        return [
            empty(w.shape, "float32" if self.half else w.dtype) if place is None and (need or self.at_once) else place
            for w, place, need in zip(self.inputs[1:], into[1:], self.needs[1:], strict=True)
        ]
