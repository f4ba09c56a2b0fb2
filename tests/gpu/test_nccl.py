"""The communicators of real GPUs. Without one: `tests/conformance/test_nccl_emulated.py`."""

import functools
import os

import numpy as np
import pytest

from distopt.comm.gpu import GpuStack
from tests.conformance.checks import CHECKS
from tests.conformance.nccl_ranks import VIA_HOST
from tests.conformance.ranks import LocalJob, Outcome, assert_passed, run_ranks, run_ranks_ok
from tests.conformance.run import run_checks

pytestmark = pytest.mark.timeout(600)

# FIRST version that lets two ranks share a GPU, and what it then needs.
SHARING_VERSION = 23000
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4"}


def check(job: LocalJob, share: bool, transport: str) -> dict[str, str | None]:
    os.environ.update(SHARING if share else {})
    return run_checks(job, transport)


@functools.cache
def outcomes(world_size: int, share: bool, transport: str = "nccl") -> list[Outcome]:
    return run_ranks(check, world_size, share, transport)


@pytest.fixture(params=["one", "all", "two on one", "via the host"])
def results(request: pytest.FixtureRequest, stack: GpuStack) -> list[Outcome]:
    if request.param == "one":
        return outcomes(1, False)
    if request.param == "via the host":
        return outcomes(2, False, VIA_HOST)
    if request.param == "all":
        count = stack.cupy.cuda.runtime.getDeviceCount()
        if count < 2:
            pytest.skip("there is one GPU only")
        return outcomes(min(count, 4), False)
    if stack.nccl_version < SHARING_VERSION:
        pytest.skip(f"two ranks on one GPU need NCCL 2.30; this is {stack.nccl_version}")
    return outcomes(2, True)


@pytest.mark.parametrize("name", CHECKS)
def test_check(results: list[Outcome], name: str) -> None:
    assert_passed(results, name)


def order_streams(job: LocalJob) -> None:
    """Long work before the collective and a reader on another stream: each fails where an event is missing."""
    from distopt.comm.nccl import NcclCommunicator

    comm = NcclCommunicator.create(job)
    cupy = comm.xp
    count, rounds = 1 << 26, 200
    for _ in range(3):
        out = cupy.zeros(count, np.float32)
        array = cupy.zeros(count, np.float32)
        cupy.cuda.Device().synchronize()
        with cupy.cuda.Stream(non_blocking=True):
            for _ in range(rounds):
                array += 1
            work = comm.all_gather(array, out)
        with cupy.cuda.Stream(non_blocking=True):
            work.wait()
            assert int((out != rounds).sum()) == 0
    comm.close()


def test_results_are_joined_to_streams_by_events(stack: GpuStack) -> None:
    run_ranks_ok(order_streams, 1)
