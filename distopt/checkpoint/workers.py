"""Workers that a rank starts by multiprocessing outlive a signal that the rank puts off, until the rank has left.

Slurm, systemd and others signal every process of a job. A loader's worker that ended by that would take with it the
rank that is about to save. A worker therefore blocks these signals, and a thread of it accepts them: one from the rank,
or from another parent, as by `Process.terminate`, takes its usual effect; another is held until the rank has ended.

The mask is inherited, so a worker has it from its first instruction, whichever way it is started: by a fork, by an
interpreter of its own, or by multiprocessing's fork server, which outlives the signal by it, too. Hazard: so do
programs that a worker runs by `subprocess`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import parent_process, resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.util import register_after_fork

from ..launch.processes import PREEMPTION_SIGNALS

_LOOK_SECONDS = 0.1  # between two looks at whether the rank has ended, once there is a signal to hold


class _Hold:
    """Holds the signals in a worker. It is pickled with a process that does not inherit it, and begins there.

    Args:
        handler: the rank's, which a forked worker inherits.
    """

    def __init__(self, handler: Callable[..., object] | None = None) -> None:
        self.rank = os.getpid()
        self.is_on = True
        self._handler = handler

    def __getstate__(self) -> int:
        return self.rank

    def __setstate__(self, rank: int) -> None:
        self.rank, self._handler = rank, None
        self.begin()

    def begin(self) -> None:
        """Called in the worker: a thread takes the preemption signals from now on."""
        signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION_SIGNALS)
        for number in PREEMPTION_SIGNALS:
            # Not the handler before it: submitit's, for example, would queue the job again.
            if self._handler is not None and signal.getsignal(number) == self._handler:
                signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=self._accept, name="distopt signals", daemon=True).start()

    def _accept(self) -> None:
        held: list[int] = []
        while True:
            info = signal.sigtimedwait(PREEMPTION_SIGNALS, _LOOK_SECONDS) if held else None
            if not held:
                info = signal.sigwaitinfo(PREEMPTION_SIGNALS)
            parent = parent_process()
            if info is not None and info.si_pid in {self.rank, os.getpid(), parent.pid if parent else self.rank}:
                loader = sys.modules.get("torch.utils.data._utils.worker")
                if info.si_signo == signal.SIGTERM and getattr(loader, "_worker_info", None) is not None:
                    os._exit(0)  # as PyTorch's own handler does if the sender, which `_deliver` hides, is the rank
                self._deliver(info.si_signo)
            elif info is not None:
                held.append(info.si_signo)
            elif not _runs(self.rank):
                self._deliver(held.pop(0))

    @staticmethod
    def _deliver(number: int) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        signal.raise_signal(number)
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})


def _runs(pid: int) -> bool:
    """Whether the process runs, and is not a zombie, as a rank is until its supervisor has read its last message."""
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:  # noqa: PTH123 - a worker may be ending
        return file.read().rpartition(")")[2].split()[0] not in "ZX"
    return False


class Workers:
    """The workers that this rank starts from now on, until `stop`.

    Args:
        handler: see `_Hold`.
    """

    def __init__(self, handler: Callable[..., object]) -> None:
        self._hold = _Hold(handler)
        register_after_fork(self._hold, lambda hold: hold.begin() if hold.is_on else None)
        self._before = before = BaseProcess.start
        hold = self._hold

        def start(process: BaseProcess) -> None:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION_SIGNALS)
            try:
                if (getattr(process, "_start_method", None) or multiprocessing.get_start_method()) != "fork":
                    resource_tracker.ensure_running()  # which unblocks SIGTERM
                    signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION_SIGNALS)
                    process.__dict__["distopt_hold"] = hold
                before(process)
            finally:
                process.__dict__.pop("distopt_hold", None)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        self._start = start
        BaseProcess.start = start  # type: ignore[method-assign, assignment]

    def end(self, number: int) -> None:
        """The rank leaves by this signal: it reaches the workers that the rank would wait for in vain."""
        for process in multiprocessing.active_children():
            if not process.daemon and process.pid:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def stop(self) -> None:
        """Workers that are started from now on hold nothing."""
        if BaseProcess.start is self._start:
            BaseProcess.start = self._before  # type: ignore[method-assign]
        self._hold.is_on = False
