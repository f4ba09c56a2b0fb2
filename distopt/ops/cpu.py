"""Kernels for NumPy arrays: the native ones of `distopt._core`, each on the calling thread.

Conventions of all functions: local, no communication; arrays are C-contiguous and share one dtype, float32 or float64;
images are [N, C, H, W]; an empty batch is allowed. Results come from a pool (see `empty`) and belong to the caller.
`saved` is opaque and refers to inputs and outputs, which must not change before the backward pass. No function changes
an argument unless it says so. Equal inputs give equal bits on equal processors.

Raises (all functions): UsageError for values that cannot be used, ValueError or TypeError for arrays whose shape, type
or layout does not fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import _core
from ..errors import UsageError
from .geometry import out_size, pool_out
from .pool import Pool

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]
    Pair = tuple[int, int]

__all__ = [
    "adagrad_update",
    "adam_update",
    "avg_pool2d",
    "avg_pool2d_backward",
    "batch_norm2d",
    "batch_norm2d_backward",
    "conv2d",
    "conv2d_backward",
    "conv2d_max_pool",
    "conv2d_max_pool_backward",
    "empty",
    "linear",
    "linear_backward",
    "max_pool2d",
    "max_pool2d_backward",
    "relu",
    "relu_backward",
    "rmsprop_update",
    "sgd_update",
    "sigmoid",
    "sigmoid_backward",
    "softmax",
    "softmax_cross_entropy",
    "softmax_cross_entropy_backward",
]

empty = Pool().empty


class _Conv(NamedTuple):
    x: Array  # with its border
    w: Array
    stride: Pair
    padding: Pair
    y: Array | None  # with ReLU


class _ConvPool(NamedTuple):
    conv: _Conv  # y is pooled
    taken: Array
    window: tuple[Pair, Pair, Pair]  # of pooling: kernel, stride, padding


class _Pool(NamedTuple):
    x_shape: tuple[int, ...]
    kernel: Pair
    stride: Pair
    padding: Pair
    taken: Array | None  # of max pooling


class _Linear(NamedTuple):
    x: Array
    w: Array
    y: Array | None  # with ReLU


class _Norm(NamedTuple):
    x: Array
    gamma: Array
    mean: Array
    inverse_deviation: Array
    training: bool


class _Loss(NamedTuple):
    probability: Array
    labels: Array | None
    target: Array | None


def conv2d(
    x: Array, w: Array, b: Array | None, stride: Pair = (1, 1), padding: Pair = (0, 0), relu: bool = False
) -> tuple[Array, Any]:
    """Cross-correlate x [N, C, H, W] with w [M, C, kh, kw], add b [M], and apply ReLU if asked.

    In float32, kernels of 3 x 3 and 5 x 5 with stride 1 and at least 8 channels on both sides go by Winograd's minimal
    filtering (csrc/winograd.h), which errs by about 2e-6 of the deviation of y; all others are summed directly.

    Returns:
        y [N, M, (H + 2 ph - kh) // sh + 1, (W + 2 pw - kw) // sw + 1], and saved.
    """
    kernel = (w.shape[2], w.shape[3])
    y = empty((len(x), len(w), *out_size(x.shape, kernel, stride, padding)), x.dtype)
    x = _with_border(x, padding)
    _core.conv2d(x, w, b, y, stride, relu)
    return y, _Conv(x, w, stride, padding, y if relu else None)


def conv2d_backward(dy: Array, saved: Any, dw: Array, db: Array | None, need_dx: bool = True) -> Array | None:
    """Overwrite dw and db with the gradients of w and b; return the gradient of x, or None if not needed."""
    x, w, stride, padding, y = saved
    dx = empty(x.shape, x.dtype) if need_dx else None
    _core.conv2d_backward(dy, y, x, w, dw, db, dx, stride)
    return dx if dx is None else _without_border(dx, padding)


def conv2d_max_pool(
    x: Array,
    w: Array,
    b: Array | None,
    stride: Pair,
    padding: Pair,
    relu: bool,
    pool_kernel: Pair,
    pool_stride: Pair,
    pool_padding: Pair,
) -> tuple[Array, Any]:
    """`max_pool2d(conv2d(x, w, b, stride, padding, relu), ...)`, to the bit, image by image.

    The result of the convolution is pooled while the cache holds it, and never travels to memory.

    Returns:
        y as of `max_pool2d`, and saved.
    """
    kernel = (w.shape[2], w.shape[3])
    full = (len(x), len(w), *out_size(x.shape, kernel, stride, padding))
    shape = pool_out(full, pool_kernel, pool_stride, pool_padding)
    y, taken = empty(shape, x.dtype), empty(shape, np.uint8)
    x = _with_border(x, padding)
    window = pool_kernel, pool_stride, pool_padding
    _core.conv2d_max_pool(x, w, b, y, taken, stride, relu, *window)
    return y, _ConvPool(_Conv(x, w, stride, padding, y if relu else None), taken, window)


def conv2d_max_pool_backward(dy: Array, saved: Any, dw: Array, db: Array | None, need_dx: bool = True) -> Array | None:
    """Overwrite dw and db with the gradients of w and b; return the gradient of x, or None if not needed.

    Without it, and with up to 4 channels, dw and db are sums over pooled pixels alone (csrc/direct_conv.h): last bits
    may then differ from those of the two functions.
    """
    (x, w, stride, padding, y), taken, window = saved
    dx = empty(x.shape, x.dtype) if need_dx else None
    _core.conv2d_max_pool_backward(dy, y, taken, x, w, dw, db, dx, stride, *window)
    return dx if dx is None else _without_border(dx, padding)


def _with_border(x: Array, padding: Pair) -> Array:
    if not any(padding):
        return x
    n, c, h, w = x.shape
    ph, pw = padding
    wide = empty((n, c, h + 2 * ph, w + 2 * pw), x.dtype)
    wide.fill(0)
    wide[:, :, ph : ph + h, pw : pw + w] = x
    return wide


def _without_border(wide: Array, padding: Pair) -> Array:
    if not any(padding):
        return wide
    n, c, h, w = wide.shape
    ph, pw = padding
    x = empty((n, c, h - 2 * ph, w - 2 * pw), wide.dtype)
    x[...] = wide[:, :, ph : h - ph, pw : w - pw]
    return x


def max_pool2d(x: Array, kernel: Pair, stride: Pair, padding: Pair = (0, 0)) -> tuple[Array, Any]:
    """Take the maximum of each window, at most 256 elements large. A border never wins; a NaN always does.

    Returns:
        y [N, C, (H + 2 ph - kh) // sh + 1, (W + 2 pw - kw) // sw + 1], and saved, which does not refer to x.
    """
    shape = pool_out(x.shape, kernel, stride, padding)
    y, taken = empty(shape, x.dtype), empty(shape, np.uint8)
    _core.max_pool2d(x, y, taken, kernel, stride, padding)
    return y, _Pool(x.shape, kernel, stride, padding, taken)


def max_pool2d_backward(dy: Array, saved: Any) -> Array:
    """Return the gradient of x. Of several equal maxima the first in the window receives it."""
    dx = empty(saved.x_shape, dy.dtype)
    _core.max_pool2d_backward(dy, saved.taken, dx, saved.kernel, saved.stride, saved.padding)
    return dx


def avg_pool2d(x: Array, kernel: Pair, stride: Pair, padding: Pair = (0, 0)) -> tuple[Array, Any]:
    """Average each window, at most 256 elements large. A border counts as zeros.

    Returns:
        y [N, C, (H + 2 ph - kh) // sh + 1, (W + 2 pw - kw) // sw + 1], and saved, which does not refer to x.
    """
    y = empty(pool_out(x.shape, kernel, stride, padding), x.dtype)
    _core.avg_pool2d(x, y, kernel, stride, padding)
    return y, _Pool(x.shape, kernel, stride, padding, None)


def avg_pool2d_backward(dy: Array, saved: Any) -> Array:
    """Return the gradient of x."""
    dx = empty(saved.x_shape, dy.dtype)
    _core.avg_pool2d_backward(dy, dx, saved.kernel, saved.stride, saved.padding)
    return dx


def linear(x: Array, w: Array, b: Array | None, relu: bool = False) -> tuple[Array, Any]:
    """Return y [N, out] = x [N, in] @ w [in, out] + b [out], with ReLU if asked, and saved."""
    if x.ndim != 2 or not x.shape[1]:
        raise UsageError(f"a linear layer takes inputs of the shape [N, in]; got {list(x.shape)}")
    y = empty((len(x), w.shape[1]), x.dtype)
    _core.linear(x, w, b, y, relu)
    return y, _Linear(x, w, y if relu else None)


def linear_backward(dy: Array, saved: Any, dw: Array, db: Array | None, need_dx: bool = True) -> Array | None:
    """Overwrite dw and db with the gradients of w and b; return the gradient of x, or None if not needed."""
    x, w, y = saved
    dx = empty(x.shape, x.dtype) if need_dx else None
    _core.linear_backward(dy, y, x, w, dw, db, dx)
    return dx


def relu(x: Array) -> Array:
    """Return max(x, 0); a NaN stays."""
    y = empty(x.shape, x.dtype)
    _core.relu(x, y)
    return y


def relu_backward(dy: Array, y: Array) -> Array:
    """Return the gradient of x, from the output y."""
    dx = empty(dy.shape, dy.dtype)
    _core.relu_backward(dy, y, dx)
    return dx


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x))."""
    y = empty(x.shape, x.dtype)
    _core.sigmoid(x, y)
    return y


def sigmoid_backward(dy: Array, y: Array) -> Array:
    """Return the gradient of x, from the output y."""
    dx = empty(dy.shape, dy.dtype)
    _core.sigmoid_backward(dy, y, dx)
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

    In training the batch's own mean and biased variance are used, and the running statistics move in place:
    running = (1 - momentum) * running + momentum * batch, with the unbiased variance, as in PyTorch. Else the running
    statistics are used and stay.

    Returns:
        y like x, and saved.

    Raises:
        UsageError: training with a single value per channel, which has no variance.
    """
    count = x.shape[0] * x.shape[2] * x.shape[3]
    if training and count == 1:
        raise UsageError("batch normalization needs more than one value per channel to train; use a larger batch")
    mean, var = running_mean.copy(), running_var.copy()
    if training and count:
        _core.channel_moments(_planes(x), mean, var)
        running_mean += momentum * (mean - running_mean)
        running_var += momentum * (var * (count / (count - 1)) - running_var)
    inverse_deviation = 1 / np.sqrt(var + x.dtype.type(eps))
    y = empty(x.shape, x.dtype)
    _core.normalize(_planes(x), mean, inverse_deviation, gamma, beta, _planes(y))
    return y, _Norm(x, gamma, mean, inverse_deviation, training)


def batch_norm2d_backward(dy: Array, saved: Any, dgamma: Array, dbeta: Array) -> Array:
    """Overwrite dgamma and dbeta [C] with the gradients of gamma and beta; return the gradient of x."""
    x, gamma, mean, inverse_deviation, training = saved
    dx = empty(x.shape, x.dtype)
    _core.normalize_backward(
        _planes(dy), _planes(x), mean, inverse_deviation, gamma, training, dgamma, dbeta, _planes(dx)
    )
    return dx


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
        target = np.ascontiguousarray(labels, logits.dtype)
    else:
        index = np.ascontiguousarray(labels.astype(np.int64, casting="same_kind", copy=False))
    probability, loss = empty(logits.shape, logits.dtype), empty((), logits.dtype)
    bad = _core.cross_entropy(logits, index, target, probability, loss)
    if bad >= 0:
        raise UsageError(f"label {labels[bad]} of sample {bad} is outside 0 ... {logits.shape[1] - 1}")
    return loss, _Loss(probability, index, target)


def softmax_cross_entropy_backward(saved: Any, scale: float | Array = 1.0) -> Array:
    """Return the gradient of the logits, times `scale`, a number or an array of one element."""
    probability, index, target = saved
    factor = scale.item() if isinstance(scale, np.ndarray) else scale
    dlogits = empty(probability.shape, probability.dtype)
    _core.cross_entropy_backward(probability, index, target, factor / max(len(probability), 1), dlogits)
    return dlogits


def sgd_update(
    param: Array,
    grad: Array,
    momentum_buffer: Array | None,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    first: bool = False,
) -> None:
    """Update `param` and `momentum_buffer` in place, with the semantics of PyTorch's SGD.

    As in all updates, arrays have any one shape, `grad` does not change, and weight decay is added to the gradient.
    `first`: the buffer is yet to be filled, and takes the gradient undampened.
    """
    _core.sgd(param, grad, momentum_buffer, lr, momentum, dampening, weight_decay, nesterov, first)


def adam_update(
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> None:
    """Update `param` and the moments in place; `step` counts from 1 (Kingma and Ba, arXiv 1412.6980, algorithm 1)."""
    _core.adam(param, grad, m, v, step, lr, beta1, beta2, eps, weight_decay)


def rmsprop_update(
    param: Array, grad: Array, running: Array, lr: float, rho: float = 0.9, eps: float = 1e-8, weight_decay: float = 0.0
) -> None:
    """Update `param` and `running`, the mean square of the gradient with decay `rho`, in place."""
    _core.rmsprop(param, grad, running, lr, rho, eps, weight_decay)


def adagrad_update(
    param: Array, grad: Array, history: Array, lr: float, eps: float = 1e-10, weight_decay: float = 0.0
) -> None:
    """Update `param` and `history`, the sum of squares of the gradient, in place."""
    _core.adagrad(param, grad, history, lr, eps, weight_decay)
