"""Output sizes of convolution and pooling, for every kind of array."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

from ...errors import UsageError

__all__ = ["Pair", "out_size", "pool_out"]

Pair: TypeAlias = tuple[int, int]


@lru_cache(maxsize=1024)
def out_size(images: tuple[int, ...], kernel: Pair, stride: Pair, padding: Pair) -> tuple[int, ...]:
    """Height and width of the result of sliding `kernel` over images of the shape given."""
    if len(images) != 4:
        raise UsageError(f"images have the shape [N, C, H, W]; got {list(images)}")
    sides = list(zip(images[2:], kernel, stride, padding, strict=True))
    if any(n < 1 or k < 1 or s < 1 or p < 0 or k > n + 2 * p for n, k, s, p in sides):
        raise UsageError(
            f"a kernel of {tuple(kernel)} with stride {tuple(stride)} and padding {tuple(padding)} does not fit "
            f"images of {images[2:]}"
        )
    return tuple((n + 2 * p - k) // s + 1 for n, k, s, p in sides)


@lru_cache(maxsize=1024)
def pool_out(images: tuple[int, ...], kernel: Pair, stride: Pair, padding: Pair) -> tuple[int, ...]:
    """Shape of the result of pooling images of the shape given."""
    size = out_size(images, kernel, stride, padding)
    if any(2 * p > k for k, p in zip(kernel, padding, strict=True)) or kernel[0] * kernel[1] > 256:
        raise UsageError(
            f"pooling takes windows of at most 256 elements and padding of at most half the window; got a window of "
            f"{tuple(kernel)} and padding {tuple(padding)}"
        )
    return (*images[:2], *size)
