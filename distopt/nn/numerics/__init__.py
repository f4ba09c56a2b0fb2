"""The numerical kernels of operations and optimizers, one module for each kind of array.

Imports devices only; never knows a tensor or an operation.

| module | arrays | role |
| --- | --- | --- |
| `cpu` | NumPy | native kernels of `_core` |
| `gpu` | CuPy | CuPy's functions, kernels of `distopt.kernels.cuda`, and cuBLAS |

All have the same functions, documented in `cpu`, and take and return C-contiguous arrays of float32 or float64 in the
layout N, C, H, W. A forward function returns `(y, saved)`; `saved` is opaque, and may be passed to the backward
function any number of times. A backward function overwrites the arrays that it is given for parameter gradients.
"""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np

from ...errors import UsageError
from . import cpu


def numerics_of(array: object) -> ModuleType:
    """Return the module of kernels for arrays of this kind.

    Raises:
        UsageError: no kernels exist for this type of array.
    """
    if isinstance(array, np.ndarray):
        return cpu
    cupy = sys.modules.get("cupy")  # without CuPy, `array` cannot be a CuPy array
    if cupy is not None and isinstance(array, cupy.ndarray):
        from . import gpu

        return gpu
    kind = type(array)
    raise UsageError(
        f"there are no kernels for arrays of type {kind.__module__}.{kind.__qualname__}; pass a NumPy array, or a CuPy "
        "array on a GPU"
    )
