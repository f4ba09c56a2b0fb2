"""Tensors: values, copies and arithmetic outside the graph."""

import numpy as np
import pytest

from distopt import autograd, device, tensor
from distopt.errors import UsageError
from distopt.nn.tensor import Tensor


def ramp(*shape, dtype=np.float32):
    return Tensor.of(np.arange(np.prod(shape), dtype=dtype).reshape(shape))


def test_a_new_tensor_holds_zeros():
    t = Tensor((2, 3), device.create_cpu_device(), tensor.int32)
    assert (t.shape, t.dtype, t.ndim(), t.size()) == ((2, 3), np.int32, 2, 6)
    np.testing.assert_array_equal(t.to_numpy(), np.zeros((2, 3)))
    assert t.creator is None
    assert t.grad is None
    assert repr(Tensor((2,), name="conv1.b")) == "Tensor(conv1.b, [2], float32, cpu:0)"


def test_of_uses_an_array_without_a_copy():
    flat = np.zeros(10, np.float32)
    t = Tensor.of(flat[2:8].reshape(2, 3))
    t.set_value(1)
    np.testing.assert_array_equal(flat, [0, 0, 1, 1, 1, 1, 1, 1, 0, 0])
    with pytest.raises(UsageError, match="strided"):
        Tensor.of(np.zeros((3, 4)).T)


@pytest.mark.parametrize("make", [tensor.from_numpy, lambda array, **options: Tensor(data=array, **options)])
def test_numpy_arrays_are_copied_in_and_out(make):
    source = np.arange(6.0).reshape(2, 3)
    t = make(source.T)
    assert t.dtype == np.float32
    assert t.array.flags.c_contiguous
    assert make(source, dtype=np.float64).dtype == np.float64
    assert make(np.arange(3)).dtype == np.int32
    assert make(np.arange(3, dtype=np.uint8)).dtype == np.uint8
    out = tensor.to_numpy(t)
    source[...] = 9
    t.set_value(7)
    np.testing.assert_array_equal(out, np.arange(6).reshape(2, 3).T)


def test_raw_tensors_share_the_memory_of_their_tensor():
    t = ramp(2, 3)
    handle = t.data
    assert handle.shape() == handle.shape == (2, 3)
    np.testing.assert_array_equal(handle.GetFloatValue(4), [0, 1, 2, 3])
    handle += 1
    assert t.array[1, 2] == 6
    same = Tensor(data=handle)
    same.set_value(2)
    assert (t.array == 2).all()
    assert type(same.array) is type(t.array) is np.ndarray


def test_copy_from_numpy_converts_and_checks_the_size():
    t = Tensor((2, 3))
    memory = t.array
    t.copy_from_numpy(np.arange(6, dtype=np.int64))
    t.copy_from_numpy(np.array([40.0, 50.0]), offset=4)
    np.testing.assert_array_equal(t.to_numpy(), [[0, 1, 2], [3, 40, 50]])
    assert t.array is memory
    assert t.dtype == np.float32
    for array, offset in ((np.zeros(5), 0), (np.zeros(6), 1), (np.zeros(7), -1)):
        with pytest.raises(UsageError, match=r"does not fill a tensor of shape \(2, 3\)"):
            t.copy_from_numpy(array, offset)


def test_copies_are_independent():
    t = ramp(2, 2)
    other = t.clone()
    t.set_value(5)
    np.testing.assert_array_equal(other.to_numpy(), [[0, 1], [2, 3]])
    t.copy_data(other)
    np.testing.assert_array_equal(t.to_numpy(), [[0, 1], [2, 3]])
    assert t.as_type(tensor.float64).dtype == np.float64
    assert Tensor.of(np.array([2.5])).item() == 2.5
    t.to_host()
    assert t.device is device.get_default_device()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arithmetic_follows_numpy(dtype):
    a, b = ramp(2, 3, dtype=dtype), Tensor.of(np.array([1, 2, 4], dtype))
    x, y = a.array, b.array
    pairs = [
        (a + b, x + y),
        (a - b, x - y),
        (a * b, x * y),
        (a / b, x / y),
        (-a, -x),
        (a @ b.reshape((3, 1)), x @ y[:, None]),
    ]
    pairs += [
        (a + 1, x + 1),
        (1 + a, 1 + x),
        (a - 1, x - 1),
        (1 - a, 1 - x),
        (2 * a, 2 * x),
        (a / 2, x / 2),
        (1 / b, 1 / y),
    ]
    pairs += [(np.float32(2) * a, 2 * x), (a * np.float32(2), x * 2)]
    for got, expected in pairs:
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.array, expected.reshape(got.shape))
    assert (Tensor((2,), dtype=np.int32) / 2).dtype == np.float32


def test_in_place_arithmetic_keeps_the_memory():
    t = ramp(3)
    memory, same = t.array, t
    t += 1
    t *= ramp(3)
    t -= 0.5
    t /= 2
    assert t is same
    assert t.array is memory
    np.testing.assert_array_equal(memory, [-0.25, 0.75, 2.75])


def test_in_place_arithmetic_leaves_recorded_values_alone(monkeypatch):
    monkeypatch.setattr(autograd, "training", True)
    w = Tensor(data=np.array([3.0]), stores_grad=True, dtype=np.float64)
    y = autograd.sigmoid(w)
    value = y.to_numpy()
    z = y
    z *= 2
    x = Tensor.of(np.array([1.0]))
    x += z
    np.testing.assert_array_equal(y.array, value)
    ((_, gradient),) = autograd.backward(x)
    np.testing.assert_allclose(gradient.array, 2 * value * (1 - value))


def test_random_values_come_from_the_seed():
    dev = device.get_default_device()
    draws = []
    for _ in range(2):
        dev.SetRandSeed(7)
        t = Tensor((200, 50), dev)
        t.gaussian(1.0, 2.0)
        draws.append(t.to_numpy())
    np.testing.assert_array_equal(*draws)
    assert abs(draws[0].mean() - 1) < 0.1
    assert abs(draws[0].std() - 2) < 0.1
    assert draws[0].dtype == np.float32
    t.uniform(-3, 1)
    assert -3 <= t.array.min() < -2.9
    assert 0.9 < t.array.max() < 1
