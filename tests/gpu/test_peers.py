"""Peers that are killed or stall while a GPU has more than 1,000 kernels to do: two ranks, on one GPU if necessary."""

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from distopt.comm.gpu import GpuStack, exchange_places, gpu_stack
from distopt.comm.nccl import NcclCommunicator
from distopt.errors import CommunicatorError
from distopt.settings import Settings
from tests.conformance.ranks import LocalJob, run_ranks

from .test_nccl import SHARING, SHARING_VERSION

LAUNCHES = 1500
HASTY = Settings(timeout=10.0, stall_warning=2.0)


def sum_on_a_busy_device(comm: Any, array: Any) -> None:
    for _ in range(LAUNCHES):
        array += 1
    comm.all_reduce(array).wait()  # blocks the device, not the host
    for _ in range(LAUNCHES):
        array += 1
    comm.barrier()


def lose(job: LocalJob, how: str, share: bool) -> float:
    """Seconds in which the host of the rank that remains got its error; it queues kernels before and after."""
    os.environ.update(SHARING if share else {})
    stack = gpu_stack()
    comm = NcclCommunicator(job, stack, exchange_places(job, stack), HASTY)
    xp = comm.xp
    array = xp.full(1 << 16, job.topology.rank + 1.0, np.float32)
    comm.all_reduce(array).wait(10.0)
    assert float(array[-1]) == 3.0
    job.all_gather(b"")
    if job.topology.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        job.all_gather(b"")  # alive, and in no collective
        return 0.0
    began = time.monotonic()
    # The end of a killed rank may be known before the sum starts.
    with pytest.raises((CommunicatorError, TimeoutError), match="rank 1"):
        sum_on_a_busy_device(comm, array)
    took = time.monotonic() - began
    if how == "stalled":
        job.all_gather(b"")
    return took


@pytest.mark.parametrize("how", ["killed", "stalled"])
def test_a_lost_peer_is_named_though_the_device_is_busy(stack: GpuStack, how: str) -> None:
    share = stack.cupy.cuda.runtime.getDeviceCount() < 2
    if share and stack.nccl_version < SHARING_VERSION:
        pytest.skip(f"needs two GPUs, or NCCL 2.30 for two ranks on one; this is {stack.nccl_version}")
    first, _ = run_ranks(lose, 2, how, share)
    assert first.error is None, first.trace
    assert first.value < HASTY.timeout + 60.0
