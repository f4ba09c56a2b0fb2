"""Convolution and pooling of CuPy arrays, a part of `gpu`.

A convolution is lowered: a product with the lowered images, `columns` [C * kh * kw, images * places], made in chunks of
images that bound the memory; with groups of channels, a product for each. Chunks of gradients are added in their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import cupy
import numpy as np

from ...kernels.cuda import THREADS, blocks, launch, launch_planes, launch_rows
from .geometry import Pair, out_size, pool_out
from .gpu_base import Array, checked, checked_or_none, product

Sizes: TypeAlias = tuple[int, ...]  # h, w, kh, kw, sh, sw, ph, pw, oh, ow: Window in images.cu

SCRATCH_BYTES = 1 << 28  # for the lowered images of a chunk; one image may take more
CHANNEL_BLOCKS = 1024  # most blocks of a sum over channels: about as many as an H100 holds


class _SavedPool(NamedTuple):
    x_shape: tuple[int, ...]
    window: Sizes
    taken: Array


class _Conv(NamedTuple):
    x: Array
    w: Array
    window: Sizes
    y: Array | None  # with ReLU
    pooling: _SavedPool | None


# -- convolution -------------------------------------------------------------------------------------------------------
def _chunks(images: int, columns_bytes: int, places: int) -> Iterator[tuple[int, int]]:
    """First image and number of images of each chunk; `columns_bytes` and `places` are those of one image."""
    count = max(1, min(SCRATCH_BYTES // max(columns_bytes, 1), (2**31 - 1) // max(places, 1)))
    for first in range(0, images, count):
        yield first, min(count, images - first)


def _column(x: Array, window: Sizes) -> int:
    """Elements of a column of the lowered images."""
    elements: int = x.shape[1] * window[2] * window[3]
    return elements


def _lowered(x: Array, window: Sizes, first: int, images: int) -> Array:
    columns = cupy.empty((_column(x, window), images * window[8] * window[9]), np.float32)
    shape = (images, x.shape[1]), window, x[first : first + images], columns
    launch_planes("lower", len(columns), columns.shape[1], *shape)
    return columns


def _groups(x: Array, w: Array) -> int:
    groups: int = x.shape[1] // max(w.shape[1], 1)
    return max(groups, 1)


def _products(groups: int, *matrices: Array, **options: bool) -> None:
    """`product` for each group, which has a run of the rows of all three matrices."""
    if groups > 1:
        matrices = tuple(matrix.reshape(groups, len(matrix) // groups, matrix.shape[1]) for matrix in matrices)
    product(*matrices, **options)


def _convolution(x: Array, w: Array, b: Array | None, stride: Pair, padding: Pair) -> Sizes:
    """Window of a convolution of arrays that fit."""
    kernel = (w.shape[2], w.shape[3])
    size = out_size(x.shape, kernel, stride, padding)
    checked(x, x.shape)
    groups = _groups(x, w)
    checked(w, (len(w) // groups * groups, x.shape[1] // groups, *kernel))
    checked_or_none(b, (len(w),))
    return (*x.shape[2:], *kernel, *stride, *padding, *size)


def conv2d(
    x: Array,
    w: Array,
    b: Array | None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    relu: bool = False,
    pool: tuple[Pair, Pair, Pair] | None = None,
) -> tuple[Array, Any]:
    """See `cpu.conv2d`; bias and ReLU are one pass over the product, and pooling is another."""
    window = _convolution(x, w, b, stride, padding)
    m, places = len(w), window[8] * window[9]
    y = cupy.empty((len(x), m, *window[8:]), np.float32)
    for first, images in _chunks(len(x), _column(x, window) * places * x.itemsize, places):
        rows = cupy.empty((m, images * places), np.float32)
        _products(_groups(x, w), w.reshape(m, -1), _lowered(x, window, first, images), rows)
        given = (images, m), places, rows, b, relu, y[first : first + images]
        launch_planes("spread", images * m, places, *given)
    pooled, pooling = (y, None) if pool is None else max_pool2d(y, *pool)
    return pooled, _Conv(x, w, window, y if relu else None, pooling)


def conv2d_backward(dy: Array, saved: Any, dw: Array | None, db: Array | None, need_dx: bool = True) -> Array | None:
    """See `cpu.conv2d_backward`."""
    x, w, window, y, pooling = saved
    if pooling is not None:
        dy = max_pool2d_backward(dy, pooling)
    m, groups, places = len(w), _groups(x, w), window[8] * window[9]
    checked(dy, (len(x), m, *window[8:]))
    checked_or_none(dw, w.shape)
    checked_or_none(db, (m,))
    dx = cupy.empty(x.shape, np.float32) if need_dx else None
    if not len(x):
        for sums in (dw, db):
            if sums is not None:
                sums.fill(0)
    for first, images in _chunks(len(x), _column(x, window) * places * x.itemsize, places):
        rows, some = cupy.empty((m, images * places), np.float32), slice(first, first + images)
        given = (images, m), places, dy[some], None if y is None else y[some], rows
        launch_planes("collect", images * m, places, *given)
        if dw is not None:
            columns = _lowered(x, window, first, images)
            _products(groups, rows, columns, dw.reshape(m, -1), b_transposed=True, accumulate=first > 0)
        else:
            columns = cupy.empty((_column(x, window), images * places), np.float32)
        if db is not None:
            _channel_sums(rows, first > 0, db)
        if dx is not None:
            _products(groups, w.reshape(m, -1), rows, columns, a_transposed=True)
            pieces = (images, x.shape[1]), window, columns, dx[some]
            launch_planes("gather_columns", images * x.shape[1], window[0] * window[1], *pieces)
    return dx


def _channel_sums(rows: Array, add: bool, sums: Array) -> None:
    """The gradient of a bias, in `sums`: a row is a channel of a single image."""
    channels, pixels = rows.shape
    parts = parts_of((1, channels), pixels)
    workspace, given = cupy.empty((channels, parts), cupy.float64), (1, channels)
    if channels:
        launch("product_parts", (channels, parts), (THREADS,), given, pixels, rows, None, None, None, workspace, None)
    launch_rows("channel_sums", channels, given, workspace, parts, add, sums)


def parts_of(batch: Pair, pixels: int) -> int:
    """Local. Number of blocks that sum up a channel; it depends on the shape alone."""
    images, channels = batch
    return max(1, min(blocks(images * pixels, 8 * THREADS), CHANNEL_BLOCKS // max(channels, 1)))


# -- pooling -----------------------------------------------------------------------------------------------------------
def _pooling(x: Array, kernel: Pair, stride: Pair, padding: Pair) -> tuple[tuple[int, ...], Sizes]:
    """Shape of the result, and the window."""
    shape = pool_out(x.shape, kernel, stride, padding)
    checked(x, x.shape)
    return shape, (*x.shape[2:], *kernel, *stride, *padding, *shape[2:])


def max_pool2d(x: Array, kernel: Pair, stride: Pair, padding: Pair = (0, 0)) -> tuple[Array, Any]:
    """See `cpu.max_pool2d`."""
    shape, window = _pooling(x, kernel, stride, padding)
    y, taken = cupy.empty(shape, np.float32), cupy.empty(shape, cupy.uint8)
    given = shape[:2], window, x, y, taken
    launch_planes("max_pool", shape[0] * shape[1], shape[2] * shape[3], *given)
    return y, _SavedPool(x.shape, window, taken)


def max_pool2d_backward(dy: Array, saved: Any) -> Array:
    """See `cpu.max_pool2d_backward`."""
    (n, c, h, w), window, taken = saved
    checked(dy, taken.shape)
    dx = cupy.empty(saved.x_shape, np.float32)
    launch_planes("max_pool_backward", n * c, h * w, (n, c), window, dy, taken, dx)
    return dx


def avg_pool2d(x: Array, kernel: Pair, stride: Pair, padding: Pair = (0, 0)) -> tuple[Array, Any]:
    """See `cpu.avg_pool2d`; a convolution of each channel with equal weights."""
    pool_out(x.shape, kernel, stride, padding)
    weights = cupy.full((x.shape[1], 1, *kernel), 1 / (kernel[0] * kernel[1]), np.float32)
    return conv2d(x, weights, None, stride, padding)


def avg_pool2d_backward(dy: Array, saved: Any) -> Array:
    """See `cpu.avg_pool2d_backward`."""
    return conv2d_backward(dy, saved, None, None)
