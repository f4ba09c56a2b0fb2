"""Kernels for NumPy arrays: the native ones of `distopt._core`, each on the calling thread.

Conventions of all functions: local, no communication; arrays are C-contiguous and share one dtype, float32 or float64;
images are [N, C, H, W]; an empty batch is allowed. Results come from a pool (see `empty`) and belong to the caller.
`saved` is opaque and refers to inputs and outputs, which must not change before the backward pass. A function changes
an argument only as its docstring describes. Equal inputs give equal bits on all processors.

Raises (all functions): UsageError for values that cannot be used, ValueError or TypeError for arrays whose shape, type
or layout does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ... import _core
from ...errors import UsageError
from ..devices.device import bad_index
from .geometry import out_size, pool_out, with_border, without_border
from .memory import empty

Array = NDArray[Any]
Pair = tuple[int, int]
Window = tuple[Pair, Pair, Pair]  # kernel, stride and padding of a pooling


# -- indices -----------------------------------------------------------------------------------------------------------
def check_index(index: Array, length: int, axis: int) -> Array | None:
    """Check that all of `index`, integers, are in [-length, length).

    Args:
        index: of any shape.
        length: of the dimension.
        axis: its number, for the message.

    Returns:
        On a GPU, where an index is out of range, an array of the shape of `index`; else None.

    Raises:
        UsageError: one is out of range; on a GPU, `Device.check` raises it.
    """
    outside = (index < -length) | (index >= length)
    if outside.any():
        position = int(outside.argmax())
        raise UsageError(bad_index(index.flat[position], position, length, axis))
    return None


# -- rows --------------------------------------------------------------------------------------------------------------
class SavedLinear(NamedTuple):
    """For `linear_backward`."""

    x: Array
    w: Array
    y: Array | None  # with ReLU


class SavedLoss(NamedTuple):
    """For `softmax_cross_entropy_backward`."""

    probability: Array
    labels: Array | None
    target: Array | None


def to_half(x: Array) -> Array:
    """Return the float32 array x as float16, rounded to nearest; magnitudes above 65,504 become infinite."""
    y = empty(x.shape, np.float16)
    _core.encode16(x.reshape(-1), y.view(np.uint16).reshape(-1), "float16", 1.0, math.inf)
    return y


def from_half(x: Array) -> Array:
    """Return the float16 array x as float32."""
    y = empty(x.shape, np.float32)
    _core.decode16(x.view(np.uint16).reshape(-1), y.reshape(-1), "float16", 1.0)
    return y


def linear(x: Array, w: Array, b: Array | None, relu: bool = False) -> tuple[Array, Any]:
    """Return y [N, out] = x [N, in] @ w [in, out] + b [out], with ReLU if asked, and saved."""
    if x.ndim != 2 or not x.shape[1]:
        raise UsageError(f"a linear layer takes inputs of the shape [N, in]; got {list(x.shape)}")
    y = empty((len(x), w.shape[1]), x.dtype)
    _core.linear(x, w, b, y, relu)
    return y, SavedLinear(x, w, y if relu else None)


def linear_backward(dy: Array, saved: Any, dw: Array | None, db: Array | None, need_dx: bool = True) -> Array | None:
    """Overwrite dw and db, if given, with the gradients of w and b; return the gradient of x, or None if not needed."""
    x, w, y = saved
    dx = empty(x.shape, x.dtype) if need_dx else None
    _core.linear_backward(dy, y, x, w, dw, db, dx)
    return dx


def relu(x: Array) -> Array:
    """Return max(x, 0); a NaN stays."""
    return _mapped(_core.relu, x)


def relu_backward(dy: Array, y: Array) -> Array:
    """Return the gradient of x, from the output y."""
    return _mapped(_core.relu_backward, dy, y)


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x))."""
    return _mapped(_core.sigmoid, x)


def sigmoid_backward(dy: Array, y: Array) -> Array:
    """Return the gradient of x, from the output y."""
    return _mapped(_core.sigmoid_backward, dy, y)


def _mapped(kernel: Callable[..., None], *xs: Array) -> Array:
    y = empty(xs[0].shape, xs[0].dtype)
    kernel(*xs, y)
    return y


def softmax(x: Array) -> Array:
    """Return the softmax of each row of x [N, classes]."""
    y = empty(x.shape, x.dtype)
    _core.softmax(x, y)
    return y


