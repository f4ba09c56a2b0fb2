"""Convolutions of images [N, C, H, W]. Padding is two numbers or four, see `distopt.nn.kernels.geometry`."""

from __future__ import annotations

from collections.abc import Sequence

from ...kernels import array_module
from ..core.array import Array
from ..core.operation import Arrays
from ..kernels import kernels_of
from ..kernels.geometry import Padding, Pair, out_size, with_border, without_border
from .border import evened, trimmed
from .weighted import Weighted


class Conv2d(Weighted):
    """Cross-correlation of x [N, C, H, W] with w [M, C, kh, kw], plus b [M] if given, optionally with ReLU.

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
        x, padding = evened(x, w.shape[2:], self.stride, self.padding)
        y, self.saved = kernels_of(x).conv2d(x, w, b, self.stride, padding, self.relu, self.pool)
        return y

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        dw, *db = self.gradient_memory(into)
        dx = kernels_of(dy).conv2d_backward(dy, self.saved, dw, db[0] if db else None, self.needs[0])
        return trimmed(dx, self.padding), dw, *db


class GroupedConv2d(Weighted):
    """`Conv2d` with w [M, C / groups, kh, kw]: each of `groups` runs of kernels sees only its own run of channels.

    Args:
        groups: divides both C and M.
        stride: of the convolution.
        padding: of the convolution.
        relu: whether to apply ReLU.
    """

    def __init__(self, groups: int, stride: Pair, padding: Padding, relu: bool) -> None:
        self.groups, self.stride, self.padding, self.relu = groups, stride, padding, relu

    def _part(self, images: Array, group: int) -> Array:
        """A copy of the channels of one group."""
        own = images[:, self._run_of(group, images.shape[1])]
        part = kernels_of(images).empty(own.shape, images.dtype)
        part[...] = own
        return part

    def _run_of(self, group: int, channels: int) -> slice:
        size = channels // self.groups
        return slice(group * size, (group + 1) * size)

    def _joined(self, parts: Sequence[Array]) -> Array:
        """The inverse of `_part`."""
        n, size, *sides = parts[0].shape
        images = kernels_of(parts[0]).empty((n, self.groups * size, *sides), parts[0].dtype)
        for group, part in enumerate(parts):
            images[:, self._run_of(group, images.shape[1])] = part
        return images

    def forward(self, x: Array, w: Array, b: Array | None = None) -> Array:
        kernels = kernels_of(x)
        x, padding = evened(x, w.shape[2:], self.stride, self.padding)
        parts, self.saved = [], []
        for group in range(self.groups):
            own = self._run_of(group, len(w))
            bias = None if b is None else b[own]
            y, saved = kernels.conv2d(self._part(x, group), w[own], bias, self.stride, padding, self.relu)
            parts.append(y)
            self.saved.append(saved)
        return self._joined(parts)

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        kernels = kernels_of(dy)
        dw, *db = self.gradient_memory(into)
        parts = []
        for group, saved in enumerate(self.saved):
            slopes = [g if g is None else g[self._run_of(group, len(g))] for g in (dw, *db)]
            dbias = slopes[1] if db else None
            parts.append(kernels.conv2d_backward(self._part(dy, group), saved, slopes[0], dbias, self.needs[0]))
        dx = self._joined(parts) if self.needs[0] else None
        return trimmed(dx, self.padding), dw, *db


class DepthwiseConv2d(Weighted):
    """Cross-correlation of each channel of x [N, C, H, W] with its own kernel of w [C, 1, kh, kw].

    Plus b [C] if given, optionally with ReLU. Makes one pass over the images for each element of a kernel.
    """

    at_once = True

    def __init__(self, stride: Pair, padding: Padding, relu: bool = False) -> None:
        self.stride, self.padding, self.relu = stride, padding, relu

    def _windows(self, wide: Array, w: Array, size: Pair) -> list[tuple[int, int, Array]]:
        """For each kernel element, its row and column, and the view of the padded images that it multiplies."""
        sh, sw = self.stride
        h, wd = size
        return [
            (i, j, wide[:, :, i : i + sh * (h - 1) + 1 : sh, j : j + sw * (wd - 1) + 1 : sw])
            for i in range(w.shape[2])
            for j in range(w.shape[3])
        ]

    def forward(self, x: Array, w: Array, b: Array | None = None) -> Array:
        kernels = kernels_of(x)
        size = out_size(x.shape, w.shape[2:], self.stride, self.padding)
        wide = with_border(x, self.padding, kernels.empty)
        y = kernels.empty((*x.shape[:2], *size), x.dtype)
        y.fill(0)
        for i, j, window in self._windows(wide, w, size):
            y += window * w[:, 0, i, j, None, None]
        if b is not None:
            y += b[:, None, None]
        if self.relu:
            y = kernels.relu(y)
        self.saved = wide, w, y if self.relu else None
        return y

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        wide, w, y = self.saved
        xp, kernels = array_module(dy), kernels_of(dy)
        dw, *db = self.gradient_memory(into)
        if y is not None:
            dy = kernels.relu_backward(dy, y)
        dwide = xp.zeros_like(wide)
        size = dy.shape[2:]
        for (i, j, window), (_, _, dwindow) in zip(
            self._windows(wide, w, size), self._windows(dwide, w, size), strict=True
        ):
            dw[:, 0, i, j] = (window * dy).sum(axis=(0, 2, 3))
            dwindow += dy * w[:, 0, i, j, None, None]
        for place in db:
            place[...] = dy.sum(axis=(0, 2, 3))
        return without_border(dwide, self.padding, kernels.empty), dw, *db
