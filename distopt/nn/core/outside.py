"""Computations on values outside the graph: parts of tensors, other orders of their elements, comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import UsageError, check_integer
from ...kernels import check_unmasked
from .values import Array, Values, float32

if TYPE_CHECKING:
    from typing_extensions import Self


class OutsideGraph(Values):
    """Values from which new ones are computed, without gradients."""

    __slots__ = ()
    __array_ufunc__ = None  # makes NumPy scalars defer to this class in arithmetic

    def transpose(self, axes: Sequence[int] | None = None) -> Self:
        """A new tensor with the dimensions in the order `axes` (default: reversed), outside the graph."""
        return self.compute("transpose", self.clone(), axes)  # NumPy's result may share memory

    def T(self) -> Self:  # noqa: N802 - SINGA's name
        """As `transpose`: a copy, where SINGA's shares memory."""
        return self.transpose()

    def repeat(self, repeats: int | Sequence[int], axis: int | None = None) -> Self:
        """A new tensor that repeats each element, or slice along `axis`, as `numpy.repeat` does; outside the graph."""
        times = [check_integer("a number of repeats", n, 0) for n in np.ravel(repeats).tolist()]
        return self.compute("repeat", self, times, axis=axis)

    def __getitem__(self, keys: int | slice | tuple[int | slice, ...]) -> Self:
        """A copy of a part, outside the graph. An index keeps its dimension, with size 1, as in SINGA.

        Raises:
            UsageError: an index is outside its dimension, or something else than an int or a slice.
        """
        keys = keys if isinstance(keys, tuple) else (keys,)
        if len(keys) > len(self.shape):
            raise UsageError(f"{len(keys)} indices are too many for a tensor of shape {self.shape}")
        parts = []
        for key, size in zip(keys, self.shape, strict=False):
            if not isinstance(key, slice):
                try:
                    index = range(size)[check_integer("an index", key)]
                except (IndexError, UsageError):
                    raise UsageError(f"{key!r} does not index the shape {self.shape}; ints and slices do") from None
                key = slice(index, index + 1)
            parts.append(key)
        return self.of(self.array[tuple(parts)].copy(), self.device)

    __iter__ = None  # Python would otherwise iterate by `__getitem__`

    # -- comparison --------------------------------------------------------------------------------------------------
    def operand(self, value: Any) -> Self:
        """`value` as a tensor: a number or array has the dtype of this one, or float32 if only the value is a float.

        Integers that the dtype of this one cannot hold keep their NumPy dtype, and so does the result; beyond
        64 bits they are floats.

        Raises:
            UsageError: it is neither a tensor nor a number nor an array of numbers.
        """
        if isinstance(value, Values):
            return value  # type: ignore[return-value]  # all are of one class
        check_unmasked(value)
        given = value if hasattr(value, "dtype") else np.asarray(value)
        if given.dtype.kind == "O" and isinstance(value, int):
            with suppress(OverflowError):
                given = np.asarray(float(value))
        if given.dtype.kind not in "biuf":
            raise UsageError(f"tensors compute with tensors, arrays and numbers, not with {value!r}")
        dtype = np.dtype(float32) if given.dtype.kind == "f" != self.dtype.kind else self.dtype
        if dtype.kind in "iu" and not _in_range(given, dtype):
            dtype = given.dtype
        xp = self.device.xp
        # Not `asarray`: on a GPU, it copies from the host, which a graph would not repeat.
        array = xp.ascontiguousarray(given, dtype) if given.ndim else xp.full((), given.item(), dtype)
        return self.of(array, self.device)

    def __eq__(self, other: object) -> Any:
        """1.0 where equal, else 0.0; False for anything that is not a number, as None.

        Dictionaries and sets of tensors still work by identity, because they compare only keys of equal hash.
        """
        return self._compared("equal", other)

    def __ne__(self, other: object) -> Any:
        """1.0 where not equal, else 0.0; True for anything that is not a number, as None."""
        return self._compared("not_equal", other)

    __hash__ = object.__hash__

    def _compared(self, name: str, other: object) -> Any:
        try:
            value = self.operand(other)
        except UsageError:
            return NotImplemented
        return self.compute(name, self, value)

    def __lt__(self, other: Any) -> Self:
        return self.compute("less", self, self.operand(other))

    def __le__(self, other: Any) -> Self:
        return self.compute("less_equal", self, self.operand(other))

    def __gt__(self, other: Any) -> Self:
        return self.compute("greater", self, self.operand(other))

    def __ge__(self, other: Any) -> Self:
        return self.compute("greater_equal", self, self.operand(other))

    def __floordiv__(self, other: Any) -> Self:
        return self.compute("floor_divide", self, self.operand(other))

    def compute(self, name: str, *operands: Any, **options: Any) -> Self:
        """Local. A new tensor outside the graph: the result of a function that NumPy and CuPy have.

        Args:
            name: of the function.
            operands: its arguments: tensors, lists of tensors, and other values; `self` is none unless it is passed.
            options: its further arguments, by name.

        Returns:
            A tensor of at least one dimension, on the device of this one, in the type of `settled`; bool becomes 0.0
            and 1.0.

        Raises:
            UsageError: the function refuses the arguments.
        """
        tensors = [t for x in operands for t in (x if isinstance(x, list) else [x]) if isinstance(t, Values)]
        xp = self.device.xp
        try:
            result = getattr(xp, name)(*map(_arrays, operands), **options)
        except (TypeError, ValueError, IndexError) as error:
            shapes = ", ".join(str(t.shape) for t in tensors)
            raise UsageError(f"{name} does not take tensors of shape {shapes}: {error}") from None
        if result.dtype.kind == "b":
            result = result.astype(float32)
        result = settled(result, *[t.array for t in tensors])
        return self.of(xp.ascontiguousarray(result) if result.ndim else result.reshape(1), self.device)


def settled(y: Array, *operands: Array) -> Array:
    """Local. `y`, computed from `operands`, as an array of the type that they give it.

    The floats among the operands decide; without one, non-integer results are float32. NumPy would make float64
    of int32 and float32, and of functions of int32.
    """
    if y.dtype != operands[0].dtype and y.dtype.kind == "f":
        floats = [x.dtype for x in operands if x.dtype.kind == "f"]
        y = y.astype(np.result_type(*floats) if floats else float32)
    return y[...]  # an array even if NumPy returned a scalar


def _in_range(values: Array, dtype: np.dtype[Any]) -> bool:
    """Whether the integer type `dtype` has all of these integers."""
    if not values.size or np.can_cast(values.dtype, dtype):
        return True
    limits = np.iinfo(dtype)
    return limits.min <= int(values.min()) and int(values.max()) <= limits.max


def _arrays(operand: Any) -> Any:
    if isinstance(operand, Values):
        return operand.array
    return [_arrays(item) for item in operand] if isinstance(operand, list) else operand
