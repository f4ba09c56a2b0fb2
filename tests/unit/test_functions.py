"""`autograd`: its functions, against NumPy and central differences, and the promises of the backward pass."""

import math
import re
import weakref
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np
import pytest

from distopt import autograd, layer, opt
from distopt.autograd import binary_cross_entropy, cross_entropy, depth_to_space, mul, space_to_depth, split
from distopt.errors import ShapeError, UsageError
from distopt.nn.core.arithmetic import MatMul
from distopt.nn.core.autograd import backward
from distopt.nn.core.mode import mode
from distopt.nn.core.operation import Operation
from distopt.nn.core.tensor import Tensor
from distopt.nn.ops import convolution, matrix, normalization, pooling
from tests.unit.refusals import refused

pytestmark = pytest.mark.usefixtures("training")


class Case(NamedTuple):
    function: Any  # of tensors
    expected: Any  # the same of arrays
    inputs: tuple[np.ndarray, ...]


def some(*shape, low=-2.03, high=1.9):
    """Distinct numbers that depend on the index; 0, 0.5 and 1 are not among them."""
    return np.random.default_rng(shape).permutation(np.linspace(low, high, math.prod(shape))).reshape(shape)


def case(function, expected, *inputs):
    """`inputs`: arrays, or shapes of some."""
    return Case(function, expected, tuple(some(*given) if isinstance(given, tuple) else given for given in inputs))


def table(rows):
    """By name, whose first word is the function: the expected one, the inputs, and what else the function is given.

    That is a list of further arguments, a dictionary of options, or a function that calls it.
    """
    cases = {}
    for name, (expected, *inputs) in rows.items():
        more = [] if isinstance(inputs[-1], (tuple, np.ndarray)) else inputs.pop()
        function = more if callable(more) else with_more(getattr(autograd, name.partition(" ")[0]), more)
        cases[name] = case(function, expected, *inputs)
    return cases


def with_more(function, more):
    return partial(function, **more) if isinstance(more, dict) else lambda *inputs: function(*inputs, *more)


def beside(x, values):
    """A constant on the device of x."""
    return Tensor(data=values, device=x.device, dtype=values.dtype)


def whole(*shape):
    return Tensor(data=np.arange(math.prod(shape), dtype=np.int32).reshape(shape))


def scattered(x, updates):
    y = x.copy()
    np.put_along_axis(y, PLACES, updates, 1)
    return y


def softmax(x, axis):
    e = np.exp(x)
    return e / e.sum(axis, keepdims=True)


def binary(x, t):
    return [-(t * np.log(x + 1e-4) + (1 - t) * np.log(1.0001 - x)).sum() / len(x)]


