"""Generated digits, for machines without MNIST and without a network connection.

Each glyph is a set of smooth strokes (a control polygon refined by corner cutting; Chaikin 1974) rendered once as a
field of distances to its strokes. Each image samples that field through its own affine map with a bend, thresholds it
at its own pen width with an anti-aliased edge, and adds noise.

Only additions, multiplications, divisions and square roots are used, whose rounding IEEE 754 defines exactly: the same
seed gives the same bits on every machine with the same `numpy.random.Generator` streams.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from distopt.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["digits"]

SIDE = 28
GRID = 128  # cells per side of a distance field, which spans -1 ... 1 and holds the glyph in -0.5 ... 0.5
CHUNK = 256  # images processed at a time: their temporaries fit in the cache

# Control points (x, y) of the strokes in a box of 8 x 10, y downwards. A repeated point is a corner.
STROKES: dict[int, list[list[tuple[float, float]]]] = {
    0: [[(4, 0), (0, 0), (0, 10), (8, 10), (8, 0), (4, 0)]],
    1: [[(2, 2.5), (4.5, 0), (4.5, 0), (4.5, 10)]],
    2: [[(0.5, 3), (0.5, 0), (4, 0), (8, 0), (7.5, 4), (6, 6), (0, 10), (0, 10), (0, 10), (8, 10)]],
    3: [
        [(0.5, 1), (2, 0), (4, 0), (7.5, 0), (7.5, 4.8), (3, 4.8)],
        [(3, 4.8), (8, 4.8), (8, 10), (4, 10), (2, 10), (0, 8.8)],
    ],
    4: [[(5.5, 0), (0, 6.7), (0, 6.7), (0, 6.7), (8, 6.7)], [(6, 3.5), (6, 10)]],
    5: [[(7.5, 0), (1.5, 0), (1.5, 0), (1.5, 0), (1, 4.5), (1, 4.5), (3, 3.5), (8, 3.5), (8, 10), (4, 10), (0, 9)]],
    6: [[(6.5, 0), (0.5, 1.5), (0, 10), (8, 10), (8, 4), (1.5, 4), (0.4, 7)]],
    7: [[(0, 0), (8, 0), (8, 0), (8, 0), (4, 5), (3, 10)]],
    8: [
        [(4, 4.6), (0.5, 4.6), (0.5, 0), (7.5, 0), (7.5, 4.6), (4, 4.6)],
        [(4, 4.6), (0, 4.6), (0, 10), (8, 10), (8, 4.6), (4, 4.6)],
    ],
    9: [[(7.5, 3), (7.5, 0), (0.5, 0), (0.5, 5.8), (7.5, 5.8), (7.5, 3), (7.5, 7), (5, 10)]],
}


def digits(count: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Local. Images of generated digits and their labels; equal arguments give equal results.

    Args:
        count: number of images, at least 0.
        seed: seed of the random stream, at least 0.

    Returns:
        Images, uint8 (count, 1, 28, 28), white on black; labels, int32 (count,), each digit equally likely.

    Raises:
        UsageError: `count` or `seed` is negative.
    """
    if count < 0 or seed < 0:
        raise UsageError(f"{count} digits from seed {seed} cannot be made; give numbers of at least 0")
    generator = np.random.default_rng(seed)
    fields = np.stack([_distance_field(STROKES[digit]) for digit in range(10)])
    labels = generator.integers(0, 10, count, dtype=np.int32)
    images = np.empty((count, 1, SIDE, SIDE), np.uint8)
    for start in range(0, count, CHUNK):
        part = slice(start, start + CHUNK)
        _render(fields, labels[part], images[part, 0], generator)
    return images, labels


def _smooth(points: list[tuple[float, float]]) -> NDArray[np.float64]:
    """The polygon of control points after cutting its corners three times; its ends are kept."""
    line = np.array(points)
    for _ in range(3):
        quarter = np.stack([0.75 * line[:-1] + 0.25 * line[1:], 0.25 * line[:-1] + 0.75 * line[1:]], axis=1)
        line = np.concatenate([line[:1], quarter.reshape(-1, 2), line[-1:]])
    return line


def _distance_field(strokes: list[list[tuple[float, float]]]) -> NDArray[np.float32]:
    """Distance from the centre of each grid cell to the nearest stroke; (GRID, GRID), rows are y."""
    axis = (np.arange(GRID) + 0.5) * (2 / GRID) - 1
    x, y = axis[None, :], axis[:, None]
    nearest = np.full((GRID, GRID), np.inf)
    for stroke in strokes:
        line = (_smooth(stroke) - (4.0, 5.0)) / 10
        for (x0, y0), (x1, y1) in itertools.pairwise(line):
            dx, dy = x1 - x0, y1 - y0
            square = dx * dx + dy * dy
            if square == 0:
                continue  # a repeated point, which marks a corner, is a segment of length 0
            along = np.clip(((x - x0) * dx + (y - y0) * dy) / square, 0, 1)
            across_x, across_y = x - x0 - along * dx, y - y0 - along * dy
            np.minimum(nearest, across_x * across_x + across_y * across_y, out=nearest)
    field: NDArray[np.float32] = np.sqrt(nearest).astype(np.float32)
    return field


def _render(
    fields: NDArray[np.float32], labels: NDArray[np.int32], out: NDArray[np.uint8], generator: np.random.Generator
) -> None:
    count = len(labels)

    def uniform(low: float, high: float) -> NDArray[np.float32]:
        draws = generator.random((count, 1, 1), np.float32)
        draws *= np.float32(high - low)
        draws += np.float32(low)
        return draws

    # A rotation by 2 atan(t), without sine and cosine, whose rounding differs between machines.
    t = uniform(-0.16, 0.16)
    cosine, sine = (1 - t * t) / (1 + t * t), 2 * t / (1 + t * t)
    width, height = uniform(14, 26), uniform(17, 25)  # of the glyph's box, in pixels
    slant, bend = uniform(-0.3, 0.3), uniform(-0.8, 0.8)
    pen, ink = uniform(0.7, 1.6), uniform(130, 255)  # half the stroke's width, in pixels; brightness
    axis = np.arange(SIDE, dtype=np.float32) - np.float32((SIDE - 1) / 2)
    x = axis[None, None, :] - uniform(-3, 3)
    y = axis[None, :, None] - uniform(-3, 3)

    # Map image coordinates back to the glyph.
    v = (cosine * y - sine * x) / height
    u = (cosine * x + sine * y) / width
    u += v * (slant + bend * v)
    row = np.clip((v + 1) * np.float32(GRID / 2), 0, GRID - 1).astype(np.int32)
    column = np.clip((u + 1) * np.float32(GRID / 2), 0, GRID - 1).astype(np.int32)
    distance = np.take(fields, (labels[:, None, None] * GRID + row) * GRID + column)
    light = np.clip((pen + np.float32(0.5)) - distance * ((width + height) / 2), 0, 1) * ink
    # The difference of two uniform bytes has a triangular distribution; half of the pixels come out darker.
    noise = generator.integers(0, 256, (2, count, SIDE, SIDE), np.uint8).astype(np.float32)
    light += (noise[0] - noise[1]) * uniform(0.05, 0.4)
    out[...] = np.clip(light, 0, 255)
