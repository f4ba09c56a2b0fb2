"""The communicator of GPUs over emulated CUDA and a stand-in for NCCL: what it computes, and what it calls."""

import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distopt.comm import create
from distopt.errors import UsageError
from tests.emulation import activate, build
from tests.parts import values_beside

from .checks import CHECKS
from .nccl_ranks import connect, emulated_checks
from .ranks import HostsOfOneMachine, LocalJob, Outcome, run_ranks, run_ranks_ok, with_ranks
from .scenes import interrupt


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    build.build()


def outcomes(world_size: int, checks: tuple[str, ...]) -> list[Outcome]:
    return run_ranks(emulated_checks, world_size, checks)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "world_size",
    [2, pytest.param(1, marks=pytest.mark.sweep), 3, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.sweep])],
)
def test_check(request, once, world_size: int, check: str) -> None:
    checks = values_beside(request, "check")
    for rank, outcome in enumerate(once(f"emulated-{world_size}", outcomes, world_size, checks)):
        assert outcome.error is None, f"rank {rank}:\n{outcome.trace}"
        assert outcome.exit_code == 0, f"rank {rank} ended with exit code {outcome.exit_code}"
        trace = outcome.value.get(check, "not reached: an earlier check failed")
        assert trace is None, f"rank {rank}:\n{trace}"


# -- devices ----------------------------------------------------------------------------------------------------------
@with_ranks(3)
def test_ranks_use_the_gpus_that_they_are_given(job: LocalJob) -> None:
    """In any order, number 0, which is current anyway, among them: PyTorch's front knows where the parameters are."""
    activate()
    from distopt.comm.nccl import NcclCommunicator

    device = 2 - job.topology.rank
    comm = NcclCommunicator.create(job, device)
    array = comm.xp.full(5, job.topology.rank)
    comm.all_reduce(array).wait()
    assert (comm.device_id, array.data.device_id, array.get().tolist()) == (device, device, [3.0] * 5)
    comm.close()


@with_ranks(4)
def test_ranks_of_several_hosts_without_mpi_use_their_gpus_and_no_ucx(job: LocalJob) -> None:
    """The kind of the job does not depend on the transport."""
    activate()
    os.environ["DISTOPT_DEVICE"] = "cuda"
    comm = create(HostsOfOneMachine(job, 2))
    array = comm.xp.full(1001, job.topology.rank)
    comm.all_reduce(array).wait()
    assert (comm.name, set(array.get().tolist()), set(comm.topology.hosts)) == ("nccl", {6.0}, {"host0", "host1"})
    assert "libucp" not in Path("/proc/self/maps").read_text()
    comm.close()


# -- streams -----------------------------------------------------------------------------------------------------------
@with_ranks(2)
def test_results_are_joined_to_streams_by_events(job: LocalJob) -> None:
    comm = connect(job)
    cupy, rank, n = comm.xp, job.topology.rank, job.topology.world_size
    pinned = cupy.cuda.alloc_pinned_memory(4 * 1001)
    host = np.frombuffer(pinned, np.float32, 1001)
    comm.all_reduce(cupy.zeros(1001, np.float32)).wait()  # the first such call connects, and waits for the other rank
    for looks in range(n):  # this rank, before the other one takes part
        with cupy.cuda.Stream(non_blocking=True):
            array = cupy.zeros(1001, np.float32)
            host[:] = np.arange(1001) + rank
            array.set(host)  # runs when the stream gets there
            if rank != looks:
                job.all_gather(b"")
            work = comm.all_reduce(array)
        with cupy.cuda.Stream(non_blocking=True):
            if rank == looks:
                seen = array.get()  # nothing makes this stream wait for the result, so it must not be there
                assert not (seen == np.arange(1001) * n + n * (n - 1) / 2).all()
                job.all_gather(b"")
            work.wait()
            np.testing.assert_array_equal(array.get(), np.arange(1001) * n + n * (n - 1) / 2)
    comm.close()


