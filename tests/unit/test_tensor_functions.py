"""The functions of the `tensor` face: values outside the graph, compared with NumPy."""

import numpy as np
import pytest

from distopt import autograd, device, initializer, layer, singa_wrap, tensor
from distopt.errors import UsageError
from distopt.nn.core.tensor import Tensor


def values(*shape, dtype=np.float32, low=0.5):
    """Distinct numbers from `low` on, not in order."""
    count = int(np.prod(shape))
    array = (low + (np.arange(count) * 7 % count) / 4).reshape(shape)
    return np.round(array).astype(dtype) if np.dtype(dtype).kind == "i" else array.astype(dtype)


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


def test_sigmoid_and_softmax_of_large_numbers_do_not_overflow():
    x = Tensor.of(np.array([[-1e4, 0, 1e4], [2e4, 2e4, -2e4]], np.float32))
    np.testing.assert_array_equal(tensor.sigmoid(x).array, [[0, 0.5, 1], [1, 1, 0]])
    np.testing.assert_array_equal(tensor.softmax(x).array, [[0, 0, 1], [0.5, 0.5, 0]])


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
    for t, a in zip(given, kept, strict=True):
        if case != "reshape":  # it shares memory
            np.testing.assert_array_equal(t.array, a)


def test_average_of_all_elements_is_a_number():
    assert tensor.average(Tensor.of(values(7))) == pytest.approx(values(7).mean())
    assert tensor.average(Tensor.of(np.array([1, 2, 4], np.int32))) == pytest.approx(7 / 3)


