"""Shifts: the right pixels, all shifts, no mirror images."""

import numpy as np
import pytest

from distopt.errors import UsageError
from examples.data.augment import MEAN, STD, normalize, random_shift


def images(count, channels=1, height=7, width=5):
    values = np.arange(count * channels * height * width) * 73 % 255 + 1  # never 0, so background is recognised
    return values.astype(np.uint8).reshape(count, channels, height, width)


def shifted(image, down, right):
    result = np.zeros_like(image)
    _, height, width = image.shape
    for row in range(height):
        for column in range(width):
            if 0 <= row + down < height and 0 <= column + right < width:
                result[:, row + down, column + right] = image[:, row, column]
    return result


def normalized(x, mean=MEAN, std=STD):
    return (x / 255.0 - mean) / std


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("pixels", [0, 1, 2])
def test_each_image_is_a_shift_of_itself_and_all_shifts_occur(channels, pixels):
    x = images(300, channels)
    before = x.copy()
    out = np.full(x.shape, np.nan, np.float32)
    assert random_shift(x, out, np.random.default_rng(3), pixels) is out
    np.testing.assert_array_equal(x, before)
    shifts = [(down, right) for down in range(-pixels, pixels + 1) for right in range(-pixels, pixels + 1)]
    seen = set()
    for image, result in zip(x, out, strict=True):
        matches = [
            shift for shift in shifts if np.allclose(result, normalized(shifted(image, *shift)), rtol=1e-5, atol=1e-5)
        ]
        assert len(matches) == 1
        seen.add(matches[0])
    assert seen == set(shifts)


def test_same_generator_same_shifts_and_the_next_call_gives_others():
    x = images(50)
    first, second, third = (np.empty(x.shape, np.float32) for _ in range(3))
    generator = np.random.default_rng(1)
    random_shift(x, first, generator)
    random_shift(x, second, generator)
    random_shift(x, third, np.random.default_rng(1))
    np.testing.assert_array_equal(first, third)
    assert (first != second).any()


@pytest.mark.parametrize("mean_std", [(MEAN, STD), (0.0, 1.0)])
def test_normalize(mean_std):
    mean, std = mean_std
    x = np.arange(256, dtype=np.uint8).reshape(2, 2, 8, 8)
    out = np.empty(x.shape, np.float32)
    for result in (normalize(x, mean=mean, std=std), normalize(x, out, mean=mean, std=std)):
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, normalized(x, mean, std), rtol=1e-5, atol=1e-6)
    assert normalize(x, out) is out


@pytest.mark.parametrize(
    ("x", "out", "pixels"),
    [
        (images(2).astype(np.float32), np.empty((2, 1, 7, 5), np.float32), 2),
        (images(2), np.empty((2, 1, 7, 5)), 2),
        (images(2), np.empty((3, 1, 7, 5), np.float32), 2),
        (images(2)[:, 0], np.empty((2, 7, 5), np.float32), 2),
        (images(2), np.empty((2, 1, 7, 5), np.float32), -1),
    ],
)
def test_errors(x, out, pixels):
    with pytest.raises(UsageError, match="; give "):
        random_shift(x, out, np.random.default_rng(0), pixels)
