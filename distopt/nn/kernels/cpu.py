"""Kernels for NumPy arrays: the native ones of `distopt._core`, each on the calling thread.

Conventions of all functions: local, no communication; arrays are C-contiguous and share one dtype, float32 or float64;
images are [N, C, H, W]; an empty batch is allowed. Results come from a pool (see `empty`) and belong to the caller.
`saved` is opaque and refers to inputs and outputs, which must not change before the backward pass. No function changes
an argument unless it says so. Equal inputs give equal bits on all processors.

Raises (all functions): UsageError for values that cannot be used, ValueError or TypeError for arrays whose shape, type
or layout does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import _core
from ...errors import UsageError
from ..mode import noted
from . import cpu_images
from .cpu_images import *  # noqa: F403 - the other half of this module
from .pool import empty

Array = NDArray[Any]

__all__ = [
    "empty",
    "from_half",
    "linear",
    "linear_backward",
    "relu",
    "relu_backward",
    "sigmoid",
    "sigmoid_backward",
    "softmax",
    "softmax_cross_entropy",
    "softmax_cross_entropy_backward",
    "to_half",
    "update",
]
__all__ += cpu_images.__all__


class SavedLinear(NamedTuple):
    x: Array
    w: Array
    y: Array | None  # with ReLU


class SavedLoss(NamedTuple):
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
    noted(_core.linear, x, w, b, y, relu)
    return y, SavedLinear(x, w, y if relu else None)


def linear_backward(dy: Array, saved: Any, dw: Array | None, db: Array | None, need_dx: bool = True) -> Array | None:
    """Overwrite dw and db, if given, with the gradients of w and b; return the gradient of x, or None if not needed."""
    x, w, y = saved
    dx = empty(x.shape, x.dtype) if need_dx else None
    noted(_core.linear_backward, dy, y, x, w, dw, db, dx)
    return dx


def relu(x: Array) -> Array:
    """Return max(x, 0); a NaN stays."""
    y = empty(x.shape, x.dtype)
    noted(_core.relu, x, y)
    return y


def relu_backward(dy: Array, y: Array) -> Array:
    """Return the gradient of x, from the output y."""
    dx = empty(dy.shape, dy.dtype)
    noted(_core.relu_backward, dy, y, dx)
    return dx


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x))."""
    y = empty(x.shape, x.dtype)
    noted(_core.sigmoid, x, y)
    return y


def sigmoid_backward(dy: Array, y: Array) -> Array:
    """Return the gradient of x, from the output y."""
    dx = empty(dy.shape, dy.dtype)
    noted(_core.sigmoid_backward, dy, y, dx)
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
        target = _converted(labels, logits.dtype)
    else:
        index = _converted(labels, np.dtype(np.int64))
    probability, loss = empty(logits.shape, logits.dtype), empty((), logits.dtype)
    noted(_cross_entropy, logits, index, target, probability, loss)
    return loss, SavedLoss(probability, index, target)


def _converted(x: Array, dtype: np.dtype[Any]) -> Array:
    if x.dtype == dtype and x.flags.c_contiguous:
        return x
    y = empty(x.shape, dtype)
    noted(np.copyto, y, x)
    return y


def _cross_entropy(logits: Array, index: Array | None, target: Array | None, probability: Array, loss: Array) -> None:
    bad = _core.cross_entropy(logits, index, target, probability, loss)
    if bad >= 0:
        assert index is not None
        raise UsageError(f"label {index[bad]} of sample {bad} is outside 0 ... {logits.shape[1] - 1}")


def softmax_cross_entropy_backward(saved: Any, scale: float | Array = 1.0) -> Array:
    """Return the gradient of the logits, times `scale`, a number or an array of one element."""
    probability, index, target = saved
    dlogits = empty(probability.shape, probability.dtype)
    noted(_cross_entropy_backward, probability, index, target, scale, dlogits)
    return dlogits


def _cross_entropy_backward(
    probability: Array, index: Array | None, target: Array | None, scale: float | Array, dlogits: Array
) -> None:
    factor = scale.item() if isinstance(scale, np.ndarray) else scale
    _core.cross_entropy_backward(probability, index, target, factor / max(len(probability), 1), dlogits)


def update(rule: str, param: Array, grad: Array, slots: Sequence[Array | None], *values: float) -> None:
    """Update `param` and `slots` in place by one of these rules of `optim`, which says how; `grad` does not change.

    | rule | slots, of the shape of `param` | values |
    | --- | --- | --- |
    | "sgd" | momentum buffer or None | lr, momentum, dampening, weight_decay, nesterov |
    | "adam" | m, v | step from 1 on, lr, beta_1, beta_2, epsilon, weight_decay |
    | "rmsprop" | running mean square | lr, rho, epsilon, weight_decay |
    | "adagrad" | sum of squares | lr, epsilon, weight_decay |
    """
    getattr(_core, rule)(param, grad, *slots, *values)