def deep(x):
    """[N, C, 2 H, 2 W] to [N, 4 C, H, W], one pixel after the other."""
    n, c, h, w = x.shape
    y = np.empty((n, 4 * c, h // 2, w // 2), x.dtype)
    for i, j in np.ndindex(2, 2):
        y[:, (2 * i + j) * c : (2 * i + j + 1) * c] = x[:, :, i::2, j::2]
    return y


def crd(y, c):
    """The channels of `deep` in the order of the mode CRD."""
    return y[:, [block * c + channel for channel in range(c) for block in range(4)]]


WORDS, PLACES = np.array([[4, 0, 1], [1, 1, 3]]), np.array([[2, 0], [-1, 1], [0, 2]])
CHANCE = some(4, 3, low=0.05, high=0.93)
TARGET = some(4, 3, low=0.01, high=0.97)[::-1].copy()
MASK = np.array([[1, 0, 1], [0, 0, 1]])

PLAIN = "abs ceil cos cosh exp floor negative reciprocal sign sin sinh tanh"
SMALL, POSITIVE = some(3, 5, low=-0.9, high=0.93), some(3, 5, low=0.1, high=3)
SINGLE = {name: (getattr(np, name),) for name in PLAIN.split()}
SINGLE |= {"asinh": (np.arcsinh,), "atan": (np.arctan,), "rounde": (np.rint,), "identity": (np.copy,)}
SINGLE |= {"acos": (np.arccos, SMALL), "asin": (np.arcsin, SMALL), "atanh": (np.arctanh, SMALL)}
SINGLE |= {"log": (np.log, POSITIVE), "sqrt": (np.sqrt, POSITIVE), "tan": (np.tan, some(3, 5, low=-1.2, high=1.3))}
SINGLE |= {
    "acosh": (np.arccosh, some(3, 5, low=1.1, high=3)),
    "clip": (lambda x: np.clip(x, -0.7, 1.2), (3, 5), [-0.7, 1.2]),
    "clip below": (lambda x: np.maximum(x, 0.1), (3, 5), {"min": 0.1}),
    "elu": (lambda x: np.where(x > 0, x, 0.7 * np.expm1(x)), (3, 5), [0.7]),
    "erf": (np.vectorize(math.erf),),
    "hardsigmoid": (lambda x: np.clip(0.6 * x + 0.4, 0, 1), (3, 5), [0.6, 0.4]),
    "leakyrelu": (lambda x: np.where(x > 0, x, 0.2 * x), (3, 5), [0.2]),
    "relu": (lambda x: np.maximum(x, 0),),
    "round": (lambda x: np.trunc(x + np.copysign(0.5, x)),),
    "selu": (lambda x: 0.8 * np.where(x > 0, x, 1.5 * np.expm1(x)), (3, 5), [1.5, 0.8]),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)),),
    "softplus": (lambda x: np.log1p(np.exp(x)),),
    "softsign": (lambda x: x / (1 + np.abs(x)),),
}
SINGLE = table({name: row if len(row) > 1 else (*row, (3, 5)) for name, row in SINGLE.items()})
SEVERAL = {
    "add": (np.add, (3, 1, 2), (4, 1)),
    "add a number": (lambda a: a + 2, (3,), [2]),
    "sub from a number": (lambda a: 2 - a, (3,), lambda a: autograd.sub(2, a)),
    "add_all": (lambda a, b, c: a + b + c, (2, 3), (3,), (2, 1)),
    "add_bias": (np.add, (3, 4), (4,)),
    "add_bias to columns": (lambda x, b: x + b[:, None], (3, 4), (3,), [1]),
    "div": (np.divide, (3, 4), (1, 4)),
    "gemm": (lambda a, b, c: 0.25 * a @ b + 0.35 * c, (3, 4), (4, 5), (1, 5), [0.25, 0.35]),
    "gemm transposed": (lambda a, b, c: 2 * a.T @ b.T - c, (4, 3), (5, 4), (3, 5), [2.0, -1.0, 1, 1]),
    "gemm of two": (lambda a, b: a @ b.T, (3, 4), (5, 4), {"transB": 1}),
    "matmul": (np.matmul, (3, 4), (4, 5)),
    "matmul batched": (np.matmul, (2, 3, 4), (2, 4, 5)),
    "matmul of a batch and a matrix": (np.matmul, (2, 3, 4), (4, 5)),
    "matmul broadcast": (np.matmul, (3, 1, 2, 4), (2, 4, 1)),
    "max": (lambda *arrays: reduce(np.maximum, arrays), (2, 3), some(3) + 0.1, some(4, 1, 1) - 0.1),
    "max of one": (lambda a: a, (2, 3)),
    "mean": (lambda a, b, c: (a + b + c) / 3, (2, 3), (3,), (2, 1)),
    "min": (np.minimum, (2, 3), some(3, 1, 3) + 0.1),
    "mul": (np.multiply, (1, 4), (3, 1)),
    "pow": (np.power, some(3, 4, low=0.2), (4,)),
    "pow of a number": (lambda a: a**3, (5,), [3]),
    "prelu": (lambda x, slope: np.where(x > 0, x, slope * x), (2, 3, 4), (3, 1)),
    "sub": (np.subtract, (3, 4), (4,)),
    "sum": (lambda a, b, c: a + b + c, (3,), (2, 3), (2, 1)),
    "where": (lambda x, y: np.where(MASK, x, y), (2, 3), (1, 3), [MASK]),
    "where of numbers": (lambda x: np.where(MASK, x, 0), (4, 2, 3), lambda x: autograd.where(x, 0, beside(x, MASK))),
}
ROWS = {
    "binary_cross_entropy": (lambda x: binary(x, TARGET), CHANCE, lambda x: binary_cross_entropy(x, beside(x, TARGET))),
    "cossim": (lambda a, b: (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1)), (3, 4), some(3, 4) ** 2 - 1),
    "cross_entropy": (
        lambda x: [-(TARGET * np.log(x)).sum() / 4],
        CHANCE,
        lambda x: cross_entropy(x, beside(x, TARGET)),
    ),
    "globalaveragepool": (lambda x: x.mean((2, 3), keepdims=True), (2, 3, 4, 5)),
    "globalaveragepool of the last": (lambda x: x.mean((1, 2), keepdims=True), (2, 4, 5, 3), ["channels_last"]),
    "mse_loss": (lambda x, t: [np.square(x - t).mean()], (4, 3), some(4, 3) ** 2),
    "ranking_loss": (lambda a, b: [np.maximum(0, 0.4 - a + b).mean()], (7,), some(7)[::-1].copy(), [0.4]),
    "reduce_mean": (lambda x: x.mean(keepdims=True), (2, 3, 4)),
    "reduce_mean of axes": (lambda x: x.mean((0, 2)), (2, 3, 4), [[0, -1], 0]),
    "reduce_sum": (lambda x: x.sum(1, keepdims=True), (2, 3, 4), [[-2]]),
    "reduce_sum to a number": (np.sum, (2, 3), [None, 0]),
    "softmax": (lambda x: softmax(x, -1), (2, 3, 4)),
    "softmax of axis 1": (lambda x: softmax(x, 1), (2, 3, 4), [1]),
}
ELEMENTS = {
    "cast": (lambda x: x, (2, 3), lambda x: autograd.cast(x, x.dtype)),
    "cat": (lambda a, b: np.concatenate([a, b, a], 1), (2, 3), (2, 5), lambda a, b: autograd.cat([a, b, a], -1)),
    "depth_to_space": (np.copy, (2, 3, 4, 6), lambda x: depth_to_space(space_to_depth(x, 2), 2)),
    "depth_to_space CRD": (np.copy, (2, 3, 4, 6), lambda x: depth_to_space(space_to_depth(x, 2, "CRD"), 2, "crd")),
    "embedding": (lambda w: w[WORDS], (5, 3), lambda w: autograd.embedding(beside(w, WORDS), w)),
    "expand": (lambda x: np.broadcast_to(x, (2, 3, 6)), (3, 1), [[2, 1, 6]]),
    "flatten": (lambda x: x.reshape(6, 4), (2, 3, 4), [2]),
    "flatten all": (lambda x: x.reshape(1, 24), (2, 3, 4), [0]),
    "gather": (lambda x: x[:, [3, 0, -1, 3]], (2, 4, 3), [1, [3, 0, -1, 3]]),
    "gather by a matrix": (lambda x: x[:, WORDS], (2, 5, 3), lambda x: autograd.gather(x, -2, beside(x, WORDS))),
    "gather one": (lambda x: x[2], (4,), [0, 2]),
    "pad": (lambda x: np.pad(x, [(0, 1), (2, 0)], constant_values=1.5), (3, 4), ["constant", [0, 2, 1, 0], 1.5]),
    "pad edge": (lambda x: np.pad(x, [(1, 3), (2, 0)], "edge"), (3, 4), ["edge", [1, 2, 3, 0]]),
    "pad reflect": (lambda x: np.pad(x, [(0, 1), (5, 2)], "reflect"), (3, 4), ["reflect", [0, 5, 1, 2]]),
    "reshape": (lambda x: x.reshape(3, 2, 2), (3, 4), [(0, 2, -1)]),
    "scatter_elements": (scattered, (3, 3), (3, 2), lambda x, u: autograd.scatter_elements(x, PLACES, u, 1)),
    "slice": (lambda x: x[5:0:-2, 1:3, -9:9:2], (6, 4, 5), [[5, -9, 1], [0, 9, 3], [0, -1, 1], [-2, 2, 1]]),
    "slice of the first": (lambda x: x[1:], (4, 3), [[1], [99]]),
    "space_to_depth": (deep, (2, 3, 4, 6), [2]),
    "space_to_depth CRD": (lambda x: crd(deep(x), 3), (2, 3, 4, 6), [2, "CRD"]),
    "split": (lambda x: x[:, 2:] ** 2, (2, 5), lambda x: mul(split(x, -1, [2, 3])[1], split(x, 1, (2, 3))[1])),
    "split equally": (lambda x: x[:2] / x[2:], (4, 3), lambda x: autograd.div(*autograd.split(x, 0, None, 2))),
    "squeeze": (lambda x: x.reshape(3, 2), (3, 1, 2, 1)),
    "squeeze some": (lambda x: x.reshape(3, 1, 2), (3, 1, 2, 1), [[-1]]),
    "tile": (lambda x: np.tile(x, [2, 1, 3]), (4, 2), [[2, 1, 3]]),
    "tile the first": (lambda x: np.tile(x, (3, 1)), (4, 2), [3]),
    "tile with a new one": (lambda x: np.tile(x, [2, 3]), (4,), [[2, 3]]),
    "transpose": (lambda x: x.transpose(1, 2, 0), (2, 3, 4), [(1, -1, 0)]),
    "transpose all": (np.transpose, (2, 3, 4)),
    "unsqueeze": (lambda x: x[None, ..., None], (2, 3), [[0, -1]]),
    "unsqueeze one": (lambda x: x[:, None], (2, 3), [1]),
    "upsample": (lambda x: x.repeat(2, 2).repeat(3, 3), (1, 2, 2, 3), ["nearest", [1.0, 1.0, 2.0, 3.0]]),
}
CASES = {**SINGLE, **table(SEVERAL), **table(ROWS), **table(ELEMENTS)}


