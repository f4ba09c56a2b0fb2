"""cuDNN itself, on a real GPU: what its stand-in cannot show."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu import require_gpu

require_gpu()

import cupy  # noqa: E402

from distopt.nn.devices.discovery import find_cudnn  # noqa: E402
from distopt.nn.kernels import cpu, gpu, gpu_cudnn  # noqa: E402
from tests.gpu.hosted import to_device  # noqa: E402
from tests.unit.test_ops import array  # noqa: E402

if find_cudnn()[0] is None:
    pytest.skip(find_cudnn()[1], allow_module_level=True)

CASES = [
    # n, c, h, w, m, kernel, stride, padding
    (64, 1, 28, 28, 20, (5, 5), (1, 1), (0, 0)),
    (64, 20, 12, 12, 50, (5, 5), (1, 1), (0, 0)),
    (17, 32, 29, 31, 40, (3, 3), (1, 1), (1, 1)),
    (8, 3, 65, 67, 24, (7, 7), (2, 2), (3, 3)),
    (8, 64, 14, 14, 96, (1, 1), (2, 2), (0, 0)),
]


@pytest.fixture(autouse=True)
def by_cudnn():
    with gpu_cudnn.convolving_by("cudnn"):
        yield


def given(case, dtype, seed=0):
    """x, weight, and the gradient of the result."""
    n, c, h, w, m, kernel, stride, padding = case
    places = [(s + 2 * p - k) // step + 1 for s, p, k, step in zip((h, w), padding, kernel, stride, strict=True)]
    shapes = (n, c, h, w), (m, c, *kernel), (n, m, *places)
    return [array(shape, dtype, seed + i) for i, shape in enumerate(shapes)]


def run(kernels, xp, x, weight, dy, case):
    y, saved = kernels.conv2d(x, weight, None, *case[6:])
    dw = xp.empty_like(weight)
    return y, kernels.conv2d_backward(dy, saved, dw, None), dw


@pytest.mark.parametrize("case", CASES)
def test_equal_bits_and_the_precision_of_float32(case):
    arrays = given(case, "float32")
    on_device = [*map(to_device, arrays)]
    runs = []
    for _ in range(3):
        runs.append([a.get() for a in run(gpu, cupy, *on_device, case)])
        cupy.full(1 << 22, np.nan, "float32")  # the next workspace is found in another state
    assert all(a.tobytes() == b.tobytes() for other in runs[1:] for a, b in zip(runs[0], other, strict=True))
    # In TF32 the error is some 1e-4 of the largest value.
    for got, exact in zip(runs[0], run(cpu, np, *(a.astype("float64") for a in arrays), case), strict=True):
        np.testing.assert_allclose(got, exact, rtol=0, atol=3e-5 * np.abs(exact).max())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["fprop", "dgrad", "wgrad"])
def test_there_are_engines_for_common_geometries(kind, case):
    x, weight, dy = map(to_device, given(case, "float32"))
    window = (*x.shape[2:], *weight.shape[2:], *case[6], *case[7], *dy.shape[2:])
    lowered = kind == "wgrad" and case[5] == (5, 5)
    assert (gpu_cudnn.plan(kind, x, weight, window) is None) == lowered


def test_plans_are_captured_in_a_cuda_graph():
    case = CASES[2]
    x, weight, dy = map(to_device, given(case, "float32"))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        run(gpu, cupy, x, weight, dy, case)
        stream.synchronize()
        stream.begin_capture()
        results = run(gpu, cupy, x, weight, dy, case)
        graph = stream.end_capture()
        for seed in (5, 9):
            for array_, values in zip((x, weight, dy), given(case, "float32", seed), strict=True):
                array_.set(values)
            graph.launch(stream)
            replayed = [a.get() for a in results]
            for got, expected in zip(replayed, run(gpu, cupy, x, weight, dy, case), strict=True):
                np.testing.assert_array_equal(got, expected.get())
