"""Errors that ranks on GPUs get when something fails; over emulated CUDA and a stand-in for NCCL."""

import ctypes
import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from distopt import _core
from distopt.comm import nccl
from distopt.errors import CommunicatorError, MismatchError, UsageError
from distopt.settings import Settings
from tests.emulation import build

from .nccl_ranks import connect
from .ranks import PATIENT, LocalJob, forked, run_ranks, run_ranks_ok, with_ranks
from .scenes import assert_loss_is_told, assert_stall_is_told, disagree, log_of_distopt, lose_last_rank, wait_briefly

HASTY = Settings(timeout=3.0, stall_warning=1.0)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    build.build()


# -- different collectives ---------------------------------------------------------------------------------------------
@pytest.mark.slow(kept=3)
@pytest.mark.parametrize("which", ["operation", "count", "empty", "dtype", "reduction", "label", "root"])
def test_different_collectives_are_named_on_all_ranks(which: str) -> None:
    outcomes = run_ranks(disagree, 3, connect, which)
    assert [o.error for o in outcomes] == ["MismatchError"] * 3, outcomes
    assert len({o.text for o in outcomes}) == 1, "all ranks tell the same story"
    if which == "operation":
        assert re.search(r"all_reduce #2 of 50,000 float64, sum \(bucket 3\)", outcomes[0].text)
        assert re.search(r"rank 2 \(host .*broadcast #2 of 10 float64 from rank 0", outcomes[0].text)
        assert all(o.fields["calls"] == outcomes[0].fields["calls"] for o in outcomes)
        assert ("broadcast", 10, "") in [
            (call.operation, call.count, call.label) for call in outcomes[0].fields["calls"]
        ]


# -- lost peers --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("waiting_in", ["all_reduce", "barrier", "all_gather_ragged", "no one"])
@pytest.mark.parametrize(("how", "error"), [("killed", "PeerLostError"), ("closed", "CommunicatorClosedError")])
def test_survivors_learn_who_was_lost(how: str, error: str, waiting_in: str) -> None:
    *survivors, lost = run_ranks(lose_last_rank, 3, connect, how, waiting_in)
    assert_loss_is_told(survivors, lost, error)


def lose_while_connecting(job: LocalJob, function: str, folder: str) -> None:
    """The last rank is killed inside of a call that connects the ranks, once the others wait for it there."""
    if job.topology.rank == 2:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
        comm = connect(job, SLEEP=f"{function}:1000", FOLDER=folder)
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
def stall(job: LocalJob, connected: str) -> list[str]:
    records, comm = log_of_distopt(), connect(job, HASTY, CONNECTED=connected)
    job.all_gather(b"")
    comm.barrier()
    records.clear()
    if job.topology.rank != 0:
        job.all_gather(b"")
        return []
    if connected:
        comm.all_reduce(comm.xp.zeros(3)).wait()  # blocks the device, not the host
        time.sleep(HASTY.timeout + 1.0)
    with pytest.raises(TimeoutError, match="no result within 3 s") as info:
        comm.barrier() if connected else comm.all_reduce(comm.xp.zeros(3))
    job.all_gather(b"")
    return [*records, str(info.value)]


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("connected", ["", "1"])
def test_a_stalled_peer_is_named_first_in_a_warning_then_in_an_error(connected: str) -> None:
    assert_stall_is_told(run_ranks_ok(stall, 3, connected)[0])


def test_the_late_rank_is_told_that_the_others_gave_up() -> None:
    first, late = run_ranks_ok(wait_briefly, 2, partial(connect, CONNECTED="1"))
    assert first == late
    assert "it has started no operation" in first


