"""UCX between ranks that believe to be on several hosts: failures, forks, and what groups give back."""

import gc
import hashlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from distopt.comm.base import Communicator
from distopt.comm.net import distance, ucx
from distopt.comm.net.ucx import UcxCommunicator, UcxNetwork, communicator_over_ucx, library
from distopt.errors import (
    CommunicatorError,
    DistoptError,
    LaunchError,
    MismatchError,
    PeerLostError,
    StalledError,
    UsageError,
)
from distopt.settings import Settings

from .ranks import (
    HostsOfOneMachine,
    LocalJob,
    OverUcx,
    OverUcxByHost,
    forked,
    needs_ucx,
    run_ranks,
    run_ranks_ok,
    with_ranks,
)
from .scenes import disagree, interrupt, lose_last_rank

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
@pytest.mark.parametrize("waiting_in", ["all_reduce", "barrier", "all_gather_ragged"])
@pytest.mark.parametrize(
    ("how", "error"), [("killed", "PeerLostError"), ("exited", "PeerLostError"), ("closed", "CommunicatorClosedError")]
)
@pytest.mark.parametrize("over", [OverUcx, pytest.param(OverUcxByHost, marks=[pytest.mark.slow, pytest.mark.sweep])])
def test_survivors_learn_who_was_lost(over: type[OverUcx], how: str, error: str, waiting_in: str) -> None:
    *survivors, lost = run_ranks(lose_last_rank, 2 + over.per_host, over.create, how, waiting_in)
    for outcome in survivors:
        assert (outcome.error, outcome.exit_code) == (error, 0), outcome
        assert re.search(rf"rank {len(survivors)} \(host host\d, pid \d+\) (ended|has closed)", outcome.text)
        assert "broadcast #0 of 3 int32 from rank 0 (hello)" in outcome.text or how == "closed"
    assert lost.exit_code == {"killed": -signal.SIGKILL, "exited": 0, "closed": 0}[how]


@pytest.mark.parametrize("which", ["operation", "count"])
def test_different_collectives_are_named_on_all_ranks(which: str) -> None:
    outcomes = run_ranks(disagree, 3, connect, which)
    assert [o.error for o in outcomes] == ["MismatchError"] * 3
    assert all(f"rank 2 (host host2, pid {outcomes[2].pid})" in o.text for o in outcomes)


def test_ctrl_c_interrupts_a_wait() -> None:
    run_ranks_ok(interrupt, 2, connect)


def fail_and_close(job: LocalJob) -> str:
    """Rank 0 fails outside of a wait, as by an operation that differs from the others', and leaves at once."""
    comm = connect(job)
    comm.barrier()
    if job.topology.rank == 0:
        with pytest.raises(MismatchError):
            comm.core.fail("MismatchError", "the cause", "its cure", [])  # type: ignore[attr-defined]
        comm.close()
        return "the cause"
    with pytest.raises(MismatchError) as info:
        comm.barrier()
    return info.value.fact


def test_a_rank_that_closes_what_has_failed_says_why() -> None:
    assert run_ranks_ok(fail_and_close, 3) == ["the cause"] * 3


def give_up(job: LocalJob) -> str:
    """Rank 0 waits briefly; rank 1 comes late, and waits for rank 2, which is later."""
    comm = connect(job)
    if job.topology.rank != 0:
        job.all_gather(b"")
    if job.topology.rank == 2:
        job.all_gather(b"")
    with pytest.raises(StalledError) as info:
        comm.all_reduce(np.zeros(100_000)).wait(0.2 if job.topology.rank == 0 else None)
    for _ in range(2 - job.topology.rank):
        job.all_gather(b"")
    return str(info.value)


def test_the_late_rank_is_told_that_the_others_gave_up() -> None:
    first, *late = run_ranks_ok(give_up, 3)
    assert late == [first] * 2


def lose_in_turn(job: LocalJob) -> str:
    """Rank 1 fails, rank 0 fails because of it and ends, and rank 2 looks at last."""
    comm = connect(job)
    check_sum(comm)
    job.all_gather(b"")
    match job.topology.rank:
        case 0:
            with pytest.raises(PeerLostError, match="rank 1"):
                comm.barrier()
            os._exit(0)
        case 1:
            os.kill(os.getpid(), signal.SIGKILL)
    while _is_alive(comm, 0):
        time.sleep(0.05)
    with pytest.raises(PeerLostError) as info:
        comm.barrier()
    return str(info.value)


def _is_alive(comm: Communicator, rank: int) -> bool:
    pid = comm._waits.processes[rank].pid  # type: ignore[attr-defined]
    return Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()


