"""Gradients against central differences in float64, and the promises of the backward pass."""

import weakref

import numpy as np
import pytest

from distopt import autograd, layer
from distopt.errors import UsageError
from distopt.nn.core.arithmetic import MatMul
from distopt.nn.core.autograd import backward
from distopt.nn.core.mode import mode
from distopt.nn.core.operation import Operation
from distopt.nn.core.tensor import Tensor
from distopt.nn.ops import convolution, matrix, normalization, pooling

pytestmark = pytest.mark.usefixtures("training")


def parameter(name, shape, seed=0, dtype=np.float64):
    rng = np.random.default_rng([seed, *shape])
    # Distinct values at least 0.01 apart and off zero: no maximum or ReLU flips within a difference step.
    values = (rng.permutation(int(np.prod(shape))) - np.prod(shape) / 2 + 0.3) * 0.037
    return Tensor(data=values.reshape(shape), dtype=dtype, stores_grad=True, name=name)


def conv(relu=False, stride=(1, 1), padding=(0, 0), pool=None):
    return lambda *inputs: convolution.Conv2d(stride, padding, relu, pool)(*inputs)


def pool(kind, kernel, stride, padding):
    return lambda x: kind(kernel, stride, padding)(x)


def batch_norm(x, gamma, beta):
    return normalization.BatchNorm2d(np.zeros(3), np.ones(3), 0.1, 1e-5)(x, gamma, beta)


LABELS = Tensor.of(np.array([2, 0, 1, 2]))
ONE_HOT = Tensor.of(np.eye(3)[[2, 0, 1, 2]])

CASES = {
    "add": (lambda a, b: a + b, (3, 4), (3, 4)),
    "add broadcast": (lambda a, b: a + b, (3, 1, 2), (4, 1)),
    "mul itself": (lambda a: a * a, (5,)),
    "mul of 0 dimensions": (lambda a, b: a * b * a, (), ()),
    "numbers": (lambda a: 2 - (3 * a + 1) / 4 - 1 / (a + 9), (3, 2)),
    "neg": (lambda a: -a, (3,)),
    "matmul itself": (lambda a: a @ a, (3, 3)),
    "reshape": (lambda a: autograd.reshape(a, (4, -1)) * a.reshape((4, 3)), (3, 4)),
    "reduce_sum without dimensions": (lambda a: autograd.reduce_sum(a, [1], keepdims=False), (2, 3, 4)),
    "softmax_cross_entropy": (lambda a: autograd.softmax_cross_entropy(a, LABELS), (4, 3)),
    "softmax_cross_entropy one-hot": (lambda a: autograd.softmax_cross_entropy(a, ONE_HOT), (4, 3)),
    "linear relu": (lambda x, w, b: matrix.Linear(relu=True)(x, w, b), (4, 3), (3, 5), (5,)),
    "conv relu": (conv(relu=True), (2, 3, 5, 6), (4, 3, 3, 2), (4,)),
    "conv uneven padding": (conv(stride=(2, 1), padding=(0, 1, 2, 1)), (2, 2, 5, 4), (3, 2, 3, 2), (3,)),
    "depthwise bias relu uneven padding": (
        conv(stride=(2, 1), padding=(1, 0, 0, 2), relu=True),
        (2, 3, 5, 4),
        (3, 1, 3, 2),
        (3,),
    ),
    "grouped": (conv(stride=(1, 2), padding=(1, 0)), (2, 4, 5, 4), (6, 2, 3, 2), (6,)),
    "grouped relu uneven padding": (conv(padding=(0, 1, 1, 0), relu=True), (2, 3, 4, 4), (6, 1, 2, 3)),
    "grouped pooled": (conv(pool=((2, 2), (2, 2), (0, 0))), (2, 4, 5, 6), (6, 2, 2, 3), (6,)),
    "max_pool uneven padding": (pool(pooling.MaxPool2d, (2, 3), (2, 1), (0, 1, 1, 0)), (2, 2, 5, 4)),
    "avg_pool uneven padding": (pool(pooling.AvgPool2d, (3, 2), (1, 2), (1, 0, 0, 1)), (2, 2, 5, 4)),
    "batch_norm": (batch_norm, (4, 3, 2, 2), (3,), (3,)),
}


def loss_of(function, inputs):
    y = function(*inputs)
    weight = Tensor.of(np.cos(np.arange(y.size(), dtype=np.float64)).reshape(y.shape) + 1.5)
    return autograd.reduce_sum(y * weight)


def central_difference(function, inputs, which, step=1e-6):
    data = inputs[which].array.reshape(-1)
    gradient = np.empty(data.size)
    for i in range(data.size):
        kept = data[i]
        data[i] = kept + step
        above = loss_of(function, inputs).item()
        data[i] = kept - step
        below = loss_of(function, inputs).item()
        data[i] = kept
        gradient[i] = (above - below) / (2 * step)
    return gradient.reshape(inputs[which].shape)


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_central_differences_wherever_they_land(case):
    """Of parameters, of inputs within a graph, and in memory that is given to them, twice each."""
    function, *shapes = CASES[case]
    inputs = [parameter(f"p{i}", shape, seed=i) for i, shape in enumerate(shapes)]
    expected = {}
    for _ in range(2):
        got = dict(autograd.backward(loss_of(function, inputs)))
        assert set(got) == set(inputs)
        for i, param in enumerate(inputs):
            difference = central_difference(function, inputs, i)
            np.testing.assert_allclose(got[param].array, difference, rtol=1e-6, atol=1e-7)
            expected[param] = got[param].to_numpy()
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


