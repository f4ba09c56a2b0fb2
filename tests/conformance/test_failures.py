"""The errors that ranks get, whatever their transport, when something fails or interrupts them; nothing is left."""

import gc
import os
import re
import signal
import time
from functools import partial
from itertools import product

import numpy as np
import pytest

from distopt.errors import Call, CommunicatorError, StalledError, UsageError

from . import nccl_ranks
from .checks import host
from .ranks import (
    HASTY,
    OverUcx,
    OverUcxByHost,
    connect,
    disagree,
    forked,
    log_of_distopt,
    needs_ucx,
    run_ranks,
    signalled,
    with_ranks,
)

pytestmark = pytest.mark.usefixtures("built")
OVER = {
    "shm": connect,
    "ucx": OverUcx.create,
    "ucx by host": OverUcxByHost.create,
    "nccl": nccl_ranks.connect,
    "nccl, connected": partial(nccl_ranks.connect, CONNECTED="1"),
    "via-host": nccl_ranks.connect_via_host,
}
MARKS = {"ucx": [needs_ucx], "ucx by host": [needs_ucx, pytest.mark.slow, pytest.mark.sweep]}


def over(transports, *given):
    """Cases over transports: what connects the ranks, and `given`."""
    return [pytest.param(OVER[one], *given, marks=MARKS.get(one, ()), id="-".join([one, *given])) for one in transports]


# -- different collectives -------------------------------------------------------------------------
DIFFERENCES = {
    "operation": ("shm", "ucx", "nccl", "via-host"),
    "count": ("shm", "ucx", "nccl"),
    **dict.fromkeys(("empty", "dtype", "reduction", "label", "root"), ("shm", "nccl")),
    **dict.fromkeys(("look", "wire memory"), ("shm",)),
}


@pytest.mark.slow(kept=8)
@pytest.mark.parametrize(
    ("connects", "which"), [case for which, transports in DIFFERENCES.items() for case in over(transports, which)]
)
def test_different_collectives_are_named_on_all_ranks(connects, which):
    """By errors that name two ranks that differ, and their calls."""
    for world_size in (2, 3) if connects is connect else (3,):
        outcomes = run_ranks(disagree, world_size, connects, which)
        odd = world_size - 1
        assert [o.error for o in outcomes] == ["MismatchError"] * world_size, outcomes
        assert len({o.text for o in outcomes}) == 1 or "host2" in outcomes[0].text  # on one host all tell the same
        for outcome in outcomes:
            assert outcome.text == "{fact}; {cure}".format(**outcome.fields)
            ours, theirs = sorted(outcome.fields["calls"], key=lambda call: call.rank)
            assert ours.rank < theirs.rank
            assert theirs.rank == odd or which == "wire memory"  # every rank requests a different size
            named = [(one.rank, one.pid) for one in sorted(outcome.fields["ranks"])]
            assert named == [(call.rank, outcomes[call.rank].pid) for call in (ours, theirs)]
            assert all(f"rank {rank} (host " in outcome.text for rank, _ in named)
            number = ours.number
            assert theirs.number == number > 0
            if which == "operation":
                assert ours == Call(ours.rank, "all_reduce", number, 50_000, "float64", "sum", 0, "bucket 3")
                assert theirs == Call(odd, "broadcast", number, 10, "float64", "", 0, "")
                assert f"all_reduce #{number} of 50,000 float64, sum (bucket 3)" in outcome.text
                assert re.search(rf"rank {odd} \(host .* broadcast #{number} of 10 float64 from rank 0", outcome.text)


# -- lost peers ------------------------------------------------------------------------------------
WAITS = ["all_reduce", "barrier", "all_gather_ragged"]
LOSSES = [
    *product([("shm",)], ["killed", "exited", "closed"], [*WAITS, "empty"]),
    *product([("ucx", "ucx by host")], ["killed", "exited", "closed"], WAITS),
    *product([("nccl",)], ["killed", "closed"], [*WAITS, "no one"]),
    (("via-host",), "killed", "all_reduce"),
]