def test_integers_stay_integers_and_never_make_float64():
    n, x = Tensor.of(np.array([1, -2, 3], np.int32)), Tensor.of(np.array([0.5, 1, 2], np.float32))
    assert tensor.sum(n).dtype.kind == "i"
    for y in (tensor.mult(n, x), tensor.average(n, 0), n < 2.5, n == 1, n // x, tensor.exp(n), tensor.pow(n, 2.0)):
        assert y.dtype == np.float32
    assert ((n < 1) * Tensor.of(np.ones(3))).dtype == np.float64
    assert (x.as_type(np.float64) < x).dtype == np.float64


@pytest.mark.parametrize("name", ["add", "sub", "eltwise_mult", "div", "pow"])
def test_results_go_into_the_tensor_that_is_given(name):
    function, a, b = getattr(tensor, name), Tensor.of(values(3, 4)), Tensor.of(values(4, low=1))
    out = Tensor((3, 4))
    memory = out.array
    assert function(a, b, out) is out
    assert out.array is memory
    np.testing.assert_array_equal(memory, function(a, b).array)
    wrong = Tensor((2, 4)).set_value(5)
    with pytest.raises(UsageError, match=r"the result has shape \(3, 4\), the tensor that is to take it has \(2, 4\)"):
        function(a, b, wrong)
    assert (wrong.array == 5).all()


def test_blas_functions_overwrite_their_last_tensor():
    y = Tensor.of(M.copy())
    assert tensor.axpy(-2, Tensor.of(M * M), y) is y
    np.testing.assert_allclose(y.array, M - 2 * M * M)
    y = Tensor.of(M.copy())
    assert tensor.add_row(3, Tensor.of(V), 0.5, y) is y
    np.testing.assert_allclose(y.array, 3 * V + M / 2)
    column = values(3)
    assert tensor.add_column(2, Tensor.of(column), -1, y) is y
    np.testing.assert_allclose(y.array, 2 * column[:, None] - (3 * V + M / 2))
    c = Tensor((3, 3)).set_value(np.nan)  # beta is 0
    assert tensor.mult(Tensor.of(M), Tensor.of(M.T.copy()), c, alpha=2) is c
    np.testing.assert_allclose(c.array, 2 * M @ M.T, rtol=1e-6)
    tensor.mult(Tensor.of(M), Tensor.of(M.T.copy()), c, beta=0.5)
    np.testing.assert_allclose(c.array, 2 * M @ M.T, rtol=1e-6)
    total = Tensor((4,))
    assert tensor.sum(Tensor.of(M), axis=0, out=total) is total
    np.testing.assert_allclose(total.array, M.sum(0))


def test_elements_are_copied_between_tensors():
    a, b = Tensor.of(values(2, 3)), Tensor.of(values(5, low=9))
    before = a.to_numpy().reshape(-1)
    tensor.copy_data_to_from(a, b, 2, dst_offset=3, src_offset=1)
    np.testing.assert_array_equal(a.array.reshape(-1), [*before[:3], *b.array[1:3], before[5]])
    for wrong in ((3, 4, 0), (3, 0, 3), (-1, 0, 0), (2, -1, 0), (2, 0, -1)):
        with pytest.raises(UsageError, match="do not fit over those from"):
            tensor.copy_data_to_from(a, b, *wrong)


def test_new_tensors_of_one_value_or_random():
    like = Tensor((2, 3), dtype=np.int32)
    for t, value, dtype in (
        (tensor.zeros((2, 3)), 0, np.float32),
        (tensor.ones((2, 3)), 1, np.float32),
        (tensor.zeros_like(like), 0, np.int32),
        (tensor.ones_like(like), 1, np.int32),
    ):
        assert (t.shape, t.dtype) == ((2, 3), dtype)
        assert (t.array == value).all()
    t = tensor.random((30, 40))
    assert 0 <= t.array.min() < 0.01
    assert 0.99 < t.array.max() < 1
    assert tensor.product((2, 3, 7)) == 42
    assert (tensor.sizeof(tensor.float16), tensor.sizeof(tensor.float32), tensor.sizeof(tensor.int64)) == (2, 4, 8)


def test_raw_tensors_share_memory_with_the_tensors_made_from_them():
    raw = singa_wrap.Tensor([2, 3])
    assert isinstance(raw, singa_wrap.Tensor)
    assert (raw.dtype, raw.shape()) == (np.float32, (2, 3))
    singa_wrap.Gaussian(5.0, 0.1, raw)
    t = tensor.from_raw_tensor(raw)
    assert type(t.array) is np.ndarray
    assert 4 < t.array.min() < t.array.max() < 6
    tensor.copy_from_numpy(raw, values(6))
    np.testing.assert_array_equal(t.array, values(6).reshape(2, 3))
    first, second = tensor.from_raw_tensors([raw, t.data])
    first.set_value(3)
    assert (second.array == 3).all()


def test_to_numpy_takes_whatever_has_values():
    t = Tensor.of(values(2, 3))
    for given in (t, t.data, t.array):
        got = tensor.to_numpy(given)
        assert type(got) is np.ndarray
        np.testing.assert_array_equal(got, values(2, 3))
        assert not np.shares_memory(got, t.array)
    assert tensor.to_numpy(0.25).tolist() == [0.25]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda a, b: tensor.mult(b, a), r"matmul does not take tensors of shape \(4,\), \(3, 4\)"),
        (lambda a, b: tensor.concatenate([a, b], 0), r"concatenate does not take tensors of shape \(3, 4\), \(4,\)"),
        (lambda a, b: tensor.concatenate([], 0), "at least one tensor"),
        (lambda a, b: tensor.einsum("ij,jk->ik", a, b), "einsum does not take"),
        (lambda a, b: tensor.sum(a, axis=2), r"sum does not take .*axis 2 is out of bounds"),
        (lambda a, b: tensor.transpose(a, (0, 0)), "transpose does not take"),
        (lambda a, b: tensor.repeat(a, -1), "a number of repeats is -1; it must be an integer of at least 0"),
        (lambda a, b: tensor.sum_rows(b), r"a matrix \[rows, columns\] is needed"),
        (lambda a, b: tensor.pow(a, None), "tensors, arrays and numbers, not with None"),
        (lambda a, b: a < "1", "tensors, arrays and numbers, not with '1'"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(call, text):
    with pytest.raises(UsageError, match=text) as caught:
        call(Tensor.of(values(3, 4)), Tensor.of(values(4)))
    assert "\n" not in str(caught.value)


def test_functions_are_outside_the_graph_and_operators_in_it(training):
    w = Tensor(data=values(3), stores_grad=True)
    for y in (tensor.exp(w), tensor.sum(w), w < 2, w[1:], w.transpose(), w.copy(), w.clone(), w.as_type("float")):
        assert not y.in_graph
        assert not y.stores_grad
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
def test_an_absent_name_is_told_with_its_cure(module, name, cure):
    with pytest.raises(
        AttributeError, match=f"^{module.__name__.replace('.singa', '', 1)} has no {name}[:;] .*{cure}"
    ) as caught:
        getattr(module, name)
    assert "\n" not in str(caught.value)
    assert all(hasattr(module, listed) for listed in module.__all__)


def test_what_is_there_is_asked_at_the_look_up(monkeypatch):
    assert singa_wrap.USE_DIST is True
    monkeypatch.setenv("DISTOPT_DEVICE", "cpu")
    assert singa_wrap.USE_CUDA is False