def busy_for_longer_than_the_limit(job: LocalJob, how: str) -> list[Any]:
    records, comm = log_of_distopt(), connect(job, HASTY, CONNECTED="1")
    import _emulation

    job.all_gather(b"")
    array, stream = comm.xp.full(3, job.topology.rank + 1.0), comm.xp.cuda.get_current_stream()
    _emulation.lag(stream.ptr, HASTY.timeout + 2.0)
    if how == "host array":  # travels through device memory, behind what is queued
        values = np.full(3, job.topology.rank + 1.0)
        comm.all_reduce(values).wait()
    elif how == "behind another":  # whose data are not ready
        work = comm.all_reduce(comm.xp.zeros(3))
        with comm.xp.cuda.Stream(non_blocking=True):
            comm.all_reduce(array).wait(HASTY.timeout)
        work.wait()
        values = array.get()
    else:
        comm.all_reduce(array).wait(HASTY.timeout)
        values = array.get()
    return [*records, values.tolist()]


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("how", ["wait", "host array", "behind another"])
def test_work_that_the_device_still_has_is_no_stall(how: str) -> None:
    assert run_ranks_ok(busy_for_longer_than_the_limit, 2, how) == [[[3.0] * 3]] * 2


def hold_the_gil(job: LocalJob, path: str) -> bool:
    """Whether the first rank aborts while its interpreter stands still, as in a launch on a full queue."""
    comm = connect(job, HASTY, RECORD=path, CONNECTED="1")
    if job.topology.rank == 0:
        comm.all_reduce(comm.xp.zeros(3))
        pipe = os.open(f"{path}.pipe", os.O_RDWR)
        ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)
        with pytest.raises(TimeoutError):
            comm.barrier()
        return True
    limit, aborted = time.monotonic() + PATIENT.timeout, False
    while not aborted and time.monotonic() < limit:
        time.sleep(0.1)
        aborted = "ncclCommAbort" in Path(f"{path}.0").read_text()
    os.write(os.open(f"{path}.pipe", os.O_RDWR), b"x")
    return aborted


def test_a_stall_is_noticed_while_python_stands_still(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "calls.pipe")
    assert run_ranks_ok(hold_the_gil, 2, str(tmp_path / "calls")) == [True, True]


def stall_in_a_connection(job: LocalJob) -> bool:
    """The device waits for a peer, and a thread in NCCL too, so that nothing is aborted: the error still comes."""
    comm = connect(job, HASTY)
    wire = comm.empty(1 << 20)
    for _ in range(2 - job.topology.rank):
        comm.all_reduce(comm.xp.zeros(3)).wait()
    if job.topology.rank == 0:
        with pytest.raises(TimeoutError, match="no result within 3 s"):
            comm.all_reduce(comm.xp.zeros(5))
        del wire
        comm.close()
    job.all_gather(b"")
    return True


def test_a_stall_on_the_device_and_in_a_connection_is_told() -> None:
    assert run_ranks_ok(stall_in_a_connection, 2) == [True, True]


def run_ahead(job: LocalJob) -> int:
    comm, works = connect(job, HASTY, CONNECTED="1"), []
    job.all_gather(b"")

    def start_many() -> None:
        for _ in range(1000):
            works.append(comm.all_reduce(comm.xp.zeros(3)))  # noqa: PERF401 - it ends by an error

    if job.topology.rank == 0:
        with pytest.raises(TimeoutError):
            start_many()
    job.all_gather(b"")
    return len(works)


def test_the_host_runs_ahead_only_so_far() -> None:
    assert run_ranks_ok(run_ahead, 2) == [128, 0]


# -- errors of NCCL ----------------------------------------------------------------------------------------------------
def meet_async_error(job: LocalJob, path: str) -> list[str]:
    comm = connect(job, RECORD=path, **({"ASYNC_ERROR": "2:6"} if job.topology.rank == 1 else {}))
    comm.all_reduce(comm.xp.zeros(3)).wait(100.0)
    texts = []
    for _ in range(2):
        with pytest.raises(CommunicatorError) as info:
            comm.all_reduce(comm.xp.zeros(4)).wait(100.0)
        texts.append(str(info.value))
    comm.close()
    return texts