def conv(stride=(1, 1), padding=(0, 0), relu=False, pool=None):
    return lambda *inputs: convolution.Conv2d(stride, padding, relu, pool)(*inputs)


def batch_norm(*inputs, relu=False):
    mean, variance = np.zeros(3, inputs[0].dtype), np.ones(3, inputs[0].dtype)
    return normalization.BatchNorm2d(mean, variance, 0.1, 1e-5, relu)(*inputs)


LABELS, ONE_HOT = Tensor.of(np.array([2, 0, 1, 2])), Tensor.of(np.eye(3)[[2, 0, 1, 2]])
IMAGES = ((4, 3, 2, 2), (3,), (3,))
# Operators, and what layers do.
OPERATIONS = {
    "mul itself": (lambda a: a * a, (5,)),
    "mul of 0 dimensions": (lambda a, b: a * b * a, (), ()),
    "numbers": (lambda a: 2 - (3 * a + 1) / 4 - 1 / (a + 9), (3, 2)),
    "neg": (lambda a: -a, (3,)),
    "matmul itself": (lambda a: a @ a, (3, 3)),
    "a factor twice": (lambda a, b: autograd.sigmoid(a @ b) @ a, (3, 3), some(3, 3) + 0.1),
    "reshape twice": (lambda a: autograd.reshape(a, (4, -1)) * a.reshape((4, 3)), (3, 4)),
    "softmax_cross_entropy": (lambda a: autograd.softmax_cross_entropy(a, LABELS), (4, 3)),
    "softmax_cross_entropy one-hot": (lambda a: autograd.softmax_cross_entropy(a, ONE_HOT), (4, 3)),
    "linear relu": (lambda x, w, b: matrix.Linear(relu=True)(x, w, b), (4, 3), (3, 5), (5,)),
    "branches of which one is off": (
        lambda x, v, w, b: matrix.Linear(relu=True)(x, v, b) + matrix.Linear(relu=True)(x, w, b) + x,
        *((4, 3), some(3, 3), -some(3, 3), np.full(3, 1e-3)),
    ),
    "conv relu": (conv(relu=True), (2, 3, 5, 6), (4, 3, 3, 2), (4,)),
    "conv uneven padding": (conv((2, 1), (0, 1, 2, 1)), (2, 2, 5, 4), (3, 2, 3, 2), (3,)),
    "depthwise relu": (conv((2, 1), (1, 0, 0, 2), relu=True), (2, 3, 5, 4), (3, 1, 3, 2), (3,)),
    "grouped": (conv((1, 2), (1, 0)), (2, 4, 5, 4), (6, 2, 3, 2), (6,)),
    "grouped relu uneven padding": (conv(padding=(0, 1, 1, 0), relu=True), (2, 3, 4, 4), (6, 1, 2, 3)),
    "grouped pooled": (conv(pool=((2, 2), (2, 2), (0, 0))), (2, 4, 5, 6), (6, 2, 2, 3), (6,)),
    "max_pool uneven padding": (lambda x: pooling.MaxPool2d((2, 3), (2, 1), (0, 1, 1, 0))(x), (2, 2, 5, 4)),
    "avg_pool uneven padding": (lambda x: pooling.AvgPool2d((3, 2), (1, 2), (1, 0, 0, 1))(x), (2, 2, 5, 4)),
    "batch_norm": (batch_norm, *IMAGES),
    "batch_norm relu": (partial(batch_norm, relu=True), *IMAGES),
    "batch_norm of a sum": (batch_norm, *IMAGES, IMAGES[0]),
    "batch_norm of a sum relu": (partial(batch_norm, relu=True), *IMAGES, IMAGES[0]),
}
GRADIENTS = CASES | {name: case(function, None, *shapes) for name, (function, *shapes) in OPERATIONS.items()}

