"""The numerical kernels under autograd, one module per kind of array.

| module | arrays | role |
| --- | --- | --- |
| `reference` | NumPy | slow and plain; the oracle of the tests |
| `cpu` | NumPy | native kernels of `_core` |
| `gpu` | CuPy | native kernels of `_cuda`, and cuBLAS |

All take and return C-contiguous arrays of float32 or float64 in the layout N, C, H, W, and all have the same functions:
`cpu` documents them. A forward function returns `(y, saved)`; `saved` goes to its backward function, once or several
times, and is opaque. A backward function overwrites the arrays for parameter gradients that it is given.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np

from ...errors import UsageError
from . import cpu

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["kernels_of"]


def kernels_of(array: object) -> ModuleType:
    """Return the module of kernels for arrays of this kind.

    Raises:
        UsageError: there are no kernels for this type of array.
        MissingDependencyError: a CuPy array, and distopt was built without `_cuda`.
    """
    if isinstance(array, np.ndarray):
        return cpu
    cupy = sys.modules.get("cupy")  # without it there is no array of it
    if cupy is not None and isinstance(array, cupy.ndarray):
        from . import gpu

        return gpu
    kind = type(array)
    raise UsageError(
        f"there are no kernels for arrays of type {kind.__module__}.{kind.__qualname__}; pass a NumPy array, or a CuPy "
        "array on a GPU"
    )
