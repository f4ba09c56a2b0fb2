"""Batches on their way to the device: each arrives, whatever the host writes meanwhile."""

import numpy as np
import pytest

from tests.gpu import require_gpu

require_gpu()

import cupy  # noqa: E402

from distopt import device  # noqa: E402
from distopt.nn.numerics import gpu, numerics_of  # noqa: E402
from distopt.nn.staging import Staging  # noqa: E402

GPU, CPU = device.create_cuda_gpu(), device.get_default_device()


def test_batches_arrive_while_the_host_runs_ahead():
    shapes = (((33, 5), np.float32), ((33,), np.int64))
    staging = Staging(GPU, *shapes)
    results = []
    for step in range(7):
        images, labels = staging.fill()
        images[...] = np.arange(165).reshape(33, 5) + step
        labels[...] = np.arange(33) * step
        x, y = staging.send()
        results.append((gpu.relu(x.array), y.array + 0))
    for step, (x, y) in enumerate(results):
        np.testing.assert_array_equal(x.get(), np.arange(165).reshape(33, 5) + step)
        np.testing.assert_array_equal(y.get(), np.arange(33) * step)


@pytest.mark.parametrize(("where", "ahead"), [(GPU, 0), (GPU, 1), (CPU, 1)])
def test_a_batch_stays_while_the_device_computes_on_it(where, ahead):
    """A later batch comes into the same memory behind what uses this one, be it sent before that is put on the stream.

    Kernels lag: the emulated GPU runs none before something waits for it.
    """
    staging, sent, results = Staging(where, ((1, 1, 10, 100), np.float32)), [], []
    for step in range(6 + ahead):
        (array,) = staging.fill()
        array[...] = step
        sent += staging.send()
        if step >= ahead:
            y = sent.pop(0).array
            for _ in range(20):
                y, _ = numerics_of(y).max_pool2d(y, (1, 1), (1, 1))
            results.append(y)
    assert [float(where.host(y).sum()) for y in results] == [1000.0 * step for step in range(6)]


def test_a_batch_arrives_though_its_staging_is_gone():
    """As the last one of an epoch: others get the pinned memory, while the device still copies."""
    staging = Staging(GPU, ((1000,), np.float32))
    staging.fill()[0][...] = 3
    (x,) = staging.send()
    del staging
    others = [np.frombuffer(cupy.cuda.alloc_pinned_memory(4000), np.float32, 1000) for _ in range(2)]
    for other in others:
        other[...] = 9
    assert float(x.array.get().sum()) == 3000.0


def test_on_the_cpu_the_arrays_are_the_tensors():
    staging = Staging(CPU, ((3, 2), np.float32))
    (array,) = staging.fill()
    array[...] = 7
    (x,) = staging.send()
    assert x.array is array
