"""Initial values: their distributions, by SINGA's fans, and what is refused."""

import numpy as np
import pytest

from distopt import device, initializer
from distopt.errors import UsageError
from distopt.nn.core.tensor import Tensor

SHAPES = {  # fan_in, fan_out
    (200, 300): (200, 300),
    (70, 50, 8): (400, 560),
    (80, 40, 5, 3): (600, 1200),
    (20, 5, 4, 3, 7): (420, 1680),
    (40000,): (200, 200),
    (4, 3, 5, 2, 6, 50): (np.sqrt(36000), np.sqrt(36000)),
}
STANDARD_DEVIATIONS = {
    "he_uniform": lambda fan_in, fan_out: np.sqrt(2 / fan_in),
    "he_normal": lambda fan_in, fan_out: np.sqrt(2 / fan_in),
    "lecun_uniform": lambda fan_in, fan_out: np.sqrt(1 / fan_in),
    "lecun_normal": lambda fan_in, fan_out: np.sqrt(1 / fan_in),
    "glorot_uniform": lambda fan_in, fan_out: np.sqrt(2 / (fan_in + fan_out)),
    "glorot_normal": lambda fan_in, fan_out: np.sqrt(2 / (fan_in + fan_out)),
}


@pytest.fixture(autouse=True)
def seed():
    device.get_default_device().SetRandSeed(3)


def check(function, t, std, uniform):
    function(t)
    assert t.array.std() == pytest.approx(std, rel=0.02)
    assert abs(t.array.mean()) < 0.02 * std
    highest = np.abs(t.array).max()
    assert (highest <= np.sqrt(3) * std * 1.0001) == uniform
    assert highest > 0.99 * np.sqrt(3) * std


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", STANDARD_DEVIATIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_spread_follows_from_the_fans(name, shape, dtype):
    t = Tensor(shape, dtype=dtype)
    check(getattr(initializer, name), t, STANDARD_DEVIATIONS[name](*SHAPES[shape]), name.endswith("uniform"))
    assert t.dtype == dtype


def test_older_names():
    matrix, images = Tensor((200, 300)), Tensor((80, 40, 5, 3))
    for fans, std in [((30, 20), np.sqrt(4 / 50)), ((30,), np.sqrt(2 / 30)), ((0, np.int64(20)), np.sqrt(2 / 20))]:
        check(lambda t, fans=fans: initializer.gaussian(t, *fans), matrix, std, False)
    check(initializer.xavier, matrix, np.sqrt(2 / 500), True)
    check(initializer.glorot, matrix, np.sqrt(2 / 500), False)
    check(initializer.msra, matrix, np.sqrt(2 / 200), False)
    check(initializer.xavier, images, np.sqrt(2 / 120), True)
    check(initializer.glorot, images, np.sqrt(2 / 120), False)
    check(initializer.msra, images, np.sqrt(2 / 80), False)
    assert initializer.xavier_uniform is initializer.glorot_uniform
    assert initializer.xavier_normal is initializer.glorot_normal


@pytest.mark.parametrize(("n", "m"), [(7, 4), (4, 7), (5, 5)])
def test_orthogonal_and_eye(n, m):
    t = Tensor((n, m))
    initializer.orthogonal(t, 2.0)
    product = t.array.T @ t.array if n >= m else t.array @ t.array.T
    np.testing.assert_allclose(product, 4 * np.eye(min(n, m)), atol=1e-5)
    assert np.abs(t.array).min() > 0
    initializer.eye(t)
    np.testing.assert_array_equal(t.array, np.eye(n, m))


def test_plain_values():
    t = Tensor((40, 30))
    initializer.uniform(t, 2, 3)
    assert 2 <= t.array.min() < 2.01
    assert 2.99 < t.array.max() <= 3
    initializer.constant(t, 4)
    assert (t.array == 4).all()
    initializer.zero(t)
    assert not t.array.any()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: initializer.gaussian(Tensor((3, 4)), 0.0, 0.01), r"fan_in is 0.0; .*; t.gaussian\(mean, std\)"),
        (lambda: initializer.gaussian(Tensor((3, 4))), "takes fan_in and fan_out"),
        (lambda: initializer.gaussian(Tensor((3, 4)), -3), "fan_in is -3; it must be an integer of at least 0"),
        (lambda: initializer.eye(Tensor((3,))), r"eye fills matrices \[n, m\]; got a tensor of shape \[3\]"),
        (lambda: initializer.orthogonal(Tensor((3, 4, 5))), "orthogonal fills matrices"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, message):
    with pytest.raises(UsageError, match=message) as caught:
        wrong()
    assert "\n" not in str(caught.value)
