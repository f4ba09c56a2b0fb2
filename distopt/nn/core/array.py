"""Types of elements, and checks of the NumPy and CuPy arrays that tensors hold."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from ...errors import UsageError
from ..notices import log_once

Array: TypeAlias = Any  # numpy.ndarray or cupy.ndarray

float16 = np.float16
float32 = np.float32
float64 = np.float64
int32 = np.int32
int64 = np.int64

_NARROW: dict[Any, DTypeLike] = {np.dtype(float64): float32, np.dtype(int64): int32, np.dtype(bool): int32}


def check_numbers(dtype: np.dtype[Any]) -> None:
    """Check that arrays of `dtype` hold real numbers or truth values.

    Raises:
        UsageError: they hold something else.
    """
    if dtype.kind not in "biuf":
        raise UsageError(f"a tensor holds numbers, not {dtype}")


def narrowed(data: Any) -> DTypeLike:
    """The type for a tensor of `data`, as in SINGA: 64-bit numbers become 32-bit ones, if they fit."""
    given: np.dtype[Any] = data.dtype if hasattr(data, "dtype") else np.asarray(data).dtype
    check_numbers(given)
    dtype: np.dtype[Any] = given.newbyteorder("=")
    if dtype.itemsize > 8:
        raise UsageError(f"a tensor holds numbers of up to 64 bits, not {dtype}; convert the array by astype")
    if dtype.char == "d" and hasattr(data, "dtype"):  # a Python float needs no notice
        log_once("float64 data becomes float32, as in SINGA; dtype=tensor.float64 keeps it")
    if dtype == np.int64 and np.size(data) and not -(2**31) <= np.min(data) <= np.max(data) < 2**31:
        return dtype
    return _NARROW.get(dtype, dtype)


def element_type(dtype: DTypeLike) -> np.dtype[Any]:
    """The element type of that name. As in SINGA, "float" and "int" have 32 bits, where NumPy's have 64.

    Raises:
        UsageError: there is no such type.
    """
    try:
        name = {"float": "float32", "int": "int32"}.get(dtype, dtype) if isinstance(dtype, str) else dtype
        found: np.dtype[Any] = np.dtype(name).newbyteorder("=")
    except TypeError:
        found = np.dtype(object)
    if found.kind not in "biuf" or found.itemsize > 8:
        raise UsageError(f"{dtype!r} is not an element type; tensor.float32, for example, is one")
    return found


def c_contiguous(array: Array) -> Array:
    """`array` itself.

    Raises:
        UsageError: it is strided.
    """
    if not array.flags.c_contiguous:
        raise UsageError("a tensor cannot use a strided array; pass a contiguous one (numpy.ascontiguousarray)")
    return array


def settled(y: Array, *operands: Array) -> Array:
    """`y`, the result of a computation on `operands`, as an array of the type that tensors give it.

    A float result has the common type of the floats among the operands, or float32 if there are none. NumPy alone would
    make float64 of int32 and float32, and of functions of int32.
    """
    if y.dtype != operands[0].dtype and y.dtype.kind == "f":
        floats = [x.dtype for x in operands if x.dtype.kind == "f"]
        y = y.astype(np.result_type(*floats) if floats else float32)
    return y[...]  # an array even if NumPy returned a scalar


def in_range(values: Array, dtype: np.dtype[Any]) -> bool:
    """Whether the integer type `dtype` can hold all `values`, which are integers."""
    if not values.size or np.can_cast(values.dtype, dtype):
        return True
    limits = np.iinfo(dtype)
    return limits.min <= int(values.min()) and int(values.max()) <= limits.max
