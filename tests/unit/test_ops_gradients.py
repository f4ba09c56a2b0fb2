"""Each backward function against central differences, in float64."""

import numpy as np
import pytest

from distopt.nn.kernels import cpu
from tests import reference

STEP = 1e-6


def array(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def check(value, arrays, gradients):
    """`value()` is a scalar that depends on `arrays`; `gradients` are claimed to be its derivatives."""
    for x, gradient in zip(arrays, gradients, strict=True):
        assert x.shape == gradient.shape
        for i in np.ndindex(x.shape):
            kept = x[i]
            x[i] = kept + STEP
            above = value()
            x[i] = kept - STEP
            below = value()
            x[i] = kept
            assert gradient[i] == pytest.approx((above - below) / (2 * STEP), rel=1e-5, abs=1e-7)


@pytest.fixture(params=[cpu, reference], ids=["cpu", "reference"])
def k(request):
    return request.param


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("stride", "padding"), [((1, 1), (0, 0)), ((2, 1), (1, 2)), ((1, 1), (2, 2))])
def test_conv2d(k, stride, padding, relu):
    x, w, b = array(2, 3, 5, 6), array(4, 3, 3, 2, seed=1), array(4, seed=2)
    y, saved = k.conv2d(x, w, b, stride, padding, relu)
    out = array(*y.shape, seed=3)
    dw, db = np.empty_like(w), np.empty_like(b)
    dx = k.conv2d_backward(out.copy(), saved, dw, db)
    check(lambda: (k.conv2d(x, w, b, stride, padding, relu)[0] * out).sum(), (x, w, b), (dx, dw, db))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("pooling", [((2, 2), (2, 2), (0, 0)), ((3, 2), (2, 1), (1, 1))])
def test_conv2d_max_pool(k, pooling, relu):
    x, w, b = array(2, 3, 6, 7), array(4, 3, 3, 2, seed=1), array(4, seed=2)
    options = (1, 1), (1, 0), relu, pooling
    y, saved = k.conv2d(x, w, b, *options)
    out = array(*y.shape, seed=3)
    dw, db = np.empty_like(w), np.empty_like(b)
    dx = k.conv2d_backward(out.copy(), saved, dw, db)
    check(lambda: (k.conv2d(x, w, b, *options)[0] * out).sum(), (x, w, b), (dx, dw, db))


@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize("geometry", [((2, 2), (2, 2), (0, 0)), ((3, 2), (2, 1), (1, 1)), ((2, 2), (2, 2), (1, 1))])
def test_pool2d(k, kind, geometry):
    forward, backward = getattr(k, f"{kind}_pool2d"), getattr(k, f"{kind}_pool2d_backward")
    x = array(2, 2, 5, 6)
    y, saved = forward(x, *geometry)
    out = array(*y.shape, seed=1)
    check(lambda: (forward(x, *geometry)[0] * out).sum(), (x,), (backward(out.copy(), saved),))


@pytest.mark.parametrize("relu", [False, True])
def test_linear(k, relu):
    x, w, b, out = array(3, 4), array(4, 5, seed=1), array(5, seed=2), array(3, 5, seed=3)
    _, saved = k.linear(x, w, b, relu)
    dw, db = np.empty_like(w), np.empty_like(b)
    dx = k.linear_backward(out.copy(), saved, dw, db)
    check(lambda: (k.linear(x, w, b, relu)[0] * out).sum(), (x, w, b), (dx, dw, db))


@pytest.mark.parametrize("name", ["relu", "sigmoid"])
def test_activations(k, name):
    forward, backward = getattr(k, name), getattr(k, f"{name}_backward")
    x, out = array(4, 5), array(4, 5, seed=1)
    check(lambda: (forward(x) * out).sum(), (x,), (backward(out.copy(), forward(x)),))


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm2d(k, training):
    x, gamma, beta, out = array(3, 2, 2, 3), array(2, seed=1), array(2, seed=2), array(3, 2, 2, 3, seed=3)

    def forward():
        return k.batch_norm2d(x, gamma, beta, np.full(2, 0.3), np.full(2, 1.7), 0.1, 1e-3, training)

    dgamma, dbeta = np.empty_like(gamma), np.empty_like(beta)
    dx = k.batch_norm2d_backward(out.copy(), forward()[1], dgamma, dbeta)
    check(lambda: (forward()[0] * out).sum(), (x, gamma, beta), (dx, dgamma, dbeta))


@pytest.mark.parametrize("labels", [np.array([0, 2, 1]), np.abs(array(3, 4, seed=1))], ids=["index", "soft"])
def test_softmax_cross_entropy(k, labels):
    logits = array(3, 4)
    _, saved = k.softmax_cross_entropy(logits, labels)
    check(
        lambda: 3 * float(k.softmax_cross_entropy(logits, labels)[0]),
        (logits,),
        (k.softmax_cross_entropy_backward(saved, 3.0),),
    )
