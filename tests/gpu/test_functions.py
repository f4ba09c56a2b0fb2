"""The functions of `autograd` on a GPU: values as on the CPU, and gradients."""

import numpy as np
import pytest

from tests.gpu import require_gpu

require_gpu()

from distopt import autograd, device  # noqa: E402
from distopt.nn.core.tensor import Tensor  # noqa: E402
from tests.unit import test_functions as on_cpu  # noqa: E402


def results(case, target, differentiable):
    """The result of a case on a device, and the gradients of its inputs."""
    inputs = [Tensor(data=x, device=target, dtype=np.float32, stores_grad=True) for x in case.inputs]
    y = case.function(*inputs)
    assert type(y.array) is type(inputs[0].array)
    if not differentiable:
        return [y.to_numpy()]
    dy = Tensor(data=np.cos(np.arange(y.size())).reshape(y.shape), device=target, dtype=np.float32)
    gradients = dict(autograd.backward(y, dy))
    return [y.to_numpy(), *[gradients[p].to_numpy() for p in inputs]]


@pytest.mark.usefixtures("training")
@pytest.mark.parametrize("table", [on_cpu.CASES, on_cpu.FIXED], ids=["with gradients", "without"])
def test_results_and_gradients_are_those_of_the_cpu(table):
    for name, case in table.items():
        expected = results(case, device.get_default_device(), table is on_cpu.CASES)
        got = results(case, device.create_cuda_gpu(), table is on_cpu.CASES)
        for array, wanted in zip(got, expected, strict=True):
            assert array.dtype == wanted.dtype, name
            np.testing.assert_allclose(array, wanted, rtol=1e-5, atol=1e-6, err_msg=name)
