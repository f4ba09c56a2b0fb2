"""Operations that choose elements by index, padding among them. A negative axis counts from the last."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ...checks import check_integer
from ...errors import ShapeError, UsageError
from ...kernels import array_module
from ..core.array import Array, float32, int32
from ..core.operation import Arrays, Operation, wants_gradient
from ..core.tensor import Tensor
from ..numerics import numerics_of
from .shape import NoGradient, axes_of

__all__ = [
    "embedding",
    "gather",
    "nonzero",
    "onehot",
    "pad",
    "scatter_elements",
]


def _index(x: Tensor, indices: Tensor | ArrayLike, axis: int) -> Array:
    """Indices along an axis of x as an array of int64 on its device. Indices in memory of the host are checked here."""
    given = _whole(indices.array if isinstance(indices, Tensor) else np.asarray(indices))
    if isinstance(given, np.ndarray):
        _outside(given, x.shape[axis], axis)
    return x.device.xp.asarray(given, np.int64)


def _whole(index: Array) -> Array:
    if index.size and index.dtype.kind not in "iu":
        raise UsageError(f"indices are integers, got {index.dtype}; convert them with autograd.cast(x, tensor.int32)")
    return index


def _outside(index: Array, length: int, axis: int) -> Array | None:
    """Where an index is out of range on a GPU, whose host does not wait to know; on a CPU that is an error at once."""
    if index.size and not length:
        raise UsageError(f"axis {axis} has no element that an index could name")
    return numerics_of(index).check_index(index, length, axis)


def _spoil(values: Array, outside: Array | None, axis: int = 0) -> None:
    """Make `values` NaN where an index is out of range, so that nothing is learnt: a GPU has taken another element.

    Args:
        values: the dimensions of the index begin at `axis`.
        outside: as `_outside` returns it.
        axis: see `values`.
    """
    if outside is not None and values.dtype.kind == "f":
        where = outside.reshape((*outside.shape, *[1] * (values.ndim - axis - outside.ndim)))
        array_module(values).copyto(values, values.dtype.type(np.nan), where=where)


def _taken(x: Array, index: Array, axis: int) -> tuple[Array, Array | None]:
    """The elements at the positions `index`, and where one is out of range."""
    outside = _outside(index, x.shape[axis], axis)
    y = array_module(x).take(x, index, axis)[...]
    _spoil(y, outside, axis)
    return y, outside


def _put_back(dy: Array, index: Array, axis: int, length: int, outside: Array | None = None) -> Array:
    """The gradient of x, whose dimension `axis` has `length` elements, given that of `_taken`, which may change."""
    xp = array_module(dy)
    _spoil(dy, outside, axis)
    dx = xp.zeros((*dy.shape[:axis], length, *dy.shape[axis + index.ndim :]), dy.dtype)
    # On a GPU the additions come in any order, so the last bits may vary where an index is repeated.
    xp.add.at(dx, (*[slice(None)] * axis, index), dy)
    return dx


class Gather(Operation):
    """The elements of x at the positions `index` along `axis`; the dimensions of `index` replace `axis`."""

    def __init__(self, axis: int, index: Array) -> None:
        self.axis, self.index = axis, index

    def forward(self, x: Array) -> Array:
        y, outside = _taken(x, self.index, self.axis)
        self.saved = x.shape[self.axis], outside
        return y

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        return (_put_back(dy, self.index, self.axis, *self.saved),)


def gather(x: Tensor, axis: int, indices: Tensor | ArrayLike) -> Tensor:
    """The elements of x at the positions `indices` along `axis`; the dimensions of `indices` replace that one."""
    (axis,) = axes_of(x, axis)
    return Gather(axis, _index(x, indices, axis))(x)


class Embedding(Operation):
    """The rows of w [words, features] at the positions x, an array of integers, whose gradient is 0."""

    def forward(self, x: Array, w: Array) -> Array:
        index = _whole(x).astype(np.int64)
        y, outside = _taken(w, index, 0)
        self.saved = index, len(w), outside
        return y

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        index, words, outside = self.saved
        dx = array_module(dy).zeros(index.shape, dy.dtype) if self.needs[0] else None
        return dx, _put_back(dy, index, 0, words, outside)


def embedding(x: Tensor, w: Tensor) -> Tensor:
    """The rows of w [words, features] at the positions x, a tensor of integers of any shape."""
    return Embedding()(x, w)


class ScatterElements(Operation):
    """A copy of x with `updates` at the positions `key`: an array of integers for each dimension, no position twice.

    The array for `axis` has the shape of `updates`; the others, which broadcast to it, are in range.
    """

    def __init__(self, key: Sequence[Array], axis: int) -> None:
        self.key, self.axis = tuple(key), axis

    def forward(self, x: Array, updates: Array) -> Array:
        y = x.copy()
        self.saved = _outside(self.key[self.axis], x.shape[self.axis], self.axis)
        y[self.key] = self._spoilt(updates)
        return y

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        assert self.inputs is not None
        updates = self._spoilt(dy[self.key]) if wants_gradient(self.inputs[1]) else None
        dy[self.key] = self._spoilt(array_module(dy).zeros(self.key[self.axis].shape, dy.dtype))
        return dy, updates

    def _spoilt(self, values: Array) -> Array:
        if self.saved is not None:
            values = values.copy()
            _spoil(values, self.saved)
        return values


def scatter_elements(x: Tensor, indices: Tensor | ArrayLike, updates: Tensor | ArrayLike, axis: int = 0) -> Tensor:
    """The tensor x, with the elements whose positions along `axis` are `indices` replaced.

    Args:
        x: any tensor.
        indices: as many dimensions as x. Along the other axes, an element has the same position as its index.
        updates: the new values, of the shape of `indices`; integers if x holds integers.
        axis: the axis along which `indices` are positions.
    """
    (axis,) = axes_of(x, axis)
    index, new = _index(x, indices, axis), x.operand(updates)
    x.check_takes(new, new is updates)
    if index.ndim != x.ndim() or index.shape != new.shape:
        raise ShapeError(
            f"indices and updates have one shape, of {x.ndim()} dimensions as x; got {index.shape} and {new.shape}"
        )
    if any(index.shape[i] > x.shape[i] for i in range(x.ndim()) if i != axis):
        raise ShapeError(f"indices {index.shape} are longer than x {x.shape} along another axis than {axis}")
    key = [x.device.xp.arange(n).reshape(-1, *[1] * (x.ndim() - i - 1)) for i, n in enumerate(index.shape)]
    key[axis] = index
    return ScatterElements(key, axis)(x, new)


class Pad(Operation):
    """x, enlarged at both ends of its dimensions.

    Args:
        widths: for each dimension, the numbers of elements before and after it.
        mode: "constant", "reflect" or "edge", as in `numpy.pad`.
        constant: the value for the first mode.
    """

    def __init__(self, widths: Sequence[tuple[int, int]], mode: str, constant: float) -> None:
        self.widths, self.mode = widths, mode
        self.options = {"constant_values": constant} if mode == "constant" else {}

    def forward(self, x: Array) -> Array:
        self.saved = x.shape
        return array_module(x).pad(x, self.widths, self.mode, **self.options)

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        if self.mode == "constant":
            inner = [slice(low, low + n) for n, (low, _) in zip(self.saved, self.widths, strict=True)]
            return (dy[tuple(inner)].copy(),)
        xp = array_module(dy)
        for axis, (n, width) in enumerate(zip(self.saved, self.widths, strict=True)):
            if width != (0, 0):
                dy = _put_back(dy, xp.pad(xp.arange(n), width, self.mode), axis, n)
        return (dy,)


def pad(x: Tensor, mode: str, pads: Sequence[int], constant: float = 0.0) -> Tensor:
    """The tensor x, enlarged at both ends of its dimensions, as `numpy.pad` does.

    Args:
        x: any tensor.
        mode: "constant", "reflect" or "edge".
        pads: how many elements to add before each dimension, then how many after each.
        constant: the value for the first mode; an integer if x holds integers.
    """
    n, pads = x.ndim(), [check_integer("a width of pad", width) for width in pads]
    if mode not in ("constant", "reflect", "edge") or len(pads) != 2 * n or any(width < 0 for width in pads):
        raise UsageError(
            f"pad takes the mode 'constant', 'reflect' or 'edge' and {2 * n} widths for a tensor of shape {x.shape}, "
            f"all before, then all after the dimensions; got {mode!r} and {pads}"
        )
    if mode != "constant" and any(length == 0 < max(pads[i], pads[n + i]) for i, length in enumerate(x.shape)):
        raise ShapeError(f"shape {x.shape} has a dimension without elements, which {mode!r} cannot enlarge")
    x.check_takes(x.operand(int(constant) if float(constant).is_integer() else constant))
    return Pad([(pads[i], pads[n + i]) for i in range(n)], mode, constant)(x)


def nonzero(x: Tensor) -> Tensor:
    """The positions of the elements of x that are not 0, int32 [dimensions, count]."""
    return NoGradient(lambda array: array_module(array).stack(array.nonzero()).astype(int32))(x)


def onehot(axis: int, indices: Tensor, depth: int | ArrayLike, values: Sequence[float] | ArrayLike) -> Tensor:
    """A tensor of float32 with a dimension more, where only the elements at positions `indices` are "on".

    Args:
        axis: the new dimension of the result.
        indices: any shape, modulo `depth`; may be negative.
        depth: length of the new dimension.
        values: the values for "off" and "on".
    """
    (axis,) = axes_of(indices, axis, more=1)
    length = np.asarray(depth).item()  # in ONNX, it may be a float
    n = check_integer("depth", int(length) if isinstance(length, float) and length.is_integer() else length, 0)
    off, on = np.asarray(values).tolist()

    def forward(index: Array) -> Array:
        xp = array_module(index)
        positions = xp.arange(n).reshape(-1, *[1] * (index.ndim - axis))
        return xp.where(xp.expand_dims(index, axis) % n == positions, on, off).astype(float32)

    return NoGradient(forward)(indices)