# Without a gradient.
A, B = np.array([[0.0, -1.5, 2.0], [1.0, 0.0, 3.0]]), np.array([0.0, 2.0, 2.0])


def typed(of):
    return lambda *arrays: of(*arrays).astype(arrays[0].dtype)


FIXED = table(
    {
        "cast": (lambda a: a.astype(np.int32), A, [np.int32]),
        "constant_of_shape": (lambda a: np.full((0, 2, 2), 2, np.float32), B, [2]),
        **{name: (typed(getattr(np, name)), A, B) for name in ("equal", "greater", "less")},
        **{f"_{name}": (typed(getattr(np, f"logical_{name}")), A, B) for name in ("and", "or", "xor")},
        "_not": (typed(np.logical_not), A),
        "less than a number": (lambda a: (a < 2).astype(a.dtype), A, [2]),
        "nonzero": (lambda a: np.array(np.nonzero(a), np.int32), A),
        "onehot": (
            lambda a: np.where(a[:, None] % 4 == np.arange(4)[:, None], 3, 0.5).astype(np.float32),
            np.array([[0.0, -1.0, 2.0], [9.0, 0.0, 3.0]]),
            lambda a: autograd.onehot(1, a, np.array([4]), [0.5, 3]),
        ),
        "shape": (lambda a: np.array(a.shape, np.int32), A),
    }
)


def tensors(arrays, dtype=np.float64, **flags):
    return [Tensor(data=x, dtype=dtype, name=f"p{i}", **flags) for i, x in enumerate(arrays)]


def test_the_table_has_all_functions():
    others = {"dropout", "softmax_cross_entropy"}  # see test_ops and below
    tested = {name.split()[0] for name in CASES} | {"logical_" + name for name in ("and", "not", "or", "xor")}
    assert tested | set(FIXED) | others >= {name for file in autograd._FILES for name in file.__all__}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_numpy_in_the_same_type_and_the_creator_can_be_walked_by_hand(case, dtype):
    function, expected, arrays = CASES[case]
    inputs = tensors(arrays, dtype)
    y = function(*inputs)
    assert y.dtype == dtype
    tolerance = 1e-11 if dtype is np.float64 else 2e-4
    np.testing.assert_allclose(y.to_numpy(), expected(*arrays), rtol=tolerance, atol=tolerance / 10)
    for tensor, array in zip(inputs, arrays, strict=True):
        np.testing.assert_array_equal(tensor.array, array.astype(dtype))
    dy = np.cos(np.arange(y.size(), dtype=dtype)).reshape(y.shape)
    kept = dy.copy()
    gradients = y.creator.backward(dy)
    np.testing.assert_array_equal(dy, kept)
    for gradient in gradients if isinstance(gradients, tuple) else [gradients]:
        assert gradient.dtype == dtype
        assert gradient.flags.c_contiguous


def loss_of(function, inputs):
    y = function(*inputs)
    weight = Tensor.of(np.cos(np.arange(y.size(), dtype=np.float64)).reshape(y.shape) + 1.5)
    return autograd.reduce_sum(y * weight)


