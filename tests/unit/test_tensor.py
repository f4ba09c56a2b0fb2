"""Tensors: values, copies and arithmetic outside the graph."""

import logging
import operator

import numpy as np
import pytest

from distopt import autograd, device, tensor
from distopt.errors import UsageError
from distopt.nn.core.mode import mode
from distopt.nn.core.tensor import Tensor


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
    assert make(np.arange(3) > 1).dtype == np.int32
    assert make(np.array([0, 1 << 40])).array[1] == 1 << 40
    out = tensor.to_numpy(t)
    source[...] = 9
    t.set_value(7)
    np.testing.assert_array_equal(out, np.arange(6).reshape(2, 3).T)


def test_float64_arrays_become_float32_with_one_notice(monkeypatch, caplog):
    monkeypatch.setattr("distopt.nn.notices._told", set())
    with caplog.at_level(logging.WARNING, "distopt"):
        assert Tensor(data=[0.5, 1.5]).dtype == np.float32  # Python's numbers have no other type
        assert not caplog.records
        for _ in range(2):
            tensor.from_numpy(np.zeros(2))
    (record,) = caplog.records
    assert "float64 data becomes float32" in record.message
    assert "dtype=tensor.float64 keeps it" in record.message


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"shape": 3}, r"no tensor has shape 3 \(.*\); pass a tuple of sizes"),
        ({"shape": (2, -1)}, r"no tensor has shape \(2, -1\)"),
        ({"shape": (2,), "dtype": "flaot32"}, "'flaot32' is not an element type"),
        ({"data": "text"}, "a tensor holds numbers, not <U4"),
        ({"data": [1j]}, "a tensor holds numbers, not complex128"),
        ({"data": np.ones(2, np.longdouble)}, "numbers of up to 64 bits, not float128; convert the array by astype"),
        ({"shape": (2,), "dtype": complex}, "<class 'complex'> is not an element type"),
        ({"data": [1], "dtype": str}, "<class 'str'> is not an element type"),
        ({"data": [[1, 2], [3]]}, "no tensor has such data, a list"),
        ({"data": ["x"], "dtype": np.float32}, "no tensor has such data, a list"),
        ({"data": None, "shape": None}, "no tensor has shape None"),
    ],
)
def test_what_no_tensor_can_hold_is_told_in_one_line(arguments, text):
    with pytest.raises(UsageError, match=text) as caught:
        Tensor(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4", "<f4", ">f2"])
def test_arrays_of_any_byte_order_are_held_in_the_native_one(dtype):
    array = np.array([1, 300, -2], dtype)
    narrow = {">f8": "f4"}.get(dtype, dtype[1:])
    for t, expected in ((tensor.from_numpy(array), narrow), (Tensor(data=array, dtype=dtype), dtype[1:])):
        assert t.dtype == np.dtype(expected)
        assert t.dtype.isnative
        np.testing.assert_array_equal(t.array, [1, 300, -2])


def test_tensors_of_pytorch_are_arrays():
    torch = pytest.importorskip("torch")
    t = tensor.from_numpy(torch.arange(6.0).reshape(2, 3).T)
    assert t.dtype == np.float32
    np.testing.assert_array_equal(t.array, [[0, 3], [1, 4], [2, 5]])
    assert tensor.from_numpy(torch.arange(3)).dtype == np.int32


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
    for array in (np.full(6, 1j), np.array(list("abcdef"))):
        with pytest.raises(UsageError, match="a tensor holds numbers, not"):
            t.copy_from_numpy(array)


def test_a_raw_tensor_of_another_type_is_converted():
    t = ramp(2, 3)
    assert Tensor(data=t.data, dtype=np.float32).array.base is not None
    other = Tensor(data=t.data, dtype=np.int32)
    assert other.dtype == np.int32
    other.set_value(9)
    np.testing.assert_array_equal(t.array, np.arange(6).reshape(2, 3))
    double = Tensor(data=ramp(3, dtype=np.float64).data)  # no copy, so no other type
    assert double.dtype == np.float64
    copied = Tensor(data=double)
    assert copied.dtype == np.float64
    assert not np.shares_memory(copied.array, double.array)
    assert Tensor(data=double, dtype="float").dtype == Tensor((2,), dtype="float").dtype == np.float32
    assert Tensor(data=double, dtype="int").dtype == np.int32


def test_copy_shares_memory_and_clone_does_not():
    t = ramp(2, 2)
    t.name, t.stores_grad = "w", True
    same, clones = t.copy(), [t.clone(), t.deepcopy(), t.contiguous(), t.transpose((0, 1)), t[:], Tensor(data=t)]
    t.set_value(5)
    assert (same.array == 5).all()
    for other in clones:
        np.testing.assert_array_equal(other.to_numpy(), [[0, 1], [2, 3]])
    for other in (same, *clones):
        assert (other.name, other.stores_grad, other.requires_grad, other.creator) == (None, False, True, None)
    t.copy_data(clones[0])
    np.testing.assert_array_equal(same.to_numpy(), [[0, 1], [2, 3]])
    t.copy_from(np.full(4, 7))
    np.testing.assert_array_equal(same.to_numpy(), np.full((2, 2), 7))
    t.copy_from(clones[0])
    np.testing.assert_array_equal(same.to_numpy(), [[0, 1], [2, 3]])


def test_types_are_converted_by_name_or_type():
    t = Tensor.of(np.array([1.5, -2.5]), requires_grad=False)
    for dtype, expected in (
        ("float", np.float32),
        ("int", np.int32),
        (tensor.float16, np.float16),
        ("float64", np.float64),
    ):
        converted = t.as_type(dtype)
        assert (converted.dtype, converted.requires_grad) == (expected, True)
        np.testing.assert_array_equal(converted.array, np.array([1.5, -2.5]).astype(expected))
        converted.set_value(0)
    assert t.to_type("int") is t
    assert t.dtype == np.int32
    np.testing.assert_array_equal(t.array, [1, -2])
    with pytest.raises(UsageError, match="'flaot' is not an element type"):
        t.to_type("flaot")
    assert t.dtype == np.int32


def test_sizes_and_norms():
    t = Tensor.of(np.array([[3, 0, -4], [0, 0, 12]], np.float32))
    assert (t.memsize(), t.is_empty(), t.is_transpose(), t.is_dummy()) == (24, False, False, True)
    assert Tensor().is_empty()
    assert t.l1() == pytest.approx(19 / 6)
    assert t.l2() == pytest.approx(13 / 6)
    other = Tensor((5,), dtype=np.float64)
    other.reset_like(t)
    assert (other.shape, other.dtype) == (t.shape, t.dtype)
    assert not np.shares_memory(other.array, t.array)
    assert Tensor.of(np.array([2.5])).item() == 2.5
    t.to_host()
    assert t.device is device.get_default_device()


def test_parts_are_copies_in_which_an_index_keeps_its_dimension():
    t = ramp(4, 5, 3)
    x = t.array
    for part, expected in (
        (t[1], x[1:2]),
        (t[-1, 2], x[3:, 2:3]),
        (t[1:3, :, :-1], x[1:3, :, :-1]),
        (t[::2, np.int64(1)], x[::2, 1:2]),
        (t[:0], x[:0]),
    ):
        assert part.array.flags.c_contiguous
        np.testing.assert_array_equal(part.array, expected)
        assert not np.shares_memory(part.array, x)
    for key in (4, -5, (0, 5), 1.5, "0", None, [0, 1], (0, 0, 0, 0)):
        with pytest.raises(UsageError, match=r"does not index the shape|too many for a tensor of shape"):
            t[key]
    with pytest.raises(TypeError, match="not iterable"):
        list(t)


def test_comparisons_give_zeros_and_ones():
    t = Tensor.of(np.array([1, 2.1, 3], np.float32))
    other = Tensor.of(np.array([3, 2.1, 1], np.float32))
    for got, expected in (
        (t < 2.1, [1, 0, 0]),
        (t <= 2.1, [1, 1, 0]),
        (t > np.float64(2.1), [0, 0, 1]),
        (t >= 2.1, [0, 1, 1]),
        (t == 2.1, [0, 1, 0]),
        (t != 2.1, [1, 0, 1]),
        (np.float32(2.1) > t, [1, 0, 0]),
        (t < other, [1, 0, 0]),
        (t == other, [0, 1, 0]),
        (t != other.array, [1, 0, 1]),
    ):
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got.array, expected)
    with pytest.raises(UsageError, match="equal does not take"):
        t == ramp(2)  # noqa: B015
    assert not t == None  # noqa: E711, SIM201
    assert t != None  # noqa: E711
    assert not t == "text"  # noqa: SIM201


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
@pytest.mark.parametrize("number", [-1, 300, 2**31, -(2**31) - 1, 2**40, -(2**40)])
def test_integers_outside_the_type_compare_and_compute_as_in_numpy(number, dtype):
    values = np.array([0, 7, 44, 255 if dtype == np.uint8 else 2**31 - 1], dtype)
    wide, t = values.astype(np.int64), Tensor.of(values)
    for other in (number, np.int64(number), np.array([7, number, 44, number])):
        for compare in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
            np.testing.assert_array_equal(compare(t, other).array, compare(wide, other), err_msg=compare.__name__)
        if np.iinfo(dtype).min <= number <= np.iinfo(dtype).max:
            continue
        for compute in (operator.add, operator.sub, operator.mul):
            np.testing.assert_array_equal(compute(t, other).array, compute(wide, other), err_msg=compute.__name__)
            np.testing.assert_array_equal(compute(other, t).array, compute(other, wide), err_msg=compute.__name__)
        with pytest.raises(UsageError, match=f"a tensor of {t.dtype} takes no int64;"):
            t += other
    np.testing.assert_array_equal(t.array, wide)
    assert (t + 7).dtype == dtype
    assert (t + np.array([7, 1, 2, 3])).dtype == dtype


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.float32])
@pytest.mark.parametrize("number", [2**64, -(2**64), 2**70])
def test_integers_beyond_64_bits_are_floats(dtype, number):
    values = np.array([0, 7, 44], dtype)
    t, wide = Tensor.of(values), values.astype(np.float64)
    for compare in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
        np.testing.assert_array_equal(compare(t, number).array, compare(wide, number), err_msg=compare.__name__)
    for compute in (operator.add, operator.sub, operator.mul, operator.truediv):
        assert compute(t, number).dtype == np.float32
        np.testing.assert_array_equal(compute(t, number).array, compute(wide, number).astype(np.float32))
    assert Tensor.of(np.array([number], np.float32)) == number
    assert (t == 10**400) is False
    with pytest.raises(UsageError, match="tensors compute with tensors, arrays and numbers"):
        t < 10**400  # noqa: B015


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(np.uint8, 300), (np.uint8, -1), (np.int32, 2**40), (np.int32, np.nan), (np.int64, np.inf), (np.float32, 10**400)],
)
def test_set_value_refuses_numbers_outside_the_type(dtype, value):
    t = Tensor.of(np.arange(3, dtype=dtype))
    with pytest.raises(UsageError, match=f"elements of {t.dtype} cannot hold"):
        t.set_value(value)
    np.testing.assert_array_equal(t.array, np.arange(3))
    assert t.set_value(100).to_numpy().tolist() == [100] * 3