def lose_last_rank(job, connects, how, waiting_in):
    comm = connects(job)
    comm.broadcast(np.zeros(3, np.int32), label="hello").wait()
    if job.topology.rank == job.topology.world_size - 1:
        time.sleep(0.2)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exited":
            os._exit(0)
        comm.close()
        return
    array = comm.xp.zeros(100_000, np.float32)

    def let_the_device_wait():
        """The error comes with a later call than that which cannot end."""
        while True:
            comm.all_reduce(array).wait()
            time.sleep(0.01)

    calls = {
        "all_reduce": lambda: comm.all_reduce(array, label="bucket 7").wait(100.0),
        "barrier": comm.barrier,
        "empty": lambda: comm.empty(100),
        "all_gather_ragged": lambda: comm.all_gather_ragged(array).wait(),
        "no one": let_the_device_wait,
    }
    calls[waiting_in]()


@pytest.mark.parametrize(("connects", "how", "waiting_in"), [case for row in LOSSES for case in over(*row)])
def test_survivors_learn_who_was_lost(connects, how, waiting_in):
    """Their errors name the last rank, how it was lost and where it was last."""
    world_size = 4 if connects == OverUcxByHost.create else 3
    *survivors, lost = run_ranks(lose_last_rank, world_size, connects, how, waiting_in)
    error, verb = ("CommunicatorClosedError", "closed") if how == "closed" else ("PeerLostError", "ended")
    assert [(o.error, o.exit_code) for o in survivors] == [(error, 0)] * (world_size - 1), survivors
    for text in (outcome.text for outcome in survivors):
        assert re.search(rf"rank {world_size - 1} \(host \S+, pid {lost.pid or '[0-9]+'}", text)
        assert re.search(rf" {verb}\b", text)
        says_where = how != "closed" or " (host host" not in text  # not over UCX
        assert re.search(r"broadcast #[01] of 3 int32 from rank 0 \(hello\)", text) or not says_where
    assert lost.exit_code == (-signal.SIGKILL if how == "killed" else 0)


@with_ranks(2, connect, lost=[1])
def test_after_a_failure_every_use_tells_the_first_cause(comm, rank):
    array = comm.empty(1000)
    if rank == 1:
        os._exit(0)
    texts = set()
    for call in (comm.barrier, lambda: comm.all_reduce(array), comm.barrier, lambda: comm.empty(3)):
        with pytest.raises(CommunicatorError, match=r"rank 1 \(host") as info:
            call()
        texts.add(str(info.value))
    assert len(texts) == 1
    comm.close()
    array[...] = 1  # the memory outlives the communicator


@with_ranks(3)
def test_a_peer_that_is_done_may_leave_before_the_others_have_noticed(job, rank):
    for _ in range(3):
        comm = connect(job)
        array = comm.empty(10_000)
        for target in (array, np.ones(300_000, np.float32)):
            target[...] = 1
            work = comm.all_reduce(target)
            if rank == 0:
                time.sleep(0.1)
            work.wait()
            assert (target == 3).all()
        comm.close()


# -- late peers, interrupts, forks -----------------------------------------------------------------
@pytest.mark.slow(kept=2)
@pytest.mark.parametrize("connects", over(["shm", "nccl, connected", "nccl", "via-host"]))
@with_ranks(3)
def test_a_stalled_peer_is_named_first_in_a_warning_then_in_an_error(job, rank, connects):
    """By rank 0, which alone has called an all-reduce."""
    records, comm = log_of_distopt(), connects(job, HASTY)
    job.all_gather(b"")
    comm.barrier()
    records.clear()
    if rank == 0:
        on_the_device = isinstance(connects, partial)
        if on_the_device:
            comm.all_reduce(comm.xp.zeros(3)).wait()  # blocks the device, not the host
            time.sleep(HASTY.timeout + 1.0)
        with pytest.raises(StalledError, match=r"no (answer|result) within 3 s") as info:
            comm.barrier() if on_the_device else comm.all_reduce(comm.xp.zeros(3)).wait()
        (warning,) = records
        for text in (warning, str(info.value)):
            assert "waits in all_reduce #2 of 3 float64, sum for rank 1 (host" in text
            assert "rank 2 (host" in text
            assert "barrier #1" in text
    job.all_gather(b"")


