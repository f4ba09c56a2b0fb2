"""What kernels for CuPy arrays share: the extension, and addresses of arrays that have been checked."""

from __future__ import annotations

from typing import Any, TypeAlias

import cupy
import numpy as np

from ..errors import MissingDependencyError

try:
    from .. import _cuda
except ImportError as error:
    raise MissingDependencyError(
        f"computing on a GPU needs distopt's extension _cuda ({error}); install the CUDA toolkit (nvcc) and install "
        "distopt again"
    ) from None

__all__ = ["Array", "address_of", "address_or_null", "code_of", "current_stream", "native"]

Array: TypeAlias = Any  # cupy.ndarray

native = _cuda

_CODES = {np.dtype(np.float32): 0, np.dtype(np.float64): 1}  # of csrc/types.h


def address_of(array: Array, shape: tuple[int, ...], dtype: Any) -> int:
    """Local. The address of `array`, which must be dense and of this shape and type: kernels get no more."""
    if not isinstance(array, cupy.ndarray):
        raise TypeError(f"kernels of a GPU take CuPy arrays, not {type(array).__name__}; copy it with Tensor.to_device")
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise TypeError(f"expected a C-contiguous array of {dtype}, got {array.dtype} with strides {array.strides}")
    if array.shape != shape:
        raise ValueError(f"expected an array of shape {shape}, got {array.shape}")
    address: int = array.data.ptr
    return address


def address_or_null(array: Array | None, shape: tuple[int, ...], dtype: Any) -> int:
    """Local. As `address_of`; 0 for None."""
    return 0 if array is None else address_of(array, shape, dtype)


def code_of(array: Array) -> int:
    """Local. What kernels call the type of `array`."""
    try:
        return _CODES[array.dtype]
    except KeyError:
        raise TypeError(f"kernels compute in float32 and float64, not in {array.dtype}") from None


def current_stream() -> int:
    """Local. The stream that CuPy computes on."""
    address: int = cupy.cuda.get_current_stream().ptr
    return address
