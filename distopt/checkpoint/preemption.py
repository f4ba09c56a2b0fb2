"""Leaving on a signal: all ranks at the same step, whenever and wherever the signal has arrived.

A signal reaches the ranks at different moments, or only one of them. To leave at one step, they must exchange signals
received. They do so about once a second, not at every step: each exchange also contains the time of the steps, from
which all ranks derive the same number of steps until the next exchange.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

from ..errors import Preempted, UsageError
from ..launch.end_together.report import supervisor
from ..launch.job.origin import origin
from ..launch.processes import PREEMPTION_SIGNALS, ignore
from .adapters import exchanged
from .workers import Workers

if TYPE_CHECKING:
    from .adapters import Ranks

_INTERVAL_SECONDS = 1.0  # the longest delay, about, of a signal until the next exchange
_SLURM_SECONDS = 20.0  # then rank 0 gives up on Slurm, whose own MessageTimeout is 10 s

_log = logging.getLogger("distopt")


class Preemption:
    """Puts off `PREEMPTION_SIGNALS` until all ranks can leave.

    Hazard: MPI must have been initialized, for MPICH replaces the handler of SIGUSR1.

    Raises:
        UsageError: this is not the main thread.
    """

    def __init__(self, communicator: Ranks) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("preemptible=True needs signals, which only the main thread gets; call resume there")
        self._communicator = communicator
        self._caught = 0
        self._steps, self._every = 0, 1  # steps since the last exchange, and from one exchange to the next
        self._since = time.monotonic()
        self._before = {number: signal.signal(number, self._catch) for number in PREEMPTION_SIGNALS}
        self._workers = Workers(self._catch)
        supervisor.send("leaves", does=True)

    def _catch(self, number: int, _: object) -> None:
        self._caught = number

    def due(self) -> int:
        """Collective, about once a second. Count a step; return the signal that makes all ranks leave, or 0."""
        self._steps += 1
        if self._steps < self._every:
            return 0
        now = time.monotonic()
        signals, durations = zip(*exchanged(self._communicator, [self._caught, now - self._since]), strict=True)
        seconds = max(durations)
        # The slowest rank counts. At most twice as many as before: first steps, or a few, may be untypically fast.
        self._every = max(1, min(2 * self._every, int(self._every * _INTERVAL_SECONDS / max(seconds, 1e-9))))
        self._steps, self._since = 0, now
        return int(max(signals))

    def leave(self, number: int, place: str) -> Preempted:
        """Collective. Request a restart of the job, from Slurm or the script's own handler.

        From then on signals have no effect, not even while the interpreter ends. Signals that come now are from Slurm
        or a launcher, which would end a process that is already ending, perhaps in the middle of MPI_Finalize.

        Args:
            number: the signal.
            place: where the job resumes, for the message.

        Returns:
            The exception that ends this process when it is raised.
        """
        self._workers.end(number)
        self._workers.stop()
        for other in PREEMPTION_SIGNALS:
            ignore(other)  # in scontrol, too, which Slurm ends together with the job
        asked, reason = self._asked(number), ""
        rank, job = self._communicator.topology.rank, slurm_job()
        if not asked:
            if rank == 0:
                reason = requeue(job) if job else "start it again to resume from there"
            reason = exchanged(self._communicator, reason)[0]
        if rank == 0:
            cure = reason or "it will be started again"
            _log.warning("%s: the job leaves after %s; %s", signal.Signals(number).name, place, cure)
        return Preempted(128 + number if reason else 0)

    def _asked(self, number: int) -> bool:
        """Collective. Call the handler of the script, or of a launcher that requeues, such as submitit."""
        before: Any = self._before[signal.Signals(number)]
        asked = False
        if callable(before) and origin.invitation is None:  # a handler of `spawn` does not requeue
            try:
                before(number, None)
            except SystemExit:
                asked = True
        return any(exchanged(self._communicator, asked))

    def stop(self) -> int:
        """Signals take their earlier effect again. Return a signal that came too late for a step, or 0."""
        supervisor.send("leaves", does=False)
        self._workers.stop()
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        return self._caught


# -- Slurm ------------------------------------------------------------------------------------------------------------
def slurm_job() -> str:
    """Identity of the Slurm job of this process, as `scontrol` takes it; empty outside of one."""
    env = os.environ
    if "SLURM_ARRAY_JOB_ID" in env and "SLURM_ARRAY_TASK_ID" in env:  # the number of one task may be given for all
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID", "")


def requeue(job: str) -> str:
    """Have Slurm end the job and queue it again, unless Slurm is already ending it.

    A cancelled job must not come back, and Slurm itself queues a job again that it preempts without grace time.

    Args:
        job: see `slurm_job`.

    Returns:
        Nothing if Slurm has accepted; else why the job is not queued again.
    """
    try:
        state = re.search(r"JobState=(\w+)", _scontrol("show", "job", "--oneliner", job))
        if state is None or state[1] != "RUNNING":
            return f"Slurm ends job {job} itself ({state[1] if state else 'unknown state'})"
        _scontrol("requeue", job)
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.splitlines()[-1:]) or f"exit code {error.returncode}"
        return f"Slurm does not queue job {job} again: {said}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"Slurm cannot be asked to queue job {job} again: {error}"
    return ""


def _scontrol(*args: str) -> str:
    command = ["scontrol", *args]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SLURM_SECONDS).stdout
