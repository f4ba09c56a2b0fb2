"""From stored bytes to what a network takes: normalised, and for training shifted at random.

SINGA's MNIST example also mirrors half of its images. That is right for photographs and wrong for glyphs: a mirrored 2
is no digit, so it spends capacity on shapes that the test set does not have. It is left out here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MEAN", "STD", "normalize", "random_shift"]

# Of all pixels of MNIST's training images, scaled to 0 ... 1.
MEAN, STD = 0.1307, 0.3081


def normalize(
    images: NDArray[np.uint8], out: NDArray[np.float32] | None = None, *, mean: float = MEAN, std: float = STD
) -> NDArray[np.float32]:
    """Local. `(images / 255 - mean) / std`.

    Args:
        images: uint8, any shape.
        out: float32 of that shape, overwritten; default: a new array.
        mean: subtracted from the pixels scaled to 0 ... 1.
        std: what they are divided by then.

    Returns:
        `out`.

    Raises:
        UsageError: a dtype or shape differs from what is said above.
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
    """Local. Each image moved by up to `pixels` up, down, left and right, then normalised as by `normalize`.

    All `(2 * pixels + 1) ** 2` shifts are equally likely. What moves in at the border is background (0).

    Args:
        images: uint8, (N, C, H, W).
        out: float32 of that shape, overwritten.
        generator: source of the shifts; a rank's own, so that ranks do not repeat each other's.
        pixels: greatest shift, at least 0.
        mean: as for `normalize`.
        std: as for `normalize`.

    Returns:
        `out`.

    Raises:
        UsageError: a dtype or shape differs from what is said above, or `pixels` is negative.
    """
    _check(images, out)
    if images.ndim != 4 or pixels < 0:
        raise UsageError(
            f"images of shape {images.shape} cannot be shifted by {pixels} pixels; give (N, C, H, W) and 0 or more"
        )
    count, channels, height, width = images.shape
    # Bytes are padded and gathered, floats only written: a quarter of the traffic.
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
