"""Whether the kernel lets the ranks of this host read each other's memory, which MPICH relies on (CMA).

It refuses that between user namespaces and between process namespaces, such as containers of their own, and where a
filter of system calls (seccomp) forbids process_vm_readv. MPI_Init fails then, or the first large message. MPICH itself
looks at Yama's ptrace_scope, and at nothing else.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

from .processes import children

_SWITCH = "MPIR_CVAR_CH4_CMA_ENABLE"
_FIRST_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of linux/proc_ns.h

_log = logging.getLogger("distopt")


def spare_reads(local_rank: int | None, local_size: int | None) -> None:
    """Local. Before MPI_Init, have MPICH copy through shared memory if reads may be refused, and say so once a host."""
    if _SWITCH in os.environ or local_size == 1 or not (reason := _refusal()):
        return
    os.environ[_SWITCH] = "0"
    if not local_rank:
        _log.warning("%s, so MPICH copies messages between ranks of one host once more (%s=0)", reason, _SWITCH)


def _refusal() -> str:
    """Why reads may be refused; empty if nothing speaks for that."""
    byte = ctypes.create_string_buffer(1)
    vector, one = (ctypes.c_size_t * 2)(ctypes.addressof(byte), 1), ctypes.c_ulong(1)
    if ctypes.CDLL(None).process_vm_readv(os.getpid(), vector, one, vector, one, ctypes.c_ulong(0)) != 1:
        return "this system refuses process_vm_readv"
    parent = os.getppid()
    # The launcher is not to be seen from a process namespace that a rank has for itself.
    if parent <= 1 and len(children(parent)) < 2 and str(Path("/proc/self/ns/pid").readlink()) != _FIRST_NAMESPACE:
        return "this rank runs in a process namespace of its own"
    try:
        own = Path("/proc/self/uid_map").read_text()
        while parent > 0:  # the ranks' launcher is among these
            if Path(f"/proc/{parent}/uid_map").read_text() != own:
                return "this rank runs in another user namespace than what started it"
            parent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # /proc is hidden, or a process has ended
        pass
    return ""


def is_open_mpi(library: str) -> bool:
    """Local. Whether it is the description of a version of Open MPI."""
    return "Open MPI" in library


def is_mpich(library: str) -> bool:
    """Local. Whether it is that of a version of MPICH which honours `PMI_FD`: Cray's, built on it, does not."""
    return "MPICH Version" in library and "CRAY" not in library
