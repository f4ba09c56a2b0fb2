"""Kernels for CuPy arrays: from `distopt._cuda`, and cuBLAS for products, on the current stream of CuPy.

The functions, their conventions and errors are those of `distopt.nn.kernels.cpu`; differences are noted here. Nothing
waits for the device, so an invalid label is found late: the loss and its gradients are then NaN, and
`Device.check` raises when a value is next read from the device.

A convolution is a cuDNN plan if there is one (`gpu_cudnn.plan`), with bias, ReLU and pooling by kernels of
`distopt._cuda`. Else it is lowered: a product with the lowered images, `columns` [C * kh * kw, images * places], made
in chunks of images that bound the memory. Sums run in an order that shapes alone determine, without atomics, so equal
inputs give equal bits on equal devices; chunks of gradients are added in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import cupy
import numpy as np

from ...errors import UsageError
from ..devices.label_flag import label_flag
from . import gpu_cudnn
from .cpu import SavedLinear, SavedLoss, SavedNorm
from .geometry import Pair, out_size, pool_out
from .gpu_base import Array, address_of, address_or_null, code_of, current_stream, native, product

Sizes: TypeAlias = tuple[int, ...]  # h, w, kh, kw, sh, sw, ph, pw, oh, ow: see csrc/cuda/layers.h

SCRATCH_BYTES = 1 << 28  # for the lowered images of a chunk; one image may take more

empty = cupy.empty


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
    address_of(x, x.shape, x.dtype)
    address_of(w, (x.shape[1], w.shape[1]), x.dtype)
    bias = address_or_null(b, (w.shape[1],), x.dtype)
    y = product(x, w)
    if bias or relu:
        native.add_bias(code_of(x), y.data.ptr, bias, len(x), w.shape[1], relu, current_stream())
    return y, SavedLinear(x, w, y if relu else None)


def linear_backward(dy: Array, saved: Any, dw: Array | None, db: Array | None, need_dx: bool = True) -> Array | None:
    """See `cpu.linear_backward`."""
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
    """See `cpu.relu`."""
    return _mapped(native.relu, x)


def relu_backward(dy: Array, y: Array) -> Array:
    """See `cpu.relu_backward`."""
    return _mapped(native.relu_backward, dy, y)


def sigmoid(x: Array) -> Array:
    """See `cpu.sigmoid`."""
    return _mapped(native.sigmoid, x)


def sigmoid_backward(dy: Array, y: Array) -> Array:
    """See `cpu.sigmoid_backward`."""
    return _mapped(native.sigmoid_backward, dy, y)


def _mapped(kernel: Callable[..., None], *xs: Array) -> Array:
    shape, dtype = xs[0].shape, xs[0].dtype
    y = cupy.empty(shape, dtype)
    addresses = [address_of(x, shape, dtype) for x in xs]
    kernel(code_of(y), *addresses, y.data.ptr, y.size, current_stream())
    return y


def _matrix(x: Array) -> tuple[int, int]:
    """Rows and columns of scores."""
    if x.ndim != 2 or x.shape[1] < 1:
        raise ValueError(f"softmax needs rows of at least one class; got the shape {x.shape}")
    return x.shape[0], x.shape[1]


def softmax(x: Array) -> Array:
    """See `cpu.softmax`."""
    rows, columns = _matrix(x)
    y = cupy.empty(x.shape, x.dtype)
    native.softmax(code_of(x), address_of(x, x.shape, x.dtype), y.data.ptr, rows, columns, current_stream())
    return y


def softmax_cross_entropy(logits: Array, labels: Array) -> tuple[Array, Any]:
    """See `cpu.softmax_cross_entropy`; an invalid label makes the loss NaN, see the module."""
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


class _Conv(NamedTuple):
    x: Array
    w: Array
    window: Sizes
    y: Array | None  # with ReLU, and pooled
    pooling: tuple[Array, Sizes] | None  # where the maxima were, and its window


class _SavedPool(NamedTuple):
    x_shape: tuple[int, ...]
    window: Sizes
    taken: Array | None  # of max pooling


# -- convolution -------------------------------------------------------------------------------------------------------
def _chunks(images: int, columns_bytes: int, places: int) -> Iterator[tuple[int, int]]:
    """First image and number of images of each chunk; `columns_bytes` and `places` are those of one image."""
    count = max(1, min(SCRATCH_BYTES // max(columns_bytes, 1), (2**31 - 1) // max(places, 1)))
    for first in range(0, images, count):
        yield first, min(count, images - first)


def _lowered(x: Array, window: Sizes, first: int, images: int) -> Array:
    channels, (h, w, kh, kw), places = x.shape[1], window[:4], window[8] * window[9]
    columns = cupy.empty((channels * kh * kw, images * places), x.dtype)
    address = x.data.ptr + first * channels * h * w * x.itemsize
    native.lower(code_of(x), (images, channels), window, address, columns.data.ptr, current_stream())
    return columns


def _results(x: Array, w: Array, window: Sizes, y: Array | None = None) -> Iterator[tuple[int, int, Array, bool]]:
    """First image, number of images, their convolution, and whether that is rows [M, images * places].

    Else it is [N, M, oh, ow] for all images at once, in `y` if given.
    """
    if (convolve := gpu_cudnn.plan("fprop", x, w, window)) is not None:
        y = cupy.empty((len(x), len(w), *window[8:]), x.dtype) if y is None else y
        convolve(x, w, y)
        yield 0, len(x), y, False
        return
    matrix = w.reshape(len(w), -1)
    places = window[8] * window[9]
    for first, images in _chunks(len(x), matrix.shape[1] * places * x.itemsize, places):
        yield first, images, product(matrix, _lowered(x, window, first, images)), True


def _convolution(x: Array, w: Array, b: Array | None, stride: Pair, padding: Pair) -> tuple[Sizes, int]:
    """Window of a convolution and address of its bias, of arrays that fit."""
    kernel = (w.shape[2], w.shape[3])
    size = out_size(x.shape, kernel, stride, padding)
    address_of(x, x.shape, x.dtype)
    address_of(w, (len(w), x.shape[1], *kernel), x.dtype)
    return (*x.shape[2:], *kernel, *stride, *padding, *size), address_or_null(b, (len(w),), x.dtype)


def conv2d(
    x: Array,
    w: Array,
    b: Array | None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    relu: bool = False,
    pool: tuple[Pair, Pair, Pair] | None = None,
) -> tuple[Array, Any]:
    """See `cpu.conv2d`; bias, ReLU and pooling are one pass over the product."""
    window, bias = _convolution(x, w, b, stride, padding)
    m, places, shape = len(w), window[8] * window[9], (len(x), len(w), *window[8:])
    pooling = None
    if pool is not None:
        kernel, step, border = pool
        shape = pool_out(shape, kernel, step, border)
        pooling = cupy.empty(shape, cupy.uint8), (*window[8:], *kernel, *step, *border, *shape[2:])
    y = cupy.empty(shape, x.dtype)
    for first, images, result, rows in _results(x, w, window, y if pool is None else None):
        at = first * prod(shape[1:])
        given, to = (result.data.ptr, rows, bias, relu), y.data.ptr + at * y.itemsize
        if pooling is not None:
            taken, over = pooling
            native.max_pool(code_of(x), (images, m), over, *given, to, taken.data.ptr + at, current_stream())
        elif rows or bias or relu:
            native.spread(code_of(x), (images, m), places, *given, to, current_stream())
    return y, _Conv(x, w, window, y if relu else None, pooling)


def conv2d_backward(dy: Array, saved: Any, dw: Array | None, db: Array | None, need_dx: bool = True) -> Array | None:
    """See `cpu.conv2d_backward`; by cuDNN if it has plans for all gradients that are needed."""
    x, w, window, y, pooling = saved
    m, size = len(w), window[8:]
    shape = (len(x), m, *size) if pooling is None else pooling[0].shape
    slope, result = address_of(dy, shape, x.dtype), address_or_null(y, shape, x.dtype)

    def collect(first: int, images: int, rows: bool) -> Array:
        if pooling is None and not rows and not result:
            return dy
        at = first * prod(shape[1:])
        from_dy, from_y = slope + at * dy.itemsize, result and result + at * dy.itemsize
        before = cupy.empty((m, images * prod(size)) if rows else (images, m, *size), dy.dtype)
        to = before.data.ptr, rows, current_stream()
        if pooling is None:
            native.collect(code_of(dy), (images, m), prod(size), from_dy, from_y, *to)
        else:
            taken, over = pooling
            native.max_pool_backward(code_of(dy), (images, m), over, from_dy, from_y, taken.data.ptr + at, *to)
        return before

    return _convolution_backward(saved, collect, dw, db, need_dx)


def _convolution_backward(
    saved: _Conv, collect: Callable[[int, int, bool], Array], dw: Array | None, db: Array | None, need_dx: bool
) -> Array | None:
    """The gradients of a convolution.

    Args:
        saved: of the convolution.
        collect: gives the gradient of its result, before bias and ReLU, for a number of images from a first one on: as
            rows [M, images * places], or as [images, M, oh, ow], which is asked for of all images only.
        dw: overwritten, if given.
        db: overwritten, if given.
        need_dx: whether the gradient of x is returned.
    """
    x, w, window, *_ = saved
    address_or_null(dw, w.shape, x.dtype)
    sums = address_or_null(db, (len(w),), x.dtype)
    dx = cupy.empty(x.shape, x.dtype) if need_dx else None
    to_w = None if dw is None else gpu_cudnn.plan("wgrad", x, w, window)
    to_x = gpu_cudnn.plan("dgrad", x, w, window) if need_dx else None
    if (dw is not None and to_w is None) or (need_dx and to_x is None):
        _lowered_backward(saved, collect, dw, db, dx)
        return dx
    slope = collect(0, len(x), False)
    if to_w is not None:
        to_w(x, slope, dw)
    if sums:
        _channel_sums(slope, (len(x), len(w)), window[8] * window[9], False, False, sums)
    if to_x is not None:
        to_x(slope, w, dx)
    return dx


def _channel_sums(x: Array, batch: Pair, pixels: int, rows: bool, add: bool, sums: int) -> None:
    """The gradient of a bias, at the address `sums`; x are `rows` or images."""
    workspace = _workspace(batch[1])
    given = x.data.ptr, rows, add, workspace.data.ptr, sums
    native.channel_sums(code_of(x), batch, pixels, *given, current_stream())


def _workspace(channels: int) -> Array:
    """The workspace of sums over channels."""
    return cupy.empty(2 * max(channels, native.channel_blocks), cupy.float64)


def _lowered_backward(
    saved: _Conv, collect: Callable[[int, int, bool], Array], dw: Array | None, db: Array | None, dx: Array | None
) -> None:
    """As `_convolution_backward`; dx is overwritten, if given."""
    x, w, window, *_ = saved
    matrix = w.reshape(len(w), -1)
    places = window[8] * window[9]
    if not len(x):
        for sums in (dw, db):
            if sums is not None:
                sums.fill(0)
    for first, images in _chunks(len(x), matrix.shape[1] * places * x.itemsize, places):
        rows = collect(first, images, True)
        if dw is not None:
            columns = _lowered(x, window, first, images)
            product(rows, columns, dw.reshape(len(w), -1), b_transposed=True, accumulate=first > 0)
        else:
            columns = cupy.empty((matrix.shape[1], images * places), x.dtype)
        if db is not None:
            _channel_sums(rows, (images, len(w)), places, True, first > 0, db.data.ptr)
        if dx is not None:
            product(matrix, rows, columns, a_transposed=True)
            address = dx.data.ptr + first * (dx.nbytes // len(x))
            native.gather_columns(code_of(x), (images, x.shape[1]), window, columns.data.ptr, address, current_stream())


# -- pooling -----------------------------------------------------------------------------------------------------------
def _pooling(x: Array, kernel: Pair, stride: Pair, padding: Pair) -> tuple[int, tuple[int, ...], Sizes]:
    """Address of x, shape of the result, and the window."""
    shape = pool_out(x.shape, kernel, stride, padding)
    return address_of(x, x.shape, x.dtype), shape, (*x.shape[2:], *kernel, *stride, *padding, *shape[2:])


def max_pool2d(x: Array, kernel: Pair, stride: Pair, padding: Pair = (0, 0)) -> tuple[Array, Any]:
    """See `cpu.max_pool2d`."""
    address, shape, window = _pooling(x, kernel, stride, padding)
    y, taken = cupy.empty(shape, x.dtype), cupy.empty(shape, cupy.uint8)
    addresses = y.data.ptr, taken.data.ptr
    native.max_pool(code_of(x), shape[:2], window, address, False, 0, False, *addresses, current_stream())
    return y, _SavedPool(x.shape, window, taken)


def max_pool2d_backward(dy: Array, saved: Any) -> Array:
    """See `cpu.max_pool2d_backward`."""
    dx = cupy.empty(saved.x_shape, dy.dtype)
    addresses = address_of(dy, saved.taken.shape, dy.dtype), 0, saved.taken.data.ptr, dx.data.ptr
    native.max_pool_backward(code_of(dy), saved.x_shape[:2], saved.window, *addresses, False, current_stream())
    return dx


def avg_pool2d(x: Array, kernel: Pair, stride: Pair, padding: Pair = (0, 0)) -> tuple[Array, Any]:
    """See `cpu.avg_pool2d`."""
    address, shape, window = _pooling(x, kernel, stride, padding)
    y = cupy.empty(shape, x.dtype)
    native.avg_pool(code_of(x), shape[:2], window, address, y.data.ptr, current_stream())
    return y, _SavedPool(x.shape, window, None)


def avg_pool2d_backward(dy: Array, saved: Any) -> Array:
    """See `cpu.avg_pool2d_backward`."""
    dx = cupy.empty(saved.x_shape, dy.dtype)
    address = address_of(dy, (*saved.x_shape[:2], *saved.window[8:]), dy.dtype)
    native.avg_pool_backward(code_of(dy), saved.x_shape[:2], saved.window, address, dx.data.ptr, current_stream())
    return dx


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
    mean, inverse = cupy.empty((c,), x.dtype), cupy.empty((c,), x.dtype)
    y = cupy.empty(x.shape, x.dtype)
    workspace = _workspace(c)
    given, moments = (code_of(x), (n, c), h * w, address_of(x, x.shape, x.dtype)), (mean.data.ptr, inverse.data.ptr)
    running = address_of(running_mean, (c,), x.dtype), address_of(running_var, (c,), x.dtype)
    results = workspace.data.ptr, *moments, *running
    native.channel_moments(*given, *results, momentum, eps, training, current_stream())
    scale = address_of(gamma, (c,), x.dtype), address_of(beta, (c,), x.dtype)
    native.normalize(*given, *moments, *scale, y.data.ptr, current_stream())
    return y, SavedNorm(x, gamma, mean, inverse, training)


def batch_norm2d_backward(dy: Array, saved: Any, dgamma: Array, dbeta: Array) -> Array:
    """See `cpu.batch_norm2d_backward`."""
    x, gamma, mean, inverse, training = saved
    n, c, h, w = x.shape
    dx, workspace = cupy.empty(x.shape, x.dtype), _workspace(c)
    given = address_of(dy, x.shape, x.dtype), x.data.ptr, mean.data.ptr, inverse.data.ptr, gamma.data.ptr, training
    results = workspace.data.ptr, address_of(dgamma, (c,), x.dtype), address_of(dbeta, (c,), x.dtype), dx.data.ptr
    native.normalize_backward(code_of(x), (n, c), h * w, *given, *results, current_stream())
    return dx


def channel_sums(x: Array) -> Array:
    """See `cpu.channel_sums`; computed in float64 throughout."""
    if not x.size:
        return cupy.zeros(2 * x.shape[1] + 1)
    mean, var = (take(axis=(0, 2, 3), dtype=cupy.float64) for take in (x.mean, x.var))
    return cupy.concatenate([mean, var + mean * mean, cupy.ones(1)]) * (x.size // x.shape[1])


# -- updates -----------------------------------------------------------------------------------------------------------
def update(rule: str, param: Array, grad: Array, slots: Sequence[Array | None], *values: float) -> None:
    """See `cpu.update`."""
    addresses = [address_or_null(array, param.shape, param.dtype) for array in (param, grad, *slots)]
    getattr(native, rule)(code_of(param), *addresses, param.size, *values, current_stream())
