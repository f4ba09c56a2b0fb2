"""Questions to child processes with a timeout: there, a library may crash or hang."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...errors import DistoptError

# Variables that launchers set for their ranks. A child that inherited them would take itself for a rank of the job that
# the doctor runs in, and would wait for its peers in MPI_Init. Written down again, since the doctor works where
# `distopt.launch` cannot be imported.
_LAUNCHER_PREFIXES = ("OMPI_COMM_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "MPI_LOCAL", "SLURM_")


@dataclass(frozen=True)
class Ended:
    """How a child process ended; `returncode` is None if it was killed at the timeout."""

    returncode: int | None
    stdout: str
    stderr: str


def run_bounded(command: Sequence[str], seconds: float, env: dict[str, str] | None = None) -> Ended:
    """Run `command` for at most `seconds`, then kill it and every process it has started.

    Raises:
        OSError: it cannot be started.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    with process:
        try:
            stdout, stderr = process.communicate(timeout=seconds)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return Ended(None, *process.communicate())
    return Ended(process.returncode, stdout, stderr)


@cache
def ask(question: str, *arguments: str, seconds: float = 20.0) -> dict[str, Any]:
    """The answer of `QUESTIONS[question]`, called in a child process.

    Args:
        question: key of the function.
        arguments: its arguments.
        seconds: timeout.

    Raises:
        ModuleNotFoundError: the package that it imports is not installed.
        DistoptError: the child raised, crashed or hung; the message says which.
    """
    code = "import sys; sys.path[:] = {!r}; from {} import answer; answer({!r}, {!r})"
    command = [sys.executable, "-c", code.format(sys.path, __name__, question, arguments)]
    ended = run_bounded(command, seconds, unlaunched_environment())
    if ended.returncode != 0:
        raise DistoptError(describe_end(ended, seconds))
    answer: dict[str, Any] = json.loads(ended.stdout)
    if "missing" in answer:
        raise ModuleNotFoundError(answer["missing"])
    if "error" in answer:
        raise DistoptError(answer["error"])
    return answer


def describe_end(ended: Ended, seconds: float) -> str:
    """A description of how a child failed."""
    lines = ended.stderr.strip().splitlines()
    said = f": {lines[-1].strip()}" if lines else ""
    if ended.returncode is None:
        return f"no answer within {seconds:g} s{said}"
    if ended.returncode < 0:
        return f"crashed with {signal.Signals(-ended.returncode).name}{said}"
    return f"exit code {ended.returncode}{said}"


def unlaunched_environment() -> dict[str, str]:
    """The environment without the variables that make a process a rank of a surrounding job."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_PREFIXES)}


def version_of(package: str) -> str | None:
    """The installed version of a package, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# -- in the child: functions that each load one foreign library and report on it ---------------------------------------
def answer(question: str, arguments: tuple[Any, ...]) -> None:
    """Print the answer to a question as JSON."""
    # Libraries may print to stdout, which must contain only the answer.
    answer_fd = os.dup(1)
    os.dup2(2, 1)
    try:
        said = QUESTIONS[question](*arguments)
    except ModuleNotFoundError as error:
        said = {"missing": str(error)}
    except Exception as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    with os.fdopen(answer_fd, "w") as out:
        json.dump(said, out)


def _numpy() -> dict[str, Any]:
    import numpy as np

    return {"version": np.__version__, "path": str(Path(np.__file__).parent)}


def _core() -> dict[str, Any]:
    from distopt import _core

    return {"path": _core.__file__, "isa": _core.isa(), "isas": _core.supported_isas(), **_core.build_info()}


def _mpi() -> dict[str, Any]:
    import mpi4py

    mpi4py.rc.initialize = False  # the version is available without MPI_Init, which may hang
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    return {
        "mpi4py": version("mpi4py"),
        "library": " ".join(MPI.Get_library_version().strip("\0").split()),
        "standard": ".".join(map(str, MPI.Get_version())),
        "path": _loaded("libmpi"),
    }


def _loaded(stem: str) -> str | None:
    """Path of the first library `stem*` in this process."""
    fields = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    paths = (Path(field[5]) for field in fields if len(field) == 6)
    return next((str(path) for path in paths if path.name.startswith(stem)), None)


def _driver() -> dict[str, Any]:
    from distopt import _core

    return {"version": _core.cuda_driver_version(), "path": _loaded("libcuda.so")}


def _devices() -> dict[str, Any]:
    """The devices, from NVML: unlike CUDA, it creates no context and sees devices that CUDA_VISIBLE_DEVICES hides."""
    import pynvml

    pynvml.nvmlInit()
    devices = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        device, memory_bytes = pynvml.nvmlDeviceGetHandleByIndex(index), None
        with contextlib.suppress(pynvml.NVMLError):  # MIG and unified-memory devices do not report memory
            memory_bytes = pynvml.nvmlDeviceGetMemoryInfo(device).total
        devices.append({"name": pynvml.nvmlDeviceGetName(device), "memory_bytes": memory_bytes})
    return {"driver": pynvml.nvmlSystemGetDriverVersion(), "devices": devices}


def _cupy() -> dict[str, Any]:
    import cupy

    runtime = cupy.cuda.runtime
    return {
        "version": cupy.__version__,
        "nvrtc": "{}.{}".format(*cupy.cuda.nvrtc.getVersion()),
        "runtime": runtime.runtimeGetVersion(),
        "devices": runtime.getDeviceCount(),
    }


def _nccl(cuda_major: str) -> dict[str, Any]:
    from distopt import _core

    from ...comm.gpu import dotted_version, find_nccl

    path = find_nccl(int(cuda_major))
    return {"version": dotted_version(_core.nccl_version(path)), "path": path}


def _ucx() -> dict[str, Any]:
    from ctypes import CDLL, c_char_p

    from ...comm.net.ucx import library

    ucp = CDLL(library())
    ucp.ucp_get_version_string.restype = c_char_p
    return {"version": ucp.ucp_get_version_string().decode(), "path": _loaded("libucp")}


def _torch() -> dict[str, Any]:
    from ...autoload import serving

    return serving()


def _resolve(name: str) -> dict[str, Any]:
    import socket

    return {"addresses": sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})}


QUESTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__.removeprefix("_"): function
    for function in (_numpy, _core, _mpi, _driver, _devices, _cupy, _nccl, _ucx, _torch, _resolve)
}