def test_the_rank_that_failed_first_is_named() -> None:
    outcome = run_ranks(lose_in_turn, 3)[2]
    assert outcome.error is None, outcome.trace
    assert outcome.value.startswith("rank 1 (host host1"), outcome.value


def stop_in_a_message(job: LocalJob, large: bool) -> list[str]:
    """Rank 1 stops while data for it, and from it, are under way; the others make a new communicator without it."""
    jobs = jobs_of(job)
    comm = communicator_over_ucx(jobs, settings=Settings(timeout=2.0, stall_warning=1.0))
    check_sum(comm)
    rank = job.topology.rank
    pids = job.all_gather(str(os.getpid()).encode())
    if rank == 1:
        time.sleep(600)
    if rank == 0:
        os.kill(int(pids[1]), signal.SIGSTOP)
    texts = []
    array = np.ones(8_000_000 if large else 1000)
    message = comm.send(array, 1) if large else comm.receive(array, 1)
    for call in (message.wait, comm.barrier):
        with pytest.raises(CommunicatorError) as info:
            call()
        texts.append(str(info.value))
    comm.close()
    del comm, info, message, call, array
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
    return texts


@pytest.mark.parametrize("large", [False, True])
def test_a_rank_that_stops_is_named_and_the_others_go_on(large: bool) -> None:
    for outcome in run_ranks(stop_in_a_message, 3, large)[::2]:
        assert outcome.error is None, outcome.trace
        assert all("rank 1 (host host1" in text for text in outcome.value), outcome.value


# -- streams -------------------------------------------------------------------------------------------------------
def sum_over_streams(job: LocalJob, is_distant: bool) -> list[bytes]:
    """Sums of odd and even sizes, one after the other and side by side, over one stream and over several."""
    jobs, rank = jobs_of(job), job.topology.rank
    found = []
    for streams in ("1", "3", "16"):
        os.environ["DISTOPT_STREAMS"] = streams
        with pytest.MonkeyPatch.context() as patch:
            if is_distant:
                patch.setattr(distance, "_FAR_SECONDS", 0.0)
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
        found.append(b"".join(np.asarray(each).tobytes() for each in (*arrays, pieces)))
        comm.close()
    assert found[0] == found[1] == found[2]
    return [hashlib.sha256(found[0]).hexdigest()]


@pytest.mark.parametrize("size", [2, 3])
def test_streams_and_distance_leave_the_bits_as_they_are(size: int) -> None:
    outcomes = run_ranks_ok(sum_over_streams, size, False) + run_ranks_ok(sum_over_streams, size, True)
    assert all(outcome == outcomes[0] for outcome in outcomes)


def lose_with_streams(job: LocalJob) -> None:
    """Rank 1 is killed while a large sum is on its way over several streams."""
    os.environ["DISTOPT_STREAMS"] = "4"
    comm = connect(job)
    check_sum(comm)
    array = np.ones(4_000_000)
    work = comm.all_reduce(array)
    if job.topology.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm._waits._peers._ranks.clear()  # type: ignore[attr-defined]  # the network alone may notice it
    with pytest.raises(PeerLostError, match="rank 1"):
        work.wait()


def test_the_end_of_a_rank_is_noticed_over_streams() -> None:
    first, lost, last = run_ranks(lose_with_streams, 3)
    assert (first.error, last.error) == (None, None), (first.trace, last.trace)
    assert lost.exit_code == -signal.SIGKILL


def join_with_streams(job: LocalJob) -> str:
    jobs = jobs_of(job)
    os.environ["DISTOPT_STREAMS"] = str(job.topology.rank + 1)
    with pytest.raises(LaunchError) as info:
        communicator_over_ucx(jobs)
    return str(info.value)


def test_ranks_with_different_numbers_of_streams_are_refused() -> None:
    text = "DISTOPT_STREAMS differs between the ranks: 1 on rank 0 (host0), 2 on rank 1 (host1); give all the same"
    assert run_ranks_ok(join_with_streams, 2) == [text] * 2


@pytest.mark.parametrize("text", ["0", "17", "-1", "two"])
def test_numbers_of_streams_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"DISTOPT_STREAMS='{text}' is not a number from 1 to 16"):
        Settings.from_env({"DISTOPT_STREAMS": text})