@with_ranks(2)
def test_dropped_inputs_live_until_they_are_sent(job: LocalJob) -> None:
    """Memory that is dropped is used again at once on its stream; a collective must not see that."""
    comm = connect(job)
    for i in range(20):
        kept = comm.xp.full(5000, i + job.topology.rank, np.int32)
        out = comm.xp.empty(5000 * job.topology.world_size, np.int32)
        work = comm.all_gather(kept, out)
        del kept
        comm.xp.full(5000, -1, np.int32)
        work.wait()
        np.testing.assert_array_equal(out.get(), np.repeat(i + np.arange(job.topology.world_size), 5000))
    comm.close()


@with_ranks(2)
def test_captures_of_the_whole_process_go_on_beside_the_detector_thread(job: LocalJob) -> None:
    """PyTorch captures in the global mode, in which a query by another thread ends the capture."""
    comm = connect(job, CONNECTED="1")
    array = comm.xp.arange(3.0) + job.topology.rank
    if job.topology.rank == 0:
        work = comm.all_reduce(array)
        runtime, stream = comm.xp.cuda.runtime, comm.xp.cuda.Stream(non_blocking=True)
        runtime.streamBeginCapture(stream.ptr, 0)
        time.sleep(0.3)
        runtime.graphDestroy(runtime.streamEndCapture(stream.ptr))
        job.all_gather(b"")
    else:
        job.all_gather(b"")
        work = comm.all_reduce(array)
    work.wait()
    np.testing.assert_array_equal(array.get(), [1, 3, 5])
    comm.close()


@with_ranks(2)
def test_arrays_of_another_gpu_are_refused(job: LocalJob) -> None:
    comm = connect(job)
    other = comm.device_id + 1
    with comm.xp.cuda.Device(other):
        array = comm.xp.ones(3)
    with pytest.raises(UsageError, match=rf"works on GPU {comm.device_id}; an array on GPU {other}"):
        comm.all_reduce(array)
    comm.close()


# -- what is called ----------------------------------------------------------------------------------------------------
def call_all(job: LocalJob, path: str) -> None:
    comm = connect(job, RECORD=path)
    xp, n, rank = comm.xp, job.topology.world_size, job.topology.rank
    comm.all_reduce(xp.zeros(10, np.float16), "mean").wait()
    comm.all_reduce(xp.zeros(11, np.uint16), "max", wire="bfloat16").wait()
    comm.reduce_scatter(xp.zeros(6 * n), xp.zeros(6)).wait()
    comm.all_gather(xp.zeros(7, np.int64), xp.zeros(7 * n, np.int64)).wait()
    comm.broadcast(xp.zeros(8, np.int32), 1).wait()
    comm.all_gather_ragged(xp.zeros(3 * rank, np.float32)).wait()
    comm.all_to_all_ragged([xp.zeros(r + 2 * rank, np.float32) for r in range(n)]).wait()
    comm.all_reduce(xp.zeros(0)).wait()
    with comm.together():
        works = [comm.all_gather(xp.zeros(size), xp.zeros(n * size)) for size in (4, 5)]
        works.append(comm.all_gather_ragged(xp.zeros(3 - rank), counts=[3, 2]))
    for work in works:
        work.wait()
    comm.all_reduce(xp.zeros(9, np.bool_), "and").wait()
    comm.broadcast(xp.zeros(9, np.int16)).wait()
    comm.barrier()
    comm.close()


