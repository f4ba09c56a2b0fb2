"""The operations of neural networks, on the kernels of `distopt.nn.kernels`.

Shapes: images are [N, C, H, W], rows are [N, features]. Weights come after their inputs. Parameter gradients are
written into the memory provided (`into`, see `distopt.nn.tensor.Operation`).
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import UsageError
from ..kernels import array_module
from .kernels import kernels_of
from .mode import mode
from .tensor import Array, Operation

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "AvgPool2d",
    "BatchNorm2d",
    "Cat",
    "Conv2d",
    "Conv2dMaxPool",
    "DepthwiseConv2d",
    "Dropout",
    "Linear",
    "MaxPool2d",
    "MeanSquareError",
    "ReLU",
    "ReduceSum",
    "Sigmoid",
    "SoftMax",
    "SoftMaxCrossEntropy",
]

Pair: TypeAlias = tuple[int, int]
Into: TypeAlias = "Sequence[Array | None]"
Gradients: TypeAlias = "Sequence[Array | None]"


class _Weighted(Operation):
    """An operation on (x, w) or (x, w, b), whose kernel needs memory for dw and db."""

    def gradient_memory(self, into: Into) -> list[Array]:
        """Memory for the gradients of all inputs but the first; they need not all be parameters."""
        assert self.inputs is not None
        empty = kernels_of(self.inputs[0].array).empty
        pairs = zip(self.inputs[1:], into[1:], strict=True)
        return [empty(w.shape, "float32" if self.half else w.dtype) if place is None else place for w, place in pairs]


class Conv2d(_Weighted):
    """Cross-correlation of x [N, C, H, W] with w [M, C, kh, kw], plus b [M] if given, optionally with ReLU."""

    native = True

    def __init__(self, stride: Pair, padding: Pair, relu: bool = False) -> None:
        self.stride, self.padding, self.relu = stride, padding, relu

    def forward(self, x: Array, w: Array, b: Array | None = None) -> Array:
        y, self.saved = kernels_of(x).conv2d(x, w, b, self.stride, self.padding, self.relu)
        return y

    def gradients(self, dy: Array, into: Into) -> Gradients:
        dw, *db = self.gradient_memory(into)
        dx = kernels_of(dy).conv2d_backward(dy, self.saved, dw, db[0] if db else None, self.needs[0])
        return dx, dw, *db


class Conv2dMaxPool(_Weighted):
    """`Conv2d` and `MaxPool2d` fused: the convolution's result stays in the cache.

    Args:
        stride: of the convolution.
        padding: of the convolution.
        relu: whether to apply ReLU in between.
        pool: kernel, stride and padding of the pooling.
    """

    native = True

    def __init__(self, stride: Pair, padding: Pair, relu: bool, pool: tuple[Pair, Pair, Pair]) -> None:
        self.stride, self.padding, self.relu, self.pool = stride, padding, relu, pool

    def forward(self, x: Array, w: Array, b: Array | None = None) -> Array:
        y, self.saved = kernels_of(x).conv2d_max_pool(x, w, b, self.stride, self.padding, self.relu, *self.pool)
        return y

    def gradients(self, dy: Array, into: Into) -> Gradients:
        dw, *db = self.gradient_memory(into)
        dx = kernels_of(dy).conv2d_max_pool_backward(dy, self.saved, dw, db[0] if db else None, self.needs[0])
        return dx, dw, *db


class Linear(_Weighted):
    """x [N, in] @ w [in, out], plus b [out] if given, optionally with ReLU."""

    native = True

    def __init__(self, relu: bool = False) -> None:
        self.relu = relu

    def forward(self, x: Array, w: Array, b: Array | None = None) -> Array:
        y, self.saved = kernels_of(x).linear(x, w, b, self.relu)
        return y

    def gradients(self, dy: Array, into: Into) -> Gradients:
        dw, *db = self.gradient_memory(into)
        dx = kernels_of(dy).linear_backward(dy, self.saved, dw, db[0] if db else None, self.needs[0])
        return dx, dw, *db


class BatchNorm2d(_Weighted):
    """Each channel of x [N, C, H, W] normalized, scaled by gamma [C], and shifted by beta [C].

    Args:
        running_mean: [C]; updated in place during training, used otherwise.
        running_var: likewise.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.
    """

    native = True

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


class DepthwiseConv2d(Operation):
    """Cross-correlation of each channel of x [N, C, H, W] with its own kernel of w [C, kh, kw]."""

    # One pass over the images for each kernel element.

    def __init__(self, stride: Pair, padding: Pair) -> None:
        self.stride, self.padding = stride, padding

    def _windows(self, wide: Array, w: Array, size: Pair) -> list[tuple[int, int, Array]]:
        """For each kernel element, its row and column, and the view of the padded images that it multiplies."""
        sh, sw = self.stride
        h, wd = size
        return [
            (i, j, wide[:, :, i : i + sh * (h - 1) + 1 : sh, j : j + sw * (wd - 1) + 1 : sw])
            for i in range(w.shape[1])
            for j in range(w.shape[2])
        ]

    def forward(self, x: Array, w: Array) -> Array:
        (ph, pw), (sh, sw) = self.padding, self.stride
        size = (x.shape[2] + 2 * ph - w.shape[1]) // sh + 1, (x.shape[3] + 2 * pw - w.shape[2]) // sw + 1
        if min(size) < 1:
            raise UsageError(f"a kernel of {w.shape[1:]} does not fit images of {x.shape[2:]} with padding {(ph, pw)}")
        wide = array_module(x).pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
        y = kernels_of(x).empty((*x.shape[:2], *size), x.dtype)
        y.fill(0)
        for i, j, window in self._windows(wide, w, size):
            y += window * w[:, i, j, None, None]
        self.saved = wide, w
        return y

    def gradients(self, dy: Array, into: Into) -> Gradients:
        wide, w = self.saved
        xp = array_module(dy)
        dwide = xp.zeros_like(wide)
        dw = xp.empty_like(w) if into[1] is None else into[1]
        size = dy.shape[2:]
        for (i, j, window), (_, _, dwindow) in zip(
            self._windows(wide, w, size), self._windows(dwide, w, size), strict=True
        ):
            dw[:, i, j] = (window * dy).sum(axis=(0, 2, 3))
            dwindow += dy * w[:, i, j, None, None]
        (ph, pw), (height, width) = self.padding, wide.shape[2:]
        return dwide[:, :, ph : height - ph, pw : width - pw].copy(), dw


class _Pool2d(Operation):
    def __init__(self, kernel: Pair, stride: Pair, padding: Pair) -> None:
        self.window = kernel, stride, padding


class MaxPool2d(_Pool2d):
    """The maximum of each window of x [N, C, H, W]."""

    native = True

    def forward(self, x: Array) -> Array:
        y, self.saved = kernels_of(x).max_pool2d(x, *self.window)
        return y

    def gradients(self, dy: Array, into: Into) -> Gradients:
        return (kernels_of(dy).max_pool2d_backward(dy, self.saved),)


class AvgPool2d(_Pool2d):
    """The mean of each window of x [N, C, H, W]; padding counts as zeros."""

    native = True

    def forward(self, x: Array) -> Array:
        y, self.saved = kernels_of(x).avg_pool2d(x, *self.window)
        return y

    def gradients(self, dy: Array, into: Into) -> Gradients:
        return (kernels_of(dy).avg_pool2d_backward(dy, self.saved),)


class ReLU(Operation):
    """max(x, 0)."""

    native = True

    def forward(self, x: Array) -> Array:
        self.saved = kernels_of(x).relu(x)
        return self.saved

    def gradients(self, dy: Array, into: Into) -> Gradients:
        return (kernels_of(dy).relu_backward(dy, self.saved),)


class Sigmoid(Operation):
    """1 / (1 + exp(-x))."""

    native = True

    def forward(self, x: Array) -> Array:
        self.saved = kernels_of(x).sigmoid(x)
        return self.saved

    def gradients(self, dy: Array, into: Into) -> Gradients:
        return (kernels_of(dy).sigmoid_backward(dy, self.saved),)


class SoftMax(Operation):
    """exp(x) / sum(exp(x)) over the last dimension."""

    def forward(self, x: Array) -> Array:
        self.saved = kernels_of(x).softmax(x.reshape(-1, x.shape[-1])).reshape(x.shape)
        return self.saved

    def gradients(self, dy: Array, into: Into) -> Gradients:
        y = self.saved
        dy *= y
        return (dy - y * dy.sum(axis=-1, keepdims=True),)


class Dropout(Operation):
    """In training, zeroes elements of x with probability `ratio` and scales the others by 1 / (1 - ratio).

    Args:
        ratio: in [0, 1).
        rng: the device's random generator.
    """

    def __init__(self, ratio: float, rng: Any) -> None:
        self.ratio, self.rng = ratio, rng

    def forward(self, x: Array) -> Array:
        if not mode.training:
            return x
        kept = self.rng.random(x.shape, dtype=x.dtype) >= self.ratio
        self.saved = kept * x.dtype.type(1 / (1 - self.ratio))
        return x * self.saved

    def gradients(self, dy: Array, into: Into) -> Gradients:
        dy *= self.saved
        return (dy,)


class Cat(Operation):
    """Arrays joined along dimension `axis`."""

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def forward(self, *parts: Array) -> Array:
        self.saved = [*accumulate(part.shape[self.axis] for part in parts)][:-1]
        return array_module(parts[0]).concatenate(parts, self.axis)

    def gradients(self, dy: Array, into: Into) -> Gradients:
        parts = array_module(dy).split(dy, self.saved, self.axis)
        return [part.copy() if need else None for part, need in zip(parts, self.needs, strict=True)]


class ReduceSum(Operation):
    """The sum over the dimensions `axes` (None: over all), which are kept with length 1 or removed."""

    def __init__(self, axes: Sequence[int] | None, keepdims: bool) -> None:
        self.axes, self.keepdims = None if axes is None else tuple(axes), keepdims

    def forward(self, x: Array) -> Array:
        y = x.sum(axis=self.axes, keepdims=True)
        self.saved = x.shape, y.shape
        return y if self.keepdims else y.squeeze(self.axes)

    def gradients(self, dy: Array, into: Into) -> Gradients:
        x_shape, kept_shape = self.saved
        return (array_module(dy).broadcast_to(dy.reshape(kept_shape), x_shape).copy(),)


class SoftMaxCrossEntropy(Operation):
    """Mean over the batch of the cross entropy of softmax(logits [N, classes]), as an array of shape (1,).

    The labels are integers [N] or one distribution per row, [N, classes]; they have no gradient.
    """

    native = is_loss = True

    def forward(self, logits: Array, labels: Array) -> Array:
        loss, self.saved = kernels_of(logits).softmax_cross_entropy(logits, labels)
        return loss.reshape(1)

    def gradients(self, dy: Array, into: Into) -> Gradients:
        return kernels_of(dy).softmax_cross_entropy_backward(self.saved, dy), None


class MeanSquareError(Operation):
    """Mean over all elements of (x - target)**2, as an array of shape (1,)."""

    is_loss = True

    def forward(self, x: Array, target: Array) -> Array:
        if x.shape != target.shape:
            raise UsageError(f"the mean square error needs equal shapes, got {x.shape} and {target.shape}")
        self.saved = x - target
        return array_module(x).square(self.saved).mean().reshape(1)

    def gradients(self, dy: Array, into: Into) -> Gradients:
        dx = self.saved * (self.saved.dtype.type(2 / self.saved.size) * dy)
        return dx, -dx if self.needs[1] else None
