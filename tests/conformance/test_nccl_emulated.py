"""The communicators of GPUs over emulated CUDA and a stand-in for NCCL: what they compute, and what is called."""

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from distopt.comm import create
from distopt.errors import UsageError
from instruments.emulation import activate
from tests.parts import values_beside

from .checks import CHECKS
from .nccl_ranks import CONNECT, VIA_HOST, connect, connect_via_host, emulated_checks
from .ranks import HostsOfOneMachine, LocalJob, assert_passed, needs_ucx, run_ranks, with_ranks

pytestmark = pytest.mark.usefixtures("built")
SWEPT = [pytest.mark.slow, pytest.mark.sweep]
JOBS = [
    ("nccl", 2),
    pytest.param("nccl", 1, marks=pytest.mark.sweep),
    ("nccl", 3),
    pytest.param("nccl", 4, marks=SWEPT),
    (VIA_HOST, 2),
    (VIA_HOST, 3),
    pytest.param("tests.conformance.nccl_ranks:ViaHosts", 2, marks=[needs_ucx, *SWEPT]),
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("transport", "world_size"), JOBS, ids=lambda value: str(value).rpartition(":")[2])
def test_check(request, once, transport: str, world_size: int, check: str) -> None:
    checks = values_beside(request, "check")
    outcomes = once(f"emulated-{transport}-{world_size}", run_ranks, emulated_checks, world_size, transport, checks)
    assert_passed(outcomes, check)


# -- devices ----------------------------------------------------------------------------------------------------------
@with_ranks(3)
def test_ranks_use_the_gpus_that_they_are_given(job: LocalJob, rank: int) -> None:
    """In any order, number 0, which is current anyway, among them: PyTorch's front knows where the parameters are."""
    activate()
    from distopt.comm.nccl import NcclCommunicator

    device = 2 - rank
    comm = NcclCommunicator.create(job, device)
    array = comm.xp.full(5, rank)
    comm.all_reduce(array).wait()
    assert (comm.device_id, array.data.device_id, array.get().tolist()) == (device, device, [3.0] * 5)


@with_ranks(4)
def test_ranks_of_several_hosts_without_mpi_use_their_gpus_and_no_ucx(job: LocalJob, rank: int) -> None:
    """The kind of the job does not depend on the transport."""
    activate()
    os.environ["DISTOPT_DEVICE"] = "cuda"
    comm = create(HostsOfOneMachine(job, 2))
    array = comm.xp.full(1001, rank)
    comm.all_reduce(array).wait()
    assert (comm.name, set(array.get().tolist()), set(comm.topology.hosts)) == ("nccl", {6.0}, {"host0", "host1"})
    assert "libucp" not in Path("/proc/self/maps").read_text()


# -- streams -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("transport", CONNECT)
@with_ranks(2)
def test_results_are_joined_to_streams_by_events(job: LocalJob, rank: int, transport: str) -> None:
    comm = CONNECT[transport](job)
    cupy, n = comm.xp, job.topology.world_size
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


@with_ranks(2)
def test_captures_of_the_whole_process_go_on_beside_the_detector_thread(job: LocalJob, rank: int) -> None:
    """PyTorch captures in the global mode, in which a query by another thread ends the capture."""
    comm = connect(job, CONNECTED="1")
    array = comm.xp.arange(3.0) + rank
    if rank == 0:
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


@pytest.mark.parametrize("transport", CONNECT)
@with_ranks(2)
def test_arrays_of_another_gpu_are_refused(job: LocalJob, transport: str) -> None:
    comm = CONNECT[transport](job)
    other = comm.device_id + 1
    with comm.xp.cuda.Device(other):
        array = comm.xp.ones(3)
    with pytest.raises(UsageError, match=rf"works on GPU {comm.device_id}; an array on GPU {other}"):
        comm.all_reduce(array)


@with_ranks(2, connect_via_host)
def test_a_wait_via_the_host_starts_what_other_ranks_wait_for(comm, job, rank):
    token = np.array([5.0])
    array = comm.xp.arange(3.0) + rank
    os.environ["DISTOPT_EMULATED_LAG"] = "1"
    import _emulation

    _emulation.lag(comm.xp.cuda.get_current_stream().ptr, 0.3)
    message = comm.receive(token, 1) if rank == 0 else None
    work = comm.all_reduce(array)
    if message is None:
        work.wait()
        message = comm.send(comm.xp.full(1, 7.0), 0)
    message.wait()
    work.wait()
    assert (array.get().tolist(), token[0]) == ([1, 3, 5], 5 if rank else 7)


