"""Tensors: values, copies and arithmetic; and the functions of the `tensor` face, compared with NumPy."""

import logging
import operator

import numpy as np
import pytest

from distopt import autograd, device, initializer, layer, singa_wrap, tensor
from distopt.errors import UsageError
from distopt.nn.core.tensor import Tensor
from tests.unit.refusals import refused

ONE = {
    "abs": np.abs,
    "ceil": np.ceil,
    "exp": np.exp,
    "log": lambda x: np.log(np.abs(x) + 1),
    "sign": np.sign,
    "sqrt": lambda x: np.sqrt(np.abs(x)),
    "square": np.square,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softmax": lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True),
}
INTEGER = {"abs", "sign", "square"}  # stay integers
COMPARISONS = operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge


def values(*shape, dtype=np.float32, low=0.5):
    count = int(np.prod(shape))
    array = (low + (np.arange(count) * 7 % count) / 4).reshape(shape)
    return np.round(array).astype(dtype) if np.dtype(dtype).kind == "i" else array.astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
@pytest.mark.parametrize("name", ONE)
def test_functions_of_each_element_follow_numpy(name, dtype):
    x = values(3, 5, dtype=dtype, low=-1.6)
    given = {"log": np.abs(x) + 1, "sqrt": np.abs(x)}.get(name, x)
    expected = ONE[name](x.astype(np.float64))
    y = getattr(tensor, name)(Tensor.of(given.copy()))
    if (name, dtype) != ("ceil", np.int32):  # float before NumPy 2.1
        assert y.dtype == (dtype if dtype != np.int32 or name in INTEGER else np.float32)
    np.testing.assert_allclose(y.array, expected, rtol=1e-12 if dtype == np.float64 else 2e-6)
    assert y.array.flags.c_contiguous


