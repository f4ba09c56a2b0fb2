"""Kernels for CuPy arrays: those of `distopt._cuda`, and cuBLAS for products, on the current stream of CuPy.

The functions, their conventions and errors are those of `distopt.nn.kernels.cpu`; what differs is said here. Nothing
waits for the device, so a label that is no class is found late: the loss and its gradients are then NaN, and
`Device.check` raises when something is next read from the device.

Convolution is in `gpu_images`: by cuDNN, or as a product with lowered images, in chunks of images. Sums run in an order
that shapes alone determine, without atomics, so equal inputs give equal bits on equal devices; chunks of gradients are
added in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from ...errors import UsageError
from ..device import label_flag
from . import cpu
from .cpu import SavedLinear, SavedLoss
from .gpu_base import Array, address_of, address_or_null, code_of, current_stream, native, product
from .gpu_images import *  # noqa: F403 - the other half of this module

__all__ = cpu.__all__

empty = cupy.empty


# -- half precision ----------------------------------------------------------------------------------------------------
def to_half(x: Array) -> Array:
    """As in `cpu`."""
    return x.astype(np.float16)


def from_half(x: Array) -> Array:
    """As in `cpu`."""
    return x.astype(np.float32)


# -- rows --------------------------------------------------------------------------------------------------------------
def linear(x: Array, w: Array, b: Array | None, relu: bool = False) -> tuple[Array, Any]:
    if x.ndim != 2 or not x.shape[1]:
        raise UsageError(f"a linear layer takes inputs of the shape [N, in]; got {list(x.shape)}")
    address_of(x, x.shape, x.dtype)
    address_of(w, (x.shape[1], w.shape[1]), x.dtype)
    bias = address_or_null(b, (w.shape[1],), x.dtype)
    y = product(x, w)
    if bias or relu:
        native.add_bias(code_of(x), y.data.ptr, bias, len(x), w.shape[1], relu, current_stream())
    return y, SavedLinear(x, w, y if relu else None)


def linear_backward(dy: Array, saved: Any, dw: Array | None, db: Array | None, need_dx: bool = True) -> Array | None:
    x, w, y = saved
    address_of(dy, (len(x), w.shape[1]), x.dtype)
    address_or_null(dw, w.shape, x.dtype)
    if y is not None:
        dy = relu_backward(dy, y)
    if dw is not None:
        product(x, dy, dw, a_transposed=True)
    if db is not None:
        sums = address_of(db, (w.shape[1],), x.dtype)
        native.column_sums(code_of(x), dy.data.ptr, len(x), w.shape[1], sums, current_stream())
    return product(dy, w, b_transposed=True) if need_dx else None


def relu(x: Array) -> Array:
    y = cupy.empty(x.shape, x.dtype)
    native.relu(code_of(x), address_of(x, x.shape, x.dtype), y.data.ptr, x.size, current_stream())
    return y


def relu_backward(dy: Array, y: Array) -> Array:
    dx = cupy.empty(dy.shape, dy.dtype)
    addresses = address_of(dy, dy.shape, dy.dtype), address_of(y, dy.shape, dy.dtype), dx.data.ptr
    native.relu_backward(code_of(dy), *addresses, dy.size, current_stream())
    return dx


def sigmoid(x: Array) -> Array:
    y = cupy.empty(x.shape, x.dtype)
    native.sigmoid(code_of(x), address_of(x, x.shape, x.dtype), y.data.ptr, x.size, current_stream())
    return y


def sigmoid_backward(dy: Array, y: Array) -> Array:
    dx = cupy.empty(dy.shape, dy.dtype)
    addresses = address_of(dy, dy.shape, dy.dtype), address_of(y, dy.shape, dy.dtype), dx.data.ptr
    native.sigmoid_backward(code_of(dy), *addresses, dy.size, current_stream())
    return dx


def _matrix(x: Array) -> tuple[int, int]:
    """Rows and columns of scores."""
    if x.ndim != 2 or x.shape[1] < 1:
        raise ValueError(f"softmax needs rows of at least one class; got the shape {x.shape}")
    return x.shape[0], x.shape[1]


def softmax(x: Array) -> Array:
    rows, columns = _matrix(x)
    y = cupy.empty(x.shape, x.dtype)
    native.softmax(code_of(x), address_of(x, x.shape, x.dtype), y.data.ptr, rows, columns, current_stream())
    return y


def softmax_cross_entropy(logits: Array, labels: Array) -> tuple[Array, Any]:
    """See `cpu.softmax_cross_entropy`; a label that is no class makes the loss NaN, see the module."""
    rows, columns = _matrix(logits)
    index = target = None
    if labels.ndim == 2:
        target = cupy.ascontiguousarray(labels, logits.dtype)
    elif labels.dtype.kind in "iu":
        index = cupy.ascontiguousarray(labels, cupy.int64)
    else:
        raise TypeError(f"labels are class indices of an integer type, not {labels.dtype}")
    probability, loss = cupy.empty(logits.shape, logits.dtype), cupy.empty((), logits.dtype)
    row_loss = cupy.empty((rows,), cupy.float64)
    given = address_of(logits, logits.shape, logits.dtype), address_or_null(index, (rows,), np.int64)
    distribution = address_or_null(target, logits.shape, logits.dtype)
    results = probability.data.ptr, row_loss.data.ptr, loss.data.ptr, label_flag(logits.device.id).address
    native.cross_entropy(code_of(logits), *given, distribution, rows, columns, *results, current_stream())
    return loss, SavedLoss(probability, index, target)


def softmax_cross_entropy_backward(saved: Any, scale: float | Array = 1.0) -> Array:
    """See `cpu.softmax_cross_entropy_backward`; a scale on the device is read there."""
    probability, index, target = saved
    rows, columns = probability.shape
    dlogits = cupy.empty(probability.shape, probability.dtype)
    labels = 0 if index is None else index.data.ptr, 0 if target is None else target.data.ptr
    on_device = isinstance(scale, cupy.ndarray)
    address = address_of(scale.reshape(()), (), probability.dtype) if on_device else 0  # type: ignore[union-attr]
    factor = (1.0 if on_device else float(scale)) / max(rows, 1)
    given = probability.data.ptr, *labels, address, factor
    native.cross_entropy_backward(code_of(probability), *given, rows, columns, dlogits.data.ptr, current_stream())
    return dlogits


# -- updates -----------------------------------------------------------------------------------------------------------
def update(rule: str, param: Array, grad: Array, slots: Sequence[Array | None], *values: float) -> None:
    addresses = [address_or_null(array, param.shape, param.dtype) for array in (param, grad, *slots)]
    getattr(native, rule)(code_of(param), *addresses, param.size, *values, current_stream())
