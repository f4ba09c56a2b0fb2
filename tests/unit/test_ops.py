"""The kernels of `nn.numerics.cpu` against the slow ones of `tests.reference`, on every instruction set here."""

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest

from distopt import _core
from distopt.errors import UsageError
from distopt.nn.numerics import cpu, numerics_of
from tests import reference
from tests.unit.refusals import refused

OF_THE_CPU = cpu  # tests of GPUs put their kernels in the place of `cpu`
TOLERANCE = {"float32": 2e-4, "float64": 1e-11}

CONVOLUTIONS = [
    # n, c, h, w, m, kernel, stride, padding
    (2, 1, 28, 28, 20, (5, 5), (1, 1), (0, 0)),
    (3, 20, 12, 12, 50, (5, 5), (1, 1), (0, 0)),
    (2, 3, 9, 7, 5, (3, 2), (1, 1), (1, 0)),
    (1, 2, 7, 11, 3, (3, 3), (2, 3), (2, 1)),
    (2, 4, 5, 5, 13, (1, 1), (1, 1), (0, 0)),
    (2, 4, 6, 5, 7, (1, 1), (2, 2), (0, 1)),
    (1, 2, 3, 70, 1, (3, 3), (1, 1), (1, 1)),
    (1, 40, 4, 4, 6, (4, 4), (1, 1), (0, 0)),
    (2, 1, 1, 1, 1, (1, 1), (1, 1), (0, 0)),
    (1, 2, 13, 14, 3, (12, 12), (1, 1), (0, 0)),  # more taps than a panel has rows
    (1, 1, 2, 70, 2, (1, 34), (1, 1), (0, 0)),  # wider than the fast path of the input gradient
    (1, 2, 3, 70, 2, (2, 32), (1, 1), (0, 0)),  # and just as wide
    (3, 4, 4, 5, 6, (4, 5), (1, 1), (0, 0)),  # one place, whose rows and columns may not be views of the images
    (0, 2, 6, 6, 4, (3, 3), (1, 1), (1, 1)),
]

WINOGRAD = [
    (3, 20, 12, 12, 50, (5, 5), (1, 1), (0, 0)),
    (2, 9, 14, 11, 17, (5, 5), (1, 1), (0, 1)),  # tiles that are cut off, channels beyond a vector
    (2, 8, 14, 8, 8, (3, 3), (1, 1), (0, 0)),  # one tile beside the other, whole
    (1, 33, 9, 16, 40, (3, 3), (1, 1), (1, 1)),
    (40, 8, 20, 20, 9, (3, 3), (1, 1), (0, 0)),  # chunks that end inside an image
    (0, 8, 12, 12, 8, (5, 5), (1, 1), (0, 0)),
]
DIRECT = [
    (3, 1, 12, 41, 21, (5, 5), (1, 1), (0, 0)),  # rows of no whole vectors
    (2, 4, 9, 23, 13, (4, 3), (1, 1), (1, 0)),
    (2, 3, 5, 90, 5, (1, 7), (1, 1), (0, 2)),
]
# Groups, and the shape of one: by direct sums, by Winograd's method, and by lowering.
GROUPED = [
    (3, (2, 2, 9, 23, 5, (4, 3), (1, 1))),
    (2, (3, 8, 14, 14, 8, (3, 3), (1, 1))),
    (5, (2, 1, 8, 7, 1, (3, 3), (2, 1))),
]

POOLS = [
    # n, c, h, w, kernel, stride, padding
    (3, 20, 24, 24, (2, 2), (2, 2), (0, 0)),
    (2, 50, 8, 8, (2, 2), (2, 2), (0, 0)),
    (2, 3, 7, 9, (2, 2), (2, 2), (0, 0)),
    (1, 2, 2, 130, (2, 2), (2, 2), (0, 0)),
    (2, 3, 7, 9, (3, 2), (2, 1), (1, 1)),
    (2, 3, 7, 9, (3, 2), (2, 1), (1, 0)),
    (1, 2, 8, 5, (3, 3), (1, 1), (1, 1)),
    (1, 2, 8, 5, (2, 2), (3, 3), (0, 0)),
    (2, 1, 1, 1, (1, 1), (1, 1), (0, 0)),
    (1, 1, 17, 16, (16, 16), (1, 1), (8, 8)),
    (0, 2, 4, 4, (2, 2), (2, 2), (0, 0)),
    (3, 2, 5, 7, (5, 7), (2, 2), (0, 0)),
]