def test_an_asynchronous_error_reaches_all_ranks_and_aborts(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for rank, texts in enumerate(run_ranks_ok(meet_async_error, 2, str(tmp_path / "calls"))):
        for text in texts:
            assert re.search(r"rank 1 \(host .*: NCCL failed in all_reduce #2 .*: remote process exited", text)
            assert "told by the fake" in text
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


def leave_a_step(job: LocalJob) -> str:
    """Rank 1 leaves a step by an exception; where the verdict stays on the device, rank 0 learns it in the next one."""
    os.environ["DISTOPT_DEVICE"] = "cuda"
    comm = connect(job)
    from distopt import dist_opt, opt
    from tests.ranks import small_net

    optimizer = opt.DistOpt(opt.SGD(lr=0.05, momentum=0.5), communicator=comm)
    net = small_net.build(optimizer)
    batches = [small_net.batch(n, job.topology.rank, optimizer.device) for n in range(3)]
    net(*batches[0], optimizer)
    before = small_net.parameters(net)

    def end_early(*_: object, **__: object) -> Iterator[object]:
        yield from ()
        raise ValueError("the test wants it")

    if job.topology.rank == 1:
        dist_opt.autograd.backward = end_early
        with pytest.raises(ValueError, match="the test wants it"):
            net(*batches[1], optimizer)
        job.all_gather(b"")
        return ""
    net(*batches[1], optimizer)
    np.testing.assert_array_equal(small_net.parameters(net), before)
    with pytest.raises(MismatchError) as info:
        net(*batches[2], optimizer)
    job.all_gather(b"")
    return str(info.value)


def test_a_step_that_an_exception_has_ended_is_told_in_the_next_one() -> None:
    assert "rank 1 left step 1: ValueError" in run_ranks_ok(leave_a_step, 2)[0]


def abort(job: LocalJob) -> str:
    comm = connect(job)
    comm.barrier()
    if job.topology.rank == 0:
        comm.abort("the test wants it")
    with pytest.raises(CommunicatorError) as info:
        comm.all_reduce(comm.xp.zeros(3)).wait(100.0)
    return str(info.value)


def test_abort_reaches_all_ranks() -> None:
    for text in run_ranks_ok(abort, 2):
        assert re.search(r"rank 0 \(host .* has aborted the communicator: the test wants it", text)


def abort_slowly(job: LocalJob) -> None:
    comm = connect(job, HASTY, SLEEP="ncclCommAbort:1000", CONNECTED="1")
    if job.topology.rank == 1:
        job.all_gather(b"")
        return
    with pytest.raises(CommunicatorError, match="no result within"):
        comm.barrier()
    comm.close()
    job.all_gather(b"")


@pytest.mark.slow
def test_an_abort_that_hangs_is_left_alone() -> None:
    run_ranks_ok(abort_slowly, 2)


@with_ranks(2)
def test_close_is_idempotent_and_final(job: LocalJob) -> None:
    comm = connect(job)
    comm.barrier()
    comm.close()
    comm.close()
    with pytest.raises(CommunicatorError, match="use it before close"):
        comm.all_reduce(comm.xp.zeros(3))


@with_ranks(2)
def test_a_closed_communicator_holds_no_object_of_python(job: LocalJob) -> None:
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
    if job.topology.rank != 0:
        job.all_gather(b"")
    work = comm.all_reduce(comm.xp.zeros(3))
    if job.topology.rank == 0:
        assert heard.wait(PATIENT.timeout)
        job.all_gather(b"")
    work.wait(PATIENT.timeout)
    comm.close()
    assert sys.getrefcount(hear) == before
    assert sys.getrefcount(boards[0]) == 2  # of the list, and of this call


@with_ranks(2)
def test_a_forked_child_is_no_rank(job: LocalJob) -> None:
    comm = connect(job)
    array = comm.xp.full(3, job.topology.rank + 1)
    work = comm.all_reduce(array)
    kept = comm._scratch, [work.arrays for work in comm._in_use]  # freeing takes a lock, which a thread may hold
    with forked() as is_child:
        if is_child:
            for call in (lambda: comm.all_reduce(array), work.wait, lambda: comm.abort("no")):
                with pytest.raises(UsageError, match="forked"):
                    call()
            comm.close()
            del comm, work, call
            gc.collect()
    work.wait()
    comm.barrier()
    assert array.get().tolist() == [3, 3, 3]
    del kept


@with_ranks(1)
def test_rank_order_is_refused(job: LocalJob) -> None:
    with pytest.raises(UsageError, match="NCCL sums in an order of its own; unset DISTOPT_SUM_ORDER"):
        connect(job, Settings(sum_order="rank"))
