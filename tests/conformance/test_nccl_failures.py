"""Errors that ranks on GPUs get when something fails; over emulated CUDA and a stand-in for NCCL."""

import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from distopt import _core
from distopt.comm import nccl
from distopt.errors import CommunicatorError, MismatchError, UsageError
from distopt.settings import Settings

from .checks import host
from .nccl_ranks import connect
from .ranks import HASTY, PATIENT, LocalJob, log_of_distopt, run_ranks, with_ranks

pytestmark = pytest.mark.usefixtures("built")
connected = partial(connect, CONNECTED="1")


# -- lost peers --------------------------------------------------------------------------------------------------------
def die_once_others_meet(folder: Path) -> None:
    while not any(folder.iterdir()):  # the record of this rank, or the file where the others wait for it
        time.sleep(0.01)
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def lose_while_connecting(job: LocalJob, function: str, folder: str) -> None:
    """The last rank is killed inside of a call that connects the ranks, once the others wait for it there."""
    if job.topology.rank == 2:
        threading.Thread(target=die_once_others_meet, args=(Path(folder),), daemon=True).start()
        comm = connect(job, SLEEP=f"{function}:1000", FOLDER=folder, RECORD=f"{folder}/calls")
    else:
        comm = connect(job, FOLDER=folder)
    comm.all_reduce(comm.xp.zeros(3)).wait()


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("function", ["ncclCommInitRankConfig", "ncclAllReduce"])
def test_a_peer_that_is_lost_while_ranks_connect_is_named(function: str, tmp_path: Path) -> None:
    *survivors, lost = run_ranks(lose_while_connecting, 3, function, str(tmp_path))
    assert [o.error for o in survivors] == ["PeerLostError"] * 2, survivors
    for outcome in survivors:
        assert re.search(rf"but a peer has ended: rank 2 \(host .*, pid {lost.pid or ''}", outcome.text)


# -- stalled peers -----------------------------------------------------------------------------------------------------
@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("how", ["wait", "host array", "behind another"])
@with_ranks(2)
def test_work_that_the_device_still_has_is_no_stall(job: LocalJob, rank: int, how: str) -> None:
    records, comm = log_of_distopt(), connected(job, HASTY)
    import _emulation

    job.all_gather(b"")
    array, stream = comm.xp.full(3, rank + 1.0), comm.xp.cuda.get_current_stream()
    _emulation.lag(stream.ptr, HASTY.timeout + 2.0)
    if how == "host array":  # travels through device memory, behind what is queued
        array = np.full(3, rank + 1.0)
        comm.all_reduce(array).wait()
    elif how == "behind another":  # whose data are not ready
        work = comm.all_reduce(comm.xp.zeros(3))
        with comm.xp.cuda.Stream(non_blocking=True):
            comm.all_reduce(array).wait(HASTY.timeout)
        work.wait()
    else:
        comm.all_reduce(array).wait(HASTY.timeout)
    assert host(array).tolist() == [3.0] * 3
    assert not records


@with_ranks(2)
def test_a_stall_is_noticed_while_python_stands_still(job: LocalJob, rank: int, tmp_path: Path) -> None:
    """The first rank aborts while its interpreter stands still, as in a launch on a full queue."""
    calls, pipe = tmp_path / "calls", tmp_path / "pipe"
    comm = connected(job, HASTY, RECORD=str(calls))
    if rank == 0:
        os.mkfifo(pipe)
        job.all_gather(b"")
        comm.all_reduce(comm.xp.zeros(3))
        ctypes.PyDLL(None).read(os.open(pipe, os.O_RDWR), ctypes.create_string_buffer(1), 1)
        with pytest.raises(TimeoutError):
            comm.barrier()
        return
    job.all_gather(b"")
    limit, aborted = time.monotonic() + PATIENT.timeout, False
    while not aborted and time.monotonic() < limit:
        time.sleep(0.1)
        aborted = "ncclCommAbort" in calls.with_suffix(".0").read_text()
    os.write(os.open(pipe, os.O_RDWR), b"x")
    assert aborted


@with_ranks(2)
def test_a_stall_on_the_device_and_in_a_connection_is_told(job: LocalJob, rank: int) -> None:
    """The device waits for a peer, and a thread in NCCL too, so that nothing is aborted: the error still comes."""
    comm = connect(job, HASTY)
    wire = comm.empty(1 << 20)
    for _ in range(2 - rank):
        comm.all_reduce(comm.xp.zeros(3)).wait()
    if rank == 0:
        with pytest.raises(TimeoutError, match="no result within 3 s"):
            comm.all_reduce(comm.xp.zeros(5))
        del wire
        comm.close()
    job.all_gather(b"")


@with_ranks(2)
def test_the_host_runs_ahead_only_so_far(job: LocalJob, rank: int) -> None:
    comm, started = connected(job, HASTY), count()
    job.all_gather(b"")

    def start_many() -> None:
        while next(started) < 1000:
            comm.all_reduce(comm.xp.zeros(3))

    if rank == 0:
        with pytest.raises(TimeoutError):
            start_many()
        assert next(started) == 128 + 1
    job.all_gather(b"")


