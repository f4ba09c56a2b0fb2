"""Convolution and pooling of CuPy arrays, a part of `gpu`.

A convolution is lowered: a product with the lowered images, `columns` [C * kh * kw, images * places], made in chunks of
images that bound the memory; with groups of channels, a product for each. Chunks of gradients are added in their order.
A convolution of 1 x 1 without stride, border or groups is *pointwise*: a product for each image, without columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple, TypeAlias

import cupy
import numpy as np

from ...kernels.cuda import launch_planes
from .geometry import Pair, out_size, pool_out
from .gpu_base import Array, checked, checked_or_none, finish, product, relu_backward

Sizes: TypeAlias = tuple[int, ...]  # h, w, kh, kw, sh, sw, ph, pw, oh, ow: Window in images.cu

SCRATCH_BYTES = 1 << 28  # for the lowered images of a chunk; one image may take more


class _SavedPool(NamedTuple):
    x_shape: tuple[int, ...]
    window: Sizes
    taken: Array


class _SavedMean(NamedTuple):
    x_shape: tuple[int, ...]


class _Conv(NamedTuple):
    x: Array
    w: Array
    window: Sizes
    y: Array | None  # with ReLU
    pooling: _SavedPool | None


# -- convolution -------------------------------------------------------------------------------------------------------
def _chunks(x: Array, window: Sizes) -> Iterator[tuple[int, int]]:
    """First image and number of images of each chunk; without images, a chunk of none."""
    image_bytes = prod((x.shape[1], *window[2:4], *window[8:], x.itemsize))
    count = max(1, SCRATCH_BYTES // max(image_bytes, 1))
    for first in range(0, max(len(x), 1), count):
        yield first, min(count, len(x) - first)


def _lowered(x: Array, window: Sizes) -> Array:
    """The columns of images: the pixel under each tap of each channel at each place."""
    n, c, *_ = x.shape
    columns = cupy.empty((c * prod(window[2:4]), n * prod(window[8:])), np.float32)
    launch_planes("lower", *columns.shape, (n, c), window, x, columns)
    return columns


def _is_pointwise(window: Sizes, groups: int) -> bool:
    return groups == 1 and window[2:8] == (1, 1, 1, 1, 0, 0)


def _matrices(images: Array) -> Array:
    """Of each image, the matrix [channels, pixels]."""
    return images.reshape(*images.shape[:2], -1)


def _groups(x: Array, w: Array) -> int:
    groups: int = x.shape[1] // max(w.shape[1], 1)
    return max(groups, 1)


def _products(groups: int, *matrices: Array, **options: bool) -> None:
    """`product` for each group, which has a run of the rows of all three matrices."""
    if groups > 1:
        matrices = tuple(matrix.reshape(groups, len(matrix) // groups, matrix.shape[1]) for matrix in matrices)
    product(*matrices, **options)


def conv2d(
    x: Array,
    w: Array,
    b: Array | None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    relu: bool = False,
    pool: tuple[Pair, Pair, Pair] | None = None,
) -> tuple[Array, Any]:
    """As `cpu.conv2d`; pooling is a pass of its own."""
    m, kernel, groups = len(w), w.shape[2:], _groups(x, w)
    size = out_size(x.shape, kernel, stride, padding)
    window = (*x.shape[2:], *kernel, *stride, *padding, *size)
    checked(x, x.shape)
    checked(w, (m // groups * groups, x.shape[1] // groups, *kernel))
    checked_or_none(b, (m,))
    y = cupy.empty((len(x), m, *size), np.float32)
    if _is_pointwise(window, groups):
        product(w.reshape(m, -1), _matrices(x), _matrices(y))
        finish(y, prod(size), b, relu)
    else:
        for first, images in _chunks(x, window):
            some, rows = slice(first, first + images), cupy.empty((m, images * prod(size)), np.float32)
            _products(groups, w.reshape(m, -1), _lowered(x[some], window), rows)
            launch_planes("from_rows", images * m, prod(size), (images, m), prod(size), rows, b, relu, y[some])
    pooled, pooling = (y, None) if pool is None else max_pool2d(y, *pool)
    return pooled, _Conv(x, w, window, y if relu else None, pooling)


def conv2d_backward(dy: Array, saved: Any, dw: Array | None, db: Array | None, need_dx: bool = True) -> Array | None:
    x, w, window, y, pooling = saved
    if pooling is not None:
        dy = max_pool2d_backward(dy, pooling, y)
    m, c, groups, size = len(w), x.shape[1], _groups(x, w), window[8:]
    checked(dy, (len(x), m, *size))
    checked_or_none(dw, w.shape)
    if y is not None and pooling is None:
        dy = relu_backward(dy, y)
    if db is not None:  # CuPy gives each result a block: for large images, first one to each plane
        sums = dy if dy.size < 1 << 22 else dy.sum(axis=(2, 3), dtype=np.float64, keepdims=True)
        sums.sum(axis=(0, 2, 3), dtype=np.float64, out=checked(db, (m,)))
    dx = cupy.empty(x.shape, np.float32) if need_dx else None
    if is_pointwise := _is_pointwise(window, groups):
        if dx is not None:
            product(w.reshape(m, c), _matrices(dy), _matrices(dx), a_transposed=True)
        if dw is None or _fits_images(x, m):
            if dw is not None:
                product(_matrices(dy), _matrices(x), b_transposed=True).sum(axis=0, out=dw.reshape(m, c))
            return dx
    for first, images in _chunks(x, window):
        some = slice(first, first + images)
        rows = cupy.ascontiguousarray(dy[some].swapaxes(0, 1)).reshape(m, images * prod(size))
        if dw is not None:
            total = dw.reshape(m, -1)
            _products(groups, rows, _lowered(x[some], window), total, b_transposed=True, accumulate=first > 0)
        if dx is not None and not is_pointwise:
            columns = cupy.empty((prod((c, *window[2:4])), images * prod(size)), np.float32)
            _products(groups, w.reshape(m, -1), rows, columns, a_transposed=True)
            launch_planes("gather_columns", images * c, prod(window[:2]), (images, c), window, columns, dx[some])
    return dx


def _fits_images(x: Array, m: int) -> bool:
    """Whether the gradients of a weight [m, C] take less memory, one for each image, than their copies in rows."""
    n, c, h, w = x.shape
    return bool(m * c <= h * w * (m + c) and 4 * n * m * c <= SCRATCH_BYTES)


# -- pooling -----------------------------------------------------------------------------------------------------------
def max_pool2d(x: Array, kernel: Pair, stride: Pair, padding: Pair = (0, 0)) -> tuple[Array, Any]:
    shape = pool_out(x.shape, kernel, stride, padding)
    window = (*x.shape[2:], *kernel, *stride, *padding, *shape[2:])
    y, taken = cupy.empty(shape, np.float32), cupy.empty(shape, cupy.uint8)
    given = shape[:2], window, checked(x, x.shape), y, taken
    launch_planes("max_pool", shape[0] * shape[1], shape[2] * shape[3], *given)
    return y, _SavedPool(x.shape, window, taken)


def max_pool2d_backward(dy: Array, saved: Any, relu: Array | None = None) -> Array:
    """As `cpu.max_pool2d_backward`; also through the ReLU that gave the pooled array `relu`."""
    (n, c, h, w), window, taken = saved
    checked(dy, taken.shape)
    dx = cupy.empty(saved.x_shape, np.float32)
    launch_planes("max_pool_backward", n * c, h * w, (n, c), window, dy, taken, relu, dx)
    return dx


def avg_pool2d(x: Array, kernel: Pair, stride: Pair, padding: Pair = (0, 0)) -> tuple[Array, Any]:
    """As `cpu.avg_pool2d`; of whole images the mean, else a convolution of each channel with equal weights."""
    pool_out(x.shape, kernel, stride, padding)
    if (kernel, padding) == (x.shape[2:], (0, 0)):
        return checked(x, x.shape).mean(axis=(2, 3), keepdims=True), _SavedMean(x.shape)
    weights = cupy.full((x.shape[1], 1, *kernel), 1 / (kernel[0] * kernel[1]), np.float32)
    return conv2d(x, weights, None, stride, padding)


def avg_pool2d_backward(dy: Array, saved: Any) -> Array:
    if isinstance(saved, _SavedMean):
        return cupy.broadcast_to(dy, saved.x_shape) * (1 / prod(saved.x_shape[2:]))
    return conv2d_backward(dy, saved, None, None)
