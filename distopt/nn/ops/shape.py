"""Operations that move, cut and repeat elements. A negative axis counts from the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

from ...checks import check_integer
from ...errors import ShapeError, UsageError
from ...kernels import array_module
from ..core.arithmetic import Broadcast, Reshape
from ..core.array import Array, float32, int32, settled
from ..core.operation import Arrays, Operation
from ..core.raw import raw
from ..core.tensor import Tensor

__all__ = [
    "cat",
    "constant_of_shape",
    "depth_to_space",
    "expand",
    "flatten",
    "reshape",
    "shape",
    "slice",
    "space_to_depth",
    "split",
    "squeeze",
    "tile",
    "transpose",
    "unsqueeze",
    "upsample",
]

_slice = slice  # a function below has this name


def axes_of(x: Tensor, *axes: int, more: int = 0) -> list[int]:
    """The axes, counted from the first.

    Args:
        x: the tensor that they belong to.
        axes: numbers in [-n, n), where n is the number of dimensions of x plus `more`.
        more: number of dimensions that the caller adds to x.

    Raises:
        ShapeError: an axis is out of range, or is named twice.
        UsageError: an axis is not an integer.
    """
    n = x.ndim() + more
    axes = tuple(check_integer("an axis", axis) for axis in axes)
    found = [axis % n if -n <= axis < n else None for axis in axes]
    if None in found or len(set(found)) < len(found):
        raise ShapeError(
            f"axes {list(axes)} of a tensor of {n} dimensions: each lies in [{-n}, {n}), and is named once"
        )
    return [axis for axis in found if axis is not None]


def several(numbers: int | Sequence[int]) -> Sequence[int]:
    """The argument as a sequence, if it is a single number."""
    return numbers if np.ndim(numbers) else [numbers]  # type: ignore[list-item, return-value]


def _dense(array: Array) -> Array:
    """`array` or a C-contiguous copy. NumPy's `ascontiguousarray` would add a dimension to an array of none."""
    return array if array.flags.c_contiguous else array.copy()


# -- order and shape --------------------------------------------------------------------------------------------------
class Permute(Operation):
    """Reshape x to the dimensions `parts`, put these in the order `axes`, then reshape to the dimensions `joined`."""

    def __init__(self, parts: Sequence[int], axes: Sequence[int], joined: Sequence[int] | None = None) -> None:
        self.parts, self.axes, self.joined = parts, axes, joined

    def forward(self, x: Array) -> Array:
        self.saved = x.shape
        y = _dense(x.reshape(self.parts).transpose(self.axes))
        return y if self.joined is None else y.reshape(self.joined)

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        back = dy.reshape([self.parts[i] for i in self.axes]).transpose(np.argsort(self.axes).tolist())
        return (_dense(back).reshape(self.saved),)


