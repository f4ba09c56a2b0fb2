"""UCX between ranks that believe to be on several hosts: failures, forks, and what groups give back."""

import gc
import hashlib
import math
import os
import re
import signal
import subprocess
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from distopt.comm.base import Communicator
from distopt.comm.net import distance, ucx
from distopt.comm.net.ucx import UcxCommunicator, UcxNetwork, communicator_over_ucx, library
from distopt.errors import CommunicatorError, DistoptError, LaunchError, MismatchError, PeerLostError, UsageError
from distopt.settings import Settings

from .ranks import HostsOfOneMachine, LocalJob, OverUcx, needs_ucx, run_ranks_ok, with_ranks

pytestmark = needs_ucx
connect = OverUcx.create


def jobs_of(job: LocalJob) -> HostsOfOneMachine:
    """Collective. The job of ranks that make several communicators."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return HostsOfOneMachine(job, 1)


def check_sum(comm: Communicator, count: int = 50_000) -> None:
    array = np.arange(count, dtype=np.float64) + comm.topology.rank
    comm.all_reduce(array).wait()
    size = comm.topology.world_size
    assert (array == np.arange(count) * size + size * (size - 1) // 2).all()


# -- failures ------------------------------------------------------------------------------------------------------
@with_ranks(3, connect)
def test_a_rank_that_closes_what_has_failed_says_why(comm: UcxCommunicator, rank: int) -> None:
    """Rank 0 fails outside of a wait, as by an operation that differs from the others', and leaves at once."""
    comm.barrier()
    if rank == 0:
        with pytest.raises(MismatchError):
            comm.core.fail("MismatchError", "the cause", "its cure", [])
        comm.close()
        return
    with pytest.raises(MismatchError) as info:
        comm.barrier()
    assert info.value.fact == "the cause"


@with_ranks(3, connect, lost=[0, 1])
def test_the_rank_that_failed_first_is_named(comm: UcxCommunicator, job: LocalJob, rank: int) -> None:
    """Rank 1 fails, rank 0 fails because of it and ends, and rank 2 looks at last."""
    check_sum(comm)
    pids = job.all_gather(str(os.getpid()).encode())
    match rank:
        case 0:
            with pytest.raises(PeerLostError, match="rank 1"):
                comm.barrier()
            os._exit(0)
        case 1:
            os.kill(os.getpid(), signal.SIGKILL)
    stat = Path(f"/proc/{int(pids[0])}/stat")
    while stat.exists() and " Z " not in stat.read_text():
        time.sleep(0.05)
    with pytest.raises(PeerLostError, match=r"^rank 1 \(host host1"):
        comm.barrier()


@pytest.mark.parametrize("large", [False, True])
@with_ranks(3, lost=[1])
def test_a_rank_that_stops_is_named_and_the_others_go_on(job: LocalJob, rank: int, large: bool) -> None:
    """Rank 1 stops while data for it, and from it, are under way; the others make a new communicator without it."""
    jobs = jobs_of(job)
    comm = communicator_over_ucx(jobs, settings=Settings(timeout=2.0, stall_warning=1.0))
    check_sum(comm)
    pids = job.all_gather(str(os.getpid()).encode())
    if rank == 1:
        time.sleep(600)
    if rank == 0:
        os.kill(int(pids[1]), signal.SIGSTOP)
    array = np.ones(8_000_000 if large else 1000)
    message = comm.send(array, 1) if large else comm.receive(array, 1)
    for call in (message.wait, comm.barrier):
        with pytest.raises(CommunicatorError, match=r"rank 1 \(host host1"):
            call()
    comm.close()
    del comm, message, call, array
    gc.collect()
    left = communicator_over_ucx(jobs.subgroup([0, 2], b"k" * 16))
    check_sum(left)
    if rank == 0:
        os.kill(int(pids[1]), signal.SIGCONT)  # what rank 1 reads and writes now is not ours any more
    for _ in range(20):
        check_sum(left)
        time.sleep(0.02)
    left.close()
    if rank == 0:
        os.kill(int(pids[1]), signal.SIGKILL)


