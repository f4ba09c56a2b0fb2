"""Signals, threads, forks, exits and memory: what a communicator survives and what it gives back."""

import gc
import os
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from distopt import _core
from distopt.errors import CommunicatorClosedError, Process, UsageError, WireMemoryError

from .ranks import connect, forked, signalled, with_ranks


# -- Ctrl-C, threads, forks, exits -----------------------------------------------------------------
# `job.all_gather(b"")` is where a rank waits for what another one does in its communicator.
@with_ranks(2, connect)
def test_a_signal_that_comes_while_an_error_is_raised_is_not_lost(comm):
    comm.close()

    def interrupted(*_, **__):  # as by a signal whose handler runs before the first statement
        raise SystemExit(143)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distopt.errors.CommunicatorClosedError", interrupted)
        with pytest.raises(SystemExit, match="143"):
            comm.core.barrier().wait()
    with pytest.raises(CommunicatorClosedError):
        comm.core.barrier().wait()


@with_ranks(2, connect)
def test_ctrl_c_in_a_call_that_cannot_be_taken_up_again_ends_the_job(comm, job, rank):
    if rank == 0:
        with pytest.raises(KeyboardInterrupt):
            signalled(signal.SIGINT, lambda: comm.empty(3))
    job.all_gather(b"")
    with pytest.raises(CommunicatorClosedError, match=r"rank 0 .* left empty"):
        comm.barrier()


@with_ranks(2, connect)
def test_a_signal_handler_may_close(comm, job, rank):
    if rank == 1:
        job.all_gather(b"")
        comm.all_reduce(np.zeros(3)).wait()  # rank 0 gave its part before it left
        with pytest.raises(CommunicatorClosedError, match=r"rank 0 .* closed"):
            comm.barrier()
        return
    signal.signal(signal.SIGUSR1, lambda *_: comm.close())
    work = comm.all_reduce(np.zeros(3))
    with pytest.raises(CommunicatorClosedError, match="has closed"):
        signalled(signal.SIGUSR1, work.wait)
    job.all_gather(b"")


@with_ranks(2, connect)
def test_a_second_thread_is_refused(comm, job, rank):
    def refuse_another_thread():
        time.sleep(0.5)
        for call in (comm.barrier, comm.close):
            with pytest.raises(UsageError, match="thread"):
                call()
        job.all_gather(b"")

    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(refuse_another_thread) if rank == 0 else job.all_gather(b"")
        comm.barrier()
        if rank == 0:
            late.result()


@with_ranks(2, connect)
def test_other_threads_run_while_a_rank_waits_in_a_small_collective(comm, job, rank):
    """Rank 1 comes when the thread beside the wait of rank 0 has run for a while."""

    def tick():
        for _ in range(20):
            time.sleep(0.01)
        job.all_gather(b"")

    for wait in (lambda: comm.all_reduce(np.ones(7, np.float32)).wait(), comm.barrier) * 2:
        thread = threading.Thread(target=tick if rank == 0 else lambda: None)
        thread.start()
        if rank == 1:
            job.all_gather(b"")
        wait()
        thread.join()


@with_ranks(2, connect)
def test_a_forked_child_writes_to_memory_of_its_own(comm, job, rank):
    own = np.arange(5000.0, dtype=np.float32) + 1000 * rank
    kept, closed = comm.empty(own.size), connect(job)
    left = closed.empty(own.size)
    closed.close()
    for array in (kept, left):
        array[...] = own
    with forked() as is_child:
        if is_child:
            for array in (kept, left):
                assert (array == own).all()
                array += 1  # as a backward pass adds to a gradient
            with forked() as is_grandchild:
                if is_grandchild:
                    assert (kept == own + 1).all()
                    kept[...] = 0
            assert (kept == own + 1).all()
    assert (kept == own).all()
    assert (left == own).all()
    comm.all_reduce(kept).wait()
    assert (kept == 2 * np.arange(own.size, dtype=np.float32) + 1000).all()


@with_ranks(2, connect)
def test_exit_with_work_outstanding(comm):
    global kept  # alive until the interpreter ends
    array = comm.empty(100_000)
    kept = (comm, array, comm.all_reduce(array), comm.all_reduce(np.zeros(70_000)), comm.barrier)


@with_ranks(2)
def test_memory_outlives_the_communicator(job, rank):
    comm = connect(job)
    array = comm.empty(1000)
    view = array[10:20]
    array[...] = rank
    comm.all_reduce(array, "max").wait()
    gathered = comm.all_gather_ragged(np.arange(9_001 * rank))
    gathered.wait()
    parts = gathered.parts
    del gathered
    comm.close()
    comm.close()
    with pytest.raises(CommunicatorClosedError, match="has closed"):
        comm.barrier()
    with pytest.raises(CommunicatorClosedError):
        comm.all_reduce(array)
    del comm, array
    gc.collect()
    assert (view == 1).all()
    view[...] = 3
    assert [part.size for part in parts] == [0, 9_001]
    assert (parts[1] == np.arange(9_001)).all()


