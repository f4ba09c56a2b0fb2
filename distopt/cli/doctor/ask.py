"""Run probes in child processes with a timeout, so that a library that crashes or hangs does so there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ...errors import DistoptError

# Variables that launchers set for their ranks. A child that inherited them would take itself for a rank of the job that
# the doctor runs in, and would wait for its peers in MPI_Init.
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
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return Ended(None, *process.communicate())
    return Ended(process.returncode, stdout, stderr)


@cache
def ask(question: str, *arguments: str, seconds: float = 20.0, variable: str = "") -> dict[str, Any]:
    """The answer of `answers.QUESTIONS[question]`, called in a child process.

    Args:
        question: key of the function.
        arguments: its arguments.
        seconds: timeout.
        variable: "NAME=value" to add to the child's environment.

    Raises:
        ModuleNotFoundError: the package that it imports is not installed.
        DistoptError: the child raised, crashed or hung; the message says which.
    """
    code = "import sys; sys.path[:] = {!r}; from {} import answers; answers.main({!r}, {!r})"
    package = __name__.rpartition(".")[0]
    env = unlaunched_environment()
    if variable:
        name, _, value = variable.partition("=")
        env[name] = value
    command = [sys.executable, "-c", code.format(sys.path, package, question, arguments)]
    ended = run_bounded(command, seconds, env)
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
