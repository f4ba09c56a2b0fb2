"""What ranks do when something fails or interrupts them, over the communicator that `connect` makes."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distopt.comm.base import Communicator

from .checks import host
from .ranks import LocalJob, Outcome

Connect = Callable[[LocalJob], Communicator]


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


def lose_last_rank(job: LocalJob, connect: Connect, how: str, waiting_in: str) -> None:
    comm = connect(job)
    comm.broadcast(np.zeros(3, np.int32), label="hello").wait()
    if job.topology.rank == job.topology.world_size - 1:
        time.sleep(0.2)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exited":
            os._exit(0)
        assert how == "closed"
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


def assert_loss_is_told(survivors: list[Outcome], lost: Outcome, error: str) -> None:
    """Of the last of three ranks."""
    assert [o.error for o in survivors] == [error] * 2, survivors
    for outcome in survivors:
        assert f"rank 2 (host {os.uname().nodename}, pid {lost.pid or ''}" in outcome.text
        assert "broadcast #1 of 3 int32 from rank 0 (hello)" in outcome.text


def log_of_distopt() -> list[str]:
    """The lines of its log from now on."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("distopt").addHandler(handler)
    return records


def assert_stall_is_told(texts: list[str]) -> None:
    """By a warning and then by an error of rank 0, of three, which alone has called an all-reduce."""
    assert len(texts) == 2
    for text in texts:
        assert "waits in all_reduce #2 of 3 float64, sum for rank 1 (host" in text
        assert "rank 2 (host" in text
        assert "barrier #1" in text


def wait_briefly(job: LocalJob, connect: Connect) -> str:
    comm = connect(job)
    if job.topology.rank == 0:
        with pytest.raises(TimeoutError) as info:
            comm.all_reduce(comm.xp.zeros(3)).wait(timeout=0.2)
        job.all_gather(b"")
        return str(info.value)
    job.all_gather(b"")
    with pytest.raises(TimeoutError) as info:
        comm.barrier()
    return str(info.value)


def signalled(signum: int, wait: Callable[[], object]) -> None:
    """Wait, while a signal comes; on a busy machine it may come before the wait, but not before this call."""
    threading.Timer(0.5, os.kill, (os.getpid(), signum)).start()
    wait()


def interrupt(job: LocalJob, connect: Connect) -> None:
    # `job.all_gather(b"")` is where a rank waits for what another one does in its communicator.
    comm = connect(job)
    array = comm.xp.full(7, job.topology.rank + 1.0)
    if job.topology.rank == 1:
        job.all_gather(b"")
        comm.all_reduce(array).wait()
        return
    work = comm.all_reduce(array)
    with pytest.raises(KeyboardInterrupt):
        signalled(signal.SIGINT, lambda: work.wait(100.0))
    job.all_gather(b"")
    work.wait(100.0)  # an interrupted wait can be taken up again
    assert (host(array) == 3).all()
