"""Slow and simple versions of the kernels of `distopt.nn.numerics.cpu`: the oracle of its tests.

Every function is the definition of the operation written with NumPy. Nothing is fused, chunked or reused, and nothing
is shared with `cpu`, which documents each function.
"""

import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distopt.errors import UsageError

Array = NDArray[Any]
Pair = tuple[int, int]


def functions_of(module: ModuleType) -> set[str]:
    """The names of the functions that a module of kernels defines and shows."""
    own = {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    return {name for name in own if inspect.isfunction(getattr(module, name)) and not name.startswith("_")}


def empty(shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
    return np.empty(shape, dtype)


def check_index(index: Array, length: int, axis: int) -> list[tuple[int, int]]:
    """The values out of range, with their positions."""
    return [(int(i), at) for at, i in enumerate(index.reshape(-1)) if not -length <= i < length]


def _padded(x: Array, padding: Pair, value: float = 0.0) -> Array:
    (ph, pw) = padding
    return np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)), constant_values=value)


def _cropped(x: Array, padding: Pair) -> Array:
    (ph, pw) = padding
    return np.ascontiguousarray(x[:, :, ph : x.shape[2] - ph, pw : x.shape[3] - pw])


def _windows(x: Array, kernel: Pair, stride: Pair, writeable: bool = False) -> Array:
    """A view: the last two axes are the rows and columns of each window."""
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel, (2, 3), writeable=writeable)
    return windows[:, :, :: stride[0], :: stride[1]]


def conv2d(
    x: Array,
    w: Array,
    b: Array | None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    relu: bool = False,
    pool: tuple[Pair, Pair, Pair] | None = None,
) -> tuple[Array, Any]:
    bordered = _padded(x, padding)
    y = np.einsum("nchwij,mcij->nmhw", _windows(bordered, w.shape[2:], stride), w)
    if b is not None:
        y += b[:, None, None]
    if relu:
        y = np.where(y < 0, 0, y)
    full = y
    y, pooling = (y, None) if pool is None else max_pool2d(y, *pool)
    return y, (bordered, w, stride, padding, full if relu else None, pooling)


def conv2d_backward(dy: Array, saved: Any, dw: Array, db: Array | None, need_dx: bool = True) -> Array | None:
    bordered, w, stride, padding, y, pooling = saved
    if pooling is not None:
        dy = max_pool2d_backward(dy, pooling)
    if y is not None:
        dy = np.where(y <= 0, 0, dy)
    dw[...] = np.einsum("nmhw,nchwij->mcij", dy, _windows(bordered, w.shape[2:], stride))
    dx = np.zeros_like(bordered)
    targets = _windows(dx, w.shape[2:], stride, writeable=True)
    for oy, ox in np.ndindex(dy.shape[2:]):
        targets[:, :, oy, ox] += np.einsum("nm,mcij->ncij", dy[:, :, oy, ox], w)
    if db is not None:
        db[...] = dy.sum((0, 2, 3))
    return _cropped(dx, padding) if need_dx else None


def max_pool2d(x: Array, kernel: Pair, stride: Pair, padding: Pair = (0, 0)) -> tuple[Array, Any]:
    bordered = _padded(x, padding, -np.inf)
    return _windows(bordered, kernel, stride).max((4, 5)), (bordered, kernel, stride, padding)


def max_pool2d_backward(dy: Array, saved: Any) -> Array:
    bordered, kernel, stride, padding = saved
    dx = np.zeros(bordered.shape, dy.dtype)
    values, targets = _windows(bordered, kernel, stride), _windows(dx, kernel, stride, writeable=True)
    for place in np.ndindex(dy.shape):
        largest = np.unravel_index(values[place].argmax(), kernel)  # of equal values the first
        targets[place][largest] += dy[place]
    return _cropped(dx, padding)


def avg_pool2d(x: Array, kernel: Pair, stride: Pair, padding: Pair = (0, 0)) -> tuple[Array, Any]:
    bordered = _padded(x, padding)
    return _windows(bordered, kernel, stride).mean((4, 5)), (bordered, kernel, stride, padding)


