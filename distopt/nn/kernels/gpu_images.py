"""Convolution and pooling of CuPy arrays, a part of `gpu`.

A convolution is lowered: a product with the lowered images, `columns` [C * kh * kw, images * places], made in chunks of
images that bound the memory; with groups of channels, a product for each. Chunks of gradients are added in their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import cupy

from ...kernels.cuda import THREADS, blocks, c_type, launch, launch_planes, launch_rows
from .geometry import Pair, out_size, pool_out
from .gpu_base import Array, checked, checked_or_none, product

Sizes: TypeAlias = tuple[int, ...]  # h, w, kh, kw, sh, sw, ph, pw, oh, ow: Window in images.cu

SCRATCH_BYTES = 1 << 28  # for the lowered images of a chunk; one image may take more
CHANNEL_BLOCKS = 1024  # most blocks of a sum over channels: about as many as an H100 holds


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


def _column(x: Array, window: Sizes) -> int:
    """Elements of a column of the lowered images."""
    elements: int = x.shape[1] * window[2] * window[3]
    return elements


def _lowered(x: Array, window: Sizes, first: int, images: int) -> Array:
    columns = cupy.empty((_column(x, window), images * window[8] * window[9]), x.dtype)
    shape = (images, x.shape[1]), window, x[first : first + images], columns
    launch_planes(f"lower<{c_type(x)}>", len(columns), columns.shape[1], *shape)
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
    checked(x, x.shape, x.dtype)
    groups = _groups(x, w)
    checked(w, (len(w) // groups * groups, x.shape[1] // groups, *kernel), x.dtype)
    checked_or_none(b, (len(w),), x.dtype)
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
    """See `cpu.conv2d`; bias, ReLU and pooling are one pass over the product."""
    window = _convolution(x, w, b, stride, padding)
    m, places, shape = len(w), window[8] * window[9], (len(x), len(w), *window[8:])
    pooling = None
    if pool is not None:
        kernel, step, border = pool
        shape = pool_out(shape, kernel, step, border)
        pooling = cupy.empty(shape, cupy.uint8), (*window[8:], *kernel, *step, *border, *shape[2:])
    y = cupy.empty(shape, x.dtype)
    for first, images in _chunks(len(x), _column(x, window) * places * x.itemsize, places):
        rows, some = cupy.empty((m, images * places), x.dtype), slice(first, first + images)
        _products(_groups(x, w), w.reshape(m, -1), _lowered(x, window, first, images), rows)
        if pooling is not None:
            _max_pool((images, m), pooling[1], (rows, True, b, relu), y[some], pooling[0][some])
        else:
            launch_planes(f"spread<{c_type(x)}>", images * m, places, (images, m), places, rows, b, relu, y[some])
    return y, _Conv(x, w, window, y if relu else None, pooling)


def conv2d_backward(dy: Array, saved: Any, dw: Array | None, db: Array | None, need_dx: bool = True) -> Array | None:
    """See `cpu.conv2d_backward`."""
    x, w, window, y, pooling = saved
    m, groups, places = len(w), _groups(x, w), window[8] * window[9]
    shape = (len(x), m, *window[8:]) if pooling is None else pooling[0].shape
    checked(dy, shape, x.dtype)
    checked_or_none(y, shape, x.dtype)
    checked_or_none(dw, w.shape, x.dtype)
    checked_or_none(db, (m,), x.dtype)
    dx = cupy.empty(x.shape, x.dtype) if need_dx else None
    if not len(x):
        for sums in (dw, db):
            if sums is not None:
                sums.fill(0)
    for first, images in _chunks(len(x), _column(x, window) * places * x.itemsize, places):
        rows, some = _collected(saved, dy, first, images), slice(first, first + images)
        if dw is not None:
            columns = _lowered(x, window, first, images)
            _products(groups, rows, columns, dw.reshape(m, -1), b_transposed=True, accumulate=first > 0)
        else:
            columns = cupy.empty((_column(x, window), images * places), x.dtype)
        if db is not None:
            _channel_sums(rows, (images, m), places, first > 0, db)
        if dx is not None:
            _products(groups, w.reshape(m, -1), rows, columns, a_transposed=True)
            given = (images, x.shape[1]), window, columns, dx[some]
            launch_planes(f"gather_columns<{c_type(x)}>", images * x.shape[1], window[0] * window[1], *given)
    return dx


def _collected(saved: _Conv, dy: Array, first: int, images: int) -> Array:
    """The gradient of some images before bias, ReLU and pooling, as rows [M, images * places]."""
    some, batch, places = slice(first, first + images), (images, len(saved.w)), saved.window[8] * saved.window[9]
    given = dy[some], None if saved.y is None else saved.y[some]
    rows = cupy.empty((batch[1], images * places), dy.dtype)
    if saved.pooling is None:
        launch_planes(f"collect<{c_type(dy)}>", images * batch[1], places, batch, places, *given, rows)
    else:
        taken, window = saved.pooling
        _max_pool_backward(batch, window, *given, taken[some], rows, True)
    return rows


def _channel_sums(rows: Array, batch: Pair, pixels: int, add: bool, sums: Array) -> None:
    """The gradient of a bias, in `sums`."""
    parts = parts_of(batch, pixels)
    workspace, kind = cupy.empty((batch[1], parts), cupy.float64), c_type(rows)
    if batch[1]:
        launch(f"channel_parts<{kind}>", (batch[1], parts), (THREADS,), batch, pixels, rows, True, workspace)
    launch_rows(f"channel_sums<{kind}>", batch[1], batch, workspace, parts, add, sums)


def parts_of(batch: Pair, pixels: int) -> int:
    """Local. Number of blocks that sum up a channel; it depends on the shape alone."""
    images, channels = batch
    return max(1, min(blocks(images * pixels, 8 * THREADS), CHANNEL_BLOCKS // max(channels, 1)))


# -- pooling -----------------------------------------------------------------------------------------------------------
def _pooling(x: Array, kernel: Pair, stride: Pair, padding: Pair) -> tuple[tuple[int, ...], Sizes]:
    """Shape of the result, and the window."""
    shape = pool_out(x.shape, kernel, stride, padding)
    checked(x, x.shape, x.dtype)
    return shape, (*x.shape[2:], *kernel, *stride, *padding, *shape[2:])


def _max_pool(batch: Pair, window: Sizes, given: tuple[Any, ...], y: Array, taken: Array) -> None:
    """The kernel; `given` are images or rows of a product, which of both, a bias or None, and whether to rectify."""
    places = window[8] * window[9]
    launch_planes(f"max_pool<{c_type(y)}>", batch[0] * batch[1], places, batch, window, *given, y, taken)


def _max_pool_backward(
    batch: Pair, window: Sizes, dy: Array, y: Array | None, taken: Array, dx: Array, rows: bool
) -> None:
    pixels = window[0] * window[1]
    given = batch, window, dy, y, taken, dx, rows
    launch_planes(f"max_pool_backward<{c_type(dy)}>", batch[0] * batch[1], pixels, *given)


def max_pool2d(x: Array, kernel: Pair, stride: Pair, padding: Pair = (0, 0)) -> tuple[Array, Any]:
    """See `cpu.max_pool2d`."""
    shape, window = _pooling(x, kernel, stride, padding)
    y, taken = cupy.empty(shape, x.dtype), cupy.empty(shape, cupy.uint8)
    _max_pool((shape[0], shape[1]), window, (x, False, None, False), y, taken)
    return y, _SavedPool(x.shape, window, taken)


def max_pool2d_backward(dy: Array, saved: Any) -> Array:
    """See `cpu.max_pool2d_backward`."""
    checked(dy, saved.taken.shape, dy.dtype)
    dx = cupy.empty(saved.x_shape, dy.dtype)
    _max_pool_backward(saved.x_shape[:2], saved.window, dy, None, saved.taken, dx, False)
    return dx


def avg_pool2d(x: Array, kernel: Pair, stride: Pair, padding: Pair = (0, 0)) -> tuple[Array, Any]:
    """See `cpu.avg_pool2d`."""
    shape, window = _pooling(x, kernel, stride, padding)
    y = cupy.empty(shape, x.dtype)
    launch_planes(f"avg_pool<{c_type(x)}>", shape[0] * shape[1], shape[2] * shape[3], shape[:2], window, x, y)
    return y, _SavedPool(x.shape, window, None)


def avg_pool2d_backward(dy: Array, saved: Any) -> Array:
    """See `cpu.avg_pool2d_backward`."""
    (n, c, h, w), window = saved.x_shape, saved.window
    checked(dy, (n, c, *window[8:]), dy.dtype)
    dx = cupy.empty(saved.x_shape, dy.dtype)
    launch_planes(f"avg_pool_backward<{c_type(dy)}>", n * c, h * w, (n, c), window, dy, dx)
    return dx