# -- errors of NCCL ----------------------------------------------------------------------------------------------------
@with_ranks(2)
def test_an_asynchronous_error_reaches_all_ranks_and_aborts(job: LocalJob, rank: int, tmp_path: Path) -> None:
    comm = connect(job, RECORD=str(tmp_path / "calls"), **({"ASYNC_ERROR": "2:6"} if rank == 1 else {}))
    comm.all_reduce(comm.xp.zeros(3)).wait(100.0)
    text = r"rank 1 \(host .*: NCCL failed in all_reduce #2 .*: remote process exited.*told by the fake"
    for _ in range(2):
        with pytest.raises(CommunicatorError, match=text):
            comm.all_reduce(comm.xp.zeros(4)).wait(100.0)
    comm.close()
    calls = (tmp_path / f"calls.{rank}").read_text()
    assert calls.endswith("ncclCommAbort depth=0\n")
    assert "Finalize" not in calls


def meet_error(job: LocalJob, function: str, folder: str) -> None:
    comm = connect(job, FOLDER=folder, **({"FAIL": f"{function}:3"} if job.topology.rank == 1 else {}))
    comm.all_reduce(comm.xp.zeros(3)).wait(100.0)
    comm.all_gather_ragged(comm.xp.zeros(3)).wait()
    comm.barrier()


@pytest.mark.parametrize("function", ["ncclCommInitRankConfig", "ncclAllReduce", "ncclBroadcast"])
def test_an_error_of_one_rank_ends_the_wait_of_all(function: str, tmp_path: Path) -> None:
    for outcome in run_ranks(meet_error, 2, function, str(tmp_path)):
        assert outcome.error == "CommunicatorError", outcome.trace
        assert re.search(r"rank 1 \(host .*: NCCL failed in .*: internal error", outcome.text)


@with_ranks(2)
def test_a_step_that_an_exception_has_ended_is_told_in_the_next_one(job: LocalJob, rank: int) -> None:
    """Rank 1 leaves a step by an exception; where the verdict stays on the device, rank 0 learns it in the next one."""
    os.environ["DISTOPT_DEVICE"] = "cuda"
    comm = connect(job)
    from distopt import dist_opt, opt
    from tests.ranks import small_net

    optimizer = opt.DistOpt(opt.SGD(lr=0.05, momentum=0.5), communicator=comm)
    net = small_net.build(optimizer)
    batches = [small_net.batch(n, rank, optimizer.device) for n in range(3)]
    net(*batches[0], optimizer)
    before = small_net.parameters(net)

    def end_early(*_: object, **__: object) -> Iterator[object]:
        yield from ()
        raise ValueError("the test wants it")

    if rank == 1:
        dist_opt.autograd.backward = end_early
        with pytest.raises(ValueError, match="the test wants it"):
            net(*batches[1], optimizer)
    else:
        net(*batches[1], optimizer)
        np.testing.assert_array_equal(small_net.parameters(net), before)
        with pytest.raises(MismatchError, match="rank 1 left step 1: ValueError"):
            net(*batches[2], optimizer)
    job.all_gather(b"")


@with_ranks(2, connect)
def test_abort_reaches_all_ranks(comm, job, rank):
    comm.barrier()
    job.all_gather(b"")  # all have left the barrier
    if rank == 0:
        comm.abort("the test wants it")
    text = r"rank 0 \(host .* has aborted the communicator: the test wants it"
    with pytest.raises(CommunicatorError, match=text):
        comm.all_reduce(comm.xp.zeros(3)).wait(100.0)


@pytest.mark.slow
@with_ranks(2)
def test_an_abort_that_hangs_is_left_alone(job: LocalJob, rank: int) -> None:
    comm = connected(job, HASTY, SLEEP="ncclCommAbort:1000")
    if rank == 0:
        with pytest.raises(CommunicatorError, match="no result within"):
            comm.barrier()
        comm.close()
    job.all_gather(b"")


@with_ranks(2)
def test_a_closed_communicator_holds_no_object_of_python(job: LocalJob, rank: int) -> None:
    """The last to let go of it is often its calling thread, perhaps when the interpreter has ended."""
    heard, boards, make = threading.Event(), [], _core.NcclBoard

    def hear(_text: str) -> None:
        heard.set()

    def remember(*given: Any) -> _core.NcclBoard:
        boards.append(make(*given))
        return boards[0]

    nccl._log, _core.NcclBoard = SimpleNamespace(warning=hear), remember
    before = sys.getrefcount(hear)
    comm = connect(job, replace(PATIENT, stall_warning=0.2), CONNECTED="1")
    if rank != 0:
        job.all_gather(b"")
    work = comm.all_reduce(comm.xp.zeros(3))
    if rank == 0:
        assert heard.wait(PATIENT.timeout)
        job.all_gather(b"")
    work.wait(PATIENT.timeout)
    for _ in range(2):
        comm.close()
    with pytest.raises(CommunicatorError, match="use it before close"):
        comm.all_reduce(comm.xp.zeros(3))
    assert sys.getrefcount(hear) == before
    assert sys.getrefcount(boards[0]) == 2  # of the list, and of this call


@with_ranks(1)
def test_rank_order_is_refused(job: LocalJob) -> None:
    with pytest.raises(UsageError, match="NCCL sums in an order of its own; unset DISTOPT_SUM_ORDER"):
        connect(job, Settings(sum_order="rank"))
