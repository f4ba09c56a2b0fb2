"""The kernels of `nn.numerics.gpu`: the tests of `nn.numerics.cpu` once more, and what only a device has."""

import numpy as np
import pytest

from tests.gpu import require_gpu

require_gpu()

import cupy  # noqa: E402

from distopt import autograd, device, tensor  # noqa: E402
from distopt.errors import UsageError  # noqa: E402
from distopt.nn.numerics import cpu, gpu, gpu_base, gpu_images, numerics_of  # noqa: E402
from tests import reference  # noqa: E402
from tests.gpu.hosted import hosted, to_device  # noqa: E402
from tests.unit import test_ops_updates as updates  # noqa: E402
from tests.unit.test_ops import (  # noqa: E402, F401 - collected here
    array,
    test_activations,
    test_batch_norm2d,
    test_batch_norm2d_needs_a_variance,
    test_channel_sums,
    test_geometry_that_does_not_fit_is_refused,
    test_inputs_do_not_change,
    test_large_logits_do_not_overflow_and_a_class_may_be_masked,
    test_linear,
    test_max_pool_passes_nan_on,
    test_pool2d,
    test_relu_in_batch_norm2d_has_the_bits_of_one_behind_it,
    test_relu_passes_nan_on,
    test_softmax_cross_entropy,
)

SGD = 0.1, 0.0, 0.0, 0.0, False
ADAM = 0.1, 0.9, 0.999, 1e-8, 0.0

pytestmark = pytest.mark.usefixtures("hosted_kernels")


# -- updates -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", updates.SHAPES)
@pytest.mark.parametrize(("name", "settings"), updates.CASES)
def test_updates_have_the_bits_of_the_cpu(name, settings, dtype, shape):
    got = updates.run(hosted, name, settings, shape, dtype)
    gated = updates.run(hosted, name, settings, shape, dtype, gates=updates.GATES)
    assert [a.tobytes() for a in got] == [a.tobytes() for a in gated]
    expected = updates.run(cpu, name, settings, shape, dtype)
    assert [a.tobytes() for a in got] == [a.tobytes() for a in expected]


def test_updates_of_many_parameters_have_the_bits_of_single_ones():
    several = [(array((n,), "float32", n), array((n,), "float32", 0), [array((n,), "float32", 1)]) for n in range(200)]
    expected = [(param.copy(), grad, [slot.copy()]) for param, grad, [slot] in several]
    hosted.update("sgd", several, 0.1, 0.9, 0.0, 0.01, True)
    for one, got in zip(expected, several, strict=True):
        hosted.update("sgd", [one], 0.1, 0.9, 0.0, 0.01, True)
        assert (one[0].tobytes(), one[2][0].tobytes()) == (got[0].tobytes(), got[2][0].tobytes())


def test_tf32_is_a_switch(monkeypatch):
    modes, call = [], gpu_base._call
    monkeypatch.setattr(
        gpu_base, "_call", lambda name, *rest: (modes.extend(rest if "MathMode" in name else ()), call(name, *rest))
    )
    for value in ("1", "0"):
        monkeypatch.setenv("CUPY_TF32", value)
        gpu_base.product(cupy.ones((2, 3), "float32"), cupy.ones((3, 2), "float32"))
    assert modes == [3, 0]


