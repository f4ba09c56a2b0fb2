"""What ranks do when something fails or interrupts them, over the communicator that `connect` makes."""

import gc
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distopt.comm.base import Communicator
from distopt.errors import Call, StalledError, UsageError
from distopt.settings import Settings

from .checks import host
from .ranks import LocalJob, forked, run_ranks, run_ranks_ok

Connect = Callable[..., Communicator]
HASTY = Settings(timeout=3.0, stall_warning=1.0)


def disagree(job: LocalJob, connect: Connect, which: str) -> None:
    """The last rank calls something else."""
    comm = connect(job)
    odd = job.topology.rank == job.topology.world_size - 1
    comm.barrier()
    small, large = comm.xp.zeros(10), comm.xp.zeros(50_000)
    calls: dict[str, Callable[[], Any]] = {
        "operation": lambda: comm.broadcast(small) if odd else comm.all_reduce(large, label="bucket 3"),
        "count": lambda: comm.all_reduce(small if odd else large),
        "empty": lambda: comm.all_reduce(small[:0] if odd else large),
        "dtype": lambda: comm.all_reduce(small.astype(np.float32) if odd else small),
        "reduction": lambda: comm.all_reduce(small, "max" if odd else "sum"),
        "label": lambda: comm.all_reduce(large, label="bucket 4" if odd else "bucket 3"),
        "look": lambda: comm.all_reduce(small, find_nonfinite=odd),
        "root": lambda: comm.broadcast(small, root=int(odd)),
        "wire memory": lambda: comm.empty(10 + job.topology.rank, "int64"),  # raises by itself
    }
    calls[which]().wait(100.0)


def check_difference(connect: Connect, which: str, world_size: int = 3) -> None:
    """All ranks get an error that names two that differ, and their calls."""
    outcomes = run_ranks(disagree, world_size, connect, which)
    odd = world_size - 1
    assert [o.error for o in outcomes] == ["MismatchError"] * world_size, outcomes
    assert len({o.text for o in outcomes}) == 1 or "host2" in outcomes[0].text, "on one host all tell the same story"
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


def lose_last_rank(job: LocalJob, connect: Connect, how: str, waiting_in: str) -> None:
    comm = connect(job)
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

    def let_the_device_wait() -> None:
        """The error comes with a later call than that which cannot end."""
        while True:
            comm.all_reduce(array).wait()
            time.sleep(0.01)

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.all_reduce(array, label="bucket 7").wait(100.0),
        "barrier": comm.barrier,
        "empty": lambda: comm.empty(100),
        "all_gather_ragged": lambda: comm.all_gather_ragged(array).wait(),
        "no one": let_the_device_wait,
    }
    calls[waiting_in]()


def check_loss(connect: Connect, how: str, waiting_in: str, world_size: int = 3) -> None:
    """The others' errors name the last rank, how it was lost and where it was last."""
    *survivors, lost = run_ranks(lose_last_rank, world_size, connect, how, waiting_in)
    error, verb = ("CommunicatorClosedError", "closed") if how == "closed" else ("PeerLostError", "ended")
    assert [(o.error, o.exit_code) for o in survivors] == [(error, 0)] * (world_size - 1), survivors
    for text in (outcome.text for outcome in survivors):
        assert re.search(rf"rank {world_size - 1} \(host \S+, pid {lost.pid or '[0-9]+'}", text)
        assert re.search(rf" {verb}\b", text)
        says_where = how != "closed" or " (host host" not in text  # not over UCX
        assert re.search(r"broadcast #[01] of 3 int32 from rank 0 \(hello\)", text) or not says_where
    assert lost.exit_code == (-signal.SIGKILL if how == "killed" else 0)


def log_of_distopt() -> list[str]:
    """The lines of its log from now on."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("distopt").addHandler(handler)
    return records


def stall(job: LocalJob, connect: Connect, on_the_device: bool) -> list[str]:
    records, comm = log_of_distopt(), connect(job, HASTY)
    job.all_gather(b"")
    comm.barrier()
    records.clear()
    if job.topology.rank != 0:
        job.all_gather(b"")
        return []
    if on_the_device:
        comm.all_reduce(comm.xp.zeros(3)).wait()  # blocks the device, not the host
        time.sleep(HASTY.timeout + 1.0)
    with pytest.raises(StalledError, match=r"no (answer|result) within 3 s") as info:
        comm.barrier() if on_the_device else comm.all_reduce(comm.xp.zeros(3)).wait()
    job.all_gather(b"")
    return [*records, str(info.value)]


def check_stall(connect: Connect, *, on_the_device: bool = False) -> None:
    """A warning and then an error of rank 0, which alone has called an all-reduce, name both others."""
    texts = run_ranks_ok(stall, 3, connect, on_the_device)[0]
    assert len(texts) == 2
    for text in texts:
        assert "waits in all_reduce #2 of 3 float64, sum for rank 1 (host" in text
        assert "rank 2 (host" in text
        assert "barrier #1" in text


def give_up(job: LocalJob, connect: Connect) -> str:
    """Rank 0 waits briefly; rank 1 comes late, and waits for rank 2, which is later."""
    comm = connect(job)
    for _ in range(job.topology.rank):
        job.all_gather(b"")

    def meet() -> None:
        comm.all_reduce(comm.xp.zeros(100_000)).wait(0.2 if job.topology.rank == 0 else None)
        comm.barrier()  # where a device waits, and not the host

    with pytest.raises(StalledError) as info:
        meet()
    for _ in range(2 - job.topology.rank):
        job.all_gather(b"")
    return str(info.value)


def check_late_ranks(connect: Connect) -> None:
    """They are told that the first one gave up."""
    first, *late = run_ranks_ok(give_up, 3, connect)
    assert late == [first] * 2
    assert re.search("it has started no operation|none was started", first), first


def signalled(signum: int, wait: Callable[[], object]) -> None:
    """Wait, while a signal comes; on a busy machine it may come before the wait, but not before this call."""
    threading.Timer(0.5, os.kill, (os.getpid(), signum)).start()
    wait()


def interrupt(job: LocalJob, connect: Connect, waiting_in: str) -> None:
    # `job.all_gather(b"")` is where a rank waits for what another one does in its communicator.
    comm, rank = connect(job), job.topology.rank
    large = waiting_in == "message"
    array = comm.xp.full(3_000_001 if large else 7 + rank, rank + 1.0)
    seconds = 100.0 if waiting_in == "all_reduce" else None
    if rank == 1:
        job.all_gather(b"")
    work: Any
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


def fork(job: LocalJob, connect: Connect) -> None:
    """The child is refused, and disturbs nobody."""
    comm: Any = connect(job)
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