def softmax_cross_entropy(logits: Array, labels: Array) -> tuple[Array, Any]:
    """Mean over the batch of the cross entropy of softmax(logits [N, classes]); 0 for an empty batch.

    Args:
        logits: scores, [N, classes].
        labels: class indices of an integer type, [N], or one distribution (such as one-hot) per row, [N, classes].

    Returns:
        the loss as an array of shape (), and saved.

    Raises:
        UsageError: a label is not a class.
    """
    index = target = None
    if labels.ndim == 2:
        target = _converted(labels, logits.dtype)
    else:
        index = _converted(labels, np.dtype(np.int64))
    probability, loss = empty(logits.shape, logits.dtype), empty((), logits.dtype)
    bad = _core.cross_entropy(logits, index, target, probability, loss)
    if bad >= 0:
        assert index is not None
        raise UsageError(f"label {index[bad]} of sample {bad} is outside 0 ... {logits.shape[1] - 1}")
    return loss, SavedLoss(probability, index, target)


def _converted(x: Array, dtype: np.dtype[Any]) -> Array:
    if x.dtype == dtype and x.flags.c_contiguous:
        return x
    y = empty(x.shape, dtype)
    np.copyto(y, x)
    return y


def softmax_cross_entropy_backward(saved: Any, scale: float | Array = 1.0) -> Array:
    """Return the gradient of the logits, times `scale`, a number or an array of one element."""
    probability, index, target = saved
    dlogits = empty(probability.shape, probability.dtype)
    factor = scale.item() if isinstance(scale, np.ndarray) else scale
    _core.cross_entropy_backward(probability, index, target, factor / max(len(probability), 1), dlogits)
    return dlogits


# -- images ------------------------------------------------------------------------------------------------------------
class _Conv(NamedTuple):
    x: Array  # with its border
    w: Array
    stride: Pair
    padding: Pair
    y: Array | None  # with ReLU, and pooled
    pooling: tuple[Array, Pair, Pair, Pair] | None  # where the maxima were; kernel, stride, padding


class _SavedPool(NamedTuple):
    x_shape: tuple[int, ...]
    kernel: Pair
    stride: Pair
    padding: Pair
    taken: Array | None  # of max pooling


class SavedNorm(NamedTuple):
    """For `batch_norm2d_backward`."""

    x: Array
    gamma: Array
    mean: Array
    inverse_deviation: Array
    training: bool
    cut: Array | None  # with ReLU behind it, what tells where that cut off: here y, on a GPU beta


