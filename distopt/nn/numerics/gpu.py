"""Kernels for CuPy arrays of float32: CuPy's functions, kernels of `distopt.kernels.cuda`, and cuBLAS for products.

The functions, their conventions and errors are those of `distopt.nn.numerics.cpu`; differences are noted here. They
work on CuPy's current stream, and nothing waits for the device, so an invalid label or index is found late: what is
computed from it is then NaN, and `Device.check` raises when a value is next read from the device. Sums run in an order
that shapes alone determine, without atomics, so equal inputs give equal bits on equal devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from math import sqrt
from typing import Any

import cupy
import numpy as np

from ...errors import UsageError
from ...kernels.cuda import THREADS, check_device, launch_each, launch_lanes, launch_planes
from ..devices.device import device_of
from . import gpu_images
from .cpu import SavedLinear, SavedNorm, Update
from .gpu_base import Array, checked, checked_or_none, finish, product, relu_backward

empty = cupy.empty
conv2d, conv2d_backward = gpu_images.conv2d, gpu_images.conv2d_backward
max_pool2d, max_pool2d_backward = gpu_images.max_pool2d, gpu_images.max_pool2d_backward
avg_pool2d, avg_pool2d_backward = gpu_images.avg_pool2d, gpu_images.avg_pool2d_backward


# -- half precision ----------------------------------------------------------------------------------------------------
def to_half(x: Array) -> Array:
    return x.astype(np.float16)


def from_half(x: Array) -> Array:
    return x.astype(np.float32)


# -- indices -----------------------------------------------------------------------------------------------------------
def check_index(index: Array, length: int, axis: int) -> Array | None:
    """As `cpu.check_index`; returns where an index is out of range, which CuPy would take modulo the length."""
    outside, found = cupy.empty(index.shape, np.bool_), device_of(index).out_of_range.ctypes.data
    launch_each(
        "check_index", index.size, checked(index, index.shape, np.int64), index.size, length, axis, outside, found
    )
    return outside


# -- rows --------------------------------------------------------------------------------------------------------------
def linear(x: Array, w: Array, b: Array | None, relu: bool = False) -> tuple[Array, Any]:
    """As `cpu.linear`; bias and ReLU are a pass of their own."""
    if x.ndim != 2 or not x.shape[1]:
        raise UsageError(f"a linear layer takes inputs of the shape [N, in]; got {list(x.shape)}")
    checked(x, x.shape)
    checked(w, (x.shape[1], w.shape[1]))
    checked_or_none(b, (w.shape[1],))
    y = product(x, w)
    finish(y, 1, b, relu)
    return y, SavedLinear(x, w, y if relu else None)


def linear_backward(dy: Array, saved: Any, dw: Array | None, db: Array | None, need_dx: bool = True) -> Array | None:
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
    return cupy.maximum(checked(x, x.shape), 0)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + cupy.exp(-x))


def sigmoid_backward(dy: Array, y: Array) -> Array:
    return dy * y * (1 - y)


def _matrix(x: Array) -> tuple[int, int]:
    """Rows and columns of scores."""
    if x.ndim != 2 or x.shape[1] < 1:
        raise ValueError(f"softmax needs rows of at least one class; got the shape {x.shape}")
    return x.shape[0], x.shape[1]


def softmax(x: Array) -> Array:
    _matrix(x)
    y = cupy.exp(x - x.max(axis=1, keepdims=True))
    return y / y.sum(axis=1, keepdims=True)


def softmax_cross_entropy(logits: Array, labels: Array) -> tuple[Array, Any]:
    """As `cpu.softmax_cross_entropy`; an invalid label makes the loss NaN, see the module."""
    rows, columns = _matrix(checked(logits, logits.shape))
    index = target = None
    if labels.ndim == 2:
        target = checked(cupy.ascontiguousarray(labels, np.float32), logits.shape)
    elif labels.dtype.kind in "biu":
        index = checked(cupy.ascontiguousarray(labels, np.int64), (rows,), np.int64)
    else:
        raise TypeError(f"labels are class indices of an integer type, not {labels.dtype}")
    gradient, losses = cupy.empty(logits.shape, np.float32), cupy.empty(rows, np.float64)
    found = device_of(logits).out_of_range.ctypes.data
    launch_lanes("cross_entropy", rows, columns, logits, index, target, rows, columns, gradient, losses, found, most=32)
    return losses.sum(dtype=np.float64, out=cupy.empty((), np.float32)), gradient


def softmax_cross_entropy_backward(saved: Any, scale: float | Array = 1.0) -> Array:
    """As `cpu.softmax_cross_entropy_backward`; the host does not wait for a `scale` on the device."""
    return saved * scale


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
    relu: bool = False,
    plus: Array | None = None,
) -> tuple[Array, Any]:
    n, c, h, w = x.shape
    if training and n * h * w == 1:
        raise UsageError("batch normalization needs more than one value per channel to train; use a larger batch")
    for array in (gamma, beta, running_mean, running_var):
        checked(array, (c,))
    y = cupy.empty(checked(x, x.shape).shape, np.float32)
    if training and x.size:
        mean, inverse = cupy.empty((2, c), np.float32)
        results = mean, inverse, running_mean, running_var, momentum, eps
        launch_each("channel_moments", c, (n, c), n * h * w, *_plane_sums(x, x), *results)
    else:
        mean, inverse = running_mean.copy(), 1 / cupy.sqrt(running_var + eps)
    given = (n, c), h * w, x, mean, inverse, gamma, beta, checked_or_none(plus, x.shape), relu, y
    launch_planes("normalize", n * c, h * w, *given)
    return y, SavedNorm(x, gamma, mean, inverse, training, beta if relu and plus is None else None)


def batch_norm2d_backward(dy: Array, saved: Any, dgamma: Array, dbeta: Array) -> Array:
    x, gamma, mean, inverse, training, beta = saved
    n, c, h, w = x.shape
    dx = cupy.empty(checked(dy, x.shape).shape, np.float32)
    sums = checked(dbeta, (c,)), checked(dgamma, (c,))
    launch_each("channel_sums", c, (n, c), *_plane_sums(dy, x, mean, inverse, gamma, beta), *sums)
    given = (n, c), h * w, dy, x, mean, inverse, gamma, beta, training, dgamma, dbeta, dx
    launch_planes("normalize_backward", n * c, h * w, *given)
    return dx


def _plane_sums(a: Array, b: Array, *normal: Array | None) -> Array:
    """The sums of a and of a * b over each plane, [2, N, C] in float64; see the kernel for mean ... beta."""
    n, c, h, w = a.shape
    sums = cupy.empty((2, n, c), np.float64)
    launch_lanes("plane_sums", n * c, h * w, n * c, c, h * w, a, b, *(normal or [None] * 4), *sums)
    return sums


def channel_sums(x: Array) -> Array:
    """As `cpu.channel_sums`; computed in float64 throughout."""
    if not x.size:
        return cupy.zeros(2 * x.shape[1] + 1)
    mean, var = (take(axis=(0, 2, 3), dtype=cupy.float64) for take in (x.mean, x.var))
    return cupy.concatenate([mean, var + mean * mean, cupy.ones(1)]) * (x.size // x.shape[1])


# -- updates -----------------------------------------------------------------------------------------------------------
UPDATES_AT_ONCE = 96  # Updates in update.cu; the arguments of a kernel have 4,096 bytes


def update(rule: str, several: Sequence[Update], *values: float, gate: Array | None = None) -> None:
    """As `cpu.update`; the gate is read on the device."""
    gate, coefficients = checked_or_none(gate, (), np.bool_), _COEFFICIENTS[rule](*values)
    device = cupy.cuda.runtime.getDevice()
    for first in range(0, len(several), UPDATES_AT_ONCE):
        some = several[first : first + UPDATES_AT_ONCE]
        fields = [[0] * UPDATES_AT_ONCE for _ in range(5)]
        for i, (param, grad, slots) in enumerate(some):
            for field, array in zip(fields, (param, grad, *slots), strict=False):
                if (given := checked_or_none(array, param.shape)) is not None:
                    check_device(given, device)
                    field[i] = given.data.ptr
            fields[4][i] = param.size
        largest = max(fields[4])
        # Blocks for the elements of the largest, and rows of the grid for parameters.
        launch_planes(
            "rmsprop" if rule == "adagrad" else rule, len(some), min(largest, THREADS << 12), gate, chain(*fields),
            *coefficients,
        )  # fmt: skip


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
