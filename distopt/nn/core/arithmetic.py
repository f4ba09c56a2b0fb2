"""Arithmetic: the operations behind the operators of `Tensor`, and the base of those that broadcast."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeAlias

from ...errors import ShapeError
from ...kernels import array_module
from .array import Array, float32, settled
from .operation import Arrays, Operation

Slope: TypeAlias = Callable[..., Array]


class Broadcast(Operation):
    """An element-wise operation on arrays, with NumPy's broadcasting.

    Attributes:
        reads: whether `gradients` needs the operands, which `forward` then keeps in `saved`.
        slopes: for each operand, a function that returns its gradient before the sum over repeated axes. Its arguments
            are the gradient of the result and, if `reads`, the operands.
    """

    reads: ClassVar[bool] = False
    slopes: ClassVar[tuple[Slope, ...]] = ()

    def value(self, *operands: Array) -> Array:
        """The result, in NumPy's type for it. A `ValueError` means that the shapes do not fit."""
        raise NotImplementedError

    def forward(self, *operands: Array) -> Array:
        self.saved = operands if self.reads else None
        try:
            y = self.value(*operands)
        except ShapeError:
            raise
        except ValueError:
            shapes = " and ".join(str(list(x.shape)) for x in operands)
            raise ShapeError(
                f"{type(self).__name__} of shapes {shapes}: dimensions, counted from the last, must be equal or 1"
            ) from None
        return settled(y, *operands)

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        operands = self.saved if self.reads else ()
        pairs = enumerate(zip(self.slopes, self.needs, strict=True))
        return [self.reduced(slope(dy, *operands), i) if need else None for i, (slope, need) in pairs]

    def reduced(self, gradient: Array, which: int) -> Array:
        """`gradient` summed over the axes along which broadcasting repeated input `which`, in the type of that input.

        For an input of integers, it is float32.
        """
        assert self.inputs is not None
        x = self.inputs[which].array
        if gradient.shape != x.shape:
            extra = gradient.ndim - x.ndim
            axes = [i + extra for i, n in enumerate(x.shape) if n == 1]
            gradient = gradient.sum(axis=(*range(extra), *axes), keepdims=True).reshape(x.shape)
        dtype = x.dtype if x.dtype.kind == "f" else float32
        return (gradient if gradient.dtype == dtype else gradient.astype(dtype))[...]


def broadcast(name: str, value: Callable[..., Array], *slopes: Slope, reads: bool = True) -> type[Broadcast]:
    """A subclass of `Broadcast` with these attributes."""
    return type(name, (Broadcast,), {"value": staticmethod(value), "slopes": slopes, "reads": reads})


# No two gradients may share memory.
Add = broadcast("Add", operator.add, lambda dy: dy, lambda dy: dy.copy(), reads=False)
Sub = broadcast("Sub", operator.sub, lambda dy: dy, operator.neg, reads=False)
Mul = broadcast("Mul", operator.mul, lambda dy, a, b: dy * b, lambda dy, a, b: dy * a)
Div = broadcast("Div", operator.truediv, lambda dy, a, b: dy / b, lambda dy, a, b: -dy * a / (b * b))


class MatMul(Broadcast):
    """a [..., n, k] @ b [..., k, m]; the dimensions before the last two are broadcast."""

    reads = True

    def value(self, a: Array, b: Array) -> Array:
        if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
            raise ShapeError(f"shapes {a.shape} and {b.shape} have no matrix product; [n, k] @ [k, m] has")
        return a @ b

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        a, b = self.saved
        matmul = array_module(dy).matmul
        if a.ndim == b.ndim == 2 and a.dtype == b.dtype:
            da = matmul(dy, b.T, out=into[0]) if self.needs[0] else None
            return da, matmul(a.T, dy, out=into[1]) if self.needs[1] else None
        da = self.reduced(matmul(dy, b.swapaxes(-1, -2)), 0) if self.needs[0] else None
        return da, self.reduced(matmul(a.swapaxes(-1, -2), dy), 1) if self.needs[1] else None


class Reshape(Operation):
    """The elements of x with other dimensions."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)

    def forward(self, x: Array) -> Array:
        self.saved = x.shape
        try:
            if min(self.shape, default=0) >= -1:  # NumPy takes every negative number for -1
                return x.reshape(self.shape)
        except (TypeError, ValueError):
            pass
        raise ShapeError(f"a tensor of shape {x.shape} cannot take the shape {self.shape}")

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        return (dy.reshape(self.saved),)