def conv2d(
    x: Array,
    w: Array,
    b: Array | None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    relu: bool = False,
    pool: Window | None = None,
) -> tuple[Array, Any]:
    """Cross-correlate x [N, C, H, W] with w [M, c, kh, kw], add b [M], and optionally apply ReLU, then `max_pool2d`.

    If c is smaller than C, there are C / c groups: each run of c channels has a run of M c / C kernels of its own.
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
    _core.conv2d(x, w, b, y, stride, relu, pooling)
    return y, _Conv(x, w, stride, padding, y if relu else None, pooling)


def conv2d_backward(dy: Array, saved: Any, dw: Array | None, db: Array | None, need_dx: bool = True) -> Array | None:
    """Overwrite dw and db, if given, with the gradients of w and b; return the gradient of x, or None if not needed.

    With pooling, at most 4 channels in a group and no need for dx, dw and db are summed over pooled pixels alone
    (csrc/cpu/conv/direct.h), so their last bits may differ from those of separate convolution and pooling.
    """
    x, w, stride, padding, y, pooling = saved
    dx = empty(x.shape, x.dtype) if need_dx else None
    _core.conv2d_backward(dy, y, x, w, dw, db, dx, stride, pooling)
    return dx if dx is None else without_border(dx, padding, empty)


def max_pool2d(x: Array, kernel: Pair, stride: Pair, padding: Pair = (0, 0)) -> tuple[Array, Any]:
    """Take the maximum of each window, at most 256 elements large. Padding is never the maximum; a NaN always is.

    Returns:
        y [N, C, (H + 2 ph - kh) // sh + 1, (W + 2 pw - kw) // sw + 1], and saved, which does not refer to x.
    """
    shape = pool_out(x.shape, kernel, stride, padding)
    y, taken = empty(shape, x.dtype), empty(shape, np.uint8)
    _core.max_pool2d(x, y, taken, kernel, stride, padding)
    return y, _SavedPool(x.shape, kernel, stride, padding, taken)


def max_pool2d_backward(dy: Array, saved: Any) -> Array:
    """Return the gradient of x. Of several equal maxima the first in the window receives it."""
    dx = empty(saved.x_shape, dy.dtype)
    _core.max_pool2d_backward(dy, saved.taken, dx, saved.kernel, saved.stride, saved.padding)
    return dx


def avg_pool2d(x: Array, kernel: Pair, stride: Pair, padding: Pair = (0, 0)) -> tuple[Array, Any]:
    """Average each window, at most 256 elements large. Padding counts as zeros.

    Returns:
        y [N, C, (H + 2 ph - kh) // sh + 1, (W + 2 pw - kw) // sw + 1], and saved, which does not refer to x.
    """
    y = empty(pool_out(x.shape, kernel, stride, padding), x.dtype)
    _core.avg_pool2d(x, y, kernel, stride, padding)
    return y, _SavedPool(x.shape, kernel, stride, padding, None)


def avg_pool2d_backward(dy: Array, saved: Any) -> Array:
    """Return the gradient of x."""
    dx = empty(saved.x_shape, dy.dtype)
    _core.avg_pool2d_backward(dy, dx, saved.kernel, saved.stride, saved.padding)
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
    relu: bool = False,
    plus: Array | None = None,
) -> tuple[Array, Any]:
    """Normalize each channel (Ioffe and Szegedy, arXiv 1502.03167); parameters and statistics have the shape [C].

    In training, the batch's own mean and biased variance are used, and the running statistics are updated in place:
    running = (1 - momentum) * running + momentum * batch, with the unbiased variance, as in PyTorch.
    Otherwise, the running statistics are used and not changed.

    Then `plus`, of the shape of x, is added if given, and ReLU applied if asked. `batch_norm2d_backward` includes the
    gradient of ReLU except behind a sum, where `relu_backward` comes first, for both terms.

    Returns:
        y like x, and saved.

    Raises:
        UsageError: training with a single value per channel, which has no variance.
    """
    count = x.shape[0] * x.shape[2] * x.shape[3]
    if training and count == 1:
        raise UsageError("batch normalization needs more than one value per channel to train; use a larger batch")
    mean, var, y = running_mean.copy(), running_var.copy(), empty(x.shape, x.dtype)
    if training and count:
        _core.channel_moments(_planes(x), mean, var)
        running_mean += momentum * (mean - running_mean)
        running_var += momentum * (var * (count / (count - 1)) - running_var)
    inverse_deviation = 1 / np.sqrt(var + x.dtype.type(eps))
    _core.normalize(_planes(x), mean, inverse_deviation, gamma, beta, _planes(y))
    if plus is not None:
        y += plus
    if relu:
        y = _mapped(_core.relu, y)
    return y, SavedNorm(x, gamma, mean, inverse_deviation, training, y if relu and plus is None else None)


def batch_norm2d_backward(dy: Array, saved: Any, dgamma: Array, dbeta: Array) -> Array:
    """Overwrite dgamma and dbeta [C] with the gradients of gamma and beta; return the gradient of x."""
    x, gamma, mean, inverse_deviation, training, y = saved
    if y is not None:
        dy = relu_backward(dy, y)
    dx = empty(x.shape, x.dtype)
    planes = _planes(dy), _planes(x)
    _core.normalize_backward(*planes, mean, inverse_deviation, gamma, training, dgamma, dbeta, _planes(dx))
    return dx


def channel_sums(x: Array) -> Array:
    """Return each channel's sum, each channel's sum of squares, and the values of a channel: [2 C + 1] in float64."""
    n, c, h, w = x.shape
    mean, var = np.zeros((2, c), x.dtype)
    if x.size:
        _core.channel_moments(_planes(x), mean, var)
    # A sum of float32 squares would lose a variance that is small relative to the mean.
    wide = mean.astype(np.float64)
    sums: Array = np.concatenate([wide, var + wide * wide, [1.0]])
    sums *= n * h * w
    return sums


# -- updates -----------------------------------------------------------------------------------------------------------
Update: TypeAlias = "tuple[Array, Array, Sequence[Array | None]]"  # a parameter, its gradient, and its slots
UPDATES_AT_ONCE = 1  # how many gain from being done together


def update(rule: str, several: Sequence[Update], *values: float, gate: Array | None = None) -> None:
    """Update parameters and slots in place by one of these rules, described in `optim.rules`; gradients do not change.

    Nothing changes if `gate`, bool [], is true.

    | rule | slots, of the shape of the parameter | values |
    | --- | --- | --- |
    | "sgd" | momentum buffer or None | lr, momentum, dampening, weight_decay, nesterov |
    | "adam" | m, v | step from 1 on, lr, beta_1, beta_2, epsilon, weight_decay |
    | "rmsprop" | running mean square | lr, rho, epsilon, weight_decay |
    | "adagrad" | sum of squares | lr, epsilon, weight_decay |
    """
    if gate is None or not gate:
        for param, grad, slots in several:
            getattr(_core, rule)(param, grad, *slots, *values)
