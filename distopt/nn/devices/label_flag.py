"""Labels out of range that a GPU's kernels have met, which are reported without waiting for the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import UsageError


class LabelFlag:
    """Host memory where GPU kernels record a label that is out of range.

    Attributes:
        address: where kernels find four int64: 1 if a label is recorded, else 0; its sample; the label; and the number
            of classes.
    """

    def __init__(self, cupy: Any) -> None:
        memory = cupy.cuda.alloc_pinned_memory(32)
        self.address: int = memory.ptr
        self._values = np.frombuffer(memory, np.int64, 4)
        self._values[:] = 0

    def check(self) -> None:
        """Raise an error if a label has been recorded since the last call.

        Raises:
            UsageError: a label was out of range.
        """
        found, sample, label, classes = self._values.tolist()
        if found:
            self._values[0] = 0
            raise UsageError(f"label {label} of sample {sample} is outside 0 ... {classes - 1}")


_label_flags: dict[int, LabelFlag] = {}


def label_flag(index: int) -> LabelFlag:
    """Local. The flag of GPU `index`, which must be the current one."""
    if index not in _label_flags:
        import cupy

        _label_flags[index] = LabelFlag(cupy)
    return _label_flags[index]


def check_labels(index: int) -> None:
    """Local. Raise an error if kernels of GPU `index` that have finished have met a label that is out of range.

    Raises:
        UsageError: one has.
    """
    if index in _label_flags:
        _label_flags[index].check()