def central_difference(function, inputs, which, step=1e-6):
    data = inputs[which].array.reshape(-1)
    gradient = np.empty(data.size)
    for i, kept in enumerate(data.copy()):
        data[i] = kept + step
        above = loss_of(function, inputs).item()
        data[i] = kept - step
        below = loss_of(function, inputs).item()
        data[i] = kept
        gradient[i] = (above - below) / (2 * step)
    return gradient.reshape(inputs[which].shape)


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_equal_central_differences_wherever_they_land(case):
    """Of parameters, of inputs within a graph, and in memory that is given to them, twice each."""
    function, _, arrays = GRADIENTS[case]
    inputs = tensors(arrays, stores_grad=True)
    differences = {param: central_difference(function, inputs, i) for i, param in enumerate(inputs)}
    for _ in range(2):
        got = dict(autograd.backward(loss_of(function, inputs)))
        assert set(got) == set(inputs)
        for param, difference in differences.items():
            np.testing.assert_allclose(got[param].array, difference, rtol=1e-6, atol=1e-8)
    expected = {param: gradient.to_numpy() for param, gradient in got.items()}
    through = dict(autograd.backward(loss_of(function, [p * 1.0 for p in inputs])))
    bucket, start = np.full(sum(p.size() for p in inputs), np.nan), 0
    for param in inputs:
        np.testing.assert_allclose(through[param].array, expected[param], rtol=1e-12)
        param.grad = Tensor.of(bucket[start : start + param.size()].reshape(param.shape))
        start += param.size()
    views = [param.grad for param in inputs]
    for _ in range(2):
        for param, gradient in autograd.backward(loss_of(function, inputs)):
            assert gradient is param.grad
            assert any(gradient is view for view in views)
            assert np.shares_memory(gradient.array, bucket)
            np.testing.assert_array_equal(gradient.array, expected[param])
    # Each input is used again after, by an operation that overwrites the gradient that it is given.
    inputs = tensors(arrays, np.float32, stores_grad=True)
    direct = {id(p): g.to_numpy() for p, g in autograd.backward(autograd.reduce_sum(function(*inputs)))}
    between = [autograd.mul(autograd.identity(p), 2.0) for p in inputs]
    through = autograd.gradients(autograd.reduce_sum(function(*[autograd.mul(x, 0.5) for x in between])))
    assert len(through) == len(inputs)
    for key, gradient in through.items():
        assert gradient.dtype == np.float32
        np.testing.assert_allclose(gradient.array, direct[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("case", FIXED)
def test_functions_without_a_gradient(case, dtype):
    function, expected, arrays = FIXED[case]
    y = function(*tensors(arrays, dtype, stores_grad=True))
    wanted = expected(*[x.astype(dtype) for x in arrays])
    assert y.dtype == wanted.dtype
    np.testing.assert_array_equal(y.to_numpy(), wanted)
    assert y.creator.backward(np.ones(y.shape, np.float32)) == ()
    refused(UsageError, "has no gradient for its input", lambda: list(autograd.backward(y, 1.0)))


def test_integers_stay_integers_or_become_float32_beside_floats():
    counts, real = Tensor(data=np.array([[1, 2], [3, 4]])), Tensor(data=np.array([0.5, 2], np.float32))
    assert counts.dtype == np.int32
    for function in (autograd.add, autograd.sub, autograd.mul, autograd.div, autograd.matmul, autograd.max):
        other = real if function is not autograd.matmul else autograd.reshape(real, (2, 1))
        y = function(counts, other)
        assert y.dtype == np.float32
        assert autograd.add(counts, counts).dtype == np.int32
        assert all(g.dtype == np.float32 for g in y.creator.backward(np.ones(y.shape, np.float32)))
    for name in SINGLE.keys() - {"clip below", "relu", "sigmoid", "acos", "asin", "atanh"}:
        y = SINGLE[name].function(counts)
        assert y.dtype in (np.float32, np.int32), name
    assert autograd.div(counts, counts).dtype == autograd.add(counts, 0.5).dtype == np.float32
    assert autograd.pow(counts, counts).dtype == np.float32
    np.testing.assert_array_equal(autograd.reciprocal(counts).to_numpy(), [[1, 0.5], [np.float32(1 / 3), 0.25]])
    x = whole(2, 3)
    padded = autograd.pad(x, "constant", [1, 0, 0, 1], 7.0)
    scattered = autograd.scatter_elements(x, [[1, 0, 1]], [[-1, -2, -3]])
    assert padded.dtype == scattered.dtype == np.int32
    assert padded.to_numpy().tolist() == [[7, 7, 7, 7], [0, 1, 2, 7], [3, 4, 5, 7]]
    assert scattered.to_numpy().tolist() == [[0, -2, 2], [-1, 4, -3]]
    assert autograd.pad(x, "constant", [0, 0, 0, 1]).to_numpy().tolist() == [[0, 1, 2, 0], [3, 4, 5, 0]]


OF_TWO = [autograd.mse_loss, autograd.ranking_loss, autograd.cossim, autograd.add]
OF_TWO += [lambda x, t: autograd.cat([x, t], 1), lambda x, t: autograd.gemm(x, t, transB=1)]
OF_TWO += [lambda x, t: autograd.add_bias(x, autograd.reshape(autograd.slice(t, [0], [1]), (3,)))]


@pytest.mark.parametrize("dtype", [np.int32, np.float64])
@pytest.mark.parametrize("function", OF_TWO)
def test_another_type_beside_it_does_not_change_the_type_of_a_gradient(function, dtype):
    """A kernel computes the gradient that comes next, and takes one type."""
    values, others = some(2, 3), np.arange(1, 7).reshape(2, 3) ** 2
    results = []
    for other in (dtype, np.float32):
        w = Tensor(data=values, dtype=np.float32, stores_grad=True)
        y = function(autograd.sigmoid(w), Tensor(data=others, dtype=other))
        assert y.dtype == np.float32 or other is np.float64
        results.append(autograd.gradients(y, 1.0)[id(w)].array)
    assert results[0].dtype == np.float32
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", [autograd.mse_loss, lambda x, t: autograd.ranking_loss(t, x, 0.0)])
def test_differences_of_small_integers_do_not_wrap(loss):
    x, t = (Tensor(data=np.array(values, np.uint8)) for values in ([0, 3], [200, 1]))
    exact = [Tensor(data=y.array.astype(np.float32)) for y in (x, t)]
    assert float(loss(x, t)) == float(loss(*exact)) > 0
    assert float(loss(t, x)) == float(loss(*exact[::-1])) > 0


def test_gradients_at_nan_at_equal_elements_and_at_zero():
    inputs = tensors([np.array([1.0, 2, np.nan]), np.array([np.nan, 3, np.nan])])
    for function in (autograd.max, autograd.min):
        got = function(*inputs).creator.backward(np.array([5.0, 7, 9]))
        np.testing.assert_array_equal(np.array(got)[:, [0, 2]], [[0, 9], [5, 0]])
    inputs = tensors([np.array([1.0, 2]), np.array([1.0, 3]), np.array([1.0, 3])])
    got = autograd.max(*inputs).creator.backward(np.array([5.0, 7]))
    np.testing.assert_array_equal(got, [[5, 0], [0, 7], [0, 0]])
    a, b = tensors([np.array([0.0, 0, 3]), np.array([2.0, 0, 0])])
    got = autograd.pow(a, b).creator.backward(np.ones(3))
    np.testing.assert_allclose(got, [[0, 0, 0], [0, 0, np.log(3)]])


def test_halves_are_rounded_as_in_c():
    x = Tensor(data=np.array([0.5, 1.5, 2.5, -0.5, -2.5, 0.49999997, 8388609], np.float32))
    np.testing.assert_array_equal(autograd.round(x).array, np.array([1, 2, 3, -1, -3, 0, 8388609], np.float32))
    np.testing.assert_array_equal(autograd.rounde(x).array, np.array([0, 2, 2, 0, -2, 0, 8388609], np.float32))


def test_gradients_by_hand_and_by_id():
    x = Tensor(data=np.arange(10, dtype=np.float32).reshape(2, 5))
    parts = autograd.split(x, 1, [2, 3])
    assert isinstance(parts, tuple)
    np.testing.assert_array_equal(parts[0].creator.backward(parts[0].data, parts[1].data), x.array)
    np.testing.assert_array_equal(parts[0].creator.backward(parts[0].data)[:, 2:], np.zeros((2, 3)))
    x, t = tensors([some(4, 3), some(4, 3) ** 2])
    assert autograd.mse_loss(x, t).creator.backward().shape == (4, 3)
    w = autograd.mse_loss(x, autograd.mul(t, Tensor(data=np.ones(3), dtype=np.float64, stores_grad=True)))
    assert len(autograd.gradients(w)) == 1
    w = Tensor(data=np.array([1.0, 2.0]), stores_grad=True)
    got = autograd.gradients(autograd.reduce_sum(autograd.mul(w, w)), 0.5)
    np.testing.assert_array_equal(got[id(w)].array, [1, 2])


X, ROW, COUNTS = Tensor((3, 4)), Tensor((3,)), whole(2, 2)
LABELLED, NO_FLOATS = "softmax_cross_entropy", "a tensor of int32 takes no floats"
LOSSES = {"mse_loss": "the mean square error", "cross_entropy": "CrossEntropy", "ranking_loss": "RankingLoss"}
# By the function: its arguments and what it says, case after case.
SHAPES = {
    LABELLED: [((X, Tensor((3, 4, 5))), r"got \[3, 4, 5\]")],
    f"{LABELLED} of no classes": [
        ((Tensor((n, 0)), y), "have no class") for n, y in ((3, whole(3)), (0, Tensor((0, 0))))
    ],
    **{name: [((X, ROW), f"{op} needs equal shapes")] for name, op in LOSSES.items()},
    "add_bias": [((X, Tensor((4,)), 3), "axis 3"), *(((X, Tensor((n,))), r"b \[M\] for axis 0") for n in (3, 1))],
    "add": [((X, ROW), r"Add of shapes \[3, 4\] and \[3\]")],
    "max": [((X, X, ROW), r"Max of shapes \[3, 4\] and \[3, 4\] and \[3\]")],
    "greater": [((X, ROW), "must be equal or 1")],
    "matmul": [((X, X), "no matrix product"), ((Tensor((2, 3, 4)), Tensor((3, 4, 5))), "MatMul of shapes")],
    "gemm": [((X, X), "no matrix product"), ((X, X, Tensor((2, 3, 3)), 1.0, 1.0, 0, 1), "must not enlarge")],
    "cossim": [((X, ROW), "one shape")],
    "softmax": [((X, 2), r"axes \[2\] of a tensor of 2 dimensions")],
    "reduce_sum": [((X, [0, -2]), "named once")],
    "reduce_mean": [((X, [3]), "axes")],
    "flatten": [((X, 3), r"axis 3 is not in \[-2, 2\]")],
    "transpose": [((X, [0]), "by 2 axes, not 1")],
    "reshape": [((X, shape), "cannot take the shape") for shape in ((5, -1), (-2, 12))],
    "squeeze": [((X, 0), "only those of length 1")],
    "cat": [(([X, ROW],), "cannot be joined")],
    "split": [((X, 1, *parts), "do not make up") for parts in ([[2, 3]], [None, 3])],
    "expand": [((X, [3, 5]), "does not expand")],
    "space_to_depth": [((Tensor((1, 1, 3, 4)), 2), "no blocks")],
    "depth_to_space": [((Tensor((1, 6, 3, 4)), 2), "a multiple of 4")],
    "scatter_elements": [((X, [[0]], [1.0]), "one shape, of 2 dimensions")],
    "constant_of_shape": [((Tensor(data=n),), rf"0 or more; got {re.escape(repr(n))}") for n in ([2, -1], [[2, 1]])],
    "pad": [((Tensor((3, 0)), "edge", [0, 1, 0, 0]), "without elements, which 'edge' cannot enlarge")],
    "pad by mirrors": [((Tensor((0, 3)), "reflect", [0, 1, 2, 0]), "without elements, which 'reflect'")],
}
MISUSE = {
    LABELLED: [
        ((X, ROW), "class indices, got float32; make"),
        ((X, whole(2)), r"class indices \[3\], or dis.*; got \[2\]"),
    ],
    f"{LABELLED} of columns": [((X, whole(3, 1)), r"scores \[3, 4\] need 3 labels.*; got \[3, 1\]")],
    f"{LABELLED} of others": [((X, Tensor((3, 3))), r"need 3 labels: .* \[3, 4\]; got \[3, 3\]")],
    f"{LABELLED} of images": [((Tensor((3, 4, 1, 1)), whole(3)), r"\[N, classes\], got .* Fl")],
    "slice": [((X, [0], [2], [0], [0]), "no step is 0"), ((X, [0, 1], [2]), "for each axis")],
    "pad": [((X, "wrap", [0, 0, 0, 0]), "got 'wrap'"), ((X, "edge", [1, 1]), "4 widths")],
    "pad integers": [((whole(3), "constant", [1, 1], value), NO_FLOATS) for value in (math.nan, 0.5)],
    "pad an integer": [((whole(3), "constant", [1, 1], 2**40), "a tensor of int32 takes no int64")],
    "upsample": [((X, "linear", [1, 2]), "'nearest'")],
    "upsample by": [((X, "nearest", by), "integers") for by in ([1, 1.5], [1, math.nan], [math.inf, 1], 2)],
    "cast": [((X, "flaot"), "'flaot' is not an element type")],
    "dropout": [((whole(3, 4),), "Dropout takes floats, got int32")],
    "depth_to_space": [((X, 2), "images")],
    "globalaveragepool": [((X,), "takes images")],
    "gather": [((X, 0, [3]), r"not in \[-3, 3\)"), ((X, 0, [1.5]), "indices are integers, got float64")],
    "gather of none": [((Tensor((0, 2)), 0, [0]), "has no element")],
    "embedding": [((X, X), "indices are integers, got float32"), ((Tensor(data=[0, 7]), X), "range of axis 0")],
    "scatter_elements": [((X, [[5]], [[1.0]]), r"index 5, number 0, is not in \[-3, 3\)")],
    "scatter_elements by a tensor": [((X, Tensor(data=np.array([[-4]])), [[1.0]]), "index -4, number 0")],
    "scatter_elements of many": [((X, [[0]] * 4, [[1.0]] * 4, 1), "longer than x")],
    "scatter_elements of floats": [((COUNTS, [[1]], u), NO_FLOATS) for u in ([[math.nan]], Tensor((1, 1)))],
    "scatter_elements of a ragged list": [((X, [[0, 1]], [[1.0], [2.0, 3.0]]), "tensors compute with")],
    "cat": [(([],), "cat needs at least one tensor")],
    "sum": [((), "Sum needs at least one tensor")],
    "max": [((), "Max needs at least one tensor")],
    "tile": [((X, -1), "a number of repeats is -1; it must be an integer of at least 0")],
    "tile of each": [((X, [2, -1]), "a number of repeats is -1")],
}


@pytest.mark.parametrize(
    ("error", "name"), [(ShapeError, name) for name in SHAPES] + [(UsageError, name) for name in MISUSE]
)
def test_shapes_that_do_not_fit_and_other_misuse_are_explained(error, name):
    for arguments, match in (SHAPES if error is ShapeError else MISUSE)[name]:
        caught = refused(error, match, getattr(autograd, name.partition(" ")[0]), *arguments)
        assert error is UsageError or isinstance(caught, AssertionError)  # SINGA's


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)])
def test_losses_and_paddings_without_elements_are_zero_or_empty(shape):
    for loss in (autograd.mse_loss, autograd.ranking_loss, autograd.cross_entropy, autograd.binary_cross_entropy):
        x = Tensor(shape, stores_grad=True)
        y = loss(x, Tensor(shape))
        assert y.to_numpy().tolist() == [0], loss
        ((_, gradient),) = autograd.backward(y)
        assert gradient.shape == shape
    kept = [0, 1] if len(shape) == 2 else [0]
    widths = [2 * (shape[axis] > 0) for axis in kept]
    assert autograd.pad(Tensor(shape), "edge", widths * 2).shape == tuple(
        n + 2 * width for n, width in zip(shape, widths, strict=True)
    )
    assert autograd.tile(Tensor(shape), 0).size() == 0
    for axis in range(len(shape)):
        x = Tensor(shape, stores_grad=True)
        ((_, gradient),) = autograd.backward(autograd.softmax(x, axis), 1.0)
        assert gradient.shape == shape