# -- streams -------------------------------------------------------------------------------------------------------
def sum_over_streams(job: LocalJob) -> str:
    """A digest of sums of odd and even sizes, in turn and side by side, over one stream and over several."""
    jobs, rank, digests = jobs_of(job), job.topology.rank, set()
    for is_distant, streams in product((False, True), ("1", "3", "16")):
        os.environ["DISTOPT_STREAMS"] = streams
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distance, "_FAR_SECONDS", 0.0 if is_distant else math.inf)  # on a busy machine, too
            network = UcxNetwork(jobs)
        assert network.is_far == is_distant
        comm = UcxCommunicator(jobs, network, chunk_bytes=12_344)  # a multiple of 8
        arrays = [
            ((np.arange(count) * 7 + rank * 13) % 1013 / (rank + 3)).astype(kind)
            for count in (1, 8_191, 12_345, 100_003, 400_001)
            for kind in (np.float32, np.float64)
        ]
        works = [comm.all_reduce(array) for array in arrays]
        for work in works:
            work.wait()
        pieces = np.empty(arrays[5].size * comm.topology.world_size)
        comm.all_gather(arrays[5] * (rank + 1), pieces).wait()
        arrays.append(arrays[-1] * (rank + 1))
        comm.broadcast(arrays[-1], 1).wait()
        digests.add(hashlib.sha256(b"".join(each.tobytes() for each in (*arrays, pieces))).hexdigest())
        comm.close()
    (digest,) = digests
    return digest


@pytest.mark.parametrize("size", [2, 3])
def test_streams_and_distance_leave_the_bits_as_they_are(size: int) -> None:
    assert len({*run_ranks_ok(sum_over_streams, size)}) == 1


@pytest.mark.parametrize("text", ["0", "17", "-1", "two"])
def test_numbers_of_streams_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"DISTOPT_STREAMS='{text}' is not a number from 1 to 16"):
        Settings.from_env({"DISTOPT_STREAMS": text})


@with_ranks(2)
def test_each_stream_is_a_connection(job: LocalJob) -> None:
    found = []
    for streams in ("1", "6"):
        os.environ["DISTOPT_STREAMS"] = streams
        before = sockets()
        check_sum(comm := connect(job), 2_000_000)
        found.append(sockets() - before)
        comm.barrier()
    assert found[1] >= 5 > found[0] - 2, found


