"""MpiJob and MpiCommunicator on the ranks that there are: one inside pytest, more under mpiexec."""

import os
import re
import resource
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="mpi4py is absent: pip install mpi4py mpich", exc_type=ImportError)

from distopt import _core, launch
from distopt.comm import create
from distopt.comm.net.mpi import MpiCommunicator
from distopt.comm.world import World
from distopt.errors import LaunchError, MismatchError, StalledError, UsageError, WireMemoryError
from tests.conformance.ranks import disagree
from tests.unit.refusals import refused


@pytest.fixture(scope="module")
def job():
    job = launch.MpiJob()
    yield job
    job.close()


@pytest.fixture(scope="module")
def comm(job):
    with MpiCommunicator(job) as communicator:
        yield communicator


def test_join_is_the_mpi_job_whose_topology_is_that_of_mpi(job):
    topology = job.topology
    assert (topology.rank, topology.world_size) == (job.comm.rank, job.comm.size)
    assert topology.single_host
    assert topology.local_rank == topology.rank
    assert len(set(topology.hosts)) == 1
    joined = launch.join()
    with create(joined, "mpi") as communicator:
        assert isinstance(communicator, MpiCommunicator)
    joined.close()
    other = launch.MultiprocessJob(launch.Ticket(), 0, 1)
    refused(UsageError, "mpiexec", MpiCommunicator.create, other)


@pytest.mark.parametrize("length", [0, 1, 100_000])
def test_job_all_gather(job, length):
    rank, size = job.topology.rank, job.topology.world_size
    for _ in range(2):
        assert job.all_gather(bytes([rank]) * length * rank) == [bytes([r]) * length * r for r in range(size)]


def test_hosts_are_told_apart_and_each_has_a_group(job):
    rank, size = job.topology.rank, job.topology.world_size
    fake = launch.MpiJob(host=f"host{rank % 2}")  # round robin, so that local ranks are not neighbours
    members = [r for r in range(size) if r % 2 == rank % 2]
    topology = fake.topology
    assert topology.hosts == tuple(f"host{r % 2}" for r in range(size))
    assert (topology.local_rank, topology.local_size) == (members.index(rank), len(members))
    assert topology.single_host == (size == 1)
    group = fake.host_group()
    assert fake.host_group() is group
    assert (group.rank, group.size) == (topology.local_rank, topology.local_size)
    assert group.client.all_gather(b"%d" % rank) == [b"%d" % r for r in members]
    fake.close()
    fake.close()
    refused(LaunchError, "closed", fake.all_gather, b"")


def test_a_communicator_of_mpi4py_has_a_world_of_its_own(job):
    rank, size = job.topology.rank, job.topology.world_size
    half = job.comm.Split(rank % 2, -rank)
    members = [other for other in reversed(range(size)) if other % 2 == rank % 2]
    with World(launch.MpiJob(half)) as world:
        assert (world.rank, world.world_size) == (members.index(rank), len(members))
        assert world.all_gather(10 * rank).tolist() == [10 * other for other in members]
    half.Free()


def test_forked_child_is_no_rank(comm):
    pid = os.fork()
    if pid == 0:
        try:
            comm.all_reduce(np.zeros(1))
        except UsageError as error:
            os._exit(7 if "was forked from rank" in str(error) else 8)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    comm.barrier()


# -- ranks that disagree ---------------------------------------------------------------------------------------------
@pytest.fixture
def peers(job):
    if job.topology.world_size == 1:
        pytest.skip("needs more than one rank; runs under mpiexec")
    communicator = MpiCommunicator.create(job)
    yield communicator
    job.comm.Barrier()
    communicator.close()


@pytest.mark.parametrize("which", ["operation", "count", "empty", "dtype", "reduction", "label", "root"])
def test_mismatch_names_both_sides(peers, job, which):
    with pytest.raises(MismatchError, match=r"rank \d \(host .* is in .*#1.*, rank \d \(host .* in .*#1") as caught:
        disagree(job, lambda _: peers, which)
    mine = next(call for call in caught.value.calls if call.rank == job.topology.rank)
    assert len(caught.value.ranks) == len(caught.value.calls) == 2
    last = job.topology.rank == job.topology.world_size - 1
    assert (mine.number, mine.label) == (1, "bucket 4" if last else "bucket 3") or which != "label"
    refused(MismatchError, re.escape(str(caught.value)) + "$", peers.all_reduce, np.zeros(4))


def test_kernels_let_bytes_move(peers):
    rank, size = peers.topology.rank, peers.topology.world_size
    x, w = np.ones((8, 4, 20, 20), np.float32), np.ones((4, 4, 5, 5), np.float32)
    dy, dw = np.ones((8, 4, 16, 16), np.float32), np.empty_like(w)
    for _ in range(2):
        array = np.full(700_001, rank + 1.0, np.float32)
        peers.all_reduce(array)
        deadline = time.monotonic() + 100
        while peers.core.oldest is not None and time.monotonic() < deadline:
            _core.conv2d_backward(dy, None, x, w, dw, None, None, (1, 1), None)
        assert peers.core.oldest is None
        assert set(array.tolist()) == {size * (size + 1) / 2}


def test_a_rank_that_polls_is_not_to_blame(peers, job):
    rank, size = job.topology.rank, job.topology.world_size
    if rank == 0:
        with pytest.raises(StalledError, match=rf"for rank {size - 1} \(host ") as caught:
            peers.all_reduce(np.zeros(4)).wait(3.0)
        assert [one.rank for one in caught.value.ranks] == [size - 1]
    elif rank < size - 1:  # polls what the last rank is to send before it comes itself
        work, deadline = peers.receive(np.zeros(3), size - 1), time.monotonic() + 5.0
        while time.monotonic() < deadline:
            assert not work.done()
            time.sleep(1e-3)
    job.all_gather(b"")


def test_a_collective_without_memory_has_failed_for_good(peers, job):
    array, limits = np.ones(4 << 20), resource.getrlimit(resource.RLIMIT_AS)
    work, text = peers.all_gather_ragged(array), "cannot allocate the result of all_gather_ragged"
    if job.topology.rank == 0:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + array.nbytes // 2, limits[1]))
        try:
            with pytest.raises(WireMemoryError, match=rf"rank 0 \(host .* {text}"):
                work.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        for call in (work.wait, work.done, peers.barrier):
            refused(WireMemoryError, text, call)
    else:
        while not peers.core.last_agreed:
            work.done()
    job.all_gather(b"")


# -- messages --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sent_before", [False, True])
def test_after_a_refused_message_every_call_raises_its_error(peers, job, sent_before):
    rank, to = peers.topology.rank, peers.topology.world_size - 1
    arrays, works = [np.zeros(2), np.zeros(3), np.zeros(4)], []
    for turn in range(3):
        if rank == 0 and turn == 1:
            for tag, count in enumerate((4, 3, 4)):
                peers.send(np.full(count, tag + 1.0), to, tag=tag)
        if rank == to and turn == (2 if sent_before else 0):
            works = [peers.receive(array, 0, tag=tag) for tag, array in enumerate(arrays)]
        job.all_gather(b"")
    if rank == to:
        calls = [call for work in works for call in (work.wait, work.done, work.wait)]
        calls += [peers.barrier, lambda: peers.send(np.ones(1), 0).wait()]
        assert len({str(refused(MismatchError, "", call)) for call in calls}) == 1
        assert not any(array.any() for array in arrays)
    job.all_gather(b"")