FUSED = [
    # as CONVOLUTIONS, then as POOLS
    ((3, 1, 28, 28, 20, (5, 5), (1, 1), (0, 0)), ((2, 2), (2, 2), (0, 0))),
    ((5, 1, 15, 33, 7, (7, 3), (1, 1), (0, 1)), ((3, 2), (2, 1), (1, 1))),
    ((2, 4, 11, 12, 6, (6, 4), (1, 1), (1, 0)), ((2, 3), (2, 3), (0, 0))),
    ((2, 20, 12, 12, 50, (5, 5), (1, 1), (0, 0)), ((2, 2), (2, 2), (0, 0))),
    ((2, 3, 9, 7, 5, (3, 2), (1, 1), (1, 0)), ((2, 2), (2, 2), (0, 0))),
    ((2, 9, 15, 13, 11, (3, 3), (1, 1), (0, 0)), ((3, 2), (2, 1), (1, 1))),
    ((40, 8, 20, 20, 9, (5, 5), (1, 1), (1, 0)), ((2, 2), (2, 2), (0, 0))),
    ((2, 2, 11, 13, 3, (3, 3), (2, 1), (2, 1)), ((3, 2), (2, 1), (1, 1))),
    ((1, 2, 8, 6, 3, (1, 1), (1, 1), (0, 0)), ((2, 2), (3, 3), (0, 0))),
    ((0, 2, 6, 6, 4, (3, 3), (1, 1), (1, 1)), ((2, 2), (2, 2), (0, 0))),
]


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


def array(shape, dtype, seed=0):
    return np.random.default_rng([seed, *np.atleast_1d(shape)]).standard_normal(shape).astype(dtype)


def near(got, expected):
    assert (got.shape, got.dtype, got.flags.c_contiguous) == (expected.shape, expected.dtype, True)
    scale = max(1, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE[got.dtype.name] * scale)


def agree(run):
    """The results of `run(cpu)`, with the bits of a first call, and near those of the slow kernels."""
    first, results = run(cpu), run(cpu)
    for before, got, expected in zip(first, results, run(reference), strict=True):
        np.testing.assert_array_equal(before, got)
        near(got, expected)
    return results


def passes(kernels, forward, w, b):
    """The output, the gradients of x, w and b, and those of w and b once more, computed without that of x.

    `forward(kernels)` gives y, the values that it saves, and the function for the gradients. On the CPU, the other
    gradients are the same where none of the weight is asked for.
    """
    y, saved, backward = forward(kernels)
    results = [y]
    for need_dx in (True, False):
        dw, db, db_alone = (None if like is None else np.full_like(like, np.nan) for like in (w, b, b))
        dx = backward(array(y.shape, y.dtype, 3), saved, dw, db, need_dx)
        assert (dx is not None) == need_dx
        results += [array for array in (dx, dw, db) if array is not None]
        if kernels is OF_THE_CPU:
            dx_alone = backward(array(y.shape, y.dtype, 3), saved, None, db_alone, need_dx)
            np.testing.assert_array_equal(dx_alone, dx)
            if b is not None:
                near(db_alone, db)
    return results


def convolved(dtype, case, with_bias, relu, pooling=None):
    n, c, h, w, m, kernel, *geometry = case
    x, weight = array((n, c, h, w), dtype), array((m, c, *kernel), dtype, 1)
    bias = array(m, dtype, 2) if with_bias else None

    def forward(k):
        return *k.conv2d(x, weight, bias, *geometry, relu, pooling), k.conv2d_backward

    return agree(lambda kernels: passes(kernels, forward, weight, bias)), x, weight, bias


