"""The base of kernels for CuPy arrays: arrays that have been checked, and products by cuBLAS.

Products call cuBLAS by CuPy's handle, but not through CuPy, which refuses to call it while a stream is captured in a
graph; they do so in and out of a capture, so that the bits are the same.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any, TypeAlias

import cupy
import numpy as np

from ...errors import MissingDependencyError, pip_install
from ...kernels.cuda import check_device, launch_each

Array: TypeAlias = Any  # cupy.ndarray

_WORKSPACE_BYTES = 32 << 20  # NVIDIA's recommendation for Hopper; other GPUs need less
_FLOAT32, _TF32 = 0, 3  # CUBLAS_DEFAULT_MATH, CUBLAS_TF32_TENSOR_OP_MATH


def checked(array: Array, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    """`array`, which must be dense and of this shape and type: kernels get no more than its address."""
    if not isinstance(array, cupy.ndarray):
        raise TypeError(f"kernels of a GPU take CuPy arrays, not {type(array).__name__}; copy it with Tensor.to_device")
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise TypeError(
            f"expected a C-contiguous array of {np.dtype(dtype)}, got {array.dtype} with strides {array.strides}; "
            "convert it with Tensor.as_type, or compute in float64 on the CPU"
        )
    if array.shape != shape:
        raise ValueError(f"expected an array of shape {shape}, got {array.shape}")
    return array


def checked_or_none(array: Array | None, shape: tuple[int, ...], dtype: Any = np.float32) -> Array | None:
    """As `checked`, also of None."""
    return None if array is None else checked(array, shape, dtype)


def finish(y: Array, width: int, bias: Array | None, relu: bool) -> None:
    """Add the bias of each channel to y [.., channels, width], in place, and apply ReLU, where wanted."""
    if relu or bias is not None:
        launch_each("finish", y.size, y.size, width, 1 if bias is None else bias.size, bias, relu, y)


def relu_backward(dy: Array, y: Array) -> Array:
    dx = cupy.empty(dy.shape, np.float32)
    launch_each("relu_backward", dy.size, dy.size, checked(dy, dy.shape), checked(y, dy.shape), dx)
    return dx


# -- products ----------------------------------------------------------------------------------------------------------
def product(
    a: Array,
    b: Array,
    out: Array | None = None,
    *,
    a_transposed: bool = False,
    b_transposed: bool = False,
    accumulate: bool = False,
) -> Array:
    """The product a [rows, inner] @ b [inner, columns], of dense matrices of float32, or of several pairs of them.

    Args:
        a: if `a_transposed`, [inner, rows].
        b: if `b_transposed`, [columns, inner].
        out: where to write the result [rows, columns]; a new array if not given.
        a_transposed: see `a`.
        b_transposed: see `b`.
        accumulate: add to what `out` holds.

    With pairs, `out` and a or b have one more dimension in front, or both; one call of cuBLAS computes all products.

    Raises:
        ValueError: the shapes do not fit.
        MissingDependencyError: cuBLAS cannot be loaded.
        UsageError: see `check_device`.
    """
    inner, rows = a.shape[-2:] if a_transposed else (a.shape[-1], a.shape[-2])
    columns, pairs = b.shape[-2] if b_transposed else b.shape[-1], a.shape[:-2] or b.shape[:-2]
    if out is None:
        out = cupy.empty((*pairs, rows, columns), np.float32)
    checked(a, a.shape)
    own = b.shape[:-2] and pairs
    checked(b, (*own, columns, inner) if b_transposed else (*own, inner, columns))
    checked(out, (*pairs, rows, columns))
    if not out.size:
        return out
    if not inner:
        if not accumulate:
            out.fill(0)
        return out
    check_device(out, cupy.cuda.runtime.getDevice())
    # On return it goes back to CuPy's pool, which gives it to later work of this stream alone.
    workspace = cupy.empty(_WORKSPACE_BYTES, np.uint8)
    _call("cublasSetStream_v2", ctypes.c_void_p(cupy.cuda.get_current_stream().ptr))
    # To set the stream takes the workspace away; without one of ours a capture would allocate in the graph. CuPy sets
    # the stream before each call of its own.
    _call("cublasSetWorkspace_v2", _address(workspace), ctypes.c_size_t(workspace.nbytes))
    _call("cublasSetMathMode", _TF32 if os.environ.get("CUPY_TF32") == "1" else _FLOAT32)
    one, beta = ctypes.byref(ctypes.c_float(1)), ctypes.byref(ctypes.c_float(accumulate))
    # cuBLAS counts by columns: a row-major matrix is its transpose to it, and out' = b' a'.
    given = int(b_transposed), int(a_transposed), columns, rows, inner, one
    matrices = (b, inner if b_transposed else columns), (a, rows if a_transposed else inner), (out, columns)
    if pairs:
        apart = [(_address(x), width, ctypes.c_longlong(x[0].size if x.ndim > 2 else 0)) for x, width in matrices]
        _call("cublasSgemmStridedBatched", *given, *apart[0], *apart[1], beta, *apart[2], *pairs)
    else:
        alone = [(_address(x), width) for x, width in matrices]
        _call("cublasSgemm_v2", *given, *alone[0], *alone[1], beta, *alone[2])
    return out


def _address(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.data.ptr)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of cuBLAS with CuPy's handle of this thread and GPU; arguments are int or of types of C."""
    library = _cublas()
    if status := getattr(library, name)(ctypes.c_void_p(cupy.cuda.Device().cublas_handle), *arguments):
        text = library.cublasGetStatusString(status).decode()
        raise RuntimeError(f"{name}: {text} (cuBLAS status {status})")


@cache
def _cublas() -> ctypes.CDLL:
    major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    try:
        # CuPy loads the library for its handle; to load this name then gives the same library.
        cupy.cuda.Device().cublas_handle  # noqa: B018
        library = ctypes.CDLL(f"libcublas.so.{major}")
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingDependencyError(
            f"products need the cuBLAS of CuPy's CUDA ({error}); {pip_install(f'cuda{major}')}"
        ) from None
    library.cublasGetStatusString.restype = ctypes.c_char_p
    return library
