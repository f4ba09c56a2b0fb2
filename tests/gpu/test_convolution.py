"""Convolution on a GPU: the tests of `nn.numerics.cpu` once more, chunks, alignment, streams."""

import numpy as np
import pytest

from tests.gpu import require_gpu

require_gpu()

import cupy  # noqa: E402

from distopt.nn.numerics import gpu, gpu_images  # noqa: E402
from tests import reference  # noqa: E402
from tests.gpu.hosted import to_device  # noqa: E402
from tests.unit import test_ops as on_cpu  # noqa: E402
from tests.unit.test_ops import array, near, test_conv2d, test_conv2d_max_pool  # noqa: E402, F401 - collected

pytestmark = pytest.mark.usefixtures("hosted_kernels")


def parts(case):
    """x, weight, bias, and the gradient of the result."""
    n, c, h, w, m, kernel, stride, padding = case
    x, weight = array((n, c, h, w), "float32"), array((m, c, *kernel), "float32", 1)
    y, _ = reference.conv2d(x, weight, None, stride, padding)
    return x, weight, array(m, "float32", 2), array(y.shape, "float32", 3)


def check(x, weight, bias, dy, stride=(1, 1), padding=(0, 0)):
    """Arrays of the device against the reference."""
    host = [a.get() for a in (x, weight, bias, dy)]
    y, saved = gpu.conv2d(x, weight, bias, stride, padding, True)
    dw, db = cupy.empty_like(weight), cupy.empty_like(bias)
    dx = gpu.conv2d_backward(dy, saved, dw, db)
    expected, saved = reference.conv2d(*host[:3], stride, padding, True)
    near(y.get(), expected)
    expected_dw, expected_db = np.empty_like(host[1]), np.empty_like(host[2])
    near(dx.get(), reference.conv2d_backward(host[3], saved, expected_dw, expected_db))
    near(dw.get(), expected_dw)
    near(db.get(), expected_db)


# -- numbers -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", [2, 3])
def test_chunks(monkeypatch, dtype, case):
    monkeypatch.setattr(gpu_images, "SCRATCH_BYTES", 2500)
    on_cpu.test_conv2d(None, dtype, on_cpu.CONVOLUTIONS[case], True, True)
    on_cpu.test_conv2d_max_pool(None, dtype, on_cpu.FUSED[case], True, True)


@pytest.mark.parametrize("case", [2, 3])
def test_without_the_gradient_of_the_weight(monkeypatch, case):
    monkeypatch.setattr(gpu_images, "SCRATCH_BYTES", 2500)
    x, weight, bias, dy = map(to_device, parts(on_cpu.CONVOLUTIONS[case]))
    _, saved = gpu.conv2d(x, weight, bias, *on_cpu.CONVOLUTIONS[case][6:], True)
    found = [(dw, cupy.full_like(bias, 7)) for dw in (cupy.empty_like(weight), None)]
    whole, some = (gpu.conv2d_backward(dy, saved, dw, db) for dw, db in found)
    near(some.get(), whole.get())
    near(found[1][1].get(), found[0][1].get())


def test_arrays_may_begin_anywhere():
    """As gradients do in a bucket."""
    given = [to_device(a) for a in parts((3, 2, 7, 6, 5, (3, 3), (1, 1), (0, 0)))]
    memory = cupy.full(sum(a.size + 1 for a in given) + 400, 7, "float32")
    moved, at = [], 1
    for one in given:
        moved.append(memory[at : at + one.size].reshape(one.shape))
        moved[-1][...] = one
        at += one.size + 1
    assert any(one.data.ptr % 16 for one in moved)
    check(*moved)
    at += at % 4 == 0
    dw = memory[at : at + given[1].size].reshape(given[1].shape)
    assert dw.data.ptr % 16
    _, saved = gpu.conv2d(moved[0], moved[1], None)
    gpu.conv2d_backward(moved[3], saved, dw, None, need_dx=False)
    assert memory[at - 1].item() == memory[at + dw.size].item() == 7
    expected = cupy.empty_like(given[1])
    gpu.conv2d_backward(given[3], saved, expected, None, need_dx=False)
    np.testing.assert_array_equal(dw.get(), expected.get())


def test_nan_is_passed_on():
    x, weight, bias, _ = parts((1, 2, 6, 6, 3, (3, 3), (1, 1), (0, 0)))
    x[0, 1, 3, 4] = np.nan
    y, _ = gpu.conv2d(*map(to_device, (x, weight, bias)), relu=True)
    np.testing.assert_array_equal(np.isnan(y.get()), np.isnan(reference.conv2d(x, weight, bias)[0]))


def test_work_stays_on_the_current_stream():
    """No data is read before another stream has computed it, and later work finds the results."""
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null):
        given = [to_device(a) for a in parts((2, 3, 8, 9, 4, (3, 3), (1, 1), (1, 0)))]
        cupy.cuda.Device().synchronize()
        with stream:
            check(*map(gpu.relu, given), padding=(1, 0))
            stream.synchronize()


@pytest.mark.parametrize("case", [(3, 4, 5, 6, 7, (1, 1), (1, 1), (0, 0)), (2, 33, 2, 2, 40, (1, 1), (1, 1), (0, 0))])
def test_pointwise(case):
    """The gradient of a weight comes from one product for each image, or where that takes more memory, from rows."""
    x, weight, bias, dy = map(to_device, parts(case))
    assert gpu_images._fits_images(x, len(weight)) is (case[2] > 2)
    check(x, weight, bias, dy)
