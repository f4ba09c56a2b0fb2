"""Operations that scripts write as in SINGA, and the classes of its `autograd` module."""

import inspect

import numpy as np
import pytest

from distopt import autograd, layer, opt
from distopt.errors import UsageError
from distopt.nn.core.raw import RawTensor
from distopt.nn.core.tensor import Tensor
from tests.unit.refusals import refused

pytestmark = pytest.mark.usefixtures("training")

X = np.linspace(-0.9, 0.8, 24, dtype=np.float32).reshape(2, 3, 4)
ROW = np.linspace(0.2, 0.9, 6, dtype=np.float32).reshape(2, 3)
# A class, its options, its tensors, and the same by the function.
CLASSES = {
    "AddBias": ((1,), (ROW, ROW[:, 0]), lambda x, b: autograd.add_bias(x, b, 1)),
    "BinaryCrossEntropy": ((ROW,), (ROW,), lambda x: autograd.binary_cross_entropy(x, Tensor(data=ROW))),
    "Clip": ((-0.5, 0.1), (X,), lambda x: autograd.clip(x, -0.5, 0.1)),
    "Concat": ((1,), (X, X), lambda *xs: autograd.cat(xs, 1)),
    "Dropout": ((0, 0.0), (X,), autograd.identity),
    "Gemm": ((2.0, 1.0, 1, 0), (ROW, ROW), lambda a, b: autograd.gemm(a, b, None, 2.0, 1.0, 1, 0)),
    "MeanSquareError": ((ROW,), (ROW + 1,), lambda x: autograd.mse_loss(x, Tensor(data=ROW))),
    "OneHot": ((0, 3, [0, 1]), (X,), lambda x: autograd.onehot(0, x, 3, [0, 1])),
    "ReLU": ((), (X,), autograd.relu),
    "SoftMax": ((1,), (X,), lambda x: autograd.softmax(x, 1)),
    "SoftMaxCrossEntropy": ((ROW,), (ROW,), lambda x: autograd.softmax_cross_entropy(x, Tensor(data=ROW))),
    "Sum": ((), (X, X, X), autograd.sum),
    "Where": ((X > 0,), (X, -X), lambda x, y: autograd.where(x, y, X > 0)),
    "Xor": ((), (X, -X), autograd._xor),
}


class Product(autograd.Operator):
    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor

    def forward(self, a, b):
        assert (type(a), a.shape()) == (RawTensor, (2, 3))
        if autograd.training:
            self.inputs = a, b
        return self.factor * np.asarray(a * b, np.float64)

    def backward(self, dy):
        a, b = self.inputs
        dy *= self.factor
        return dy * b, dy * a


def parameters(*seeds):
    values = [np.random.default_rng(seed).standard_normal((2, 3)) for seed in seeds]
    return [Tensor(data=value, dtype=np.float32, stores_grad=True) for value in values]


def test_an_operator_of_a_script_is_part_of_the_graph():
    a, b = parameters(0, 1)
    (y,) = Product(2)(autograd.tanh(a), b)
    assert (type(y.array), y.dtype) == (np.ndarray, np.float32)
    got = autograd.gradients(autograd.reduce_sum(y))
    expected = autograd.gradients(autograd.reduce_sum(autograd.tanh(a) * b * 2))
    for p in (a, b):
        assert got[id(p)].dtype == np.float32
        np.testing.assert_allclose(got[id(p)].array, expected[id(p)].array, rtol=1e-6)
    opt.SGD(lr=0.1)(autograd.reduce_sum(y))
    refused(UsageError, "used before", y.creator.backward, y.data)


def test_operators_may_return_their_argument_a_tuple_and_no_gradient():
    class Same(autograd.Operator):
        def forward(self, x):
            return x

        def backward(self, dy):
            self.kept = dy
            return [dy]

    (a,) = parameters(0)
    operator = Same()
    (y,) = operator(a)
    y.array.fill(0)
    assert a.array.any()
    # ReLU's kernel may overwrite the gradient that it is given.
    (z,) = operator(autograd.relu(a * -1.0))
    list(autograd.backward(autograd.reduce_sum(z)))
    np.testing.assert_array_equal(operator.kept, np.ones((2, 3)))
    np.testing.assert_array_equal(y.creator.backward(np.full((2, 3), 5.0)), np.full((2, 3), 5))

    class Masked(autograd.Operator):
        def forward(self, x, mask):
            self.mask = mask
            return (x * mask,)

        def backward(self, dy):
            return dy * self.mask, None

    a, mask = *parameters(0), Tensor(data=np.eye(2, 3, dtype=np.float32))
    y = Masked("mine")(a, mask)[0]
    np.testing.assert_array_equal(y.array, a.array * mask.array)
    np.testing.assert_array_equal(autograd.gradients(autograd.reduce_sum(y))[id(a)].array, mask.array)


def test_misuse_of_operators_is_explained():
    class Wrong(autograd.Operator):
        def forward(self, x, *more):
            return (x + 1, *more)

        def backward(self, dy):
            return dy[:1]

    (a,) = parameters(0)
    y = autograd.reduce_sum(Wrong()(a)[0])
    refused(UsageError, r"Wrong\.backward returned gradients of shapes \[\(1, 3\)\]", lambda: [*autograd.backward(y)])
    refused(UsageError, r"Wrong\.forward returned 2 results", lambda: Wrong()(a, a))


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_returns_a_tuple_of_what_its_function_returns(name):
    options, arrays, function = CLASSES[name]
    options = [Tensor(data=o) if isinstance(o, np.ndarray) and o.dtype == np.float32 else o for o in options]
    tensors = [Tensor(data=x) for x in arrays]
    (y,) = getattr(autograd, name)(*options)(*tensors)
    np.testing.assert_array_equal(y.array, function(*tensors).array)


def test_classes_of_singas_autograd():
    parts = autograd.Split(-1, [1, 3])(Tensor(data=X))
    assert [part.shape for part in parts] == [(2, 3, 1), (2, 3, 3)]
    refused(TypeError, r"Split\(axis, parts, num_output\) got 4 arguments", autograd.Split, 0, 1, 2, 3)
    for name in autograd._CLASSES:
        kind = getattr(autograd, name)
        assert set(kind.options) <= set(inspect.signature(kind.function).parameters), name
    x = Tensor(data=np.ones((40, 50), np.float32))
    for y, ratio in [(autograd.dropout(x, 3, 0.25), 0.25), (autograd.dropout(x, 0.1), 0.1), (autograd.dropout(x), 0.5)]:
        assert (y.array == 0).mean() == pytest.approx(ratio, abs=0.04)
    assert autograd.Conv2d is layer.Conv2d
