"""The errors that ranks get when something fails; nothing is left behind."""

import os
import re
import signal
import time

import numpy as np
import pytest

from distopt import _core
from distopt.errors import Call, CommunicatorError
from distopt.settings import Settings

from .ranks import LocalJob, connect, run_ranks, run_ranks_ok
from .scenes import assert_loss_is_told, assert_stall_is_told, disagree, log_of_distopt, lose_last_rank, wait_briefly


# -- different collectives -------------------------------------------------------------------------
@pytest.mark.slow(kept=4)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "which", ["operation", "count", "empty", "dtype", "reduction", "label", "look", "root", "wire memory"]
)
def test_different_collectives_are_named_on_all_ranks(world_size: int, which: str) -> None:
    outcomes = run_ranks(disagree, world_size, connect, which)
    assert [o.error for o in outcomes] == ["MismatchError"] * world_size
    assert len({o.text for o in outcomes}) == 1, "all ranks tell the same story"
    if which == "operation":
        assert re.search(r"all_reduce #2 of 50,000 float64, sum \(bucket 3\)", outcomes[0].text)
        assert re.search(r"broadcast #2 of 10 float64 from rank 0", outcomes[0].text)
        assert f"rank {world_size - 1} (host" in outcomes[0].text
    for outcome in outcomes:
        assert outcome.text == "{fact}; {cure}".format(**outcome.fields)
        ours, theirs = sorted(outcome.fields["calls"], key=lambda call: call.rank)
        assert ours.rank < theirs.rank
        assert theirs.rank == world_size - 1 or which == "wire memory"  # every rank requests a different size
        assert [(one.rank, one.pid) for one in sorted(outcome.fields["ranks"])] == [
            (call.rank, outcomes[call.rank].pid) for call in (ours, theirs)
        ]
        assert ours.number == theirs.number > 0
        if which == "operation":
            assert ours == Call(ours.rank, "all_reduce", 2, 50_000, "float64", "sum", 0, "bucket 3")
            assert theirs == Call(world_size - 1, "broadcast", 2, 10, "float64", "", 0, "")


# -- lost peers ------------------------------------------------------------------------------------
@pytest.mark.parametrize("waiting_in", ["all_reduce", "barrier", "empty", "all_gather_ragged"])
@pytest.mark.parametrize(
    ("how", "error"), [("killed", "PeerLostError"), ("exited", "PeerLostError"), ("closed", "CommunicatorClosedError")]
)
def test_survivors_learn_who_was_lost(how: str, error: str, waiting_in: str) -> None:
    *survivors, lost = run_ranks(lose_last_rank, 3, connect, how, waiting_in)
    assert_loss_is_told(survivors, lost, error)
    assert lost.exit_code == {"killed": -signal.SIGKILL, "exited": 0, "closed": 0}[how]


def use_after_failure(job: LocalJob) -> list[str]:
    comm = connect(job)
    array = comm.empty(1000)
    if job.topology.rank == 1:
        os._exit(0)
    texts = []
    for call in (comm.barrier, lambda: comm.all_reduce(array), comm.barrier, lambda: comm.empty(3)):
        with pytest.raises(CommunicatorError) as info:
            call()
        texts.append(str(info.value))
    comm.close()
    array[...] = 1  # the memory outlives the communicator
    return texts


def test_after_a_failure_every_use_tells_the_first_cause() -> None:
    outcome, _ = run_ranks(use_after_failure, 2)
    assert outcome.error is None, outcome.trace
    assert len(set(outcome.value)) == 1
    assert "rank 1 (host" in outcome.value[0]


def test_a_peer_that_is_done_may_leave_before_the_others_have_noticed() -> None:
    for _ in range(3):
        run_ranks_ok(finish_and_leave, 3)


def finish_and_leave(job: LocalJob) -> None:
    comm = connect(job)
    array = comm.empty(10_000)
    for target in (array, np.ones(300_000, np.float32)):
        target[...] = 1
        work = comm.all_reduce(target)
        if job.topology.rank == 0:
            time.sleep(0.1)
        work.wait()
        assert (target == 3).all()
    comm.close()


# -- stalled peers ---------------------------------------------------------------------------------
def stall(job: LocalJob) -> list[str]:
    records, comm = log_of_distopt(), connect(job, Settings(timeout=3.0, stall_warning=1.0))
    job.all_gather(b"")
    comm.barrier()
    records.clear()
    if job.topology.rank != 0:
        job.all_gather(b"")
        return []
    with pytest.raises(TimeoutError, match=r"no answer within 3 s") as info:
        comm.all_reduce(np.zeros(3)).wait()
    job.all_gather(b"")
    return [*records, str(info.value)]


def test_a_stalled_peer_is_named_first_in_a_warning_then_in_an_error() -> None:
    assert_stall_is_told(run_ranks_ok(stall, 3)[0])


def test_the_late_rank_is_told_that_the_others_gave_up() -> None:
    first, late = run_ranks_ok(wait_briefly, 2, connect)
    assert first == late
    assert "it has started no operation" in first


@pytest.mark.parametrize("named_fallback", [False, True])
def test_shared_memory_is_the_owner_s_alone(named_fallback: bool) -> None:
    fd = _core.create_segment(2, 4096, named_fallback)
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    os.close(fd)