def sockets() -> int:
    """Connections of this process, to itself included."""
    links = [each.readlink() for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return sum(link.name.startswith("socket:") for link in links)


# -- groups one after the other --------------------------------------------------------------------------------------
@with_ranks(2)
def test_a_new_communicator_beside_one_that_only_the_other_rank_has_closed(job: LocalJob) -> None:
    jobs = jobs_of(job)
    for _ in range(5):
        first = communicator_over_ucx(jobs)
        check_sum(first)
        if job.topology.rank == 0:
            first.close()
            del first
            gc.collect()
        check_sum(second := communicator_over_ucx(jobs))
        second.close()


FEW = 5  # two processes that connect to each other at the same time have two connections for a while


def used() -> int:
    """Number of open files and of threads."""
    return sum(len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("fd", "task"))


@pytest.mark.parametrize("ends", ["with shared connections", "closed", "interrupted", "refused"])
@with_ranks(2)
def test_communicators_that_have_ended_leave_no_files_and_threads(job: LocalJob, rank: int, ends: str) -> None:
    """At once if connections are their own: a collection of garbage, which would end them, too, may be hours away."""
    jobs, before, alone = jobs_of(job), 0, ends != "with shared connections"
    gc.collect()
    if alone:
        gc.disable()
    for _ in range(12 if alone else 30):
        if ends == "refused":  # a rank is lost while they meet
            with pytest.raises(ZeroDivisionError):
                communicator_over_ucx(LostWhenMeeting(jobs), alone=True)  # type: ignore[arg-type]
        else:
            comm = communicator_over_ucx(jobs, alone=alone)
            check_sum(comm)
            if ends == "interrupted" and rank == 0:
                late = comm.all_reduce(np.ones(100_000))
                comm.abort("the other one is late")  # type: ignore[attr-defined]
                with pytest.raises(CommunicatorError, match="was interrupted: the other one is late"):
                    late.wait()
                del late
            if alone:
                job.all_gather(b"")
            comm.close()
            del comm
        before = before or used()
    assert used() <= before + FEW
    assert not alone or ucx._workers == set()


class LostWhenMeeting:
    """A job one of whose ranks is lost once all have begun with UCX."""

    def __init__(self, job: HostsOfOneMachine) -> None:
        self._job, self._left = job, 2

    def __getattr__(self, name: str) -> object:
        return getattr(self._job, name)

    def exchange(self, value: object) -> list[object]:
        self._left -= 1
        if not self._left:
            raise ZeroDivisionError("a rank is lost")
        return self._job.exchange(value)


@with_ranks(2)
def test_live_communicators_share_their_connections(job: LocalJob) -> None:
    jobs = jobs_of(job)
    live = [communicator_over_ucx(jobs)]
    check_sum(live[0])
    before = used()
    live += [communicator_over_ucx(jobs) for _ in range(50)]
    for comm in live:
        check_sum(comm, 100)
    assert used() <= before + FEW


# -- forks -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["several streams", "fork", "program"])
@with_ranks(3, lost=[1])
def test_the_network_notices_the_end_of_a_rank(job: LocalJob, rank: int, how: str) -> None:
    """Rank 1 is killed with a large sum on its way, over several streams, or while its child lives on."""
    if how == "several streams":
        os.environ["DISTOPT_STREAMS"] = "4"
    comm = connect(job)
    check_sum(comm)
    comm.barrier()
    child = 0
    if rank == 1 and how == "program":
        time.sleep(1.5)  # the thread has marked the sockets
        child = subprocess.Popen(["sleep", "200"], close_fds=False).pid
    elif rank == 1 and how == "fork" and (child := os.fork()) == 0:
        time.sleep(200)
        os._exit(0)
    child = int(job.all_gather(b"%d" % child)[1])
    work = comm.all_reduce(np.ones(4_000_000))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm._waits._peers._ranks.clear()  # type: ignore[attr-defined]  # the network alone may notice it
    with pytest.raises(PeerLostError, match="rank 1"):
        work.wait()
    if child and rank == 0:
        os.kill(child, signal.SIGKILL)


# -- what a user may have set ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"GLOO_SOCKET_IFNAME": "nowhere0"}, "there is no network interface 'nowhere0'"),
        ({"DISTOPT_UCX_LIBRARY": "/nowhere/libucp.so.0"}, "UCX cannot be loaded: /nowhere/libucp.so.0"),
    ],
)
@with_ranks(2)
def test_a_rank_that_cannot_use_ucx_is_named_on_all(
    job: LocalJob, rank: int, variables: dict[str, str], text: str
) -> None:
    jobs = jobs_of(job)
    if rank == 1:
        os.environ |= variables
        library.cache_clear()
    with pytest.raises(DistoptError) as info:
        communicator_over_ucx(jobs)
    assert f"UCX cannot connect the hosts: rank 1 (host1): {text}" in str(info.value)
    assert "or start the script with mpiexec" in str(info.value)
    assert len(set(job.all_gather(str(info.value).encode()))) == 1


@with_ranks(3)
def test_ranks_that_differ_in_ucx_or_streams_are_named_on_all(job: LocalJob, rank: int) -> None:
    jobs = jobs_of(job)
    os.environ["DISTOPT_STREAMS"] = str(1 + rank % 2)
    text = (
        "DISTOPT_STREAMS differs between the ranks: 1 on ranks 0, 2 (host0, host2), 2 on rank 1 (host1); "
        "give all the same"
    )
    with pytest.raises(LaunchError, match=f"^{re.escape(text)}$"):
        communicator_over_ucx(jobs)
    os.environ["DISTOPT_STREAMS"] = "1"
    if rank == 1:
        ucx._worker = lambda *_: SimpleNamespace(version="1.2.3", address=b"")  # type: ignore[attr-defined]
    expected = r"different versions of UCX: \S+ on ranks 0, 2 \(host0, host2\), 1.2.3 on rank 1 \(host1\); pip install"
    with pytest.raises(LaunchError, match=expected):
        communicator_over_ucx(jobs)


# -- what else is the process's own ----------------------------------------------------------------------------------
def signals_caught() -> int:
    """As bits, those that end a process or show its state."""
    status = Path("/proc/self/status").read_text()
    caught = int(re.search(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)[1], 16)  # type: ignore[index]
    kinds = (signal.SIGHUP, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
    return caught & sum(1 << (kind - 1) for kind in kinds)


@with_ranks(2)
def test_ucx_handles_no_signal(job: LocalJob) -> None:
    before = signals_caught()
    check_sum(connect(job))
    assert signals_caught() == before