# -- the backward pass -------------------------------------------------------------------------------------------------
def parameter(name, shape, seed=0, dtype=np.float64):
    rng = np.random.default_rng([seed, *shape])
    # Distinct values at least 0.01 apart and off zero: no maximum or ReLU flips within a difference step.
    values = (rng.permutation(int(np.prod(shape))) - np.prod(shape) / 2 + 0.3) * 0.037
    return Tensor(data=values.reshape(shape), dtype=dtype, stores_grad=True, name=name)


def test_dropout_scales_what_it_keeps_and_passes_its_gradient():
    x, drop = parameter("x", (50, 40)), layer.Dropout(0.25)
    y = drop(x)
    assert not np.array_equal(y.array, drop(x).array)
    kept = y.array != 0
    assert 0.7 < kept.mean() < 0.8
    np.testing.assert_allclose(y.array[kept], x.array[kept] / 0.75)
    ((_, gradient),) = autograd.backward(autograd.reduce_sum(y))
    np.testing.assert_allclose(gradient.array, kept / 0.75)
    autograd.training = False
    np.testing.assert_array_equal(drop(x).data, x.array)


def test_the_gradient_that_is_given_stays_as_it_is():
    w = parameter("w", (3,))
    dy = Tensor.of(np.array([1.0, 2.0, 3.0]))
    list(autograd.backward(w * 2 + w, dy))
    np.testing.assert_array_equal(w.grad.array, [3, 6, 9])
    np.testing.assert_array_equal(dy.array, [1, 2, 3])
    y = autograd.clip(parameter("v", (3, 3)), 0.0)  # overwrites what it is given
    assert 0 < (y.array == 0).sum() < 9
    ones = Tensor.of(np.ones((3, 3)))
    list(autograd.backward(y, ones))
    np.testing.assert_array_equal(ones.array, np.ones((3, 3)))