# -- memory ----------------------------------------------------------------------------------------
@with_ranks(2, connect)
def test_wire_memory_begins_at_a_page_of_any_size(comm, rank):
    arrays = [comm.empty(1_000 + 7 * i) for i in range(3)]
    for i, array in enumerate(arrays):
        array[:] = np.arange(array.size) + 10 * i + rank
        comm.all_reduce(array).wait()
        np.testing.assert_array_equal(array, 2 * np.arange(array.size) + 20 * i + 1)
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    offsets = [int(line[2], 16) for line in lines if "memfd:distopt" in line[-2]]
    assert len(offsets) > len(arrays)
    assert [offset % 65_536 for offset in offsets] == [0] * len(offsets)  # pages of some ARM kernels


@with_ranks(2)
def test_wire_memory_that_one_rank_cannot_have_is_refused_on_all(job, rank):
    for count, texts in (
        (1 << 44, ["MiB of wire memory for each of 2 ranks do not fit"]),
        (2 << 20, ["rank 1 (host", "cannot allocate its share of 16 MiB"]),
    ):
        if rank == 1 and count == 2 << 20:  # its share of the file would end beyond this
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
        with pytest.raises(WireMemoryError) as info:
            connect(job).empty(count, "float64")
        assert set(job.all_gather(str(info.value).encode())) == {str(info.value).encode()}
        assert all(text in str(info.value) for text in texts)


@with_ranks(2)
def test_without_memfd_an_unlinked_file_serves(job, rank):
    fd = job.host_group().share_fd(lambda: _core.create_segment(2, 4096, True))
    for each in (fd, _core.create_segment(2, 4096, False)):
        assert os.fstat(each).st_mode & 0o777 == 0o600, "the owner's alone"
    assert str(Path(f"/proc/self/fd/{fd}").readlink()).startswith("/dev/shm/")
    assert os.fstat(fd).st_nlink == 0
    core = _core.ShmCommunicator(fd, rank, [Process(one, "host", 7) for one in range(2)], 10.0, 5.0, print)
    job.all_gather(b"")
    array = core.empty(30_000, 0, 1 << 30)
    for target in (array, np.empty(30_001, np.float32)):
        target[...] = rank + 1
        core.start("all_reduce", target, target, 0, 0, 0, "", False).wait()
        assert (target == 3).all()


@with_ranks(2)
def test_descriptors_and_mappings_are_released(job):
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        comm = connect(job)
        array = comm.empty(1000)
        comm.all_reduce(array).wait()
        comm.close()
        del comm, array
        gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert "memfd:distopt" not in Path("/proc/self/maps").read_text()


# -- an operation on what an unfinished one still reads ----------------------------------------------------------------
COUNT = 20_006


def start_reading(comm, kind, array):
    """An operation that reads `array`; its work, what returns the result, and the result in NumPy."""
    both = [np.arange(COUNT, dtype=np.float32) + 1000 * q for q in range(2)]
    if kind == "all_gather":
        out = np.zeros(2 * COUNT, np.float32)
        return comm.all_gather(array, out), lambda _: out, np.concatenate(both)
    if kind == "all_gather_ragged":
        return comm.all_gather_ragged(array), lambda work: np.concatenate(work.parts), np.concatenate(both)
    out = np.zeros(COUNT // 2, np.float32)
    return comm.reduce_scatter(array, out), lambda _: out, np.split(both[0] + both[1], 2)[comm.topology.rank]


@pytest.mark.parametrize("kind", ["all_gather", "all_gather_ragged", "reduce_scatter"])
@with_ranks(2, connect)
def test_peers_do_not_reduce_an_array_that_this_rank_still_reads(comm, job, rank, kind):
    """Rank 0 has sent its array and starts to reduce it; rank 1 is through with both before rank 0 reads it again."""
    wire = comm.empty(COUNT, "float32")
    wire[:] = np.arange(COUNT) + 1000 * rank
    array = wire if rank == 0 else wire.copy()  # ordinary memory on one rank: the array is read in chunks
    if rank == 0:
        job.all_gather(b"rank 1 has started to read")
    first, result, expected = start_reading(comm, kind, array)
    if rank == 1:
        job.all_gather(b"rank 1 has started to read")
        job.all_gather(b"rank 0 has started both")
    second = comm.all_reduce(wire[: COUNT // 2])
    if rank == 0:
        job.all_gather(b"rank 0 has started both")
    job.all_gather(b"rank 1 has gone as far as it can")
    first.wait()
    second.wait()
    np.testing.assert_array_equal(result(first), expected)
    np.testing.assert_array_equal(wire[: COUNT // 2], 2 * np.arange(COUNT // 2) + 1000)