def test_large_numbers_do_not_overflow_and_integers_never_make_float64():
    x = Tensor.of(np.array([[-1e4, 0, 1e4], [2e4, 2e4, -2e4]], np.float32))
    np.testing.assert_array_equal(tensor.sigmoid(x).array, [[0, 0.5, 1], [1, 1, 0]])
    np.testing.assert_array_equal(tensor.softmax(x).array, [[0, 0, 1], [0.5, 0.5, 0]])
    assert tensor.average(Tensor.of(values(7))) == pytest.approx(values(7).mean())
    assert tensor.average(Tensor.of(np.array([1, 2, 4], np.int32))) == pytest.approx(7 / 3)
    n, x = Tensor.of(np.array([1, -2, 3], np.int32)), Tensor.of(np.array([0.5, 1, 2], np.float32))
    assert tensor.sum(n).dtype.kind == "i"
    for y in (tensor.mult(n, x), tensor.average(n, 0), n < 2.5, n == 1, n // x, tensor.exp(n), tensor.pow(n, 2.0)):
        assert y.dtype == np.float32
    assert ((n < 1) * Tensor.of(np.ones(3))).dtype == np.float64
    assert (x.as_type(np.float64) < x).dtype == np.float64


A, B = values(2, 3, 4), values(3, 4, 5)
M, V = values(3, 4), values(4, low=1)
TWO = {
    "add": (tensor.add, lambda: A + V, (A, V)),
    "sub": (tensor.sub, lambda: A - V, (A, V)),
    "eltwise_mult": (tensor.eltwise_mult, lambda: A * V, (A, V)),
    "div": (tensor.div, lambda: A / V, (A, V)),
    "pow": (tensor.pow, lambda: A**V, (A, V)),
    "pow of a number": (lambda t: tensor.pow(t, 3), lambda: A**3, (A,)),
    "matrix by vector": (tensor.mult, lambda: M @ V, (M, V)),
    "matrices": (tensor.mult, lambda: M @ M.T, (M, M.T.copy())),
    "batches": (tensor.mult, lambda: A @ np.stack([M.T, M.T]), (A, np.stack([M.T, M.T]))),
    "scaled product": (lambda a, b: tensor.mult(a, b, alpha=0.5), lambda: M @ V / 2, (M, V)),
    "einsum": (lambda a, b: tensor.einsum("kij,ijl->lk", a, b), lambda: np.einsum("kij,ijl->lk", A, B), (A, B)),
    "tensordot": (tensor.tensordot, lambda: np.tensordot(A, B), (A, B)),
    "tensordot of pairs": (
        lambda a, b: tensor.tensordot(a, b, axes=([0, 1], [0, 1])),
        lambda: np.tensordot(A, A, axes=([0, 1], [0, 1])),
        (A, A),
    ),
    "concatenate": (lambda a, b: tensor.concatenate((a, b), 1), lambda: np.concatenate([M, M], 1), (M, M)),
    "repeat": (lambda t: tensor.repeat(t, 3), lambda: np.repeat(M, 3), (M,)),
    "repeat slices": (lambda t: tensor.repeat(t, [2, 0, 1], 0), lambda: np.repeat(M, [2, 0, 1], 0), (M,)),
    "transpose": (tensor.transpose, lambda: A.transpose(), (A,)),
    "transpose axes": (lambda t: tensor.transpose(t, (1, 0, 2)), lambda: A.transpose(1, 0, 2), (A,)),
    "T": (lambda t: t.T(), lambda: M.T, (M,)),
    "reshape": (lambda t: tensor.reshape(t, (4, -1)), lambda: A.reshape(4, -1), (A,)),
    "sum": (tensor.sum, lambda: A.sum().reshape(1), (A,)),
    "sum over an axis": (lambda t: tensor.sum(t, 1), lambda: A.sum(1), (A,)),
    "sum over two axes": (lambda t: tensor.sum(t, axis=(0, 2)), lambda: A.sum((0, 2)), (A,)),
    "average over an axis": (lambda t: tensor.average(t, 0), lambda: A.mean(0), (A,)),
    "sum_columns": (tensor.sum_columns, lambda: M.sum(1).reshape(3, 1), (M,)),
    "sum_rows": (tensor.sum_rows, lambda: M.sum(0).reshape(1, 4), (M,)),
    "floor division": (lambda a, b: a // b, lambda: A // V, (A, V)),
}


@pytest.mark.parametrize("case", TWO)
def test_functions_of_tensors_follow_numpy(case):
    function, expected, arrays = TWO[case]
    kept = [a.copy() for a in arrays]
    given = [Tensor.of(a.copy()) for a in arrays]
    y = function(*given)
    assert (y.shape, y.dtype, y.creator) == (expected().shape, np.float32, None)
    np.testing.assert_allclose(y.array, expected(), rtol=1e-6)
    y.set_value(9)
    if case != "reshape":  # it shares memory
        np.testing.assert_equal([t.array for t in given], kept)


@pytest.mark.parametrize("name", ["add", "sub", "eltwise_mult", "div", "pow"])
def test_results_go_into_the_tensor_that_is_given(name):
    function, a, b = getattr(tensor, name), Tensor.of(values(3, 4)), Tensor.of(values(4, low=1))
    out = Tensor((3, 4))
    memory = out.array
    assert function(a, b, out) is out
    assert out.array is memory
    np.testing.assert_array_equal(memory, function(a, b).array)
    wrong = Tensor((2, 4)).set_value(5)
    error = r"the result has shape \(3, 4\), the tensor that is to take it has \(2, 4\)"
    refused(UsageError, error, function, a, b, wrong)
    assert (wrong.array == 5).all()


def test_blas_functions_overwrite_their_last_tensor():
    m, row, column = Tensor.of(M.copy()), Tensor.of(V.copy()), values(3)
    y, z, total = Tensor.of(M.copy()), Tensor.of(M.copy()), Tensor((4,))
    square = Tensor((3, 3)).set_value(np.nan)  # beta is 0
    for got, last, expected in (
        (tensor.axpy(-2, Tensor.of(M * M), y), y, M - 2 * M * M),
        (tensor.add_row(3, row, 0.5, z), z, 3 * V + M / 2),
        (tensor.add_column(2, Tensor.of(column), -1, m), m, 2 * column[:, None] - M),
        (tensor.mult(Tensor.of(M), Tensor.of(M.T.copy()), square, alpha=2), square, 2 * M @ M.T),
        (tensor.sum(Tensor.of(M), axis=0, out=total), total, M.sum(0)),
    ):
        assert got is last
        np.testing.assert_allclose(got.array, expected, rtol=1e-6 if got is square else 1e-7)
    tensor.mult(Tensor.of(M), Tensor.of(M.T.copy()), square, beta=0.5)
    np.testing.assert_allclose(square.array, 2 * M @ M.T, rtol=1e-6)


def test_copies_and_new_tensors():
    a, b = Tensor.of(values(2, 3)), Tensor.of(values(5, low=9))
    before = a.to_numpy().reshape(-1)
    tensor.copy_data_to_from(a, b, 2, dst_offset=3, src_offset=1)
    np.testing.assert_array_equal(a.array.reshape(-1), [*before[:3], *b.array[1:3], before[5]])
    for wrong in ((3, 4, 0), (3, 0, 3), (-1, 0, 0), (2, -1, 0), (2, 0, -1)):
        refused(UsageError, "do not fit over those from", tensor.copy_data_to_from, a, b, *wrong)
    like = Tensor((2, 3), dtype=np.int32)
    for value, new, new_like in ((0, tensor.zeros, tensor.zeros_like), (1, tensor.ones, tensor.ones_like)):
        for t, dtype in ((new((2, 3)), np.float32), (new_like(like), np.int32)):
            assert (t.shape, t.dtype) == ((2, 3), dtype)
            assert (t.array == value).all()
    t = tensor.random((30, 40))
    assert 0 <= t.array.min() < 0.01
    assert 0.99 < t.array.max() < 1
    assert tensor.product((2, 3, 7)) == 42
    assert [tensor.sizeof(t) for t in (tensor.float16, tensor.float32, tensor.int64)] == [2, 4, 8]


def test_raw_tensors_share_memory_and_numpy_gets_copies():
    raw = singa_wrap.Tensor([2, 3])
    assert (type(raw), raw.dtype, raw.shape()) == (singa_wrap.Tensor, np.float32, (2, 3))
    singa_wrap.Gaussian(5.0, 0.1, raw)
    t = tensor.from_raw_tensor(raw)
    assert type(t.array) is np.ndarray
    assert 4 < t.array.min() < t.array.max() < 6
    tensor.copy_from_numpy(raw, values(6))
    np.testing.assert_array_equal(t.array, values(6).reshape(2, 3))
    first, second = tensor.from_raw_tensors([raw, t.data])
    first.set_value(3)
    assert (second.array == 3).all()
    t = Tensor.of(values(2, 3))
    for given in (t, t.data, t.array):
        got = tensor.to_numpy(given)
        assert (type(got), got.tolist()) == (np.ndarray, values(2, 3).tolist())
        assert not np.shares_memory(got, t.array)
    assert tensor.to_numpy(0.25).tolist() == [0.25]


def test_functions_are_outside_the_graph_and_operators_in_it(training):
    w = Tensor(data=values(3), stores_grad=True)
    for y in (tensor.exp(w), tensor.sum(w), w < 2, w[1:], w.transpose(), w.copy(), w.clone(), w.as_type("float")):
        assert (y.in_graph, y.stores_grad) == (False, False)
    for y in (tensor.add(w, 1), tensor.div(w, 2), tensor.reshape(w, (3, 1))):
        assert y.in_graph


@pytest.mark.parametrize(
    ("module", "name", "cure"),
    [
        (tensor, "flaot32", "did you mean float32?"),
        (tensor, "eltwise_multiply", "did you mean eltwise_mult?"),
        (tensor, "qqq", r"dir\(distopt.tensor\) lists"),
        (device, "create_cuda_gpu_s", "did you mean create_cuda_gpus?"),
        (device, "create_opencl_device", "OpenCL is not supported; use create_cuda_gpu"),
        (singa_wrap, "NcclIDHolder", "did you mean NcclIdHolder?"),
        (singa_wrap, "Axpy", "C\\+\\+ functions are absent; use those of distopt.tensor"),
        (layer, "Maxpool2d", "did you mean MaxPool2d?"),
        (layer, "Embedding", "distopt keeps to convolutional networks; PyTorch is the way to others"),
        (autograd, "LSTM", "distopt keeps to convolutional networks"),
        (autograd, "conv2d", r"use layer\.Conv2d"),
        (autograd, "rleu", "did you mean relu?"),
        (initializer, "he_norm", "did you mean he_normal?"),
    ],
)
def test_an_absent_name_is_told_with_its_cure(module, name, cure, monkeypatch):
    error = f"^{module.__name__.replace('.singa', '', 1)} has no {name}[:;] .*{cure}"
    refused(AttributeError, error, getattr, module, name)
    assert all(hasattr(module, listed) for listed in module.__all__)
    monkeypatch.setenv("DISTOPT_DEVICE", "cpu")
    assert (singa_wrap.USE_DIST, singa_wrap.USE_CUDA) == (True, False), "asked at the look-up"


@pytest.mark.parametrize("name", ["sonnx", "image_tool", "snapshot", "utils"])
def test_an_absent_module_of_singa_is_told(name):
    error = rf"^distopt has no module {name} of SINGA's; .*'Coming from Apache SINGA'"
    refused(ImportError, error, exec, f"from distopt import {name}")


def ramp(*shape, dtype=np.float32):
    return Tensor.of(np.arange(np.prod(shape), dtype=dtype).reshape(shape))


def test_a_new_tensor_holds_zeros_or_an_array_without_a_copy():
    t = Tensor((2, 3), device.create_cpu_device(), tensor.int32)
    assert (t.shape, t.dtype, t.ndim(), t.size(), t.creator, t.grad) == ((2, 3), np.int32, 2, 6, None, None)
    np.testing.assert_array_equal(t.to_numpy(), np.zeros((2, 3)))
    assert repr(Tensor((2,), name="conv1.b")) == "Tensor(conv1.b, [2], float32, cpu:0)"
    flat = np.zeros(10, np.float32)
    t = Tensor.of(flat[2:8].reshape(2, 3))
    t.set_value(1)
    np.testing.assert_array_equal(flat, [0, 0, 1, 1, 1, 1, 1, 1, 0, 0])
    refused(UsageError, "strided", lambda: Tensor.of(np.zeros((3, 4)).T))


@pytest.mark.parametrize("make", [tensor.from_numpy, lambda array, **options: Tensor(data=array, **options)])
def test_numpy_arrays_are_copied_in_and_out(make):
    source = np.arange(6.0).reshape(2, 3)
    t = make(source.T)
    assert (t.dtype, t.array.flags.c_contiguous) == (np.float32, True)
    assert make(source, dtype=np.float64).dtype == np.float64
    integers = np.arange(3), np.arange(3, dtype=np.uint8), np.arange(3) > 1
    assert [make(array).dtype for array in integers] == [np.int32, np.uint8, np.int32]
    assert make(np.array([0, 1 << 40])).array[1] == 1 << 40
    out = tensor.to_numpy(t)
    source[...] = 9
    t.set_value(7)
    np.testing.assert_array_equal(out, np.arange(6).reshape(2, 3).T)


def test_numpy_sees_the_values_of_a_tensor_and_one_element_is_a_number():
    values = np.array([[1, 3, 2], [6, 5, 4]], np.float32)
    t = tensor.from_numpy(values)
    for got in (np.asarray(t), t.numpy(), np.array(t, np.float32)):
        np.testing.assert_array_equal(got, values)
        got[0] = 0  # a copy
    assert (t.array[0, 1], np.argmax(t), np.asarray(t, np.int32).dtype) == (3, 3, np.int32)
    refused(UsageError, r"a copy; Tensor.array is", t.__array__, copy=False)
    t = tensor.from_numpy(np.array([0.12345], np.float32))
    assert float(t) == np.float32(0.12345)
    assert (f"{t:.3f}", "%.2f" % t, f"{t}") == ("0.123", "0.12", repr(t))  # noqa: UP031 - as SINGA's scripts print
    for use in (float, lambda t: f"{t:.3f}", Tensor.item):
        refused(UsageError, r"a tensor of shape \(2,\) is not a number", use, tensor.ones((2,)))


def test_float64_arrays_become_float32_with_one_notice(untold, caplog):
    with caplog.at_level(logging.WARNING, "distopt"):
        assert Tensor(data=[0.5, 1.5]).dtype == np.float32  # Python's numbers have no other type
        assert not caplog.records
        for _ in range(2):
            tensor.from_numpy(np.zeros(2))
    assert len(caplog.records) == 1
    assert "float64 data becomes float32" in caplog.text
    assert "dtype=tensor.float64 keeps it" in caplog.text


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4", "<f4", ">f2"])
def test_arrays_of_any_byte_order_are_held_in_the_native_one(dtype):
    array = np.array([1, 300, -2], dtype)
    narrow = {">f8": "f4"}.get(dtype, dtype[1:])
    for t, expected in ((tensor.from_numpy(array), narrow), (Tensor(data=array, dtype=dtype), dtype[1:])):
        assert (t.dtype, t.dtype.isnative) == (np.dtype(expected), True)
        np.testing.assert_array_equal(t.array, [1, 300, -2])


def test_tensors_of_pytorch_are_arrays():
    torch = pytest.importorskip("torch")
    t = tensor.from_numpy(torch.arange(6.0).reshape(2, 3).T)
    assert (t.dtype, t.array.tolist()) == (np.float32, [[0, 3], [1, 4], [2, 5]])
    assert tensor.from_numpy(torch.arange(3)).dtype == np.int32


def test_raw_tensors_share_memory_unless_they_are_converted():
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
    t = ramp(2, 3)
    assert Tensor(data=t.data, dtype=np.float32).array.base is not None
    other = Tensor(data=t.data, dtype=np.int32)
    other.set_value(9)
    np.testing.assert_array_equal(t.array, np.arange(6).reshape(2, 3))
    double = Tensor(data=ramp(3, dtype=np.float64).data)  # no copy, so no other type
    copied = Tensor(data=double)
    assert (other.dtype, double.dtype, copied.dtype) == (np.int32, np.float64, np.float64)
    assert not np.shares_memory(copied.array, double.array)
    assert Tensor(data=double, dtype="float").dtype == Tensor((2,), dtype="float").dtype == np.float32
    assert Tensor(data=double, dtype="int").dtype == np.int32


def test_copies_share_memory_or_not_and_check_the_size():
    t = Tensor((2, 3))
    memory = t.array
    t.copy_from_numpy(np.arange(6, dtype=np.int64))
    t.copy_from_numpy(np.array([40.0, 50.0]), offset=4)
    assert (t.dtype, t.array.tolist()) == (np.float32, [[0, 1, 2], [3, 40, 50]])
    assert t.array is memory
    for array, offset in ((np.zeros(5), 0), (np.zeros(6), 1), (np.zeros(7), -1)):
        refused(UsageError, r"does not fill a tensor of shape \(2, 3\)", t.copy_from_numpy, array, offset)
    for array in (np.full(6, 1j), np.array(list("abcdef"))):
        refused(UsageError, "a tensor holds numbers, not", t.copy_from_numpy, array)
    t = ramp(2, 2)
    t.name, t.stores_grad = "w", True
    same, clones = t.copy(), [t.clone(), t.deepcopy(), t.contiguous(), t.transpose((0, 1)), t[:], Tensor(data=t)]
    t.set_value(5)
    assert (same.array == 5).all()
    for other in clones:
        np.testing.assert_array_equal(other.to_numpy(), [[0, 1], [2, 3]])
    for other in (same, *clones):
        assert (other.name, other.stores_grad, other.requires_grad, other.creator) == (None, False, True, None)
    for copy, source, expected in (
        (t.copy_data, clones[0], [[0, 1], [2, 3]]),
        (t.copy_from, np.full(4, 7), [[7, 7], [7, 7]]),
        (t.copy_from, clones[0], [[0, 1], [2, 3]]),
    ):
        copy(source)
        assert same.to_numpy().tolist() == expected


def test_types_sizes_and_norms():
    t = Tensor.of(np.array([1.5, -2.5]), requires_grad=False)
    names = {"float": np.float32, "int": np.int32, tensor.float16: np.float16, "float64": np.float64}
    for dtype, expected in names.items():
        converted = t.as_type(dtype)
        assert (converted.dtype, converted.requires_grad) == (expected, True)
        np.testing.assert_array_equal(converted.array, np.array([1.5, -2.5]).astype(expected))
        converted.set_value(0)
    assert t.to_type("int") is t
    refused(UsageError, "'flaot' is not an element type", t.to_type, "flaot")
    assert (t.dtype, t.array.tolist()) == (np.int32, [1, -2])
    t = Tensor.of(np.array([[3, 0, -4], [0, 0, 12]], np.float32))
    assert (t.memsize(), t.is_empty(), t.is_transpose(), t.is_dummy()) == (24, False, False, True)
    assert Tensor().is_empty()
    assert (t.l1(), t.l2()) == pytest.approx((19 / 6, 13 / 6))
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
    parts = [(t[1], x[1:2]), (t[-1, 2], x[3:, 2:3]), (t[1:3, :, :-1], x[1:3, :, :-1])]
    for part, expected in [*parts, (t[::2, np.int64(1)], x[::2, 1:2]), (t[:0], x[:0])]:
        assert part.array.flags.c_contiguous
        np.testing.assert_array_equal(part.array, expected)
        assert not np.shares_memory(part.array, x)
    for key in (4, -5, (0, 5), 1.5, "0", None, [0, 1], (0, 0, 0, 0)):
        refused(UsageError, "does not index the shape|too many for a tensor of shape", t.__getitem__, key)
    refused(TypeError, "not iterable", list, t)


def test_comparisons_give_zeros_and_ones_and_containers_go_by_identity():
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
        assert (got.dtype, got.array.tolist()) == (np.float32, expected)
    refused(UsageError, "equal does not take", lambda: t == ramp(2))
    assert not t == None  # noqa: E711, SIM201
    assert t != None  # noqa: E711
    assert not t == "text"  # noqa: SIM201
    a, b = ramp(3), ramp(3)
    assert (len({a, b, a}), {a: 1, b: 2}[b]) == (2, 2)
    assert b not in {a: 1}
    assert a in [a, b]
    refused(UsageError, "neither true nor false", lambda: b in [a])
    assert ramp(1) == 0
    assert not ramp(1) == 1  # noqa: SIM201


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
@pytest.mark.parametrize("number", [-1, 300, 2**31, -(2**31) - 1, 2**40, -(2**40)])
def test_integers_outside_the_type_compare_and_compute_as_in_numpy(number, dtype):
    values = np.array([0, 7, 44, 255 if dtype == np.uint8 else 2**31 - 1], dtype)
    wide, t = values.astype(np.int64), Tensor.of(values)
    for other in (number, np.int64(number), np.array([7, number, 44, number])):
        for compare in COMPARISONS:
            np.testing.assert_array_equal(compare(t, other).array, compare(wide, other), err_msg=compare.__name__)
        if np.iinfo(dtype).min <= number <= np.iinfo(dtype).max:
            continue
        for compute in (operator.add, operator.sub, operator.mul):
            np.testing.assert_array_equal(compute(t, other).array, compute(wide, other), err_msg=compute.__name__)
            np.testing.assert_array_equal(compute(other, t).array, compute(other, wide), err_msg=compute.__name__)
        refused(UsageError, f"a tensor of {t.dtype} takes no int64;", operator.iadd, t, other)
    np.testing.assert_array_equal(t.array, wide)
    assert (t + 7).dtype == (t + np.array([7, 1, 2, 3])).dtype == dtype


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.float32])
@pytest.mark.parametrize("number", [2**64, -(2**64), 2**70])
def test_integers_beyond_64_bits_are_floats(dtype, number):
    values = np.array([0, 7, 44], dtype)
    t, wide = Tensor.of(values), values.astype(np.float64)
    for compare in COMPARISONS:
        np.testing.assert_array_equal(compare(t, number).array, compare(wide, number), err_msg=compare.__name__)
    for compute in (operator.add, operator.sub, operator.mul, operator.truediv):
        assert compute(t, number).dtype == np.float32
        np.testing.assert_array_equal(compute(t, number).array, compute(wide, number).astype(np.float32))
    assert Tensor.of(np.array([number], np.float32)) == number
    assert (t == 10**400) is False
    refused(UsageError, "tensors compute with tensors, arrays and numbers", lambda: t < 10**400)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(np.uint8, 300), (np.uint8, -1), (np.int32, 2**40), (np.int32, np.nan), (np.int64, np.inf), (np.float32, 10**400)],
)
def test_set_value_refuses_numbers_outside_the_type(dtype, value):
    t = Tensor.of(np.arange(3, dtype=dtype))
    refused(UsageError, f"elements of {t.dtype} cannot hold", t.set_value, value)
    np.testing.assert_array_equal(t.array, np.arange(3))
    assert t.set_value(100).to_numpy().tolist() == [100] * 3


