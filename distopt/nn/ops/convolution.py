"""Convolutions of images [N, C, H, W]. Padding is two numbers or four, see `distopt.nn.numerics.geometry`."""

from __future__ import annotations

from ..core.array import Array
from ..core.operation import Arrays
from ..numerics import numerics_of
from ..numerics.geometry import Padding, Pair
from .border import with_even_padding, without_uneven_border
from .weighted import Weighted


class Conv2d(Weighted):
    """Cross-correlation of x [N, C, H, W] with w [M, C / groups, kh, kw], plus b [M] if given, optionally with ReLU.

    The number of groups follows from the shapes; see `distopt.nn.numerics.cpu.conv2d`.

    Args:
        stride: of the convolution.
        padding: of the convolution.
        relu: whether to apply ReLU.
        pool: kernel, stride and padding (two numbers) of a `MaxPool2d`, which pools the convolution's result while this
            is in the cache.
    """

    def __init__(
        self, stride: Pair, padding: Padding, relu: bool = False, pool: tuple[Pair, Pair, Padding] | None = None
    ) -> None:
        self.stride, self.padding, self.relu, self.pool = stride, padding, relu, pool

    def forward(self, x: Array, w: Array, b: Array | None = None) -> Array:
        x, padding = with_even_padding(x, w.shape[2:], self.stride, self.padding)
        y, self.saved = numerics_of(x).conv2d(x, w, b, self.stride, padding, self.relu, self.pool)
        return y

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        dw, *db = self.gradient_memory(into)
        dx = numerics_of(dy).conv2d_backward(dy, self.saved, dw, db[0] if db else None, self.needs[0])
        return without_uneven_border(dx, self.padding), dw, *db
