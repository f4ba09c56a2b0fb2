"""Batches on their way to the device: each arrives, whatever the host writes meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu import require_gpu

require_gpu()

import cupy  # noqa: E402

from distopt import device  # noqa: E402
from distopt.nn.numerics import gpu, numerics_of  # noqa: E402
from distopt.nn.staging import Staging  # noqa: E402


def test_batches_arrive_while_the_host_runs_ahead():
    shapes = (((33, 5), np.float32), ((33,), np.int64))
    staging = Staging(device.create_cuda_gpu(), *shapes)
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


def test_a_batch_stays_while_the_device_computes_on_it():
    """The copy of a later batch into the same memory waits for the work that was put on the stream before it."""
    staging = Staging(device.create_cuda_gpu(), ((1, 1, 10, 100), np.float32))
    results = []
    for step in range(6):
        (array,) = staging.fill()
        array[...] = step
        (x,) = staging.send()
        y = x.array
        for _ in range(20):
            y, _ = gpu.max_pool2d(y, (1, 1), (1, 1))  # a kernel, which the emulated GPU never runs at once
        results.append(y)
    assert [float(y.get().sum()) for y in results] == [1000.0 * step for step in range(6)]


def on_gpu_and_cpu() -> list[device.Device]:
    return [device.create_cuda_gpu(), device.get_default_device()]


@pytest.mark.parametrize("where", on_gpu_and_cpu(), ids=lambda where: where.kind)
def test_the_next_batch_may_be_sent_before_this_one_is_used(where):
    """Kernels that lag: the emulated GPU runs none before something waits for it."""
    staging = Staging(where, ((1, 1, 10, 100), np.float32))

    def load(step):
        staging.fill()[0][...] = step
        return staging.send()[0]

    results, following = [], load(0)
    for step in range(6):
        x, following = following, load(step + 1)
        y = x.array
        for _ in range(20):
            y, _ = numerics_of(y).max_pool2d(y, (1, 1), (1, 1))
        results.append(y)
    assert [float(where.host(y).sum()) for y in results] == [1000.0 * step for step in range(6)]


def test_a_batch_arrives_though_its_staging_is_gone():
    """As the last one of an epoch: others get the pinned memory, while the device still copies."""
    staging = Staging(device.create_cuda_gpu(), ((1000,), np.float32))
    staging.fill()[0][...] = 3
    (x,) = staging.send()
    del staging
    others = [np.frombuffer(cupy.cuda.alloc_pinned_memory(4000), np.float32, 1000) for _ in range(2)]
    for other in others:
        other[...] = 9
    assert float(x.array.get().sum()) == 3000.0


def test_on_the_cpu_the_arrays_are_the_tensors():
    staging = Staging(device.get_default_device(), ((3, 2), np.float32))
    (array,) = staging.fill()
    array[...] = 7
    (x,) = staging.send()
    assert x.array is array
