"""Preparation of images: normalization and, for training, random shifts.

SINGA's MNIST example also mirrors half of its images. This suits photographs but not glyphs: a mirrored 2 is not a
digit, and learning such shapes wastes capacity. Mirroring is therefore omitted here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from distopt.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MEAN", "STD", "normalize", "random_shift"]

# Over all pixels of MNIST's training images, scaled to 0 ... 1.
MEAN, STD = 0.1307, 0.3081


def normalize(
    images: NDArray[np.uint8], out: NDArray[np.float32] | None = None, *, mean: float = MEAN, std: float = STD
) -> NDArray[np.float32]:
    """Local. `(images / 255 - mean) / std`.

    Args:
        images: uint8, any shape.
        out: float32 of that shape, overwritten; default: a new array.
        mean: subtracted from the pixels scaled to 0 ... 1.
        std: divisor applied after the subtraction.

    Returns:
        `out`.

    Raises:
        UsageError: a dtype or shape differs from the description above.
    """
    if out is None:
        out = np.empty(images.shape, np.float32)
    _check(images, out)
    _scale(images, out, mean, std)
    return out


def random_shift(
    images: NDArray[np.uint8],
    out: NDArray[np.float32],
    generator: np.random.Generator,
    pixels: int = 2,
    *,
    mean: float = MEAN,
    std: float = STD,
) -> NDArray[np.float32]:
    """Local. Shift each image by up to `pixels` in each direction, then normalize it as `normalize` does.

    All `(2 * pixels + 1) ** 2` shifts are equally likely. The border is filled with background (0).

    Args:
        images: uint8, (N, C, H, W).
        out: float32 of that shape, overwritten.
        generator: source of the shifts; each rank needs its own, or all ranks draw the same shifts.
        pixels: largest shift, at least 0.
        mean: as for `normalize`.
        std: as for `normalize`.

    Returns:
        `out`.

    Raises:
        UsageError: a dtype or shape differs from the description above, or `pixels` is negative.
    """
    _check(images, out)
    if images.ndim != 4 or pixels < 0:
        raise UsageError(
            f"images of shape {images.shape} cannot be shifted by {pixels} pixels; give (N, C, H, W) and 0 or more"
        )
    count, channels, height, width = images.shape
    # Padding and gathering work on bytes, with a quarter of the memory traffic of floats.
    padded = np.zeros((count, channels, height + 2 * pixels, width + 2 * pixels), np.uint8)
    padded[:, :, pixels : pixels + height, pixels : pixels + width] = images
    windows = sliding_window_view(padded, (height, width), axis=(2, 3))
    down, right = generator.integers(0, 2 * pixels + 1, (2, count))
    _scale(windows[np.arange(count), :, down, right], out, mean, std)
    return out


def _scale(images: NDArray[np.uint8], out: NDArray[np.float32], mean: float, std: float) -> None:
    out[...] = images
    out *= np.float32(1 / (255 * std))
    out -= np.float32(mean / std)


def _check(images: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    if images.dtype != np.uint8 or out.dtype != np.float32 or images.shape != out.shape:
        raise UsageError(
            f"images of {images.dtype} {images.shape} cannot be written to {out.dtype} {out.shape}; "
            "give uint8 and float32 of one shape"
        )
