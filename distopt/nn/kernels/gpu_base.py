"""The base of kernels for CuPy arrays: arrays that have been checked, and products by cuBLAS.

Products call cuBLAS directly, as CuPy refuses to call it while a stream is captured in a graph; they do so in
and out of a capture, so that the bits are the same.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any, TypeAlias

import cupy
import numpy as np

from ...errors import MissingDependencyError, pip_install
from ...kernels.cuda import check_device

Array: TypeAlias = Any  # cupy.ndarray

# NVIDIA's recommendation for Hopper; other GPUs need less.
_WORKSPACE_BYTES = 32 << 20

_workspaces: dict[tuple[int, int], Array] = {}  # by device and stream: products of one stream run one by one


def checked(array: Array, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    """Local. `array`, which must be dense and of this shape and type: kernels get no more than its address."""
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
    """Local. As `checked`, also of None."""
    return None if array is None else checked(array, shape, dtype)


def current_stream() -> int:
    """Local. The stream that CuPy computes on."""
    address: int = cupy.cuda.get_current_stream().ptr
    return address


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
    """Local. a [rows, inner] @ b [inner, columns], of dense matrices of float32, or of as many pairs of them.

    Args:
        a: if `a_transposed`, [inner, rows].
        b: if `b_transposed`, [columns, inner].
        out: where to write the result [rows, columns]; a new array if not given.
        a_transposed: see `a`.
        b_transposed: see `b`.
        accumulate: add to what `out` holds.

    With pairs, all of them have one more dimension in front; one call of cuBLAS computes all products.

    Raises:
        ValueError: the shapes do not fit.
        MissingDependencyError: cuBLAS cannot be loaded.
        UsageError: see `check_device`.
    """
    *pairs, inner, rows = a.shape if a_transposed else (*a.shape[:-2], a.shape[-1], a.shape[-2])
    columns = b.shape[-2] if b_transposed else b.shape[-1]
    if out is None:
        out = cupy.empty((*pairs, rows, columns), np.float32)
    checked(a, a.shape)
    checked(b, (*pairs, columns, inner) if b_transposed else (*pairs, inner, columns))
    checked(out, (*pairs, rows, columns))
    if not out.size:
        return out
    if not inner:
        if not accumulate:
            out.fill(0)
        return out
    device, stream = cupy.cuda.runtime.getDevice(), current_stream()
    check_device(out, device)
    cublas = _handles.get(device) or _open_cublas(device)
    workspace = _workspaces.get((device, stream))
    if workspace is None:
        workspace = _workspaces[device, stream] = cupy.empty(_WORKSPACE_BYTES, cupy.uint8)
    # cuBLAS counts by columns: a row-major matrix is its transpose to it, and out' = b' a'.
    given = int(b_transposed), int(a_transposed), columns, rows, inner
    matrices = (b, inner if b_transposed else columns), (a, rows if a_transposed else inner), (out, columns)
    cublas.multiply(stream, workspace, given, matrices, accumulate)
    return out


def share_workspace(device: int, stream: int, with_stream: int | None) -> None:
    """Local. Let products of `stream` use the workspace of `with_stream`; None: no more.

    So a product captured on a stream uses the workspace of the stream that launches it, in order with the work there.
    """
    if with_stream is None:
        _workspaces.pop((device, stream), None)
    elif (device, with_stream) in _workspaces:
        _workspaces[device, stream] = _workspaces[device, with_stream]


_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_MATRIX, _MATRICES = (_POINTER, _INT), (_POINTER, _INT, ctypes.c_longlong)
_GEMM = (_POINTER, *(_INT,) * 5, _POINTER, *_MATRIX, *_MATRIX, _POINTER, *_MATRIX)
_GEMMS = (_POINTER, *(_INT,) * 5, _POINTER, *_MATRICES, *_MATRICES, _POINTER, *_MATRICES, _INT)
# Of CUDA 12 and 13 alike.
_FUNCTIONS = {
    "cublasCreate_v2": (_POINTER,),
    "cublasSetMathMode": (_POINTER, _INT),
    "cublasSetStream_v2": (_POINTER, _POINTER),
    "cublasSetWorkspace_v2": (_POINTER, _POINTER, ctypes.c_size_t),
    "cublasSgemm_v2": _GEMM,
    "cublasSgemmStridedBatched": _GEMMS,
}
_STANDARD, _TF32 = 0, 3  # math modes


class _Cublas:
    """A handle of cuBLAS on the current device. It is never destroyed: the library may be torn down before it."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._library.cublasGetStatusString.restype = ctypes.c_char_p
        for name, types in _FUNCTIONS.items():
            getattr(self._library, name).argtypes = types
        self._handle = ctypes.c_void_p()
        self._lock = threading.Lock()
        self._place: tuple[int, int] | None = None  # stream and workspace
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._call("cublasSetMathMode", self._handle, _TF32 if os.environ.get("CUPY_TF32") == "1" else _STANDARD)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            text = self._library.cublasGetStatusString(status).decode()
            raise RuntimeError(f"{name}: {text} (cuBLAS status {status})")

    def multiply(
        self,
        stream: int,
        workspace: Array,
        given: tuple[int, ...],
        matrices: tuple[tuple[Array, int], ...],
        accumulate: bool,
    ) -> None:
        """The product by gemm: `given` are its integers; matrices a, b and c come with their leading dimensions."""
        one, beta = ctypes.c_float(1), ctypes.c_float(accumulate)
        given_matrices: list[tuple[int, ...]] = [(array.data.ptr, width) for array, width in matrices]
        gemm, pairs = "cublasSgemm_v2", matrices[0][0].shape[:-2]
        if pairs:
            given_matrices = [(array.data.ptr, width, array[0].size) for array, width in matrices]
            gemm = "cublasSgemmStridedBatched"
        a, b, c = given_matrices
        place = stream, workspace.data.ptr
        with self._lock:
            if place != self._place:
                self._call("cublasSetStream_v2", self._handle, stream)
                # To set the stream takes the workspace away; without one of ours a capture would allocate in the graph.
                self._call("cublasSetWorkspace_v2", self._handle, place[1], workspace.nbytes)
                self._place = place
            scalars = ctypes.byref(one), ctypes.byref(beta)
            self._call(gemm, self._handle, *given, scalars[0], *a, *b, scalars[1], *c, *pairs)


_handles: dict[int, _Cublas] = {}  # by device


def _open_cublas(device: int) -> _Cublas:
    major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    try:
        # CuPy loads the library for its own handle; to load this name then gives the same library.
        cupy.cuda.Device(device).cublas_handle  # noqa: B018
        _handles[device] = _Cublas(f"libcublas.so.{major}")
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingDependencyError(
            f"products need the cuBLAS of CuPy's CUDA ({error}); {pip_install(f'cuda{major}')}"
        ) from None
    return _handles[device]
