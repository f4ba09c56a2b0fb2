"""Changes in place between forward and backward are refused where the gradient needs the old values, or harmless."""

import gc

import numpy as np
import pytest

from distopt import autograd, opt, tensor
from distopt.errors import UsageError
from distopt.nn.core import changes
from distopt.nn.core.operation import Operation
from distopt.nn.core.tensor import Tensor
from distopt.nn.ops import matrix
from tests.unit.refusals import refused

F32 = np.float32

pytestmark = pytest.mark.usefixtures("training")


def ramp(*shape, start=1.0, **options):
    return Tensor(data=(start + np.arange(np.prod(shape)) / 7).reshape(shape).astype(F32), **options)


def weight(*shape):
    return ramp(*shape, start=0.5, stores_grad=True)


def gradient_of(y):
    ((_, gradient),) = autograd.backward(y, 1.0)
    return gradient.to_numpy()


def shifted(x):
    x += 10


IN_PLACE = {
    "+=": shifted,
    "/=": lambda x: x.__itruediv__(3),
    "-= of a tensor": lambda x: x.__isub__(ramp(*x.shape)),
    "set_value": lambda x: x.set_value(3),
    "gaussian": lambda x: x.gaussian(),
    "uniform": lambda x: x.uniform(0, 1),
    "bernoulli": lambda x: x.bernoulli(0.5),
    "copy_from_numpy": lambda x: x.copy_from_numpy(np.ones(x.shape)),
    "a part of copy_from_numpy": lambda x: x.copy_from_numpy(np.ones(2), x.size() - 2),
    "copy_data": lambda x: x.copy_data(ramp(*x.shape)),
    "copy_data_to_from": lambda x: tensor.copy_data_to_from(x, ramp(3), 2, 1),
    "axpy": lambda x: tensor.axpy(2.0, ramp(*x.shape), x),
    "out": lambda x: tensor.softmax(ramp(*x.shape), x),
    "a copy that shares the memory": lambda x: shifted(x.copy()),
    "its raw tensor": lambda x: shifted(tensor.from_raw_tensor(x.data)),
    "a view that is gone": lambda x: shifted(Tensor.of(x.array[1:])),
}


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
def test_a_change_of_what_a_gradient_needs_is_refused_and_another_is_allowed(change):
    x, w = ramp(3, 5), weight(3, 5)
    for y in (x * w, autograd.reshape(x, (5, 3)) * autograd.reshape(w, (5, 3)), autograd.relu(x * w)):
        change(x)
        refused(UsageError, "gradient of Mul needs were changed in place", gradient_of, y)
    x, other, w = ramp(3, 5), ramp(3, 5), weight(3, 5)
    expected = x.to_numpy()
    y = x * w + other
    change(other)
    change(kept_tensor := Tensor(data=x.to_numpy()))
    np.testing.assert_array_equal(gradient_of(y), expected)
    y = x * w
    np.testing.assert_array_equal(gradient_of(y), expected)
    change(x)  # after the pass
    change(x)
    y = x * w
    np.testing.assert_array_equal(gradient_of(y), x.to_numpy())
    assert kept_tensor.shape == x.shape


@pytest.mark.parametrize(
    "replace",
    [
        lambda x: x.to_type("float64"),
        lambda x: x.reset_like(ramp(2, 2)),
        lambda x: (x.to_type("float64"), shifted(x)),
        lambda x: setattr(x, "data", np.zeros((3, 5), F32)),
    ],
)
def test_new_memory_leaves_the_old_values_to_the_graph(replace):
    x, w = ramp(3, 5), weight(3, 5)
    expected = x.to_numpy()
    y = x * w
    replace(x)
    np.testing.assert_array_equal(gradient_of(y), expected)
    x = ramp(3, 5)
    y = x * w
    shifted(x)
    replace(x)
    refused(UsageError, "changed in place", gradient_of, y)