def test_pairs_come_each_once_in_order_of_readiness_and_before_the_pass_ends(monkeypatch):
    params = [parameter(f"w{i}", (3, 3), seed=i) for i in range(4)]
    visited, gradients = [], MatMul.gradients
    monkeypatch.setattr(MatMul, "gradients", lambda op, *args: visited.append(op) or gradients(op, *args))
    for _ in range(2):
        visited.clear()
        x = Tensor.of(np.ones((2, 3)))
        for w in params:
            x = autograd.sigmoid(x @ w)
        loss = autograd.reduce_sum(x)
        assert [p.name for p in autograd.gradient_order(loss)] == ["w3", "w2", "w1", "w0"]
        assert not visited
        for count, (param, _) in enumerate(autograd.backward(loss)):
            assert param is params[3 - count]
            assert len(visited) == count + 1
    shared, other = parameter("shared", (3, 3)), parameter("other", (3, 3), seed=1)
    x = Tensor.of(np.ones((2, 3)))

    def function(shared, other):
        return autograd.sigmoid(autograd.sigmoid(x @ shared) @ other) @ shared

    for _ in range(2):
        loss = loss_of(function, [shared, other])
        assert autograd.gradient_order(loss) == [other, shared]
        assert [p for p, _ in list(autograd.backward(loss))] == [other, shared]


