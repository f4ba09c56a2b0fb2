"""The end of a rank whose parent has ended: nothing else would end it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from multiprocessing import parent_process
from multiprocessing.connection import wait

from ..processes import end_of

_log = logging.getLogger("distopt")

_LEAVE_SECONDS = 10.0  # then SIGKILL ends a process whose parent has ended, if SIGTERM has not


def end_with_parent(*, launched: bool = False) -> None:
    """End this process by SIGTERM when the process that started it ends.

    A parent that exits normally waits for its children first, but one that is killed does not: without this, Open MPI
    leaves ranks running when their mpiexec is killed.

    Args:
        launched: the parent is a launcher such as mpiexec. If False, only a parent that used multiprocessing counts.
    """
    parent = parent_process()
    sentinel = parent.sentinel if parent is not None else end_of(os.getppid()) if launched else None
    if sentinel is not None:
        threading.Thread(target=_outlive, args=(sentinel,), name="distopt parent", daemon=True).start()


def _outlive(sentinel: int) -> None:
    wait([sentinel])
    _log.error("the process that started this one (pid %d) has ended before it", os.getpid())
    os.kill(os.getpid(), signal.SIGTERM)
    # A handler may put the signal off. It needs the main thread, and that may wait for a peer.
    time.sleep(_LEAVE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