def test_branches_whose_kernels_overwrite_their_gradient_do_not_meet():
    x = parameter("x", (4, 3))
    w = [parameter(f"w{i}", (3, 3), seed=i) for i in range(2)]
    b = parameter("b", (3,))

    def function(x, w0, w1, b):
        return matrix.Linear(relu=True)(x, w0, b) + matrix.Linear(relu=True)(x, w1, b) + x

    w[1].array[...] = -w[0].array  # where one branch is off, the other is on
    b.array[...] = 1e-3
    inputs = [x, *w, b]
    got = dict(autograd.backward(loss_of(function, inputs)))
    for i, param in enumerate(inputs):
        np.testing.assert_allclose(got[param].array, central_difference(function, inputs, i), rtol=1e-6, atol=1e-7)


def chain(params, x):
    for w in params:
        x = autograd.sigmoid(x @ w)
    return autograd.reduce_sum(x)


def test_pairs_come_in_order_of_readiness_and_before_the_pass_ends(monkeypatch):
    params = [parameter(f"w{i}", (3, 3), seed=i) for i in range(4)]
    visited = []
    gradients = MatMul.gradients

    def counted(self, dy, into):
        visited.append(self)
        return gradients(self, dy, into)

    monkeypatch.setattr(MatMul, "gradients", counted)
    for _ in range(2):
        visited.clear()
        loss = chain(params, Tensor.of(np.ones((2, 3))))
        assert [p.name for p in autograd.gradient_order(loss)] == ["w3", "w2", "w1", "w0"]
        assert not visited
        for count, (param, _) in enumerate(autograd.backward(loss)):
            assert param is params[3 - count]
            assert len(visited) == count + 1


def test_shared_parameter_is_yielded_once_after_its_last_contribution():
    shared, other = parameter("shared", (3, 3)), parameter("other", (3, 3), seed=1)
    x = Tensor.of(np.ones((2, 3)))

    def function(shared, other):
        return autograd.sigmoid(autograd.sigmoid(x @ shared) @ other) @ shared

    for _ in range(2):
        loss = loss_of(function, [shared, other])
        assert autograd.gradient_order(loss) == [other, shared]
        pairs = list(autograd.backward(loss))
        assert [p for p, _ in pairs] == [other, shared]
        np.testing.assert_allclose(shared.grad.array, central_difference(function, [shared, other], 0), rtol=1e-6)


def test_layers_allow_updates_within_the_loop():
    def build():
        net = [layer.Conv2d(4, 3, activation="RELU"), layer.BatchNorm2d(), layer.Flatten(), layer.Linear(3)]
        x = Tensor.of(np.random.default_rng(0).standard_normal((2, 2, 5, 5)))
        x.device.SetRandSeed(1)
        for item in net:
            x = item(x)
        return autograd.reduce_sum(x * x)

    expected = [g.to_numpy() for _, g in autograd.backward(build())]
    for (param, gradient), value in zip(autograd.backward(build()), expected, strict=True):
        np.testing.assert_array_equal(gradient.array, value)
        param.array.fill(np.nan)


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
    with pytest.raises(UsageError, match="used before"):
        next(autograd.backward(loss))
    with pytest.raises(UsageError, match="used before"):
        autograd.gradient_order(loss + 1)


def test_gradient_of_the_result_can_be_given():
    w = parameter("w", (3,))
    dy = Tensor.of(np.array([1.0, 2.0, 3.0]))
    list(autograd.backward(w * 2 + w, dy))
    np.testing.assert_array_equal(w.grad.array, [3, 6, 9])
    np.testing.assert_array_equal(dy.array, [1, 2, 3])
    y = matrix.Linear(relu=True)(Tensor.of(np.eye(3)), parameter("v", (3, 3)))  # overwrites what it is given
    assert 0 < (y.array == 0).sum() < 9
    ones = Tensor.of(np.ones((3, 3)))
    list(autograd.backward(y, ones))
    np.testing.assert_array_equal(ones.array, np.ones((3, 3)))


def test_only_what_leads_to_parameters_is_recorded():
    x, w = Tensor((2, 3)), Tensor((3, 4), stores_grad=True)
    assert (x + x).creator is None
    y = matrix.Linear()(x, w)
    assert y.creator.needs == (False, True)
    autograd.training = False
    assert mode.training is autograd.training is False
    assert matrix.Linear()(x, w).creator is None


def test_misuse_is_explained():
    x, w = Tensor((3,)), Tensor((3,), stores_grad=True)
    with pytest.raises(UsageError, match="no operation was recorded"):
        next(autograd.backward(x))
    with pytest.raises(UsageError, match=r"shape \(3,\) needs `dy`"):
        next(autograd.backward(w * 2))
    with pytest.raises(UsageError, match=r"`dy` of shape \(2,\)"):
        next(autograd.backward(w * 2, Tensor((2,))))
    with pytest.raises(UsageError, match=r"\[n, k\] @ \[k, m\]"):
        autograd.matmul(x, w)
    with pytest.raises(UsageError, match="equal shapes"):
        autograd.mse_loss(x, Tensor((4,)))
    with pytest.raises(UsageError, match=r"not in \[0, 1\)"):
        autograd.dropout(x, ratio=1.0)
    with pytest.raises(UsageError, match=r"Tensor\(\[3\], int32, cpu:0\) cannot train: its gradient would be rounded"):
        next(autograd.backward(autograd.reduce_sum(Tensor(data=[1, 2, 3], stores_grad=True) * 0.5)))
    with pytest.raises(UsageError, match=r"parts by index .* are outside the graph"):
        next(autograd.backward(autograd.reduce_sum(w[:2])))
    labels = Tensor((2, 3), stores_grad=True, dtype=np.float64)
    with pytest.raises(UsageError, match="SoftMaxCrossEntropy has no gradient for its input"):
        list(autograd.backward(autograd.softmax_cross_entropy(parameter("w", (2, 3)), labels)))


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