def test_the_graph_is_released_while_it_is_walked():
    alive = []

    class Watched(Operation):
        def forward(self, x):
            self.saved = np.empty(1)
            alive.append(weakref.ref(self.saved))
            return x + 0.0

        def gradients(self, dy, into):
            return (dy,)

    params = [parameter(f"w{i}", (2, 2), seed=i) for i in range(3)]
    x = Tensor.of(np.ones((1, 2)))
    for w in params:
        x = Watched()(x @ w)
    loss = autograd.reduce_sum(x)
    counts = []
    first = {p: g.to_numpy() for p, g in autograd.backward(loss)}
    for p, g in backward(loss):  # as optimizers walk it
        np.testing.assert_array_equal(g.array, first[p])
        counts.append(sum(ref() is not None for ref in alive))
    assert counts == [2, 1, 0]
    refused(UsageError, "used before", lambda: next(autograd.backward(loss)))
    refused(UsageError, "used before", lambda: autograd.gradient_order(loss + 1))


def test_a_second_pass_goes_by_the_values_that_the_parameters_have_then():
    w = Tensor(data=np.array([[2.0]], np.float32), stores_grad=True, name="w")
    v = Tensor(data=np.array([[3.0]], np.float32), stores_grad=True, name="v")
    loss = autograd.reduce_sum(Tensor.of(np.ones((1, 1), np.float32)) @ w @ v)
    autograd.training = False
    sgd = opt.SGD(lr=1.0)
    for p, g in autograd.backward(loss):
        sgd.apply(p.name, p, g)
    assert (w.item(), v.item()) == (2 - 3, 3 - 2)
    assert {p.name: g.item() for p, g in autograd.backward(loss)} == {"v": 2.0, "w": 1.0}


def test_only_what_leads_to_parameters_is_recorded():
    x, w = Tensor((2, 3)), Tensor((3, 4), stores_grad=True)
    assert (x + x).creator is None
    assert matrix.Linear()(x, w).creator.needs == (False, True)
    autograd.training = False
    assert mode.training is autograd.training is False
    assert matrix.Linear()(x, w).creator is None


def test_misuse_is_explained():
    x, w = Tensor((3,)), Tensor((3,), stores_grad=True)
    refused(UsageError, "no operation was recorded", lambda: next(autograd.backward(x)))
    refused(UsageError, r"shape \(3,\) needs `dy`", lambda: next(autograd.backward(w * 2)))
    refused(UsageError, r"`dy` of shape \(2,\)", lambda: next(autograd.backward(w * 2, Tensor((2,)))))
    refused(UsageError, r"\[n, k\] @ \[k, m\]", autograd.matmul, x, w)
    refused(UsageError, r"not in \[0, 1\)", autograd.dropout, x, ratio=1.0)
    with pytest.raises(UsageError, match=r"Tensor\(\[3\], int32, cpu:0\) cannot train: its gradient would be rounded"):
        next(autograd.backward(autograd.reduce_sum(Tensor(data=[1, 2, 3], stores_grad=True) * 0.5)))
    refused(UsageError, "parts by index .* are outside the graph", next, autograd.backward(autograd.reduce_sum(w[:2])))
    labels = Tensor((2, 3), stores_grad=True, dtype=np.float64)
    loss = autograd.softmax_cross_entropy(parameter("w", (2, 3)), labels)
    refused(UsageError, "SoftMaxCrossEntropy has no gradient for its input", list, autograd.backward(loss))


def test_operations_are_timed_when_asked():
    w = parameter("w", (3,))
    device = w.device
    device.SetVerbosity(1)
    device.SetSkipIteration(1)
    try:
        for _ in range(3):
            list(autograd.backward(autograd.reduce_sum(autograd.sigmoid(w))))
        text = device.PrintTimeProfiling()
    finally:
        device.SetVerbosity(0)
        device.SetSkipIteration(0)
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "2 calls" in lines["Sigmoid"]
    assert "2 calls" in lines["Sigmoid backward"]
