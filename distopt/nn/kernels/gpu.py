"""Kernels for CuPy arrays of float32: from `distopt.kernels.cuda`, and cuBLAS for products, on CuPy's current stream.

The functions, their conventions and errors are those of `distopt.nn.kernels.cpu`; differences are noted here. Nothing
waits for the device, so an invalid label is found late: the loss and its gradients are then NaN, and
`Device.check` raises when a value is next read from the device. Sums run in an order that shapes alone determine,
without atomics, so equal inputs give equal bits on equal devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import cupy
import numpy as np

from ...errors import UsageError
from ...kernels.cuda import (
    THREADS,
    are_aligned,
    launch,
    launch_each,
    launch_planes,
    launch_rows,
    launch_units,
)
from ..devices.label_flag import label_flag
from . import gpu_images
from .cpu import SavedLinear, SavedLoss, SavedNorm
from .gpu_base import Array, checked, checked_or_none, product

empty = cupy.empty
conv2d, conv2d_backward = gpu_images.conv2d, gpu_images.conv2d_backward
max_pool2d, max_pool2d_backward = gpu_images.max_pool2d, gpu_images.max_pool2d_backward
avg_pool2d, avg_pool2d_backward = gpu_images.avg_pool2d, gpu_images.avg_pool2d_backward


# -- half precision ----------------------------------------------------------------------------------------------------
def to_half(x: Array) -> Array:
    """See `cpu.to_half`."""
    return x.astype(np.float16)


def from_half(x: Array) -> Array:
    """See `cpu.from_half`."""
    return x.astype(np.float32)


# -- rows --------------------------------------------------------------------------------------------------------------
def linear(x: Array, w: Array, b: Array | None, relu: bool = False) -> tuple[Array, Any]:
    """See `cpu.linear`; a product by cuBLAS, then one pass for bias and ReLU."""
    if x.ndim != 2 or not x.shape[1]:
        raise UsageError(f"a linear layer takes inputs of the shape [N, in]; got {list(x.shape)}")
    checked(x, x.shape)
    checked(w, (x.shape[1], w.shape[1]))
    checked_or_none(b, (w.shape[1],))
    y = product(x, w)
    if b is not None or relu:
        aligned = are_aligned(y) and w.shape[1] * y.itemsize % 16 == 0
        launch_units("add_bias", y.size, aligned, y, b, y, y.size, w.shape[1], relu)
    return y, SavedLinear(x, w, y if relu else None)


def linear_backward(dy: Array, saved: Any, dw: Array | None, db: Array | None, need_dx: bool = True) -> Array | None:
    """See `cpu.linear_backward`."""
    x, w, y = saved
    checked(dy, (len(x), w.shape[1]))
    checked_or_none(dw, w.shape)
    if y is not None:
        dy = relu_backward(dy, y)
    if dw is not None:
        product(x, dy, dw, a_transposed=True)
    if db is not None:
        dy.sum(axis=0, out=checked(db, (w.shape[1],)))
    return product(dy, w, b_transposed=True) if need_dx else None


def relu(x: Array) -> Array:
    """See `cpu.relu`."""
    y = _like(x)
    launch_units("add_bias", y.size, are_aligned(x, y), x, None, y, y.size, 1, True)
    return y


def relu_backward(dy: Array, y: Array) -> Array:
    """See `cpu.relu_backward`."""
    dx = _like(dy, y)
    launch_units("relu_backward", dx.size, are_aligned(dy, y, dx), dy, y, dx, dx.size)
    return dx


def sigmoid(x: Array) -> Array:
    """See `cpu.sigmoid`."""
    return 1 / (1 + cupy.exp(-x))


def sigmoid_backward(dy: Array, y: Array) -> Array:
    """See `cpu.sigmoid_backward`."""
    return dy * y * (1 - y)


def _like(*xs: Array) -> Array:
    """A new array of the shape and type that all of `xs` must have."""
    for x in xs:
        checked(x, xs[0].shape)
    return cupy.empty(xs[0].shape, np.float32)


def _matrix(x: Array) -> tuple[int, int]:
    """Rows and columns of scores."""
    if x.ndim != 2 or x.shape[1] < 1:
        raise ValueError(f"softmax needs rows of at least one class; got the shape {x.shape}")
    return x.shape[0], x.shape[1]


def softmax(x: Array) -> Array:
    """See `cpu.softmax`."""
    _matrix(x)
    y = cupy.exp(x - x.max(axis=1, keepdims=True))
    return y / y.sum(axis=1, keepdims=True)


def softmax_cross_entropy(logits: Array, labels: Array) -> tuple[Array, Any]:
    """See `cpu.softmax_cross_entropy`; an invalid label makes the loss NaN, see the module."""
    rows, columns = _matrix(logits)
    index = target = None
    if labels.ndim == 2:
        target = cupy.ascontiguousarray(labels, np.float32)
    elif labels.dtype.kind in "iu":
        index = cupy.ascontiguousarray(labels, cupy.int64)
    else:
        raise TypeError(f"labels are class indices of an integer type, not {labels.dtype}")
    checked_or_none(index, (rows,), np.int64)
    checked_or_none(target, logits.shape)
    probability, loss = _like(logits), cupy.empty((), np.float32)
    row_loss = cupy.empty((rows,), cupy.float64)
    launch_rows("cross_entropy", rows, logits, index, target, rows, columns, probability, row_loss)
    flag = label_flag(logits.device.id).address
    launch("mean_loss", (1,), (THREADS,), row_loss, index, rows, columns, loss, flag)
    return loss, SavedLoss(probability, index, target)


def softmax_cross_entropy_backward(saved: Any, scale: float | Array = 1.0) -> Array:
    """See `cpu.softmax_cross_entropy_backward`; the host does not wait for a `scale` on the device."""
    probability, index, target = saved
    rows, columns = probability.shape
    dlogits = _like(probability)
    on_device = isinstance(scale, cupy.ndarray)
    factor = (1.0 if on_device else float(scale)) / max(rows, 1)
    given = probability, index, target, checked(scale.reshape(()), ()) if on_device else None  # type: ignore[union-attr]
    launch_rows("cross_entropy_backward", rows, *given, factor, rows, columns, dlogits)
    return dlogits


# -- normalization -----------------------------------------------------------------------------------------------------
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
    """See `cpu.batch_norm2d`."""
    n, c, h, w = x.shape
    if training and n * h * w == 1:
        raise UsageError("batch normalization needs more than one value per channel to train; use a larger batch")
    for array in (gamma, beta, running_mean, running_var):
        checked(array, (c,))
    y = _like(x)
    if training and x.size:
        mean, inverse = cupy.empty((c,), np.float32), cupy.empty((c,), np.float32)
        given, parts = ((n, c), h * w), gpu_images.parts_of((n, c), h * w)
        sums, squares = cupy.empty((2, c, parts), cupy.float64)
        launch("product_parts", (c, parts), (THREADS,), *given, x, x, None, None, sums, squares)
        results = mean, inverse, running_mean, running_var, momentum, eps
        launch_rows("channel_moments", c, *given, sums, squares, parts, *results)
    else:
        mean, inverse = running_mean.copy(), 1 / cupy.sqrt(running_var + eps)
    launch_planes("normalize", n * c, h * w, (n, c), h * w, x, mean, inverse, gamma, beta, y)
    return y, SavedNorm(x, gamma, mean, inverse, training)


def batch_norm2d_backward(dy: Array, saved: Any, dgamma: Array, dbeta: Array) -> Array:
    """See `cpu.batch_norm2d_backward`."""
    x, gamma, mean, inverse, training = saved
    n, c, h, w = x.shape
    checked(dgamma, (c,))
    checked(dbeta, (c,))
    dx, parts = _like(x, dy), gpu_images.parts_of((n, c), h * w)
    given = (n, c), h * w, dy, x, mean, inverse
    sums, projections = cupy.empty((2, c, parts), cupy.float64)
    if c:
        launch("product_parts", (c, parts), (THREADS,), *given, sums, projections)
    for parts_of_sum, result in ((sums, dbeta), (projections, dgamma)):
        launch_rows("channel_sums", c, (n, c), parts_of_sum, parts, False, result)
    results = gamma, training, dgamma, dbeta, dx
    launch_planes("normalize_backward", n * c, h * w, *given, *results)
    return dx


def channel_sums(x: Array) -> Array:
    """See `cpu.channel_sums`; computed in float64 throughout."""
    if not x.size:
        return cupy.zeros(2 * x.shape[1] + 1)
    mean, var = (take(axis=(0, 2, 3), dtype=cupy.float64) for take in (x.mean, x.var))
    return cupy.concatenate([mean, var + mean * mean, cupy.ones(1)]) * (x.size // x.shape[1])


# -- updates -----------------------------------------------------------------------------------------------------------
def update(
    rule: str, param: Array, grad: Array, slots: Sequence[Array | None], *values: float, gate: Array | None = None
) -> None:
    """See `cpu.update`; the gate is read on the device."""
    arrays = [checked_or_none(array, param.shape) for array in (param, grad, *slots)]
    gate = checked_or_none(gate, (), np.bool_)
    kernel = "rmsprop" if rule == "adagrad" else rule
    launch_each(kernel, param.size, gate, *arrays, param.size, *_COEFFICIENTS[rule](*values))


def _adam_coefficients(
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float
) -> tuple[float, ...]:
    if step < 1:
        raise ValueError(f"Adam counts steps from 1; got step {step}")
    corrections = lr / (1 - beta1**step), sqrt(1 - beta2**step)
    return *corrections, beta1, 1 - beta1, beta2, 1 - beta2, eps, weight_decay


# By rule, the coefficients that its kernel in update.cu takes, computed from the values of `cpu.update`.
_COEFFICIENTS: dict[str, Callable[..., tuple[float, ...]]] = {
    "sgd": lambda lr, momentum, dampening, decay, nesterov: (lr, momentum, 1 - dampening, decay, nesterov),
    "adam": _adam_coefficients,
    "rmsprop": lambda lr, rho, eps, decay: (lr, rho, 1 - rho, eps, decay),
    "adagrad": lambda lr, eps, decay: (lr, 1.0, 1.0, eps, decay),
}