def test_containers_of_tensors_go_by_identity():
    a, b = ramp(3), ramp(3)
    assert len({a, b, a}) == 2
    assert {a: 1, b: 2}[b] == 2
    assert b not in {a: 1}
    assert a in [a, b]
    with pytest.raises(UsageError, match="neither true nor false"):
        b in [a]  # noqa: B015
    assert ramp(1) == 0
    assert not ramp(1) == 1  # noqa: SIM201


def test_setters_return_their_tensor_and_report_the_change():
    t = ramp(3)
    memory = t.array
    for change in (
        lambda: t.set_value(2),
        lambda: t.gaussian(0, 1),
        lambda: t.uniform(2, 3),
        lambda: t.bernoulli(1),
        lambda: t.__iadd__(1),
        lambda: t.copy_from_numpy(np.ones(3)) or t,
        lambda: t.copy_data(ramp(3)) or t,
    ):
        before = mode.last_change
        assert change() is t
        assert mode.last_change > before
        assert t.array is memory


ARITHMETIC = {
    "tensors": lambda a, b: [a + b, a - b, a * b, a / b, -a, a @ b.reshape((3, 1))],
    "numbers": lambda a, b: [a + 1, 1 + a, a - 1, 1 - a, 2 * a, a / 2, 1 / b],
    "NumPy's numbers": lambda a, b: [np.float32(2) * a, a * np.float32(2)],
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("several", ARITHMETIC)
def test_arithmetic_follows_numpy(several, dtype):
    a, b = ramp(2, 3, dtype=dtype), Tensor.of(np.array([1, 2, 4], dtype))
    for got, expected in zip(ARITHMETIC[several](a, b), ARITHMETIC[several](a.array, b.array), strict=True):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.array, expected)
    assert (Tensor((2,), dtype=np.int32) / 2).dtype == np.float32


