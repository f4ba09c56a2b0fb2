"""Arguments and results of `World`: numbers, and arrays of any kind, as the flat arrays that communicators move.

The memory of an argument is never written, and never part of a result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UsageError
from ..kernels import array_module, check_resolved, check_unmasked
from .base import Array

# By the kind of a number's NumPy type: its Python type, its type on the wire, and its name in messages.
_NUMBERS: dict[str, tuple[type, Any, str]] = {
    "b": (bool, np.bool_, "a bool"),
    "i": (int, np.int64, "an int"),
    "u": (int, np.int64, "an int"),
    "f": (float, np.float64, "a float"),
}
# Types that every communicator moves as they are.
_NATIVE = {np.dtype(name) for name in ("float16", "float32", "float64", "int32", "int64")}
_OPS = ("sum", "max", "min", "mean")
_DLPACK_CPU, _DLPACK_CUDA = 1, 2  # DLDeviceType of dlpack.h
_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Value:
    """An argument of a collective.

    Attributes:
        array: its values, of NumPy or CuPy, in any layout; the caller's memory.
        label: its type and shape as text, which must be equal on all ranks.
        give: converts a result, of its array module, to the kind of the argument.
    """

    array: Array
    label: str
    give: Callable[[Array], Any]


def take(value: Any) -> Value:
    """Local. A number, an array of NumPy or CuPy, or an array of any library that speaks DLPack.

    Raises:
        UsageError: it is something else, or holds no plain data.
    """
    number = _NUMBERS.get(_kind_of_number(value))
    if number is not None:
        kind, dtype, label = number
        try:
            array: Array = np.array(kind(value), dtype)
        except OverflowError:
            bits = int(value).bit_length()
            raise UsageError(f"an int of {bits} bits does not fit in int64; pass it as a float") from None
        return Value(array, label, lambda result: result if result.ndim else result.item())
    give: Callable[[Array], Any]
    cupy = sys.modules.get("cupy")
    check_unmasked(value)
    if isinstance(value, np.ndarray):
        array, give = value.view(np.ndarray), _as_it_is
    elif isinstance(value, np.longdouble):
        array, give = np.asarray(value), lambda result: result[()]
    elif cupy is not None and isinstance(value, cupy.ndarray):
        array, give = value, _as_it_is
    elif hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        array, give = _read_dlpack(value), _from_dlpack_of(value)
    else:
        raise _refused(value)
    dtype = array.dtype
    if dtype.hasobject or not dtype.itemsize:
        raise UsageError(f"an array of type {dtype} holds no plain data; convert it with array.astype")
    return Value(array, f"{dtype.newbyteorder('=')} {list(array.shape)}", give)


def _kind_of_number(value: Any) -> str:
    if isinstance(value, np.generic):
        return value.dtype.kind if value.dtype.itemsize <= np.dtype(np.float64).itemsize else ""
    return next((kind for kind, number in _NUMBERS.items() if isinstance(value, number[0])), "")


def _as_it_is(result: Array) -> Array:
    return result


def _refused(value: Any) -> UsageError:
    return UsageError(
        f"a {type(value).__name__} is neither a number nor an array; convert it with numpy.asarray, or send it as it "
        "is with broadcast_object"
    )


# -- DLPack ----------------------------------------------------------------------------------------------------------
def _read_dlpack(value: Any) -> Array:
    name = type(value).__name__
    check_resolved(value)
    try:
        kind = value.__dlpack_device__()[0]
        xp = {_DLPACK_CPU: np, _DLPACK_CUDA: sys.modules.get("cupy")}.get(kind)
        if xp is None:
            raise UsageError(f"a {name} on a device of DLPack's kind {int(kind)} cannot be sent; copy it to the CPU")
        return xp.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"a {name} cannot be read through DLPack ({error}); pass a dense, detached one of a type that NumPy has"
        ) from error


def _from_dlpack_of(value: Any) -> Callable[[Array], Any]:
    """`from_dlpack` of the class of `value`, of its array namespace, or of the library that it comes from."""
    namespace = getattr(value, "__array_namespace__", lambda: None)()
    owners = [type(value), namespace]
    for cls in type(value).__mro__:
        parts = cls.__module__.split(".")
        owners += [sys.modules.get(".".join(parts[:end])) for end in range(len(parts), 0, -1)]
    for owner in owners:
        if (found := getattr(owner, "from_dlpack", None)) is not None:
            return found  # type: ignore[no-any-return]
    raise _refused(value)


# -- conversions -----------------------------------------------------------------------------------------------------
def carried(array: Array) -> tuple[Array, Callable[[Array], Array]]:
    """Local. A flat array with the bits of `array`, of any type, and a function that makes such rows arrays again.

    Returns:
        A new array [n] that communicators move, and a function that makes [k, n] into [k, *array.shape].
    """
    xp, dtype = array_module(array), array.dtype.newbyteorder("=")
    flat = array.reshape(-1).astype(dtype, order="C")
    n_bytes = flat.nbytes
    if dtype not in _NATIVE:
        padded = xp.zeros(-(-n_bytes // 4) * 4, np.uint8)
        padded[:n_bytes] = flat.view(np.uint8)
        flat = padded.view(np.int32)

    def restored(rows: Array) -> Array:
        shape = (len(rows), *array.shape)
        if rows.dtype != dtype:
            rows = xp.ascontiguousarray(rows.view(np.uint8)[:, :n_bytes]).reshape(-1).view(dtype)
        return rows.reshape(shape).astype(array.dtype, copy=False)

    return flat, restored


def reducible(array: Array, op: str) -> tuple[Array, Callable[[Array], Array]]:
    """Local. A flat array to reduce by `op` in place of `array`, and a function that converts the result back.

    Integers become wide enough for an exact result. The second function raises a UsageError if that does not fit in
    their type, which for the sum of booleans is int64, and for a mean float64.

    Raises:
        UsageError: `op` is unknown, or the array is not numeric.
    """
    if op not in _OPS:
        raise UsageError(f"unknown reduction {op!r}; choose one of {', '.join(_OPS)}")
    dtype, result = array.dtype.newbyteorder("="), array.dtype
    flat = array.reshape(-1).astype(dtype, order="C")
    restore: Callable[[Array], Array]
    if dtype.kind == "f" and dtype in _NATIVE:
        wire, restore = flat, _as_it_is
    elif dtype.kind not in "biu":
        raise UsageError(
            f"an array of {dtype} cannot be reduced; convert it to float16, float32, float64, bool or an integer type"
        )
    elif op == "mean":
        wire, restore, result = flat.astype(np.float64), _as_it_is, np.dtype(np.float64)
    elif op == "sum":
        wire, restore = _summands(flat), lambda total: _fitting(total, dtype)
        result = np.dtype(np.int64) if dtype.kind == "b" else result
    elif dtype == np.uint64:
        # With the highest bit flipped, signed integers have the order of unsigned ones.
        top = np.uint64(1 << 63)
        wire, restore = (flat ^ top).view(np.int64), lambda extreme: extreme.view(np.uint64) ^ top
    else:
        wire, restore = flat.astype(np.int32 if np.can_cast(dtype, np.int32) else np.int64), _as_it_is
    return wire, lambda reduced: restore(reduced).astype(result, copy=False).reshape(array.shape)


def _summands(flat: Array) -> Array:
    """Integers in a type whose sums are exact; with 64 bits, their upper halves and then their lower halves."""
    if flat.itemsize < 8:
        return flat.astype(np.int32 if flat.itemsize < 4 else np.int64)
    stacked: Array = array_module(flat).stack([flat >> 32, flat & _LOW])
    return stacked.astype(np.int64).reshape(-1)


def _fitting(total: Array, dtype: np.dtype[Any]) -> Array:
    """Sums of `_summands` of `dtype`; an error if one does not fit in it. Sums of booleans always do, in int64."""
    if dtype.kind == "b":
        return total
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    if dtype.itemsize < 8:
        return _within(total, least, most, dtype).astype(dtype)
    upper, lower = total.reshape(2, -1)
    upper = _within(upper + (lower >> 32), least >> 32, most >> 32, dtype)
    joined: Array = upper.astype(dtype) * (1 << 32) + (lower & _LOW).astype(dtype)
    return joined


def _within(values: Array, least: int, most: int, dtype: np.dtype[Any]) -> Array:
    if values.size and (values.min() < least or values.max() > most):
        raise UsageError(f"the sum over the ranks does not fit in {dtype}; convert to a wider type, such as float64")
    return values
