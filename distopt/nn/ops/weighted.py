"""The base of operations with weights: memory for the gradients that a kernel writes."""

from __future__ import annotations

from ..core.array import Array
from ..core.operation import Arrays, Operation
from ..numerics import numerics_of


class Weighted(Operation):
    """An operation on (x, w) or (x, w, b) whose kernel writes dw and db into memory that it is given."""

    def gradient_memory(self, into: Arrays, *, at_once: bool = False) -> list[Array]:
        """Memory for the gradient of each input but the first, parameter or not; None where no gradient is wanted.

        `into` may be shorter than the inputs: the last ones then have none.
        With `at_once` there is memory for all, because the kernel writes all or none.
        """
        assert self.inputs is not None
        empty = numerics_of(self.inputs[0].array).empty
        end = len(into)
        return [
            empty(w.shape, "float32" if self.half else w.dtype) if place is None and (need or at_once) else place
            for w, place, need in zip(self.inputs[1:end], into[1:], self.needs[1:end], strict=True)
        ]
