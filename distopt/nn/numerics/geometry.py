"""Sizes and borders of images in convolution and pooling, for every kind of array.

Padding is two numbers, of rows above and below and of columns left and right, or four where the sides differ: top,
bottom, left, right. Kernels take two; `with_border` makes four part of the images.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

from ...errors import ShapeError

Pair: TypeAlias = tuple[int, int]
Padding: TypeAlias = tuple[int, ...]


def _sides(padding: Padding) -> tuple[Pair, Pair]:
    """Padding above and below, and left and right."""
    if len(padding) == 2:
        return (padding[0], padding[0]), (padding[1], padding[1])
    top, bottom, left, right = padding
    return (top, bottom), (left, right)


@lru_cache(maxsize=1024)
def out_size(images: tuple[int, ...], kernel: Pair, stride: Pair, padding: Padding) -> Pair:
    """Height and width of the result of sliding `kernel` over images of the shape given."""
    _check_images(images)
    sides = list(zip(images[2:], kernel, stride, _sides(padding), strict=True))
    if any(n < 1 or k < 1 or s < 1 or min(p) < 0 or k > n + sum(p) for n, k, s, p in sides):
        raise ShapeError(
            f"a kernel of {tuple(kernel)} with stride {tuple(stride)} and padding {tuple(padding)} does not fit "
            f"images of {images[2:]}"
        )
    height, width = ((n + sum(p) - k) // s + 1 for n, k, s, p in sides)
    return height, width


@lru_cache(maxsize=1024)
def pool_out(images: tuple[int, ...], kernel: Pair, stride: Pair, padding: Padding) -> tuple[int, ...]:
    """Shape of the result of pooling images of the shape given."""
    size = out_size(images, kernel, stride, padding)
    if any(2 * max(p) > k for k, p in zip(kernel, _sides(padding), strict=True)) or kernel[0] * kernel[1] > 256:
        raise ShapeError(
            f"pooling takes windows of at most 256 elements and padding of at most half the window; got a window of "
            f"{tuple(kernel)} and padding {tuple(padding)}"
        )
    return (*images[:2], *size)


@lru_cache(maxsize=1024)
def same_padding(images: tuple[int, ...], kernel: Pair, stride: Pair, upper: bool) -> Padding:
    """The padding that gives results the size of the images, divided by the stride and rounded up.

    This is ONNX's `auto_pad`: of an odd number of rows or columns, one more is below and right (SAME_UPPER, also
    TensorFlow's SAME), or above and left (SAME_LOWER).
    """
    _check_images(images)
    padding = []
    for n, k, s in zip(images[2:], kernel, stride, strict=True):
        total = max((-(-n // s) - 1) * s + k - n, 0)
        less, more = total // 2, total - total // 2
        padding += [less, more] if upper else [more, less]
    top, bottom, left, right = padding
    return (top, left) if (top, left) == (bottom, right) else (top, bottom, left, right)


def _check_images(images: tuple[int, ...]) -> None:
    if len(images) != 4:
        raise ShapeError(f"images have the shape [N, C, H, W]; got {list(images)}")


def with_border(x: Any, padding: Padding, empty: Callable[..., Any], fill: float = 0.0) -> Any:
    """A copy of images `x` in a frame of `fill`, or `x` itself without padding. `empty` allocates the copy."""
    if not any(padding):
        return x
    (top, bottom), (left, right) = _sides(padding)
    n, c, h, w = x.shape
    wide = empty((n, c, top + h + bottom, left + w + right), x.dtype)
    wide.fill(fill)
    wide[:, :, top : top + h, left : left + w] = x
    return wide


def without_border(wide: Any, padding: Padding, empty: Callable[..., Any]) -> Any:
    """A copy of the images inside the frame of `with_border`, or `wide` itself without padding."""
    if not any(padding):
        return wide
    (top, bottom), (left, right) = _sides(padding)
    n, c, h, w = wide.shape
    x = empty((n, c, h - top - bottom, w - left - right), wide.dtype)
    x[...] = wide[:, :, top : h - bottom, left : w - right]
    return x