@pytest.mark.parametrize("pool", [None, ((2, 2), (2, 2), (0, 0))])
@pytest.mark.parametrize("case", GROUPED)
def test_each_group_has_the_bits_of_a_convolution_of_its_own(isa, case, pool):
    groups, (n, c, h, w, m, kernel, stride) = case
    x, weight = array((n, groups * c, h, w), "float32"), array((groups * m, c, *kernel), "float32", 1)
    bias = array(groups * m, "float32", 2)

    def run(x, weight, bias, dy=None):
        y, saved = cpu.conv2d(x, weight, bias, stride, (0, 0), True, pool)
        dy = array(y.shape, "float32", 3) if dy is None else dy
        dw, db = np.full_like(weight, np.nan), np.full_like(bias, np.nan)
        dx = cpu.conv2d_backward(dy, saved, dw, db)
        return y, dx, dw, db, dy

    *whole, dy = run(x, weight, bias)
    for group in range(groups):
        own_in, own = slice(group * c, (group + 1) * c), slice(group * m, (group + 1) * m)
        parts = run(x[:, own_in].copy(), weight[own], bias[own], dy[:, own].copy())
        np.testing.assert_equal((whole[0][:, own], whole[1][:, own_in], whole[2][own], whole[3][own]), parts[:4])


@pytest.mark.sweep(rest=40)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("case", CONVOLUTIONS + WINOGRAD[1:] + DIRECT)
def test_conv2d(isa, dtype, case, with_bias, relu):
    results, _, _, bias = convolved(dtype, case, with_bias, relu)
    np.testing.assert_array_equal(results[2], results[-1 if bias is None else -2], "dw without dx")


@pytest.mark.parametrize("case", WINOGRAD[:-1])
def test_error_of_winograd(isa, case):
    """The precision that csrc/cpu/conv/winograd.h states."""
    n, c, h, w, m, kernel, stride, padding = case
    x, weight = array((n, c, h, w), "float32"), array((m, c, *kernel), "float32", 1)

    def run(kernels, dtype):
        y, saved = kernels.conv2d(x.astype(dtype), weight.astype(dtype), None, stride, padding)
        dw = np.empty_like(weight, dtype)
        dx = kernels.conv2d_backward(array(y.shape, "float32", 3).astype(dtype), saved, dw, None)
        return y, dx, dw

    for got, exact in zip(run(cpu, "float32"), run(reference, "float64"), strict=True):
        error = np.sqrt(np.mean((got - exact) ** 2)) / exact.std()
        assert 3e-7 < error < 6e-6  # the direct sum would be better than that


@pytest.mark.parametrize(("n", "kernel"), [(3, 3), (1, 1)])
def test_inputs_do_not_change(isa, dtype, n, kernel):
    x, w, b = array((n, 2, 6, 6), dtype), array((4, 2, kernel, kernel), dtype, 1), array(4, dtype, 2)
    dy = array((n, 4, 7 - kernel, 7 - kernel), dtype, 3)
    given = (x, w, b, dy, x.reshape(n, 72), array((72, 4), dtype, 4), dy[:, :, 0, 0].copy())
    kept = tuple(a.copy() for a in given)
    _, saved = cpu.conv2d(x, w, b, relu=True)
    cpu.conv2d_backward(dy, saved, np.empty_like(w), np.empty_like(b))
    _, saved = cpu.linear(given[4], given[5], b, relu=True)
    cpu.linear_backward(given[6], saved, np.empty_like(given[5]), np.empty_like(b))
    np.testing.assert_equal(given, kept)