def test_neighbours_are_other_values_and_results_count_too():
    memory = np.arange(30, dtype=F32)
    x, other = Tensor.of(memory[:15].reshape(3, 5)), Tensor.of(memory[15:])
    y = x * weight(3, 5)
    shifted(other)
    np.testing.assert_array_equal(gradient_of(y), memory[:15].reshape(3, 5))
    for walk in (gradient_of, lambda y: y.creator.backward(np.ones(4, F32))):
        y = autograd.sigmoid(weight(4))
        y.set_value(0.5)
        refused(UsageError, "Sigmoid", walk, y)


class Strided(Operation):
    """Adds up some elements, times a factor whose gradient needs them."""

    def __init__(self, part):
        self.part = part

    def forward(self, x, w):
        self.saved = x[self.part]
        return (w * self.saved.sum()).astype(F32)

    def gradients(self, dy, into):
        return None, (dy * self.saved.sum()).astype(F32)


@pytest.mark.parametrize("part", [np.s_[::2], np.s_[::-1], np.s_[::-3], np.s_[4:], np.s_[:0]], ids=str)
def test_strided_values_lie_between_their_first_and_last(part):
    memory = np.arange(8, dtype=F32)
    for i in range(8):
        x, w = Tensor.of(memory), weight(1)
        y = Strided(part)(x, w)
        shifted(Tensor.of(memory[i : i + 1]))
        saved = np.arange(8)[part]
        if saved.size and saved.min() <= i <= saved.max():
            refused(UsageError, "gradient of Strided needs were changed in place", gradient_of, y)
        else:
            assert gradient_of(y) == memory[part].sum()


OPERATIONS = {
    "Div": lambda x, w: x / w,
    "MatMul": lambda x, w: x @ w,
    "Gemm": lambda x, w: autograd.gemm(x, w),
    "Pow": lambda x, w: autograd.pow(x, w),
    "PRelu": lambda x, w: autograd.prelu(x, w),
    "Max": lambda x, w: autograd.max(x, w),
    "CosSim": lambda x, w: autograd.cossim(x, w),
    "MeanSquareError": lambda x, w: autograd.mse_loss(autograd.sum(w), x),
    "Linear": lambda x, w: matrix.Linear()(x, w),
    "Gather": lambda x, w: autograd.gather(w, 0, x),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_that_reads_its_input_backward_refuses(name):
    x = ramp(3, 3, start=0.2 if name == "Pow" else -0.6)
    if name == "Gather":
        x = Tensor(data=np.arange(9).reshape(3, 3) % 3, dtype=tensor.int64)
    w = weight(3, 3)
    expected = gradient_of(OPERATIONS[name](x, w))
    y = OPERATIONS[name](x, w)
    shifted(x)
    try:
        np.testing.assert_array_equal(gradient_of(y), expected)  # it keeps values of its own
    except UsageError as error:
        assert f"gradient of {name} needs were changed" in str(error)  # noqa: PT017 - either is right


@pytest.mark.parametrize("name", ["sum", "max", "min", "mean"])
def test_the_result_of_one_tensor_has_memory_of_its_own(name):
    x = weight(2, 3)
    y = getattr(autograd, name)(x)
    assert not np.shares_memory(x.array, y.array)
    expected = y.to_numpy()
    x.set_value(0)
    np.testing.assert_array_equal(y.array, expected)


def test_an_update_of_parameters_that_another_graph_needs_is_refused():
    w, v, u, sgd = weight(3), weight(3), weight(3), opt.SGD(lr=0.1, momentum=0.9)
    for _ in range(3):
        sgd(autograd.reduce_sum(w * w))  # an update after backward, and in its middle
        sgd(autograd.reduce_sum(u * u))
    losses = [autograd.reduce_sum(x) for x in (w * w, u * u, w * w * v, v * v)]
    sgd(losses[0])
    sgd(losses[1])  # another parameter
    opt.SGD(lr=0.1)(losses[3])
    refused(UsageError, "Mul", lambda: sgd(losses[2]))


def test_what_is_noted_ends_with_its_memory():
    gc.collect()  # of other tests' tensors
    before = len(changes._changes)
    tensors = [Tensor((3, 4)).gaussian() for _ in range(50)]
    assert len(changes._changes) >= before + 50
    views = [Tensor.of(t.array[1:]) for t in tensors]
    del tensors
    assert len(changes._changes) >= before + 50
    del views
    assert len(changes._changes) == before