@pytest.mark.parametrize("connects", over(["shm", "ucx", "nccl, connected", "via-host"]))
@with_ranks(3)
def test_the_late_rank_is_told_that_the_others_gave_up(job, rank, connects):
    """Rank 0 waits briefly; rank 1 comes late, and waits for rank 2, which is later."""
    comm = connects(job)
    for _ in range(rank):
        job.all_gather(b"")

    def meet():
        comm.all_reduce(comm.xp.zeros(100_000)).wait(0.2 if rank == 0 else None)
        comm.barrier()  # where a device waits, and not the host

    with pytest.raises(StalledError, match=r"it has started no operation|none was started") as info:
        meet()
    for _ in range(2 - rank):
        job.all_gather(b"")
    assert len({*job.all_gather(str(info.value).encode())}) == 1


@pytest.mark.parametrize(
    ("connects", "waiting_in"),
    [*over(["shm", "ucx", "nccl, connected"], "all_reduce"), *over(["shm"], "ragged"), *over(["shm"], "message")],
)
@with_ranks(2)
def test_ctrl_c_interrupts_a_wait(job, rank, connects, waiting_in):
    # `job.all_gather(b"")` is where a rank waits for what another one does in its communicator.
    comm = connects(job)
    large = waiting_in == "message"
    array = comm.xp.full(3_000_001 if large else 7 + rank, rank + 1.0)
    seconds = 100.0 if waiting_in == "all_reduce" else None
    if rank == 1:
        job.all_gather(b"")
    if large:
        work = comm.send(array, 0) if rank == 1 else comm.receive(array, 1)
    else:
        work = comm.all_reduce(array[:7]) if seconds else comm.all_gather_ragged(array)
    if rank == 0:
        if waiting_in == "ragged":
            with pytest.raises(UsageError, match="wait"):
                _ = work.parts
        with pytest.raises(KeyboardInterrupt):
            signalled(signal.SIGINT, lambda: work.wait(seconds))
        job.all_gather(b"")
    work.wait(seconds)  # an interrupted wait can be taken up again
    if waiting_in == "ragged":
        assert [part.tolist() for part in work.parts] == [[1.0] * 7, [2.0] * 8]
    else:
        assert (host(array)[:7] == 2).all() if large else (host(array)[:7] == 3).all()


@pytest.mark.parametrize("connects", over(["shm", "ucx", "nccl"]))
@with_ranks(2)
def test_a_forked_child_is_no_rank(job, connects):
    """The child is refused, and disturbs nobody."""
    comm = connects(job)
    array = comm.empty(10)
    # Large, so that a thread of the transport is at it at a fork.
    work = comm.all_reduce(total := comm.xp.ones(3 if comm.name == "nccl" else 1 << 22))
    kept = []
    if comm.name == "nccl":
        kept = [comm._scratch, *(work.arrays for work in comm._in_use)]  # to free them takes a lock of a thread
    for _ in range(20):
        with forked() as is_child:
            if is_child:
                calls = [comm.barrier, lambda: comm.all_reduce(array)]
                if comm.name == "nccl":
                    calls += [work.wait, lambda: comm.abort("no")]
                else:
                    calls += [comm.progress, *([lambda: comm.empty(1)] if comm.name == "shm" else [])]
                for call in calls:
                    with pytest.raises(UsageError, match="forked"):
                        call()
                comm.close()
                del comm, work, array, calls, call
                gc.collect()
    work.wait()
    comm.barrier()
    assert np.all(host(total) == job.topology.world_size)
    assert comm.empty(5).size == 5
    del kept
