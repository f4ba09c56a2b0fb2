"""The operations of neural networks on images [N, C, H, W]: convolution, pooling, normalization.

See `distopt.nn.ops.operations`. Padding is two numbers or four, see `distopt.nn.kernels.geometry`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import iadd, imul, setitem
from typing import ClassVar, Protocol, TypeAlias

from ...kernels import array_module
from ..core.array import Array
from ..core.mode import mode
from ..core.operation import Operation
from ..kernels import kernels_of
from ..kernels.geometry import Padding, Pair, out_size, pool_out, with_border, without_border
from ..kernels.recorder import noted

Into: TypeAlias = "Sequence[Array | None]"
Gradients: TypeAlias = "Sequence[Array | None]"


class Weighted(Operation):
    """An operation on (x, w) or (x, w, b), whose kernel needs memory for dw and db.

    Attributes:
        at_once: whether it needs memory for both, even if only one is wanted.
    """

    at_once: ClassVar[bool] = False

    def gradient_memory(self, into: Into) -> list[Array]:
        """Memory for the gradients of all inputs but the first, which need not be parameters; None if not wanted."""
        assert self.inputs is not None
        empty = kernels_of(self.inputs[0].array).empty
        return [
            empty(w.shape, "float32" if self.half else w.dtype) if place is None and (need or self.at_once) else place
            for w, place, need in zip(self.inputs[1:], into[1:], self.needs[1:], strict=True)
        ]


def _evened(x: Array, kernel: Pair, stride: Pair, padding: Padding, fill: float = 0.0) -> tuple[Array, Pair]:
    """Images and padding as kernels take them: a border of four numbers becomes part of the images."""
    if len(padding) == 2:
        return x, (padding[0], padding[1])
    out_size(x.shape, kernel, stride, padding)  # its error names the padding that was given
    return with_border(x, padding, kernels_of(x).empty, fill), (0, 0)


def _trimmed(dx: Array | None, padding: Padding) -> Array | None:
    """The gradient of the images that `_evened` took."""
    return dx if dx is None or len(padding) == 2 else without_border(dx, padding, kernels_of(dx).empty)


class Conv2d(Weighted):
    """Cross-correlation of x [N, C, H, W] with w [M, C, kh, kw], plus b [M] if given, optionally with ReLU.

    Args:
        stride: of the convolution.
        padding: of the convolution.
        relu: whether to apply ReLU.
        pool: kernel, stride and padding of a `MaxPool2d`, the latter of two numbers: the convolution's result is pooled
            while it is in the cache.
    """

    native = True

    def __init__(
        self, stride: Pair, padding: Padding, relu: bool = False, pool: tuple[Pair, Pair, Padding] | None = None
    ) -> None:
        self.stride, self.padding, self.relu, self.pool = stride, padding, relu, pool

    def forward(self, x: Array, w: Array, b: Array | None = None) -> Array:
        x, padding = _evened(x, w.shape[2:], self.stride, self.padding)
        y, self.saved = kernels_of(x).conv2d(x, w, b, self.stride, padding, self.relu, self.pool)
        return y

    def gradients(self, dy: Array, into: Into) -> Gradients:
        dw, *db = self.gradient_memory(into)
        dx = kernels_of(dy).conv2d_backward(dy, self.saved, dw, db[0] if db else None, self.needs[0])
        return _trimmed(dx, self.padding), dw, *db


class GroupedConv2d(Weighted):
    """`Conv2d` in groups: of w [M, C / groups, kh, kw], each of `groups` runs of kernels sees its own run of channels.

    Args:
        groups: divides both C and M.
        stride: of the convolution.
        padding: of the convolution.
        relu: whether to apply ReLU.
    """

    native = True

    def __init__(self, groups: int, stride: Pair, padding: Padding, relu: bool) -> None:
        self.groups, self.stride, self.padding, self.relu = groups, stride, padding, relu

    def _part(self, images: Array, group: int) -> Array:
        """A copy of the channels of one group."""
        own = images[:, self._run_of(group, images.shape[1])]
        part = kernels_of(images).empty(own.shape, images.dtype)
        noted(setitem, part, ..., own)
        return part

    def _run_of(self, group: int, channels: int) -> slice:
        size = channels // self.groups
        return slice(group * size, (group + 1) * size)

    def _joined(self, parts: Sequence[Array]) -> Array:
        """The inverse of `_part`."""
        n, size, *sides = parts[0].shape
        images = kernels_of(parts[0]).empty((n, self.groups * size, *sides), parts[0].dtype)
        for group, part in enumerate(parts):
            noted(setitem, images, (slice(None), self._run_of(group, images.shape[1])), part)
        return images

    def forward(self, x: Array, w: Array, b: Array | None = None) -> Array:
        kernels = kernels_of(x)
        x, padding = _evened(x, w.shape[2:], self.stride, self.padding)
        parts, self.saved = [], []
        for group in range(self.groups):
            own = self._run_of(group, len(w))
            bias = None if b is None else b[own]
            y, saved = kernels.conv2d(self._part(x, group), w[own], bias, self.stride, padding, self.relu)
            parts.append(y)
            self.saved.append(saved)
        return self._joined(parts)

    def gradients(self, dy: Array, into: Into) -> Gradients:
        kernels = kernels_of(dy)
        dw, *db = self.gradient_memory(into)
        parts = []
        for group, saved in enumerate(self.saved):
            slopes = [g if g is None else g[self._run_of(group, len(g))] for g in (dw, *db)]
            dbias = slopes[1] if db else None
            parts.append(kernels.conv2d_backward(self._part(dy, group), saved, slopes[0], dbias, self.needs[0]))
        dx = self._joined(parts) if self.needs[0] else None
        return _trimmed(dx, self.padding), dw, *db


class BatchNorm2d(Weighted):
    """Each channel of x [N, C, H, W] normalized, scaled by gamma [C], and shifted by beta [C].

    Args:
        running_mean: [C]; updated in place during training, used otherwise.
        running_var: likewise.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.
    """

    native = at_once = True

    def __init__(self, running_mean: Array, running_var: Array, momentum: float, eps: float) -> None:
        self.running = running_mean, running_var
        self.momentum, self.eps = momentum, eps

    def forward(self, x: Array, gamma: Array, beta: Array) -> Array:
        y, self.saved = kernels_of(x).batch_norm2d(
            x, gamma, beta, *self.running, self.momentum, self.eps, mode.training
        )
        return y

    def gradients(self, dy: Array, into: Into) -> Gradients:
        dgamma, dbeta = self.gradient_memory(into)
        return kernels_of(dy).batch_norm2d_backward(dy, self.saved, dgamma, dbeta), dgamma, dbeta


class Reduce(Protocol):
    """Replaces a contiguous array of float64, in place, by its sum over all ranks. Collective."""

    def __call__(self, array: Array, /) -> object: ...


class SyncBatchNorm2d(BatchNorm2d):
    """`BatchNorm2d` in training, by the statistics of all ranks; the gradients of gamma and beta are this rank's share.

    Both passes sum an array over the ranks, and are collective.

    Args:
        running_mean: see `BatchNorm2d`, as are the next three.
        running_var: see there.
        momentum: see there.
        eps: see there.
        reduce: sums over ranks.
    """

    native = True

    def __init__(self, running_mean: Array, running_var: Array, momentum: float, eps: float, reduce: Reduce) -> None:
        super().__init__(running_mean, running_var, momentum, eps)
        self.reduce = reduce

    def forward(self, x: Array, gamma: Array, beta: Array) -> Array:
        kernels = kernels_of(x)
        sums = kernels.channel_sums(x)
        noted(self.reduce, sums)
        mean, var = (kernels.empty(array.shape, array.dtype) for array in self.running)
        noted(_all_statistics, sums, mean, var, self.running, self.momentum)
        y, saved = kernels.batch_norm2d(x, gamma, beta, mean, var, 0.0, self.eps, False)
        self.saved = saved, mean, var, sums
        return y

    def gradients(self, dy: Array, into: Gradients) -> Gradients:
        saved, mean, var, sums = self.saved
        kernels = kernels_of(dy)
        dgamma, dbeta = self.gradient_memory(into)
        dx = kernels.batch_norm2d_backward(dy, saved, dgamma, dbeta)  # as if mean and variance were constants
        if not self.needs[0]:
            return None, dgamma, dbeta
        totals = kernels.empty((2, len(mean)), "float64")
        noted(setitem, totals, 0, dgamma)
        noted(setitem, totals, 1, dbeta)
        noted(imul, totals, saved.gamma)
        noted(self.reduce, totals)
        # They depend on every x, which adds an affine function of x.
        slope, shift = (kernels.empty(mean.shape, mean.dtype) for _ in range(2))
        noted(_through_statistics, totals, sums, saved.inverse_deviation, slope, shift)
        more, _ = kernels.batch_norm2d(saved.x, slope, shift, mean, var, 0.0, self.eps, False)
        return noted(iadd, dx, more), dgamma, dbeta


def _all_statistics(sums: Array, mean: Array, var: Array, running: tuple[Array, Array], momentum: float) -> None:
    """Mean and biased variance from the `channel_sums` of all ranks; they move the running ones."""
    count, channels = sums[-1], len(mean)
    wide = sums[:channels] / count
    mean[...] = wide
    var[...] = (sums[channels:-1] / count - wide * wide).clip(0)
    running_mean, running_var = running
    running_mean += momentum * (mean - running_mean)
    running_var += momentum * (var * (count / (count - 1).clip(1)) - running_var)


def _through_statistics(totals: Array, sums: Array, inverse_deviation: Array, slope: Array, shift: Array) -> None:
    """Scale and shift of normalized x in its gradient, from sums over all ranks: gamma times those of gamma and beta.

    Gamma counts before the sum, since ranks have different ones between partial updates.
    """
    factor = inverse_deviation / -sums[-1]
    slope[...], shift[...] = factor * totals[0], factor * totals[1]


class DepthwiseConv2d(Weighted):
    """Cross-correlation of each channel of x [N, C, H, W] with its own kernel of w [C, 1, kh, kw].

    Plus b [C] if given, optionally with ReLU.
    """

    at_once = True

    # One pass over the images for each kernel element.

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

    def gradients(self, dy: Array, into: Into) -> Gradients:
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


class _Pool2d(Operation):
    fill: float  # of a border: a value without effect

    def __init__(self, kernel: Pair, stride: Pair, padding: Padding) -> None:
        self.kernel, self.stride, self.padding = kernel, stride, padding

    def evened(self, x: Array) -> tuple[Array, tuple[Pair, Pair, Pair]]:
        """Images and window as kernels take them."""
        pool_out(x.shape, self.kernel, self.stride, self.padding)  # likewise
        x, padding = _evened(x, self.kernel, self.stride, self.padding, self.fill)
        return x, (self.kernel, self.stride, padding)


class MaxPool2d(_Pool2d):
    """The maximum of each window of x [N, C, H, W]."""

    native = True
    fill = -inf

    def forward(self, x: Array) -> Array:
        x, window = self.evened(x)
        y, self.saved = kernels_of(x).max_pool2d(x, *window)
        return y

    def gradients(self, dy: Array, into: Into) -> Gradients:
        return (_trimmed(kernels_of(dy).max_pool2d_backward(dy, self.saved), self.padding),)


class AvgPool2d(_Pool2d):
    """The mean of each window of x [N, C, H, W]; padding counts as zeros."""

    native = True
    fill = 0.0

    def forward(self, x: Array) -> Array:
        x, window = self.evened(x)
        y, self.saved = kernels_of(x).avg_pool2d(x, *window)
        return y

    def gradients(self, dy: Array, into: Into) -> Gradients:
        return (_trimmed(kernels_of(dy).avg_pool2d_backward(dy, self.saved), self.padding),)