def avg_pool2d_backward(dy: Array, saved: Any) -> Array:
    bordered, kernel, stride, padding = saved
    dx = np.zeros(bordered.shape, dy.dtype)
    targets = _windows(dx, kernel, stride, writeable=True)
    for place in np.ndindex(dy.shape):
        targets[place] += dy[place] / (kernel[0] * kernel[1])
    return _cropped(dx, padding)


def to_half(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return x.astype(np.float16)


def from_half(x: Array) -> Array:
    return x.astype(np.float32)


def linear(x: Array, w: Array, b: Array | None, relu: bool = False) -> tuple[Array, Any]:
    y = x @ w
    if b is not None:
        y += b
    if relu:
        y = np.where(y < 0, 0, y)
    return y, (x, w, y if relu else None)


def linear_backward(dy: Array, saved: Any, dw: Array, db: Array | None, need_dx: bool = True) -> Array | None:
    x, w, y = saved
    if y is not None:
        dy = np.where(y <= 0, 0, dy)
    dw[...] = x.T @ dy
    if db is not None:
        db[...] = dy.sum(0)
    return np.ascontiguousarray(dy @ w.T) if need_dx else None


def relu(x: Array) -> Array:
    return np.where(x < 0, np.zeros_like(x), x)


def relu_backward(dy: Array, y: Array) -> Array:
    return np.where(y <= 0, np.zeros_like(dy), dy)


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def sigmoid_backward(dy: Array, y: Array) -> Array:
    return np.asarray(dy * y * (1 - y))


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
    mean, var = running_mean.copy(), running_var.copy()
    count = x.size // max(x.shape[1], 1)
    if training and count == 1:
        raise UsageError("batch normalization needs more than one value per channel to train")
    if training and count:
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
        running_mean += momentum * (mean - running_mean)
        running_var += momentum * (var * count / (count - 1) - running_var)
    inverse = 1 / np.sqrt(var + eps)
    normal = (x - mean[:, None, None]) * inverse[:, None, None]
    y = normal * gamma[:, None, None] + beta[:, None, None]
    if plus is not None:
        y = y + plus
    cut = y <= 0 if relu and plus is None else None
    return np.where(y <= 0, 0 * y, y) if relu else y, (normal, inverse, gamma, training, cut)


def batch_norm2d_backward(dy: Array, saved: Any, dgamma: Array, dbeta: Array) -> Array:
    normal, inverse, gamma, training, cut = saved
    if cut is not None:
        dy = np.where(cut, 0 * dy, dy)
    dbeta[...] = dy.sum((0, 2, 3))
    dgamma[...] = (dy * normal).sum((0, 2, 3))
    inner = dy
    if training and dy.size:
        count = dy.size // dy.shape[1]
        inner = dy - (dbeta[:, None, None] + normal * dgamma[:, None, None]) / count
    return np.asarray(inner * (gamma * inverse)[:, None, None])


def channel_sums(x: Array) -> Array:
    wide = x.astype(np.float64)
    return np.concatenate([wide.sum((0, 2, 3)), (wide * wide).sum((0, 2, 3)), [x.size // max(x.shape[1], 1)]])


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True))


def _distribution(logits: Array, labels: Array) -> Array:
    if labels.ndim == 2:
        return labels.astype(logits.dtype)
    if ((labels < 0) | (labels >= logits.shape[1])).any():
        raise UsageError(f"a label is outside 0 ... {logits.shape[1] - 1}")
    return np.eye(logits.shape[1], dtype=logits.dtype)[labels.astype(np.int64)]


def softmax_cross_entropy(logits: Array, labels: Array) -> tuple[Array, Any]:
    target = _distribution(logits, labels)
    shifted = logits - logits.max(1, keepdims=True)
    log_probability = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    loss = -(target * log_probability).sum() / max(len(logits), 1)
    return np.asarray(loss, logits.dtype), (softmax(logits), target)


def softmax_cross_entropy_backward(saved: Any, scale: float | Array = 1.0) -> Array:
    probability, target = saved
    scale = np.asarray(scale).item()
    weight = target.sum(1, keepdims=True)
    return np.asarray((probability * weight - target) * probability.dtype.type(scale / max(len(target), 1)))