def sockets() -> int:
    """Connections of this process, to itself included."""
    links = [each.readlink() for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return sum(link.name.startswith("socket:") for link in links)


def count_sockets(job: LocalJob) -> list[int]:
    found = []
    for streams in ("1", "6"):
        os.environ["DISTOPT_STREAMS"] = streams
        before = sockets()
        check_sum(comm := connect(job), 2_000_000)
        found.append(sockets() - before)
        comm.barrier()
    return found


def test_each_stream_is_a_connection() -> None:
    for one, more in run_ranks_ok(count_sockets, 2):
        assert more >= 5 > one - 2, (one, more)


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


@with_ranks(2)
def test_closed_communicators_leave_no_files_and_threads(job: LocalJob) -> None:
    jobs = jobs_of(job)
    before = 0
    for _ in range(30):
        comm = communicator_over_ucx(jobs)
        check_sum(comm)
        comm.close()
        before = before or used()
    assert used() <= before + FEW


@pytest.mark.parametrize("ends", ["closed", "interrupted", "refused"])
def test_communicators_of_their_own_connections_leave_nothing(ends: str) -> None:
    """At once: a collection of garbage, which would end them, too, may be hours away."""
    run_ranks_ok(end_again_and_again, 2, ends)


def end_again_and_again(job: LocalJob, ends: str) -> None:
    jobs, before = jobs_of(job), 0
    gc.collect()
    gc.disable()
    for _ in range(12):
        if ends == "refused":  # a rank is lost while they meet
            with pytest.raises(ZeroDivisionError):
                communicator_over_ucx(LostWhenMeeting(jobs), alone=True)  # type: ignore[arg-type]
        else:
            comm = communicator_over_ucx(jobs, alone=True)
            check_sum(comm)
            if ends == "interrupted" and job.topology.rank == 0:
                late = comm.all_reduce(np.ones(100_000))
                comm.abort("the other one is late")  # type: ignore[attr-defined]
                with pytest.raises(CommunicatorError, match="was interrupted: the other one is late"):
                    late.wait()
                del late
            job.all_gather(b"")
            comm.close()
            del comm
        before = before or used()
    assert used() <= before + FEW
    assert ucx._workers == set()


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
def die_with_children(job: LocalJob, how: str) -> None:
    """The last rank is killed while its child lives on."""
    comm = connect(job)
    check_sum(comm)
    comm.barrier()
    child = 0
    if job.topology.rank == 1:
        if how == "program":
            time.sleep(1.5)  # the thread has marked the sockets
            child = subprocess.Popen(["sleep", "200"], close_fds=False).pid
        elif (child := os.fork()) == 0:
            time.sleep(200)
            os._exit(0)
    child = int(job.all_gather(b"%d" % child)[1])
    if job.topology.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm._waits._peers._ranks.clear()  # type: ignore[attr-defined]  # the network alone may notice it
    with pytest.raises(PeerLostError, match="rank 1"):
        comm.barrier()
    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("how", ["fork", "program"])
def test_the_end_of_a_rank_is_noticed_while_its_child_lives(how: str) -> None:
    outcome, lost = run_ranks(die_with_children, 2, how)
    assert outcome.error is None, outcome.trace
    assert lost.exit_code == -signal.SIGKILL


@with_ranks(2)
def test_a_forked_child_is_refused_and_disturbs_nobody(job: LocalJob) -> None:
    jobs = jobs_of(job)
    comm = communicator_over_ucx(jobs)
    check_sum(comm)
    with forked() as is_child:
        if is_child:
            with pytest.raises(UsageError, match="forked"):
                comm.barrier()
            comm.close()
            del comm
            gc.collect()
    if not is_child:
        check_sum(comm)
        comm.barrier()


# -- what a user may have set ----------------------------------------------------------------------------------------
def join_with(job: LocalJob, variables: dict[str, str]) -> str:
    jobs = jobs_of(job)
    if job.topology.rank == 1:
        os.environ |= variables
        library.cache_clear()
    with pytest.raises(DistoptError) as info:
        communicator_over_ucx(jobs)
    return str(info.value)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"GLOO_SOCKET_IFNAME": "nowhere0"}, "there is no network interface 'nowhere0'"),
        ({"DISTOPT_UCX_LIBRARY": "/nowhere/libucp.so.0"}, "UCX cannot be loaded: /nowhere/libucp.so.0"),
    ],
)
def test_a_rank_that_cannot_use_ucx_is_named_on_all(variables: dict[str, str], text: str) -> None:
    first, second = run_ranks_ok(join_with, 2, variables)
    assert first == second
    assert f"UCX cannot connect the hosts: rank 1 (host1): {text}" in first
    assert "or start the script with mpiexec" in first


@with_ranks(3)
def test_ranks_with_different_versions_of_ucx_are_named_on_all(job: LocalJob) -> None:
    jobs = jobs_of(job)
    if job.topology.rank == 1:
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
