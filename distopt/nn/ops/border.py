"""Borders of four different widths around images: kernels take two, so such a border becomes part of the images."""

from __future__ import annotations

from ..core.array import Array
from ..numerics import numerics_of
from ..numerics.geometry import Padding, Pair, out_size, with_border, without_border


def with_even_padding(x: Array, kernel: Pair, stride: Pair, padding: Padding, fill: float = 0.0) -> tuple[Array, Pair]:
    """Images and padding as kernels take them: a border of four numbers becomes part of the images."""
    if len(padding) == 2:
        return x, (padding[0], padding[1])
    out_size(x.shape, kernel, stride, padding)  # its error names the padding that was given
    return with_border(x, padding, numerics_of(x).empty, fill), (0, 0)


def without_uneven_border(dx: Array | None, padding: Padding) -> Array | None:
    """The gradient of the images that `with_even_padding` took."""
    return dx if dx is None or len(padding) == 2 else without_border(dx, padding, numerics_of(dx).empty)
