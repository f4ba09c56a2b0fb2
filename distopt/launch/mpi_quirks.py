"""Quirks of MPI libraries and their mpiexec, each with the version that has it.

Quirks that have their code here say so at their function. These shape code elsewhere:

- Open MPI 5.0.11 leaves ranks behind when its mpiexec is killed: `end_together.parent`.
- Open MPI 5.0.11 may never end when several ranks call MPI_Abort at a time: in `end_together.lifeline`, ranks end by
  `os._exit`, except after the loss of a host.
- MPICH 5.0.2: its mpiexec takes a rank that ends with code 0 and without MPI_Finalize for a success, kills the others
  and ends with 0 or, by chance, with 9: `end_together.exit_guard` changes such an end into a failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from .. import _core
from .processes import children, stat_of

# On an abort, mpiexec drops output of ranks that it has not read from their pipes yet. MPICH 5.0.2, Open MPI 5.0.11.
FORWARD_SECONDS = 0.1  # for mpiexec to read them
_ABORT_SECONDS = 2  # then this process ends itself, if MPI_Abort has not ended it
_MAX_TEXT = 1 << 16  # characters

_SWITCH = "MPIR_CVAR_CH4_CMA_ENABLE"
_FIRST_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of linux/proc_ns.h

# How many SIGTERM, half a second apart, end the processes of Open MPI's mpiexec.
_WAITING_DAEMONS = {"prterun": 3, "prted": 1}
_TERMINATE = """
import os, sys, time
for _ in range(int(sys.argv[2])):
    time.sleep(0.5)
    os.kill(int(sys.argv[1]), 15)
"""

_log = logging.getLogger("distopt")


# -- which library it is -----------------------------------------------------------------------------------------------
def library_of(mpi: Any) -> str:
    """The first line of the MPI library's description of its version; `mpi` is the module `mpi4py.MPI`."""
    return " ".join(mpi.Get_library_version().strip("\0").splitlines()[0].split())


def is_open_mpi(library: str) -> bool:
    """Whether a library describes its version as Open MPI's."""
    return "Open MPI" in library


# -- MPI_Init ----------------------------------------------------------------------------------------------------------
def spare_reads(local_rank: int | None, local_size: int | None) -> None:
    """Before MPI_Init, have MPICH copy through shared memory if reads may be refused, and say so once per host.

    MPICH 5.0.2 lets the ranks of a host read each other's memory (CMA). The kernel refuses that between user namespaces
    and between process namespaces, such as containers of their own, and where a filter of system calls (seccomp)
    forbids process_vm_readv. MPI_Init fails then, or the first large message: MPICH looks at Yama's ptrace_scope only.
    """
    if _SWITCH in os.environ or not (reason := _refusal()):
        return
    os.environ[_SWITCH] = "0"
    # Containers of one host may share its name, by which MPICH finds the ranks that it connects through shared memory.
    if not local_rank and local_size != 1:
        _log.warning("%s, so MPICH copies messages between ranks of one host once more (%s=0)", reason, _SWITCH)


def _refusal() -> str:
    """Why reads may be refused; empty if nothing speaks for that."""
    byte = ctypes.create_string_buffer(1)
    vector, one = (ctypes.c_size_t * 2)(ctypes.addressof(byte), 1), ctypes.c_ulong(1)
    if ctypes.CDLL(None).process_vm_readv(os.getpid(), vector, one, vector, one, ctypes.c_ulong(0)) != 1:
        return "this system refuses process_vm_readv"
    parent = os.getppid()
    # A rank in its own process namespace cannot see its launcher.
    if parent <= 1 and len(children(parent)) < 2 and str(Path("/proc/self/ns/pid").readlink()) != _FIRST_NAMESPACE:
        return "this rank runs in a process namespace of its own"
    try:
        own = Path("/proc/self/uid_map").read_text()
        while parent > 0:  # the ranks' launcher is among these
            if Path(f"/proc/{parent}/uid_map").read_text() != own:
                return "this rank runs in another user namespace than what started it"
            parent = int(stat_of(parent)[1])
    except OSError:  # /proc is hidden, or a process has ended
        pass
    return ""


def remove_shared_files(pid: int = 0) -> None:
    """Remove the files in /dev/shm that a process, by default this one, has mapped for MPI.

    MPICH 5.0.2 removes them at the end of MPI_Init only, so that a rank which ends before would leave them behind.
    """
    _core.remove_mpich_files(pid)


def keep_hangups() -> None:
    """After MPI_Init, give SIGHUP its handler back: UCX in MPICH 5.0.2 takes it for its debugging output."""
    handler = signal.getsignal(signal.SIGHUP)  # None: not Python's
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, handler)


# -- the end -----------------------------------------------------------------------------------------------------------
def shortened(text: str) -> str:
    """A text of 65,536 characters at most; a longer one, such as an exception with an array, loses its middle.

    A launcher may not survive much more on stderr: mpiexec of Open MPI 5.0.11 needs minutes for 50 MB, and the job does
    not end before.
    """
    left_out = len(text) - _MAX_TEXT
    if left_out <= 0:
        return text
    half = _MAX_TEXT // 2 - 40
    return f"{text[:half]}\n... {left_out + 80:,} characters are left out ...\n{text[-half:]}"


def is_crash_of_a_send(code: int) -> bool:
    """Whether an exit code may be the crash of MPICH 5.0.2 in MPI_Isend to a rank that has ended."""
    return code == 128 + signal.SIGSEGV


def exit_well() -> None:
    """End this process by C's `exit(0)`: a handler of MPICH 5.0.2 reports to mpiexec that it did not crash."""
    ctypes.CDLL(None).exit(0)


def abort(mpi: Any, code: int) -> NoReturn:
    """End all ranks by MPI_Abort, and this process in any case.

    MPICH 5.0.2 prints a line of its own, which would follow the traceback, and may return. Open MPI 5.0.11 waits for an
    answer of mpiexec, which may not come.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    last = _core.Watchdog(_ABORT_SECONDS, "", code, [])
    mpi.COMM_WORLD.Abort(code)
    last.stop()
    os._exit(code)


def end_waiting_daemon() -> None:
    """End the parent soon, if it is one that would wait for a lost host forever.

    These are mpiexec of Open MPI 5.0.11 (prterun) and its daemons (prted). Another process sends the signals, since the
    first one ends this process, too.
    """
    parent = os.getppid()
    with contextlib.suppress(OSError):  # it has ended, or no process can be started: this one must end in any case
        n_signals = _WAITING_DAEMONS.get(Path(f"/proc/{parent}/comm").read_text().strip(), 0)
        if n_signals:
            program = [sys.executable, "-I", "-S", "-c", _TERMINATE, str(parent), str(n_signals)]
            subprocess.Popen(program, stderr=subprocess.DEVNULL, start_new_session=True)
