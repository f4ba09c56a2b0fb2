"""What ranks do when something fails or interrupts them, over the communicator that `connect` makes."""

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from distopt.comm.base import Communicator
from distopt.settings import Settings

from .ranks import LocalJob

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


def log_of_distopt() -> list[str]:
    """The lines of its log from now on."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("distopt").addHandler(handler)
    return records


def signalled(signum: int, wait: Callable[[], object]) -> None:
    """Wait, while a signal comes; on a busy machine it may come before the wait, but not before this call."""
    threading.Timer(0.5, os.kill, (os.getpid(), signum)).start()
    wait()