# -- errors ------------------------------------------------------------------------------------------------------------
def zeros(*shape, kind="float32"):
    return cupy.zeros(shape, kind)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: gpu.conv2d(zeros(1, 2, 4, 4), zeros(3, 1, 3, 3), None), ValueError),
        (lambda: gpu.conv2d(zeros(1, 1, 4, 4), zeros(3, 1, 3, 3), zeros(2)), ValueError),
        (lambda: gpu.conv2d(zeros(1, 1, 4, 4, kind="float16"), zeros(3, 1, 3, 3, kind="float16"), None), TypeError),
        (lambda: gpu.linear(zeros(2, 3), zeros(4, 5), None), ValueError),
        (lambda: gpu.relu_backward(zeros(3), zeros(2)), ValueError),
        (lambda: gpu.softmax(zeros(3, 0)), ValueError),
        (lambda: gpu.softmax_cross_entropy(zeros(2, 3), zeros(3, kind="int64")), ValueError),
        (lambda: gpu.softmax_cross_entropy(zeros(2, 3), zeros(2)), TypeError),
        (lambda: gpu.update("sgd", [(zeros(3), zeros(4), [None])], *SGD), ValueError),
        (lambda: gpu.update("sgd", [(zeros(6)[::2], zeros(3), [None])], *SGD), TypeError),
        (lambda: gpu.update("sgd", [(zeros(3), zeros(3, kind="float64"), [None])], *SGD), TypeError),
        (lambda: gpu.update("sgd", [(np.zeros(3, "float32"), zeros(3), [None])], *SGD), TypeError),
        (lambda: gpu.relu(zeros(3, kind="float64")), TypeError),
        (lambda: gpu.update("adam", [(zeros(3), zeros(3), [zeros(3), zeros(3)])], 0, *ADAM), ValueError),
    ],
)
def test_arrays_that_do_not_fit_never_reach_a_kernel(call, kind):
    with pytest.raises(kind):
        call()


def test_kernels_of_an_array_of_the_device():
    assert numerics_of(zeros(3)) is gpu
    images = {name for name in reference.functions_of(gpu_images) if hasattr(gpu, name)}
    assert reference.functions_of(gpu) | images | {"relu_backward"} == reference.functions_of(cpu)
    assert gpu.relu_backward is gpu_images.relu_backward