def test_arguments_grouping_and_order_of_the_calls(tmp_path: Path) -> None:
    run_ranks_ok(call_all, 2, str(tmp_path / "calls"))
    for rank in (0, 1):
        assert (tmp_path / f"calls.{rank}").read_text().splitlines() == [
            f"ncclCommInitRankConfig size=2 rank={rank} version=21800 depth=0",
            "ncclAllReduce in_place=1 count=10 type=6 op=4 depth=0",
            "ncclAllReduce in_place=1 count=11 type=9 op=2 depth=0",
            "ncclReduceScatter count=6 type=8 op=0 depth=0",
            "ncclAllGather count=7 type=4 depth=0",
            "ncclBroadcast count=8 type=2 root=1 depth=0",
            "ncclAllGather count=1 type=4 depth=0",  # the counts
            "ncclBroadcast count=3 type=7 root=1 depth=1",  # rank 0 has nothing to send
            "ncclAllGather count=2 type=4 depth=0",
            *(
                [  # rank 0 keeps nothing
                    "ncclSend count=1 type=7 peer=1 depth=1",
                    "ncclRecv count=2 type=7 peer=1 depth=1",
                ]
                if rank == 0
                else [
                    "ncclSend count=2 type=7 peer=0 depth=1",
                    "ncclRecv count=1 type=7 peer=0 depth=1",
                    "ncclSend count=3 type=7 peer=1 depth=1",
                    "ncclRecv count=3 type=7 peer=1 depth=1",
                ]
            ),
            "ncclAllReduce in_place=1 count=1 type=2 op=0 depth=0",  # no elements
            "ncclAllGather count=4 type=8 depth=1",
            "ncclAllGather count=5 type=8 depth=1",
            "ncclBroadcast count=3 type=8 root=0 depth=2",  # the counts are known
            "ncclBroadcast count=2 type=8 root=1 depth=2",
            "ncclAllReduce in_place=1 count=9 type=1 op=3 depth=0",
            "ncclBroadcast count=18 type=1 root=0 depth=0",
            "ncclAllReduce in_place=1 count=1 type=2 op=0 depth=0",  # the barrier
            "ncclCommFinalize depth=0",
            "ncclCommDestroy depth=0",
        ]


def count_beside(job: LocalJob, function: str) -> int:
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(0.01):
            ticks += 1

    stop = threading.Event()
    thread = threading.Thread(target=tick)
    thread.start()
    try:
        comm = connect(job, SLEEP=f"{function}:2.0")
        before = ticks
        comm.all_reduce(comm.xp.zeros(3)).wait()
        comm.close()
        return ticks if function.startswith("ncclComm") else ticks - before
    finally:
        stop.set()
        thread.join()


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("function", ["ncclCommInitRankConfig", "ncclAllReduce", "ncclCommFinalize"])
def test_other_threads_run_while_nccl_takes_its_time(function: str) -> None:
    for ticks in run_ranks_ok(count_beside, 2, function):
        assert ticks > 10, "the GIL was held"


def test_ctrl_c_interrupts_a_wait_of_the_host() -> None:
    run_ranks_ok(interrupt, 2, partial(connect, CONNECTED="1"))


# -- which communicator ------------------------------------------------------------------------------------------------
def choose(job: LocalJob, gpus: str, device: str, visible: str) -> str:
    import os

    os.environ.update(DISTOPT_EMULATED_GPUS=gpus, DISTOPT_DEVICE=device)
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(";")[job.topology.rank]
    from tests.emulation import activate

    activate()
    from distopt import comm

    with comm.create(job) as communicator:
        communicator.all_reduce(np.zeros(3)).wait()
        device_id: Any = getattr(communicator, "device_id", "")
        return f"{communicator.name} {device_id}".strip()


@pytest.mark.parametrize(
    ("gpus", "device", "visible", "expected"),
    [
        ("8", "auto", "", ["nccl 0", "nccl 1"]),
        ("8", "auto", "3;5", ["nccl 0", "nccl 0"]),  # one for each, as srun --gpus-per-task=1 does it
        ("8", "auto", "2,3;4,5", ["nccl 0", "nccl 0"]),
        ("8", "auto", "4,6;4,6", ["nccl 0", "nccl 1"]),
        ("8", "cpu", "", ["shm", "shm"]),
        ("0", "auto", "", ["shm", "shm"]),
    ],
)
def test_the_choice_of_communicator_and_device(gpus: str, device: str, visible: str, expected: list[str]) -> None:
    assert run_ranks_ok(choose, 2, gpus, device, visible) == expected