def test_threads_have_scratch_memory_of_their_own(dtype):
    def work(seed):
        x, w = array((4, 3, 11, 9), dtype, seed), array((7, 3, 3, 3), dtype, seed)
        y, saved = cpu.conv2d(x, w, None, relu=True)
        dw = np.empty_like(w)
        return y.copy(), cpu.conv2d_backward(y, saved, dw, None), dw

    expected = [work(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for seed, got in enumerate(pool.map(work, [0, 1, 2, 3] * 25)):
            np.testing.assert_equal(got, expected[seed % 4])


@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize("case", POOLS)
def test_pool2d(isa, dtype, case, kind):
    shape, geometry = case[:4], case[4:]
    x = array(shape, dtype)
    x.ravel()[::3] = np.round(x.ravel()[::3])  # equal values: the first of them counts

    def run(kernels):
        y, saved = getattr(kernels, f"{kind}_pool2d")(x, *geometry)
        return y, getattr(kernels, f"{kind}_pool2d_backward")(array(y.shape, dtype, 1), saved)

    agree(run)


@pytest.mark.sweep(rest=30)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("case", FUSED)
def test_conv2d_max_pool(isa, dtype, case, with_bias, relu):
    (*_, stride, padding), pooling = case
    results, x, weight, bias = convolved(dtype, case[0], with_bias, relu, pooling)
    y, conv = cpu.conv2d(x, weight, bias, stride, padding, relu)
    y, pool = cpu.max_pool2d(y, *pooling)
    dw, db = np.empty_like(weight), None if bias is None else np.empty_like(bias)
    dx = cpu.conv2d_backward(cpu.max_pool2d_backward(array(y.shape, dtype, 3), pool), conv, dw, db)
    apart = [array for array in (y, dx, dw, db) if array is not None]
    np.testing.assert_equal(results[: len(apart)], apart)


def test_max_pool_passes_nan_on(isa, dtype):
    for place, kernel in product(range(4), [(2, 2), (1, 4)]):
        x = array((1, 1, 2, 40) if kernel == (2, 2) else (1, 1, 1, 80), dtype)
        x.ravel()[[[10, 11, 50, 51], [8, 9, 10, 11]][kernel == (1, 4)][place]] = np.nan
        y, _ = cpu.max_pool2d(x, kernel, kernel)
        assert np.isnan(y).sum() == 1


@pytest.mark.sweep(rest=20)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("sizes", [(64, 800, 500), (130, 129, 70), (5, 37, 10), (1, 1, 1), (0, 4, 3)])
def test_linear(isa, dtype, sizes, with_bias, relu):
    n, n_in, n_out = sizes
    x, w = array((n, n_in), dtype), array((n_in, n_out), dtype, 1)
    b = array(n_out, dtype, 2) if with_bias else None

    def forward(k):
        return *k.linear(x, w, b, relu), k.linear_backward

    agree(lambda kernels: passes(kernels, forward, w, b))


@pytest.mark.parametrize("shape", [(), (1,), (7, 13), (2, 3, 5, 7), (0, 3)])
@pytest.mark.parametrize("name", ["relu", "sigmoid"])
def test_activations(isa, dtype, name, shape):
    x = array(shape, dtype)

    def run(kernels):
        y = getattr(kernels, name)(x)
        return y, getattr(kernels, f"{name}_backward")(array(shape, dtype, 1), y)

    agree(run)


def test_relu_passes_nan_on(isa, dtype):
    x = np.array([np.nan, -1, 0, 2], dtype)
    np.testing.assert_array_equal(cpu.relu(x), np.array([np.nan, 0, 0, 2], dtype))
    y, _ = cpu.conv2d(x.reshape(1, 1, 1, 4), np.ones((1, 1, 1, 1), dtype), None, relu=True)
    np.testing.assert_array_equal(y.ravel(), cpu.relu(x))
    y, _ = cpu.linear(x.reshape(4, 1), np.ones((1, 1), dtype), None, relu=True)
    np.testing.assert_array_equal(y.ravel(), cpu.relu(x))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("shape", [(4, 3, 5, 7), (2, 1, 1, 1), (64, 20, 12, 12), (40, 2, 41, 43), (0, 3, 4, 4)])
def test_batch_norm2d(isa, dtype, shape, training):
    c = shape[1]
    x = array(shape, dtype) + 3
    gamma, beta = array(c, dtype, 1), array(c, dtype, 2)

    def run(kernels):
        mean, var = array(c, dtype, 3), np.abs(array(c, dtype, 4))
        y, saved = kernels.batch_norm2d(x, gamma, beta, mean, var, 0.1, 1e-5, training)
        dgamma, dbeta = np.full_like(gamma, np.nan), np.full_like(beta, np.nan)
        dx = kernels.batch_norm2d_backward(array(shape, dtype, 5), saved, dgamma, dbeta)
        return y, mean, var, dx, dgamma, dbeta

    agree(run)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("shape", [(4, 3, 5, 7), (40, 2, 41, 43)])
def test_relu_in_batch_norm2d_has_the_bits_of_one_behind_it(isa, dtype, shape, training, adds):
    x, dy, plus = (array(shape, dtype, i) for i in range(3))
    x[0, 1, 2, 3] = np.nan

    def run(fused):
        gamma, beta, mean, var, dgamma, dbeta = (np.abs(array(shape[1], dtype, i)) for i in range(6))
        options = (training, True, plus if adds else None) if fused else (training,)
        y, saved = cpu.batch_norm2d(x, gamma, beta, mean, var, 0.1, 1e-5, *options)
        if not fused:
            y = cpu.relu(y + plus if adds else y)
        slope = dy if fused and not adds else cpu.relu_backward(dy, y)
        return y, cpu.batch_norm2d_backward(slope, saved, dgamma, dbeta), dgamma, dbeta, mean, var

    y, *_ = fused = run(True)
    np.testing.assert_equal(fused, run(False))
    assert (y == 0).any()
    assert (y > 0).any()


@pytest.mark.parametrize("shape", [(4, 3, 5, 7), (2, 1, 1, 1), (64, 20, 12, 12), (0, 3, 4, 4)])
def test_channel_sums(isa, dtype, shape):
    x = array(shape, dtype) * np.arange(1, shape[1] + 1)[:, None, None].astype(dtype) + 3
    got = cpu.channel_sums(x)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, reference.channel_sums(x), rtol=1e-6)


def test_batch_norm2d_needs_a_variance(dtype):
    one, c = array((1, 2, 1, 1), dtype), np.ones(2, dtype)
    error = "more than one value per channel"
    refused(UsageError, error, cpu.batch_norm2d, one, c, c, c.copy(), c.copy(), 0.1, 1e-5, True)


@pytest.mark.parametrize("kind", ["int64", "int32", "uint8", "one_hot", "soft"])
@pytest.mark.parametrize(("n", "classes"), [(64, 10), (3, 1), (5, 17), (0, 4)])
def test_softmax_cross_entropy(isa, dtype, n, classes, kind):
    logits = array((n, classes), dtype) * 20
    classes_of = np.arange(n) * 7 % classes
    soft = np.abs(array((n, classes), dtype, 1)) / classes
    labels = {"one_hot": np.eye(classes)[classes_of], "soft": soft}
    labels = labels[kind] if kind in labels else classes_of.astype(kind)

    def run(kernels):
        loss, saved = kernels.softmax_cross_entropy(logits, labels)
        backward = kernels.softmax_cross_entropy_backward
        return loss, kernels.softmax(logits), backward(saved), backward(saved, 0.25)

    agree(run)


def test_large_logits_do_not_overflow_and_a_class_may_be_masked(dtype):
    logits = np.array([[1e4, 0, -1e4, -np.inf]], dtype)
    loss, saved = cpu.softmax_cross_entropy(logits, np.array([1]))
    assert loss == 1e4
    for scale in (1.0, 0.5):
        assert cpu.softmax_cross_entropy_backward(saved, scale).tolist() == [[scale, -scale, 0, 0]]


def test_functions_and_refused_values_of_the_cpu(dtype):
    slow = reference.functions_of(reference) - {"empty", "functions_of"}
    assert slow == reference.functions_of(cpu) - {"update"}  # which test_optim.py has the formulas for
    assert numerics_of(np.zeros(3)) is cpu
    refused(UsageError, r"builtins\.list", numerics_of, [1.0])
    for kernels, label in product((cpu, reference), (-1, 3, 1 << 40)):
        arguments = np.zeros((2, 3), dtype), np.array([0, label])
        refused(UsageError, r"outside 0 \.\.\. 2", kernels.softmax_cross_entropy, *arguments)
    assert _core.cross_entropy_backward(zeros(2, 3), np.array([0, 3]), None, 1.0, zeros(2, 3)) == 1


@pytest.mark.parametrize("index", [[0, -3, 2], [3], [2, -4, 5], [[0, 1], [7, -9]], []], ids=str)
def test_an_index_out_of_range_is_named(index):
    index = np.array(index, np.int64)
    outside = reference.check_index(index, 3, 1)
    if outside:
        error = r"index {}, number {}, is not in \[-3, 3\), the range of axis 1".format(*outside[0])
        refused(UsageError, error, cpu.check_index, index, 3, 1)
    else:
        assert cpu.check_index(index, 3, 1) is None


def zeros(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    "call",
    [
        lambda: cpu.conv2d(zeros(1, 1, 4, 4), zeros(1, 1, 5, 5), None),
        lambda: cpu.conv2d(zeros(1, 1, 4, 4), zeros(1, 1, 3, 3), None, stride=(0, 1)),
        lambda: cpu.conv2d(zeros(1, 4, 4), zeros(1, 1, 3, 3), None),
        lambda: cpu.max_pool2d(zeros(1, 1, 4, 4), (2, 2), (1, 1), (2, 2)),
        lambda: cpu.avg_pool2d(zeros(1, 1, 40, 40), (17, 17), (1, 1)),
    ],
)
def test_geometry_that_does_not_fit_is_refused(call):
    refused(UsageError, "", call)


X, W, Y = zeros(1, 1, 4, 4), zeros(3, 1, 3, 3), zeros(1, 3, 2, 2)
PLACES, HALF = np.zeros((1, 1, 2, 1), np.uint8), ((2, 2), (2, 2), (0, 0))
SGD = None, 0.1, 0, 0, 0, False


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (ValueError, lambda: _core.conv2d(zeros(1, 2, 4, 4), W, None, Y, (1, 1), False, None)),
        (ValueError, lambda: _core.conv2d(X, W, zeros(2), Y, (1, 1), False, None)),
        (ValueError, lambda: _core.conv2d(X, W, None, zeros(1, 3, 2, 1), (1, 1), False, None)),
        (ValueError, lambda: _core.conv2d_backward(Y, None, X, W, zeros(3, 1, 3, 2), None, None, (1, 1), None)),
        (ValueError, lambda: _core.max_pool2d(X, zeros(1, 1, 2, 2), PLACES, *HALF)),
        (ValueError, lambda: _core.relu(zeros(3), zeros(2))),
        (ValueError, lambda: _core.sgd(zeros(3), zeros(4), *SGD)),
        (ValueError, lambda: _core.adam(zeros(3), zeros(3), zeros(3), zeros(3), 0, 0.1, 0.9, 0.99, 1e-8, 0)),
        (ValueError, lambda: _core.softmax(zeros(3, 0), zeros(3, 0))),
        (ValueError, lambda: _core.cross_entropy(zeros(2, 3), np.zeros(3, np.int64), None, zeros(2, 3), zeros())),
        (ValueError, lambda: _core.cross_entropy(zeros(2, 3), None, None, zeros(2, 3), zeros())),
        # Arrays are never copied behind the caller's back.
        (TypeError, lambda: _core.sgd(zeros(6)[::2], zeros(3), *SGD)),
        (TypeError, lambda: _core.sgd(np.zeros(3, np.float64), zeros(3), *SGD)),
        (TypeError, lambda: _core.sgd(np.zeros(3, np.float16), zeros(3), *SGD)),
    ],
)
def test_shapes_and_types_that_do_not_fit_never_reach_a_kernel(error, call):
    with pytest.raises(error):
        call()