def transpose(x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Dimension i of the result is dimension shape[i] of x; by default, the order is reversed."""
    order = axes_of(x, *(range(x.ndim())[::-1] if shape is None else shape))
    if len(order) != x.ndim():
        raise ShapeError(f"a tensor of shape {x.shape} is transposed by {x.ndim()} axes, not {len(order)}")
    return Permute(x.shape, order)(x)


# For each mode, the order of the dimensions [N, C, H, b, W, b] that turns squares into channels.
_BLOCKS = {"DCR": (0, 3, 5, 1, 2, 4), "CRD": (0, 1, 3, 5, 2, 4)}


def _blocks(x: Tensor, blocksize: int, mode: str) -> tuple[int, ...]:
    if x.ndim() != 4 or check_integer("blocksize", blocksize) < 1 or mode.upper() not in _BLOCKS:
        raise UsageError(
            f"blocks are of images [N, C, H, W], have a size of at least 1, and the mode DCR or CRD; got {x.shape}, "
            f"{blocksize} and {mode!r}"
        )
    return _BLOCKS[mode.upper()]


def space_to_depth(x: Tensor, blocksize: int, mode: str = "DCR") -> Tensor:
    """Squares of pixels of x [N, C, H b, W b] become channels [N, C b b, H, W], where b is `blocksize`.

    Args:
        x: images.
        blocksize: b, at least 1.
        mode: "DCR" if row i and column j of a square of channel c become channel (i b + j) C + c, "CRD" if they become
            channel (c b + i) b + j.
    """
    order, b = _blocks(x, blocksize, mode), blocksize
    n, c, h, w = x.shape
    if h % b or w % b:
        raise ShapeError(f"images of {h} x {w} pixels have no blocks of {b} x {b}; pad or slice them")
    return Permute((n, c, h // b, b, w // b, b), order, (n, c * b * b, h // b, w // b))(x)


def depth_to_space(x: Tensor, blocksize: int, mode: str = "DCR") -> Tensor:
    """The inverse of `space_to_depth`: channels of x [N, C b b, H, W] become squares of pixels [N, C, H b, W b]."""
    order, b = _blocks(x, blocksize, mode), blocksize
    n, c, h, w = x.shape
    if c % (b * b):
        raise ShapeError(f"{c} channels make no blocks of {b} x {b} pixels; their number is a multiple of {b * b}")
    c //= b * b
    deep = [(n, c, h, b, w, b)[i] for i in order]
    return Permute(deep, np.argsort(order).tolist(), (n, c, h * b, w * b))(x)


def reshape(x: Tensor, shape: int | Sequence[int]) -> Tensor:
    """The elements of x with other dimensions. One may be -1, for the remaining elements; 0 keeps x's dimension."""
    sizes = [check_integer("a size of the shape", n) for n in several(shape)]
    return Reshape([x.shape[i] if n == 0 and i < x.ndim() else n for i, n in enumerate(sizes)])(x)


def flatten(x: Tensor, axis: int = 1) -> Tensor:
    """`x` as a matrix: dimensions before `axis` become rows, the others columns."""
    if not -x.ndim() <= check_integer("axis", axis) <= x.ndim():
        raise ShapeError(f"axis {axis} is not in [{-x.ndim()}, {x.ndim()}], the range for a tensor of shape {x.shape}")
    return Reshape((prod(x.shape[:axis]), prod(x.shape[axis:])))(x)


def squeeze(x: Tensor, axis: int | Sequence[int] = ()) -> Tensor:
    """The tensor x without the dimensions `axis`, whose length is 1; by default without all of length 1."""
    axes = axes_of(x, *several(axis)) or [i for i, n in enumerate(x.shape) if n == 1]
    if any(x.shape[i] != 1 for i in axes):
        raise ShapeError(f"dimensions {axes} of shape {x.shape} cannot go: only those of length 1 can")
    return Reshape([n for i, n in enumerate(x.shape) if i not in axes])(x)


def unsqueeze(x: Tensor, axis: int | Sequence[int] = -1) -> Tensor:
    """The tensor x with more dimensions, of length 1, which are the dimensions `axis` of the result."""
    given = several(axis)
    axes = axes_of(x, *given, more=len(given))
    rest = iter(x.shape)
    return Reshape([1 if i in axes else next(rest) for i in range(x.ndim() + len(axes))])(x)


# -- parts ------------------------------------------------------------------------------------------------------------
class Slice(Operation):
    """The part of x that slices, one for each dimension, select."""

    def __init__(self, key: Sequence[Any]) -> None:
        self.key = tuple(key)

    def forward(self, x: Array) -> Array:
        self.saved = x.shape
        return x[self.key].copy()

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        dx = array_module(dy).zeros(self.saved, dy.dtype)
        dx[self.key] = dy
        return (dx,)


def slice(
    x: Tensor,
    starts: Sequence[int],
    ends: Sequence[int],
    axes: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> Tensor:
    """The elements of x from `starts` up to `ends`, which are excluded, along each of `axes`, as slices of Python.

    Args:
        x: any tensor.
        starts: for each axis, an index; a negative one counts from the end.
        ends: the same; a number beyond the dimension means its end.
        axes: by default, the first dimensions.
        steps: by default 1; not 0. A negative one goes backwards.
    """
    chosen = axes_of(x, *(range(len(starts)) if axes is None else axes))
    by = [1] * len(chosen) if steps is None else list(steps)
    if not len(chosen) == len(starts) == len(ends) == len(by) or 0 in by:
        raise UsageError("a slice takes a start, an end and a step for each axis, and no step is 0")
    key = [_slice(None)] * x.ndim()
    for axis, start, end, step in zip(chosen, starts, ends, by, strict=True):
        key[axis] = _slice(*(check_integer("an index of a slice", n) for n in (start, end, step)))
    return Slice(key)(x)


class SplitPart(Slice):
    """A part of x, as `split` divides it along `axis`."""

    axis: int

    def backward(self, dy: Array = None, *others: Array) -> Any:
        """As `Operation.backward`; given the gradients of all parts, in their order, the gradient of x."""
        if not others:
            return super().backward(dy)
        return raw(array_module(dy).concatenate((dy, *others), self.axis))


def split(
    x: Tensor, axis: int, parts: Sequence[int] | None = None, num_output: int | None = None
) -> tuple[Tensor, ...]:
    """The tensor x divided along `axis` into parts of the lengths `parts`, or into `num_output` equal ones."""
    (axis,) = axes_of(x, axis)
    n = x.shape[axis]
    if parts is None and num_output is not None:
        parts = [n // check_integer("num_output", num_output, 1)] * num_output
    parts = [check_integer("a length of split", part, 0) for part in parts or ()]
    if sum(parts) != n:
        raise ShapeError(f"parts {parts} do not make up dimension {axis} of shape {x.shape}")
    tensors = []
    for start, end in pairwise([0, *accumulate(parts)]):
        part = SplitPart([*[_slice(None)] * axis, _slice(start, end)])
        part.axis = axis
        tensors.append(part(x))
    return tuple(tensors)


class Cat(Operation):
    """Arrays joined along dimension `axis`."""

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def forward(self, *parts: Array) -> Array:
        self.saved = [*accumulate(part.shape[self.axis] for part in parts)][:-1]
        return settled(array_module(parts[0]).concatenate(parts, self.axis), *parts)

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        parts = array_module(dy).split(dy, self.saved, self.axis)
        return [part.copy() if need else None for part, need in zip(parts, self.needs, strict=True)]


def cat(xs: Sequence[Tensor], axis: int = 0) -> Tensor:
    """The tensors `xs`, one at least, joined along dimension `axis`."""
    if not xs:
        raise UsageError("cat needs at least one tensor")
    axes_of(xs[0], axis)
    try:
        return Cat(axis)(*xs)
    except ValueError:
        shapes = " and ".join(str(x.shape) for x in xs)
        raise ShapeError(f"shapes {shapes} cannot be joined: all but dimension {axis} must be equal") from None


# -- repetition -------------------------------------------------------------------------------------------------------
class Repeat(Operation):
    """x repeated along each dimension, as a whole or element by element.

    Args:
        times: number of repetitions for each dimension of the result. If x has fewer dimensions, dimensions of length 1
            are added at its front.
        each: whether each element is repeated by itself.
    """

    def __init__(self, times: Sequence[int], each: bool) -> None:
        self.times, self.each = times, each

    def forward(self, x: Array) -> Array:
        lengths = (*[1] * (len(self.times) - x.ndim), *x.shape)
        # Each dimension becomes two, and one of them is repeated.
        before = [n for pair in zip(lengths, [1] * len(lengths), strict=True) for n in pair[:: 1 if self.each else -1]]
        after = [n for pair in zip(lengths, self.times, strict=True) for n in pair[:: 1 if self.each else -1]]
        self.saved = x.shape, after
        y = array_module(x).broadcast_to(x.reshape(before), after).copy()
        return y.reshape([n * k for n, k in zip(lengths, self.times, strict=True)])

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        shape, after = self.saved
        repeated = tuple(range(int(self.each), len(after), 2))
        return (dy.reshape(after).sum(axis=repeated).reshape(shape),)


def tile(x: Tensor, repeats: int | Sequence[int]) -> Tensor:
    """The tensor x repeated along each dimension; a number, or the first of too few, is for the first dimension."""
    times = [check_integer("a number of repeats", n, 0) for n in several(repeats)]
    return Repeat(times + [1] * (x.ndim() - len(times)), each=False)(x)


def upsample(x: Tensor, mode: str, scales: Sequence[float]) -> Tensor:
    """The tensor x with each element repeated `scales` times, one integer for each dimension; the mode is "nearest"."""
    given = np.asarray(scales)
    fits = (
        given.shape == (x.ndim(),)
        and given.dtype.kind in "iuf"
        and ((given >= 1) & (given < 2**31) & (given == np.trunc(given))).all()
    )
    if mode.lower() != "nearest" or not fits:
        raise UsageError(
            f"upsample takes the mode 'nearest' and {x.ndim()} integers for a tensor of shape {x.shape}; got {mode!r} "
            f"and {scales!r}"
        )
    return Repeat(given.astype(int).tolist(), each=True)(x)


class Expand(Broadcast):
    """x, repeated as NumPy's broadcasting does until it has the dimensions `shape`."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)

    def value(self, x: Array) -> Array:
        return array_module(x).broadcast_to(x, self.shape).copy()

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        return (self.reduced(dy, 0),)


def expand(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor x, broadcast with a tensor of the dimensions `shape`."""
    try:
        return Expand(np.broadcast_shapes(x.shape, tuple(check_integer("a size of the shape", n) for n in shape)))(x)
    except ValueError:
        raise ShapeError(f"shape {x.shape} does not expand to {tuple(shape)}: only dimensions of length 1 do") from None


# -- shapes as tensors ------------------------------------------------------------------------------------------------
class NoGradient(Operation):
    """A function of an array that has no gradient."""

    def __init__(self, function: Callable[[Array], Array]) -> None:
        self.forward = function  # type: ignore[method-assign]

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        return (None,)


def shape(x: Tensor) -> Tensor:
    """The dimensions of x as a tensor, int32 [dimensions]."""
    return NoGradient(lambda array: array_module(array).asarray(np.array(array.shape, int32)))(x)


def constant_of_shape(x: Tensor, value: float = 0) -> Tensor:
    """A tensor of float32 filled with `value`, whose shape is given by the elements of x, integers [dimensions]."""

    def forward(array: Array) -> Array:
        lengths = [int(n) for n in array.reshape(-1).tolist()]
        if array.ndim != 1 or min(lengths, default=0) < 0:
            raise ShapeError(f"a shape is a tensor [dimensions] of lengths, 0 or more; got {array.tolist()}")
        return array_module(array).full(lengths, value, float32)

    return NoGradient(forward)(x)