# -- products ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("pairs", [((), ()), ((3,), (3,)), ((), (3,)), ((3,), ())])
@pytest.mark.parametrize("sizes", [(5, 7, 3), (1, 1, 1), (33, 2, 65), (4, 3, 0), (0, 3, 4), (4, 0, 3)])
def test_products(sizes, pairs, transposed, accumulate, dtype):
    """Of two matrices, of several pairs, and of one with several."""
    rows, columns, inner = sizes
    a, b = array((*pairs[0], rows, inner), dtype), array((*pairs[1], inner, columns), dtype)
    before = array((*max(pairs), rows, columns), dtype)
    given = [to_device(np.ascontiguousarray(x.mT if t else x)) for x, t in zip((a, b), transposed, strict=True)]
    out = to_device(before) if accumulate else cupy.full(before.shape, np.nan, dtype)
    flags = {"a_transposed": transposed[0], "b_transposed": transposed[1]}
    assert gpu_base.product(*given, out, accumulate=accumulate, **flags) is out
    np.testing.assert_allclose(out.get(), a @ b + (before if accumulate else 0), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(gpu_base.product(*given, **flags).get(), gpu_base.product(*given, **flags).get())


def test_products_of_shapes_that_do_not_fit():
    for b, options in ((zeros(4, 2), {}), (zeros(2, 4), {"b_transposed": True}), (zeros(3, 2), {"out": zeros(2, 5)})):
        with pytest.raises(ValueError, match="expected an array of shape"):
            gpu_base.product(zeros(2, 3), b, **options)


def test_gradients_of_a_linear_layer_lie_in_a_bucket():
    """At any address of its own, and nothing beside them changes."""
    x, w, b, dy = (array(shape, "float32", i) for i, shape in enumerate([(6, 5), (5, 7), 7, (6, 7)]))
    bucket = cupy.full(45, 7, "float32")
    dw, db = bucket[1:36].reshape(5, 7), bucket[37:44]
    _, saved = gpu.linear(*map(to_device, (x, w, b)), relu=True)
    dx = gpu.linear_backward(to_device(dy), saved, dw, db)
    expected = np.empty_like(w), np.empty_like(b)
    _, saved = cpu.linear(x, w, b, relu=True)
    for got, wanted in ((dx, cpu.linear_backward(dy, saved, *expected)), (dw, expected[0]), (db, expected[1])):
        np.testing.assert_allclose(got.get(), wanted, rtol=1e-5, atol=1e-5)
    assert bucket.get()[[0, 36, 44]].tolist() == [7, 7, 7]


# -- labels ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("label", [-1, 3, 1 << 40])
def test_a_label_that_is_no_class_is_found_when_the_loss_is_read(label, training):
    gpu_device = device.create_cuda_gpu()
    logits = tensor.Tensor((4, 3), gpu_device, stores_grad=True)
    text = f"label {label} of sample [23] is outside 0 ... 2"
    for labels, message in (([0, 1, label, label], text), ([0, 1, 2, 0], None)):
        loss = autograd.softmax_cross_entropy(logits, tensor.from_numpy(np.array(labels), gpu_device))
        ((_, grad),) = autograd.backward(loss)
        if message:
            assert np.isnan(grad.array.get()[2]).all(), "nothing may be learnt from it"
            with pytest.raises(UsageError, match=message):
                loss.item()
        assert np.isnan(loss.item()) == bool(message), "it is told once"


def scatter(x, index):
    return autograd.scatter_elements(x, autograd.reshape(index, (2, 1)), autograd.slice(x, [0, 0], [2, 1]))


CHOICES = {  # of x [4, 2] by indices [2], and the axis
    "embedding": (lambda x, index: autograd.embedding(index, x), 0),
    "gather": (lambda x, index: autograd.gather(x, 1, index), 1),
    "scatter_elements": (scatter, 0),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("index", [5, -5, 1 << 40])
def test_an_index_out_of_range_is_found_when_a_value_is_read(choice, index, training):
    """CuPy takes it modulo the length; nothing may be learnt from that."""
    gpu_device = device.create_cuda_gpu()
    function, axis = CHOICES[choice]
    length = (4, 2)[axis]
    for given, message in (([1, index], rf"index {index}, number 1, is not in \[-{length}, "), ([0, -1], None)):
        x = tensor.from_numpy(array((4, 2), "float32"), gpu_device)
        x.stores_grad = True
        y = function(x, tensor.from_numpy(np.array(given), gpu_device))
        ((_, grad),) = autograd.backward(autograd.reduce_sum(y))
        assert np.isnan(grad.array.get()).any() == bool(message), "nothing may be learnt from it"
        assert np.isnan(y.array.get()).any() == bool(message)
        if message:
            with pytest.raises(UsageError, match=message):
                y.to_numpy()
        y.to_numpy()


def test_an_index_that_the_host_has_is_refused_at_once():
    with pytest.raises(UsageError, match="index 4, number 1"):
        autograd.gather(tensor.Tensor((4, 2), device.create_cuda_gpu()), 0, [0, 4])


def test_labels_of_two_classes_may_be_bool():
    logits, labels = array((4, 2), "float32"), np.array([True, False, False, True])
    on_device, _ = gpu.softmax_cross_entropy(to_device(logits), to_device(labels))
    on_host, _ = cpu.softmax_cross_entropy(logits, labels)
    np.testing.assert_allclose(float(on_device), float(on_host), rtol=1e-6)


def test_a_loss_that_diverged_is_no_wrong_label():
    loss, _ = gpu.softmax_cross_entropy(cupy.full((2, 3), np.nan, "float32"), zeros(2, kind="int64"))
    assert np.isnan(loss.item())
    device.create_cuda_gpu().check()


def test_the_scale_of_a_gradient_may_be_on_the_device():
    logits, labels = to_device(array((5, 7), "float32")), to_device(np.arange(5))
    _, saved = gpu.softmax_cross_entropy(logits, labels)
    got = gpu.softmax_cross_entropy_backward(saved, cupy.full((1,), 0.25, "float32"))
    np.testing.assert_allclose(got.get(), gpu.softmax_cross_entropy_backward(saved, 0.25).get(), rtol=1e-6)
