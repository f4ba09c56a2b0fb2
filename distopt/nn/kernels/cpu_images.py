"""Kernels for images in NumPy arrays: convolution, pooling, normalization. See `cpu` for the conventions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import _core
from ...errors import UsageError
from ..mode import noted
from .geometry import out_size, pool_out, with_border, without_border
from .pool import empty

Array = NDArray[Any]
Pair = tuple[int, int]
Window = tuple[Pair, Pair, Pair]  # kernel, stride and padding of a pooling

__all__ = [
    "avg_pool2d",
    "avg_pool2d_backward",
    "batch_norm2d",
    "batch_norm2d_backward",
    "conv2d",
    "conv2d_backward",
    "max_pool2d",
    "max_pool2d_backward",
]


class _Conv(NamedTuple):
    x: Array  # with its border
    w: Array
    stride: Pair
    padding: Pair
    y: Array | None  # with ReLU, and pooled
    pooling: tuple[Array, Pair, Pair, Pair] | None  # where the maxima were; kernel, stride, padding


class _Pool(NamedTuple):
    x_shape: tuple[int, ...]
    kernel: Pair
    stride: Pair
    padding: Pair
    taken: Array | None  # of max pooling


class SavedNorm(NamedTuple):
    x: Array
    gamma: Array
    mean: Array
    inverse_deviation: Array
    training: bool


def conv2d(
    x: Array,
    w: Array,
    b: Array | None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    relu: bool = False,
    pool: Window | None = None,
) -> tuple[Array, Any]:
    """Cross-correlate x [N, C, H, W] with w [M, C, kh, kw], add b [M], and optionally apply ReLU, then `max_pool2d`.

    In float32, kernels of 3 x 3 and 5 x 5 with stride 1 and at least 8 input and output channels use Winograd's minimal
    filtering (csrc/cpu/conv/winograd.h), with an error of about 2e-6 standard deviations of y; others are summed
    directly. With `pool`, the convolution of each image is pooled while it is in the cache, with the same bits as by
    `max_pool2d`, and is not written to memory.

    Returns:
        y [N, M, (H + 2 ph - kh) // sh + 1, (W + 2 pw - kw) // sw + 1], or that pooled, and saved.
    """
    kernel = (w.shape[2], w.shape[3])
    shape: tuple[int, ...] = (len(x), len(w), *out_size(x.shape, kernel, stride, padding))
    pooling = None
    if pool is not None:
        shape = pool_out(shape, *pool)
        pooling = empty(shape, np.uint8), *pool
    y = empty(shape, x.dtype)
    x = with_border(x, padding, empty)
    noted(_core.conv2d, x, w, b, y, stride, relu, pooling)
    return y, _Conv(x, w, stride, padding, y if relu else None, pooling)


def conv2d_backward(dy: Array, saved: Any, dw: Array | None, db: Array | None, need_dx: bool = True) -> Array | None:
    """Overwrite dw and db, if given, with the gradients of w and b; return the gradient of x, or None if not needed.

    With pooling, and up to 4 channels, dw and db are sums over pooled pixels only if dx is not needed
    (csrc/cpu/conv/direct.h). Their last bits may differ from those of convolution and pooling apart.
    """
    x, w, stride, padding, y, pooling = saved
    dx = empty(x.shape, x.dtype) if need_dx else None
    noted(_core.conv2d_backward, dy, y, x, w, dw, db, dx, stride, pooling)
    return dx if dx is None else without_border(dx, padding, empty)


def max_pool2d(x: Array, kernel: Pair, stride: Pair, padding: Pair = (0, 0)) -> tuple[Array, Any]:
    """Take the maximum of each window, at most 256 elements large. Padding is never the maximum; a NaN always is.

    Returns:
        y [N, C, (H + 2 ph - kh) // sh + 1, (W + 2 pw - kw) // sw + 1], and saved, which does not refer to x.
    """
    shape = pool_out(x.shape, kernel, stride, padding)
    y, taken = empty(shape, x.dtype), empty(shape, np.uint8)
    noted(_core.max_pool2d, x, y, taken, kernel, stride, padding)
    return y, _Pool(x.shape, kernel, stride, padding, taken)


def max_pool2d_backward(dy: Array, saved: Any) -> Array:
    """Return the gradient of x. Of several equal maxima the first in the window receives it."""
    dx = empty(saved.x_shape, dy.dtype)
    noted(_core.max_pool2d_backward, dy, saved.taken, dx, saved.kernel, saved.stride, saved.padding)
    return dx


def avg_pool2d(x: Array, kernel: Pair, stride: Pair, padding: Pair = (0, 0)) -> tuple[Array, Any]:
    """Average each window, at most 256 elements large. Padding counts as zeros.

    Returns:
        y [N, C, (H + 2 ph - kh) // sh + 1, (W + 2 pw - kw) // sw + 1], and saved, which does not refer to x.
    """
    y = empty(pool_out(x.shape, kernel, stride, padding), x.dtype)
    noted(_core.avg_pool2d, x, y, kernel, stride, padding)
    return y, _Pool(x.shape, kernel, stride, padding, None)


def avg_pool2d_backward(dy: Array, saved: Any) -> Array:
    """Return the gradient of x."""
    dx = empty(saved.x_shape, dy.dtype)
    noted(_core.avg_pool2d_backward, dy, dx, saved.kernel, saved.stride, saved.padding)
    return dx


def _planes(x: Array) -> Array:
    n, c, h, w = x.shape
    return x.reshape(n, c, h * w)


def batch_norm2d(
    x: Array,
    gamma: Array,
    beta: Array,
    running_mean: Array,
    running_var: Array,
    momentum: float,
    eps: float,
    training: bool,
) -> tuple[Array, Any]:
    """Normalize each channel (Ioffe and Szegedy, arXiv 1502.03167); parameters and statistics have the shape [C].

    In training, the batch's own mean and biased variance are used, and the running statistics are updated in place:
    running = (1 - momentum) * running + momentum * batch, with the unbiased variance, as in PyTorch.
    Otherwise, the running statistics are used and not changed.

    Returns:
        y like x, and saved.

    Raises:
        UsageError: training with a single value per channel, which has no variance.
    """
    count = x.shape[0] * x.shape[2] * x.shape[3]
    if training and count == 1:
        raise UsageError("batch normalization needs more than one value per channel to train; use a larger batch")
    mean, inverse_deviation, y = np.empty_like(running_mean), np.empty_like(running_var), empty(x.shape, x.dtype)
    running = running_mean, running_var
    noted(
        _channel_statistics, _planes(x), running, momentum if training and count else None, eps, mean, inverse_deviation
    )
    noted(_core.normalize, _planes(x), mean, inverse_deviation, gamma, beta, _planes(y))
    return y, SavedNorm(x, gamma, mean, inverse_deviation, training)


def _channel_statistics(
    x: Array, running: tuple[Array, Array], momentum: float | None, eps: float, mean: Array, inverse_deviation: Array
) -> None:
    """Mean and inverse deviation: the running ones, or with a momentum those of x, by which it moves them."""
    running_mean, running_var = running
    np.copyto(mean, running_mean)
    var = running_var.copy()
    if momentum is not None:
        count = x.shape[0] * x.shape[2]
        _core.channel_moments(x, mean, var)
        running_mean += momentum * (mean - running_mean)
        running_var += momentum * (var * (count / (count - 1)) - running_var)
    np.copyto(inverse_deviation, 1 / np.sqrt(var + x.dtype.type(eps)))


def batch_norm2d_backward(dy: Array, saved: Any, dgamma: Array, dbeta: Array) -> Array:
    """Overwrite dgamma and dbeta [C] with the gradients of gamma and beta; return the gradient of x."""
    x, gamma, mean, inverse_deviation, training = saved
    dx = empty(x.shape, x.dtype)
    planes = _planes(dy), _planes(x)
    noted(_core.normalize_backward, *planes, mean, inverse_deviation, gamma, training, dgamma, dbeta, _planes(dx))
    return dx
