"""Sums, means and softmax over dimensions of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

from ...kernels import array_module
from ..core.array import Array, settled
from ..core.operation import Arrays, Operation
from ..core.tensor import Tensor
from ..numerics import numerics_of
from .shape import axes_of, several

__all__ = [
    "reduce_mean",
    "reduce_sum",
    "softmax",
]


class ReduceSum(Operation):
    """The sum over the dimensions `axes` (None: over all), which are kept with length 1 or removed."""

    def __init__(self, axes: Sequence[int] | None, keepdims: bool) -> None:
        self.axes, self.keepdims = None if axes is None else tuple(axes), keepdims

    def forward(self, x: Array) -> Array:
        y = x.sum(axis=self.axes, keepdims=True)
        self.saved = x.shape, y.shape
        return y if self.keepdims else y.squeeze(self.axes)

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        x_shape, kept_shape = self.saved
        return (array_module(dy).broadcast_to(dy.reshape(kept_shape), x_shape).copy(),)


def reduce_sum(x: Tensor, axes: int | Sequence[int] | None = None, keepdims: bool = True) -> Tensor:
    """The sum over the dimensions `axes` (None: over all), which are kept with length 1 unless `keepdims` is false."""
    return ReduceSum(None if axes is None else axes_of(x, *several(axes)), bool(keepdims))(x)


class ReduceMean(ReduceSum):
    """The mean over the dimensions `axes`; see `ReduceSum`."""

    def forward(self, x: Array) -> Array:
        y = super().forward(x)
        self.share = y.size / max(x.size, 1)
        return settled(y * self.share, x)

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        (dx,) = super().gradients(dy, into)
        dx *= self.share
        return (dx,)


def reduce_mean(x: Tensor, axes: int | Sequence[int] | None = None, keepdims: bool = True) -> Tensor:
    """The mean over the dimensions `axes` (None: over all); see `reduce_sum`."""
    return ReduceMean(None if axes is None else axes_of(x, *several(axes)), bool(keepdims))(x)


class SoftMax(Operation):
    """exp(x) / sum(exp(x)) over the dimension `axis`."""

    def __init__(self, axis: int = -1) -> None:
        self.axis = axis

    def forward(self, x: Array) -> Array:
        dense = array_module(x).ascontiguousarray
        rows = dense(x.swapaxes(self.axis, -1))
        y = numerics_of(x).softmax(rows.reshape(-1, rows.shape[-1])) if x.size else rows
        self.saved = dense(y.reshape(rows.shape).swapaxes(self.axis, -1))
        return self.saved

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        y = self.saved
        dy *= y
        return (dy - y * dy.sum(axis=self.axis, keepdims=True),)


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) over the dimension `axis`."""
    (axis,) = axes_of(x, axis)
    return SoftMax(axis)(x)
