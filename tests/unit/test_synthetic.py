"""Generated digits: reproducible, and neither trivial nor hopeless to tell apart."""

import hashlib

import numpy as np
import pytest

from distopt.errors import UsageError
from examples.data.synthetic import digits


def test_same_bits_on_every_machine():
    for _ in range(2):
        images, labels = digits(600, 7)
        content = images.tobytes() + labels.astype("<i4").tobytes()
        assert hashlib.md5(content).hexdigest() == "355827ba4af9648f15b23453bcc86827"


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257])
def test_shapes_and_types(count):
    images, labels = digits(count, 3)
    assert images.shape == (count, 1, 28, 28)
    assert images.dtype == np.uint8
    assert labels.shape == (count,)
    assert labels.dtype == np.int32
    assert images.any(axis=(1, 2, 3)).all()


def test_seeds_differ_and_all_digits_come():
    first, second = digits(500, 0), digits(500, 1)
    assert (first[0] != second[0]).any()
    assert (np.bincount(first[1], minlength=10) > 25).all()


def test_nearest_mean_is_not_enough_but_neighbours_agree():
    images, labels = digits(5000, 1)
    test_images, test_labels = digits(500, 2)
    train = images.reshape(5000, -1).astype(float)
    test = test_images.reshape(500, -1).astype(float)
    means = np.stack([train[labels == digit].mean(axis=0) for digit in range(10)])

    def nearest(points):
        return ((points * points).sum(axis=1) - 2 * test @ points.T).argmin(axis=1)

    assert 0.5 < np.mean(nearest(means) == test_labels) < 0.85
    assert np.mean(labels[nearest(train)] == test_labels) > 0.8


@pytest.mark.parametrize("arguments", [(-1, 0), (1, -1)])
def test_errors(arguments):
    with pytest.raises(UsageError, match="at least 0"):
        digits(*arguments)
