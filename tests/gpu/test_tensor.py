"""Tensors on a GPU: the functions of `tensor` and of `autograd` give what they give on the CPU."""

import numpy as np
import pytest

from tests.gpu import require_gpu

require_gpu()

import cupy  # noqa: E402

from distopt import autograd, device, singa_wrap, tensor  # noqa: E402
from distopt.nn.core.tensor import Tensor  # noqa: E402
from tests.unit import test_functions as on_cpu  # noqa: E402
from tests.unit.test_tensor_functions import ONE, TWO, values  # noqa: E402

GPU = device.create_cuda_gpu()


def both(*arrays):
    """Tensors of `arrays` on the CPU and on the GPU."""
    return [[Tensor(data=a.copy(), device=where, dtype=a.dtype) for a in arrays] for where in (None, GPU)]


def positive(dtype):
    return (np.abs(values(3, 5, dtype=dtype)) + 1).astype(dtype)


TYPES = np.float32, np.int32
CASES = {f"{name} of {kind.__name__}": (getattr(tensor, name), [positive(kind)]) for name in ONE for kind in TYPES}
CASES |= {case: (function, arrays) for case, (function, _, arrays) in TWO.items()}


@pytest.mark.parametrize("case", CASES)
def test_functions_of_tensors(case):
    function, arrays = CASES[case]
    hosts, on_gpu = both(*arrays)
    expected, got = function(*hosts), function(*on_gpu)
    assert isinstance(got.array, cupy.ndarray)
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype or case == "ceil of int32"
    np.testing.assert_allclose(got.to_numpy(), expected.array, rtol=1e-6 if case in TWO else 2e-6)


OF_THE_CPU = "softmax_cross_entropy", "batch_norm"  # have labels and statistics there
GRADIENTS = {name: case for name, case in on_cpu.GRADIENTS.items() if not name.startswith(OF_THE_CPU)}


@pytest.mark.usefixtures("training")
@pytest.mark.parametrize("table", [GRADIENTS, on_cpu.FIXED], ids=["with gradients", "without"])
def test_results_and_gradients_of_autograd(table):
    for name, case in table.items():
        results = []
        for where in (None, GPU):
            inputs = [Tensor(data=x, device=where, dtype=np.float32, stores_grad=True) for x in case.inputs]
            y = case.function(*inputs)
            assert type(y.array) is type(inputs[0].array)
            results.append([y.to_numpy()])
            if table is GRADIENTS:
                dy = Tensor(data=np.cos(np.arange(y.size())).reshape(y.shape), device=where, dtype=np.float32)
                gradients = dict(autograd.backward(y, dy))
                results[-1] += [gradients[p].to_numpy() for p in inputs]
        for expected, got in zip(*results, strict=True):
            assert got.dtype == expected.dtype, name
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_comparisons_parts_and_in_place_functions():
    x, v = values(4, 5), values(5, low=1)
    (host, row), (on_gpu, gpu_row) = both(x, v)
    for a, b in ((host, row), (on_gpu, gpu_row)):
        tensor.add_row(2, b, -1, a)
        tensor.axpy(0.5, a, a)
        tensor.copy_data_to_from(a, b, 3, 7, 1)
    np.testing.assert_allclose(on_gpu.to_numpy(), host.array, rtol=1e-6)
    for got, expected in (
        (on_gpu < 2, host < 2),
        (on_gpu == on_gpu, host == host),  # noqa: PLR0124
        (on_gpu != gpu_row, host != row),
        (on_gpu[1:3, -1], host[1:3, -1]),
    ):
        np.testing.assert_array_equal(got.to_numpy(), expected.array)
    tensor.copy_data_to_from(host, on_gpu, 20)
    np.testing.assert_array_equal(on_gpu.to_numpy(), host.array)
    assert (on_gpu.l1(), on_gpu.l2()) == (host.l1(), host.l2())
    np.testing.assert_array_equal(on_gpu.bernoulli(1).to_numpy(), np.ones((4, 5)))


def test_raw_tensors_stay_on_their_device():
    raw = singa_wrap.Tensor((2, 3), GPU)
    assert isinstance(raw, cupy.ndarray)
    singa_wrap.Gaussian(5.0, 0.1, raw)
    for t in (tensor.from_raw_tensor(raw), Tensor(data=raw), Tensor(device=GPU, data=raw)):
        assert t.device is GPU
        t.array += 1
    np.testing.assert_allclose(tensor.to_numpy(raw), 8, atol=1)
    on_cpu = Tensor(device=device.get_default_device(), data=raw)
    assert isinstance(on_cpu.array, np.ndarray)
    np.testing.assert_array_equal(on_cpu.array, raw.get())
    on_cpu.data = raw
    assert on_cpu.device is GPU
    assert Tensor(data=raw, dtype=np.float64).dtype == np.float64
