"""A stand-in for CuPy on the emulated driver, for tests on machines without a GPU.

Only what distopt uses, and strict where CuPy is strict: arrays of NumPy and of the device do not mix, and reach each
other by `get`, `set`, `asarray` and `asnumpy` alone. Every operation first runs what waits on the current stream, or,
with $DISTOPT_EMULATED_LAG, waits there itself.
`tests/unit/test_cupy_names.py` compares names and arguments with the real CuPy where that is installed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as _numpy

from . import cuda
from . import random as random
from ._array import call as _call
from ._array import device as _device
from ._array import ndarray
from .cuda.compiler import RawModule as RawModule

__version__ = "14.2.0"

# NumPy names that CuPy re-exports.
TYPES = ("bool_", "int32", "int64", "uint8", "uint16", "float32", "float64", "dtype", "nan", "inf")
globals().update({name: getattr(_numpy, name) for name in TYPES})

# Functions that CuPy has by the same name and with the same arguments, as far as they are used.
FUNCTIONS = (
    *("abs", "add", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctanh", "argpartition", "broadcast_to"),
    *("ceil", "clip", "concatenate", "copyto", "cos", "cosh", "divide", "einsum", "empty_like", "equal", "exp"),
    *("expand_dims", "expm1", "floor", "floor_divide", "frexp", "full_like", "greater", "greater_equal", "ldexp"),
    *("less", "less_equal", "log", "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor", "matmul"),
    *("max", "maximum", "mean", "min", "minimum", "multiply", "negative", "not_equal", "ones_like", "pad", "power"),
    *("repeat", "reshape", "rint", "searchsorted", "sign", "sin", "sinh", "split", "sqrt", "square", "squeeze"),
    *("stack", "subtract", "sum", "take", "tan", "tanh", "tensordot", "tile", "transpose", "trunc", "where"),
    "zeros_like",
)

for _name in FUNCTIONS:
    globals()[_name] = partial(_call, getattr(_numpy, _name))
globals()["add"].at = partial(_call, _numpy.add.at)


def empty(shape: Any, dtype: Any = float) -> ndarray:
    """Uninitialised: filled with bytes that make a NaN of any float."""
    return ndarray(shape, dtype)


def full(shape: Any, fill_value: Any, dtype: Any = None) -> ndarray:
    result: ndarray = _device(_numpy.full(shape, fill_value, dtype))
    return result


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    return full(shape, 0, dtype)


def ones(shape: Any, dtype: Any = float) -> ndarray:
    return full(shape, 1, dtype)


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> ndarray:
    start, stop = (0, start) if stop is None else (start, stop)
    result: ndarray = _device(_numpy.arange(start, stop, step, dtype))
    return result


def array(obj: Any, dtype: Any = None, *, order: Any = "K") -> ndarray:
    """A copy of a device array, a NumPy array or numbers."""
    if isinstance(obj, ndarray):
        copied: ndarray = _call(_numpy.array, obj, dtype=dtype, order=order)
        return copied
    if cuda.capturing():  # it goes through pinned memory, with an event that CuPy then queries
        raise cuda.runtime.CUDARuntimeError("cudaErrorCapturedEvent: operation not permitted on an event last ...")
    result: ndarray = _device(_numpy.array(_numpy.asarray(obj), dtype=dtype, order=order))
    return result


def asarray(a: Any, dtype: Any = None) -> ndarray:
    return a if isinstance(a, ndarray) and dtype in (None, a.dtype) else array(a, dtype)


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    return (
        a
        if isinstance(a, ndarray) and dtype in (None, a.dtype) and a.flags.c_contiguous
        else array(a, dtype, order="C")
    )


def asnumpy(a: ndarray) -> Any:
    return a.get()


def from_dlpack(array: Any) -> ndarray:
    """A view of an array of another library on the device; one of this module itself."""
    return array if isinstance(array, ndarray) else ndarray._of_others(array)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"the stand-in for CuPy has no {name}; if CuPy has it, add it to FUNCTIONS in {__file__}")
