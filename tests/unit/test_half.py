"""Half precision: what is float16, what is float32, and how close the results are to those of float32."""

import numpy as np
import pytest

from distopt import autograd, layer, opt, tensor
from distopt.nn.core.mode import mode
from distopt.nn.numerics import cpu as kernels
from distopt.tensor import Tensor
from tests.unit.nets import Chain

SHAPE = (6, 3, 9, 7)


class Net(Chain):
    def __init__(self):
        first = {"conv": layer.Conv2d(5, 3, padding=1), "norm": layer.BatchNorm2d(), "relu": layer.ReLU()}
        super().__init__(**first, pool=layer.MaxPool2d(2), flatten=layer.Flatten(), linear=layer.Linear(4))

    def forward(self, x):
        return self.linear(self.flatten(self.pool(self.relu(self.norm(self.conv(x)))) + 0.5))


def batch(dtype, seed=0):
    rng = np.random.default_rng(seed)
    return Tensor(data=rng.standard_normal(SHAPE), dtype=dtype), tensor.from_numpy(rng.integers(0, 4, SHAPE[0]))


def net(dtype):
    x, _ = batch(dtype)
    x.device.SetRandSeed(3)
    made = Net()
    made.set_optimizer(opt.SGD(0.05, momentum=0.9))
    made.compile([x])
    return made


def test_activations_are_float16_and_master_weights_losses_and_gradients_float32():
    made, (x, y) = net(np.float16), batch(np.float16)
    hidden = made.conv(x)
    assert hidden.dtype == np.float16
    saved = [a.dtype for a in hidden.creator.saved if isinstance(a, np.ndarray)]
    assert saved == [np.float16] * len(saved)
    out = made.forward(x)
    loss = autograd.softmax_cross_entropy(out, y)
    assert (out.dtype, loss.dtype) == (np.float16, np.float32)
    pairs = list(autograd.backward(loss))
    assert len(pairs) == 6
    assert all(p.dtype == g.dtype == np.float32 for p, g in pairs)
    assert {t.dtype for t in made.get_states().values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("scale", [1.0, 1024.0, 2.0**14])
def test_gradients_are_those_of_float32_whatever_the_loss_scale(monkeypatch, scale):
    monkeypatch.setattr(mode, "loss_scale", scale)
    gradients = []
    for dtype in (np.float16, np.float32):
        made, (x, y) = net(dtype), batch(dtype)
        loss = autograd.softmax_cross_entropy(made.forward(x), y)
        gradients.append({p.name: g.to_numpy() for p, g in autograd.backward(loss)})
    for name, expected in gradients[1].items():
        largest = np.abs(expected).max()
        np.testing.assert_allclose(gradients[0][name], expected, atol=0.01 * largest + 2e-4, err_msg=name)


def test_the_loss_scale_keeps_small_gradients_from_underflowing(monkeypatch, training):
    kept = {}
    for scale in (1.0, 1024.0):
        monkeypatch.setattr(mode, "loss_scale", scale)
        w = Tensor(data=[[20.0, 0.0]], dtype=np.float16, stores_grad=True)
        x = Tensor(data=np.ones((1, 1)), dtype=np.float16)
        loss = autograd.softmax_cross_entropy(autograd.matmul(x, w), tensor.from_numpy(np.array([0])))
        ((_, gradient),) = autograd.backward(loss)
        kept[scale] = gradient.array[0, 1]
    assert kept[1.0] == 0
    assert kept[1024.0] == pytest.approx(np.exp(-20), rel=0.05)


def test_master_weights_are_rounded_where_they_are_used_alone(training):
    w = Tensor(data=np.ones((2, 1)), dtype=np.float16, stores_grad=True)
    assert w.dtype == np.float32
    x = Tensor(data=np.ones((3, 2)), dtype=np.float16)
    sgd = opt.SGD(1e-4)
    for _ in range(100):
        sgd(autograd.reduce_sum(autograd.matmul(x, w)))
    np.testing.assert_allclose(w.array, 1 - 100 * 3e-4, rtol=1e-3)
    x = Tensor(data=np.ones((1, 1)), dtype=np.float16)
    w = Tensor(data=[[1 + 2.0**-13]], dtype=np.float16, stores_grad=True)
    assert w.array[0, 0] == 1 + 2.0**-13
    wide = autograd.softmax_cross_entropy(autograd.matmul(x, w), tensor.from_numpy(np.array([0])))
    assert (autograd.matmul(x, w).item(), wide.item()) == (1, 0)


def test_casts_keep_their_type_and_conversions_are_those_of_numpy():
    x = Tensor(data=np.array([[1.5, 7.0]], np.float16))
    converted = autograd.cast(x, tensor.float32), autograd.cast(x, tensor.int32), autograd.exp(x)
    assert [y.dtype for y in converted] == [np.float32, np.int32, np.float16]
    special = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519, 65520, 6e-8, 2.9e-8, 1e30])
    x = np.concatenate([special, np.random.default_rng(0).standard_normal(1001, np.float32)])
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    for shape in ((-1,), (2, -1)):
        got = kernels.to_half(x.reshape(shape))
        np.testing.assert_array_equal(got.view(np.uint16).reshape(-1)[5:], expected.view(np.uint16)[5:])
        np.testing.assert_array_equal(got.reshape(-1), expected)
        np.testing.assert_array_equal(kernels.from_half(got).reshape(-1), expected.astype(np.float32))
