"""A stand-in for CuPy on the emulated driver, for tests on machines without a GPU.

Only what distopt uses, and strict where CuPy is strict: arrays of NumPy and of the device do not mix, and reach each
other by `get`, `set`, `asarray` and `asnumpy` alone. Every operation first runs what waits on the current stream.
`tests/unit/test_cupy_names.py` compares names and arguments with the real CuPy where that is installed.
"""

from __future__ import annotations

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
TYPES = (
    *("bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32"),
    *("float64", "dtype", "newaxis", "nan", "inf", "pi", "result_type", "promote_types"),
)
globals().update({name: getattr(_numpy, name) for name in TYPES})

# Functions that CuPy has by the same name and with the same arguments, as far as they are used.
FUNCTIONS = (
    *("abs", "add", "add.at", "all", "allclose", "any", "arccos", "arccosh", "arcsin", "arcsinh", "arctan"),
    *("arctanh", "argmax", "argmin", "argpartition", "argsort", "array_equal", "bincount", "broadcast_to", "ceil"),
    *("clip", "concatenate", "copyto", "cos", "cosh", "count_nonzero", "cumsum", "divide", "dot", "einsum"),
    *("empty_like", "equal", "exp", "expand_dims", "expm1", "flatnonzero", "floor", "floor_divide", "frexp"),
    *("full_like", "greater", "greater_equal", "isfinite", "isinf", "isnan", "ldexp", "less", "less_equal"),
    *("linalg.norm", "log", "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor", "matmul"),
    *("max", "maximum", "mean", "min", "minimum", "multiply", "negative", "nonzero", "not_equal", "ones_like"),
    *("pad", "partition", "power", "prod", "ravel", "repeat", "reshape", "rint", "searchsorted", "sign", "sin"),
    *("sinh", "sort", "split", "sqrt", "square", "squeeze", "stack", "subtract", "sum", "take", "tan", "tanh"),
    *("tensordot", "tile", "transpose", "trunc", "unique", "where", "zeros_like"),
)


def _function(name: str) -> Any:
    function: Any = _numpy
    for part in name.split("."):
        function = getattr(function, part)

    def wrapper(*args: Any, **options: Any) -> Any:
        return _call(function, *args, **options)

    wrapper.__name__ = name
    return wrapper


class linalg:  # noqa: N801
    """`cupy.linalg`."""


for _name in FUNCTIONS:
    _module, _, _short = _name.rpartition(".")
    if _module:
        setattr(globals()[_module], _short, staticmethod(_function(_name)))
    else:
        globals()[_name] = _function(_name)


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    """Uninitialised: filled with bytes that make a NaN of any float."""
    return ndarray(shape, dtype, order=order)


def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    if isinstance(fill_value, ndarray):
        fill_value = fill_value.item()
    result: ndarray = _device(_numpy.full(shape, fill_value, dtype, order))
    return result


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 0, dtype, order)


def ones(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 1, dtype, order)


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> ndarray:
    start, stop = (0, start) if stop is None else (start, stop)
    result: ndarray = _device(_numpy.arange(start, stop, step, dtype))
    return result


def array(
    obj: Any,
    dtype: Any = None,
    copy: bool = True,
    order: str = "K",
    subok: bool = False,
    ndmin: int = 0,
    *,
    blocking: bool = False,
) -> ndarray:
    """A copy of a device array, a NumPy array or numbers."""
    if isinstance(obj, ndarray):
        if not copy and dtype in (None, obj.dtype):
            return obj
        copied: ndarray = _call(_numpy.array, obj, dtype=dtype, order=order, ndmin=ndmin)
        return copied
    if cuda.capturing():  # it goes through pinned memory, with an event that CuPy then queries
        raise cuda.runtime.CUDARuntimeError("cudaErrorCapturedEvent: operation not permitted on an event last ...")
    result: ndarray = _device(_numpy.array(_numpy.asarray(obj), dtype=dtype, order=order, ndmin=ndmin))  # type: ignore[call-overload]
    return result


def asarray(a: Any, dtype: Any = None, order: Any = None, *, copy: Any = None, blocking: bool = False) -> ndarray:
    if isinstance(a, ndarray) and dtype in (None, a.dtype) and not copy:
        return a
    return array(a, dtype, order=order or "K")


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    if isinstance(a, ndarray) and dtype in (None, a.dtype) and a.flags.c_contiguous:
        return a
    return array(a, dtype, order="C")


def asnumpy(a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True) -> Any:
    if isinstance(a, ndarray):
        return a.get(stream, order, out, blocking)
    return _numpy.asarray(a, order=order)  # type: ignore[call-overload]


def from_dlpack(array: Any) -> ndarray:
    """Of arrays of this module, and what exports one."""
    own: ndarray = array.__dlpack__()
    return own
