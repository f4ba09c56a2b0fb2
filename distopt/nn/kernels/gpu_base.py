"""The base of kernels for CuPy arrays: the extension, addresses of arrays that have been checked, and products.

Products call cuBLAS directly, as CuPy refuses to call it while a stream is captured in a graph; they do so in
and out of a capture, so that the bits are the same.
"""

from __future__ import annotations

import os
from typing import Any, TypeAlias

import cupy
import numpy as np

from ...errors import MissingDependencyError, pip_install
from ...settings import Settings

try:
    from ... import _cuda
except ImportError as error:
    raise MissingDependencyError(
        f"computing on a GPU needs distopt's extension _cuda ({error}); install the CUDA toolkit (nvcc), then "
        "distopt again with DISTOPT_CUDA=ON (docs/gpu.md)"
    ) from None

Array: TypeAlias = Any  # cupy.ndarray

native = _cuda

# NVIDIA's recommendation for Hopper; other GPUs need less.
_WORKSPACE_BYTES = 32 << 20

_workspaces: dict[tuple[int, int], Array] = {}  # by device and stream: products of one stream run one by one
_products: dict[int, Any] = {}  # by device

_CODES = {np.dtype(np.float32): 0, np.dtype(np.float64): 1}  # of csrc/base/types.h


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
    """Local. The code of the type of `array` in kernels."""
    try:
        return _CODES[array.dtype]
    except KeyError:
        raise TypeError(f"kernels compute in float32 and float64, not in {array.dtype}; convert by to_type") from None


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
    """Local. a [rows, inner] @ b [inner, columns], of dense matrices of one type.

    Args:
        a: if `a_transposed`, [inner, rows].
        b: if `b_transposed`, [columns, inner].
        out: where to write the result [rows, columns]; a new array if not given.
        a_transposed: see `a`.
        b_transposed: see `b`.
        accumulate: add to what `out` holds.

    Raises:
        ValueError: the shapes do not fit.
    """
    inner, rows = a.shape if a_transposed else a.shape[::-1]
    columns = b.shape[0] if b_transposed else b.shape[1]
    if out is None:
        out = cupy.empty((rows, columns), a.dtype)
    b_shape = (columns, inner) if b_transposed else (inner, columns)
    addresses = (
        address_of(a, a.shape, a.dtype),
        address_of(b, b_shape, a.dtype),
        address_of(out, (rows, columns), a.dtype),
    )
    if not out.size:
        return out
    if not inner:
        if not accumulate:
            out.fill(0)
        return out
    device = out.device.id
    products = _products.get(device) or _load_products(device)
    stream = current_stream()
    workspace = _workspaces.get((device, stream))
    if workspace is None:
        workspace = _workspaces[device, stream] = cupy.empty(_WORKSPACE_BYTES, cupy.uint8)
    given = code_of(a), rows, columns, inner, a_transposed, b_transposed, accumulate
    products.multiply(*given, *addresses, workspace.data.ptr, workspace.nbytes, stream)
    return out


def share_workspace(device: int, stream: int, with_stream: int | None) -> None:
    """Local. Let products of `stream` use the workspace of `with_stream`; None: no more.

    So a product captured on a stream uses the workspace of the stream that launches it, in order with the work there.
    """
    if with_stream is None:
        _workspaces.pop((device, stream), None)
    elif (device, with_stream) in _workspaces:
        _workspaces[device, stream] = _workspaces[device, with_stream]


def _load_products(device: int) -> Any:
    named, major = Settings.from_env().cublas_library, cupy.cuda.runtime.runtimeGetVersion() // 1000
    if named is None:
        # CuPy loads the library for its own handle; to load this name then gives the same library.
        cupy.cuda.Device(device).cublas_handle  # noqa: B018
        named = f"libcublas.so.{major}"
    try:
        _products[device] = native.products(named, tf32=os.environ.get("CUPY_TF32", "0") == "1")
    except RuntimeError as error:
        raise MissingDependencyError(
            f"products need cuBLAS ({error}); {pip_install(f'cuda{major}')}, or set DISTOPT_CUBLAS_LIBRARY to the path "
            "of a libcublas.so"
        ) from None
    return _products[device]