@with_ranks(2, connect_via_host)
def test_copies_via_the_host_end_before_their_memory_is_used_again(comm, job, rank):
    cupy = comm.xp
    os.environ["DISTOPT_EMULATED_LAG"] = "1"
    import _emulation

    with cupy.cuda.Stream(non_blocking=True) as stream:
        array, gathered = cupy.full(1001, rank + 1.0), cupy.empty(2002)
        reduced = comm.all_reduce(array)
        _emulation.lag(stream.ptr, 0.3)
        work = comm.all_gather(array, gathered)  # waits for the sum, whose copy comes behind the lag
    with cupy.cuda.Stream(non_blocking=True):
        reduced.wait()
        assert set(array.get()) == {3}
        work.wait()
        del work  # the copy of its result is under way
        comm.all_reduce(np.zeros(1)).wait()
        np.frombuffer(cupy.cuda.alloc_pinned_memory(gathered.nbytes)).fill(-1)
        assert set(gathered.get()) == {3}


# -- what is called ----------------------------------------------------------------------------------------------------
@with_ranks(2)
def test_arguments_grouping_and_order_of_the_calls(job: LocalJob, rank: int, tmp_path: Path) -> None:
    comm = connect(job, RECORD=str(tmp_path / "calls"))
    xp, n = comm.xp, job.topology.world_size
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
    exchange = [  # rank 0 keeps nothing
        ["ncclSend count=1 type=7 peer=1 depth=1", "ncclRecv count=2 type=7 peer=1 depth=1"],
        [
            "ncclSend count=2 type=7 peer=0 depth=1",
            "ncclRecv count=1 type=7 peer=0 depth=1",
            "ncclSend count=3 type=7 peer=1 depth=1",
            "ncclRecv count=3 type=7 peer=1 depth=1",
        ],
    ]
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
        *exchange[rank],
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


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("function", ["ncclCommInitRankConfig", "ncclAllReduce", "ncclCommFinalize"])
@with_ranks(2)
def test_other_threads_run_while_nccl_takes_its_time(job: LocalJob, function: str) -> None:
    ticks, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.wait(0.01):
            ticks.append(0)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        comm = connect(job, SLEEP=f"{function}:2.0")
        before = 0 if function.startswith("ncclComm") else len(ticks)
        comm.all_reduce(comm.xp.zeros(3)).wait()
        comm.close()
        assert len(ticks) > before + 10, "the GIL was held"
    finally:
        stop.set()
        thread.join()


# -- which communicator ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("gpus", "device", "transport", "visible", "expected"),
    [
        ("8", "auto", "auto", "", ["nccl 0", "nccl 1"]),
        ("8", "auto", "auto", "3;5", ["nccl 0", "nccl 0"]),  # one for each, as srun --gpus-per-task=1 does it
        ("8", "auto", "auto", "2,3;4,5", ["nccl 0", "nccl 0"]),
        ("8", "auto", "auto", "4,6;4,6", ["nccl 0", "nccl 1"]),
        ("8", "cpu", "auto", "", ["shm", "shm"]),
        ("0", "auto", "auto", "", ["shm", "shm"]),
        ("8", "auto", "shm", "", ["shm", "shm"]),
        ("8", "cuda", "shm", "", ["via-host 0", "via-host 1"]),
        ("1", "cuda", "shm", "", ["via-host 0", "via-host 0"]),
    ],
)
@with_ranks(2)
def test_the_choice_of_communicator_and_device(
    job: LocalJob, rank: int, gpus: str, device: str, transport: str, visible: str, expected: list[str]
) -> None:
    os.environ.update(DISTOPT_EMULATED_GPUS=gpus, DISTOPT_DEVICE=device, DISTOPT_TRANSPORT=transport)
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(";")[rank]
    activate()
    with create(job) as comm:
        comm.all_reduce(np.zeros(3)).wait()
        assert f"{comm.name} {getattr(comm, 'device_id', '')}".strip() == expected[rank]