def test_a_number_or_array_takes_the_type_of_the_tensor():
    t = ramp(3)
    assert (t + np.float64(2.1)).dtype == np.float32
    assert (t + np.ones(3)).dtype == np.float32
    assert (t * [1, 2, 3]).array.tolist() == [0, 2, 6]
    n = ramp(3, dtype=np.int32)
    assert (n + 1).dtype == (n * True).dtype == np.int32
    assert t.operand(2).requires_grad is False
    assert t.operand(n) is n
    for wrong in (None, "1", object()):
        with pytest.raises(UsageError, match="tensors compute with tensors, arrays and numbers, not with"):
            t + wrong


def test_integers_take_no_floats_in_place():
    n = ramp(3, dtype=np.int32)
    n += 1
    n -= ramp(3, dtype=np.int32)
    np.testing.assert_array_equal(n.array, [1, 1, 1])
    for other in (0.5, ramp(3)):
        with pytest.raises(UsageError, match="a tensor of int32 takes no floats; convert it first"):
            n += other
    with pytest.raises(UsageError, match="takes no floats;"):
        n /= 2
    np.testing.assert_array_equal(n.array, [1, 1, 1])


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


def test_in_place_arithmetic_leaves_recorded_values_alone(training):
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
    half = Tensor((200, 50), dtype=np.float16).gaussian(1.0, 2.0)
    assert half.dtype == np.float16
    assert abs(half.array.std(dtype=np.float64) - 2) < 0.1
    assert t.bernoulli(0.25).array.mean() == pytest.approx(0.25, abs=0.02)
    t.uniform(-3, 1)
    assert -3 <= t.array.min() < -2.9
    assert 0.9 < t.array.max() < 1
