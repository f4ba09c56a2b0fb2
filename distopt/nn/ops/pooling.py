"""Pooling of images [N, C, H, W]. Padding is two numbers or four, see `distopt.nn.numerics.geometry`."""

from __future__ import annotations

from math import inf
from typing import ClassVar

from ...errors import UsageError
from ..core.array import Array
from ..core.operation import Arrays, Operation
from ..core.tensor import Tensor
from ..numerics import numerics_of
from ..numerics.geometry import Padding, Pair, pool_out
from .border import with_even_padding, without_uneven_border
from .reduction import ReduceMean

__all__ = [
    "globalaveragepool",
]


class _Pool2d(Operation):
    function: ClassVar[str]  # of the kernels; that of the gradient has `_backward` after its name
    fill: ClassVar[float]  # of the border: a value without effect on the result

    def __init__(self, kernel: Pair, stride: Pair, padding: Padding) -> None:
        self.kernel, self.stride, self.padding = kernel, stride, padding

    def forward(self, x: Array) -> Array:
        pool_out(x.shape, self.kernel, self.stride, self.padding)  # its error names the padding that was given
        x, padding = with_even_padding(x, self.kernel, self.stride, self.padding, self.fill)
        y, self.saved = getattr(numerics_of(x), self.function)(x, self.kernel, self.stride, padding)
        return y

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        dx = getattr(numerics_of(dy), f"{self.function}_backward")(dy, self.saved)
        return (without_uneven_border(dx, self.padding),)


class MaxPool2d(_Pool2d):
    """The maximum of each window of x [N, C, H, W]."""

    function, fill = "max_pool2d", -inf


class AvgPool2d(_Pool2d):
    """The mean of each window of x [N, C, H, W]; padding counts as zeros."""

    function, fill = "avg_pool2d", 0.0


def globalaveragepool(x: Tensor, data_format: str = "channels_first") -> Tensor:
    """The mean of each channel of images [N, C, H, W]: [N, C, 1, 1].

    With `data_format` "channels_last", images are [N, H, W, C], and the result is [N, 1, 1, C].
    """
    first = 2 if data_format == "channels_first" else 1
    if data_format not in ("channels_first", "channels_last", "channel_last") or x.ndim() < 3:
        raise UsageError(
            f"globalaveragepool takes images, 'channels_first' or 'channels_last'; got {x.shape} and {data_format!r}"
        )
    return ReduceMean(range(first, first + x.ndim() - 2), keepdims=True)(x)