def arithmetic(a, b):
    of_arrays = [a + b, a - b, a * b, a / b, -a, a @ b.reshape((3, 1))]
    return [*of_arrays, a + 1, 1 + a, a - 1, 1 - a, 2 * a, a / 2, 1 / b, np.float32(2) * a, a * np.float32(2)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arithmetic_follows_numpy(dtype):
    a, b = ramp(2, 3, dtype=dtype), Tensor.of(np.array([1, 2, 4], dtype))
    for got, expected in zip(arithmetic(a, b), arithmetic(a.array, b.array), strict=True):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.array, expected)
    assert (Tensor((2,), dtype=np.int32) / 2).dtype == np.float32


def test_arithmetic_keeps_the_type_and_in_place_the_memory():
    t = ramp(3)
    assert (t + np.float64(2.1)).dtype == (t + np.ones(3)).dtype == np.float32
    assert (t * [1, 2, 3]).array.tolist() == [0, 2, 6]
    n = ramp(3, dtype=np.int32)
    assert (n + 1).dtype == (n * True).dtype == np.int32
    assert t.operand(2).requires_grad is False
    assert t.operand(n) is n
    for wrong in (None, "1", object()):
        refused(UsageError, "tensors compute with tensors, arrays and numbers, not with", operator.add, t, wrong)
    t = ramp(3)
    memory, same = t.array, t
    t += 1
    t *= ramp(3)
    t -= 0.5
    t /= 2
    assert t is same
    assert t.array is memory
    assert memory.tolist() == [-0.25, 0.75, 2.75]
    n = ramp(3, dtype=np.int32)
    n += 1
    n -= ramp(3, dtype=np.int32)
    assert n.array.tolist() == [1, 1, 1]
    for other in (0.5, ramp(3)):
        refused(UsageError, "a tensor of int32 takes no floats; convert it first", operator.iadd, n, other)
    refused(UsageError, "takes no floats;", operator.itruediv, n, 2)
    assert n.array.tolist() == [1, 1, 1]


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
        t = Tensor((200, 50), dev).gaussian(1.0, 2.0)
        draws.append(t.to_numpy())
    np.testing.assert_array_equal(*draws)
    half = Tensor((200, 50), dtype=np.float16).gaussian(1.0, 2.0).array
    for array, dtype in ((draws[0], np.float32), (half, np.float16)):
        assert array.dtype == dtype
        assert (array.mean(dtype="f8"), array.std(dtype="f8")) == pytest.approx((1, 2), abs=0.1)
    assert t.bernoulli(0.25).array.mean() == pytest.approx(0.25, abs=0.02)
    assert t.uniform(-3, 1) is t
    assert -3 <= t.array.min() < -2.9
    assert 0.9 < t.array.max() < 1
