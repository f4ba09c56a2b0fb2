"""Ranks that start warm: forked from a process that has imported their modules, and has computed nothing.

`ForkServer` is the agent's side. This file is also the program of that process. An order is a JSON object in a memory
file, sent together with the descriptors that the rank gets. A rank is forked twice, so that the agent, to which the
kernel gives orphans of its descendants, becomes its parent. It then runs the script as the main module of an ordinary
interpreter, with exit handlers.

A fork of a process with several threads may hang, since locks of the others stay taken. OpenMP and BLAS libraries
therefore get one thread here, and their numbers in the rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import random
import runpy
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..ending import die_with
from ..threads import THREAD_VARIABLES
from ..watch import siblings
from ..watch.report import VARIABLE, supervisor
from .slots import slots_in

_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36  # linux/prctl.h
_FORK_SECONDS = 20.0
_ORPHANED_SECONDS = 2.0  # for which a rank waits to become a child of the agent
_N_FDS = 5  # of the order, and those passed to the rank
_libc = ctypes.CDLL(None, use_errno=True)


class ForkServer:
    """The process from which this one has its ranks forked.

    Args:
        modules: names of the modules to import, in this order; failing imports are left out.
        env: the environment of the ranks.
        selector: waits for the answer of the process.
        warn: prints a line.

    Attributes:
        ready: whether it has imported all, and can fork.
        ended: whether it has ended, and another may take its place.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        modules: Sequence[str],
        env: Mapping[str, str],
        selector: selectors.BaseSelector,
        warn: Callable[[str], None],
    ) -> None:
        self.ready = self.ended = False
        self._selector = selector
        self._warn = warn
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(theirs.fileno())],
                # By the mark, children that ranks have forked are known.
                env={**env, **dict.fromkeys(THREAD_VARIABLES, "1"), VARIABLE: f"{os.getpid()} -1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *slots_in(env)),
                start_new_session=True,
                preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509 - this process has no other thread
            )
        self._send({"modules": list(modules)}, ())
        self._selector.register(self._link, selectors.EVENT_READ, self._hear)

    def fork(self, order: Mapping[str, Any], fds: Sequence[int]) -> int:
        """Local. Fork a rank.

        Args:
            order: `program`, the words that start it, and `env`.
            fds: standard input, output and error, and the pipe to its supervisor.

        Returns:
            Its process id; 0 if that has not been possible.
        """
        pid = 0
        if self.ready:
            self._link.settimeout(_FORK_SECONDS)
            with contextlib.suppress(OSError):
                self._send(order, fds)
                pid = int(self._link.recv(64) or b"0")
            if not pid:
                self._end()
        return pid

    def close(self) -> None:
        """Local. End the process; idempotent."""
        self.ready, self.ended = False, True
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._link)
        self._link.close()
        self._process.kill()
        self._process.wait()

    def _send(self, order: Mapping[str, Any], fds: Sequence[int]) -> None:
        with os.fdopen(os.memfd_create("distopt order"), "wb") as file:
            file.write(json.dumps(order).encode())
            file.flush()
            socket.send_fds(self._link, [b"!"], [file.fileno(), *fds])

    def _hear(self) -> None:
        """It has imported all, or ended."""
        threads = int(self._link.recv(64) or b"0")
        if threads > 1:
            self._warn(
                f"importing the script's modules starts {threads - 1} threads, which a fork would lose: restarted "
                "ranks import the modules again"
            )
            self.close()
            self.ended = False
        elif not threads:
            self._end()
        self.ready = threads == 1

    def _end(self) -> None:
        self._warn("the process that forks ranks has ended; ranks start cold until another has imported their modules")
        self.close()


# -- in that process --------------------------------------------------------------------------------------------------
def _import(modules: Sequence[str]) -> None:
    """MPI is initialized by the rank; where that is not left to distopt, importing it does it, and must fail here."""
    with_mpi = "mpi4py.MPI" in modules
    if with_mpi:
        importlib.import_module("mpi4py").rc(initialize=False, finalize=False)
    else:
        sys.modules["mpi4py.MPI"] = None  # type: ignore[assignment]
    for name in modules:
        with contextlib.suppress(BaseException):
            importlib.import_module(name)
    if not with_mpi:
        del sys.modules["mpi4py.MPI"]


def _serve(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a rank for each order; return in it, with the order and its descriptors, or end with the agent."""
    agent = os.getppid()
    while True:
        _, fds, *_ = socket.recv_fds(link, 1, _N_FDS)
        if not fds:
            sys.exit()
        order: dict[str, Any] = json.loads(Path(f"/proc/self/fd/{fds[0]}").read_bytes())
        if "modules" in order:
            _import(order["modules"])
            link.send(b"%d" % len(os.listdir("/proc/self/task")))  # noqa: PTH208 - their number
        elif (child := os.fork()) == 0:
            if os.fork():
                os._exit(0)
            end = time.monotonic() + _ORPHANED_SECONDS
            while os.getppid() != agent:
                if time.monotonic() > end:  # in a sandbox without subreapers
                    link.send(b"0")
                    os._exit(1)
                time.sleep(0.0002)
            die_with(agent)
            os.setsid()
            link.send(b"%d" % os.getpid())
            link.close()
            return order, fds[1:]
        else:
            os.waitpid(child, 0)
        for fd in fds:
            os.close(fd)


def _become(order: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Make this process the rank, up to running its script."""
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
        os.close(fd)
    _libc.prctl(_PR_SET_NAME, Path(sys.executable).name.encode(), 0, 0, 0)
    siblings.look()
    os.environ.clear()
    os.environ.update(order["env"])
    supervisor.open(fds[3])
    supervisor.hook()
    random.seed()
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    if torch := sys.modules.get("torch"):
        torch.seed()
    _use_threads(order["env"])


def _use_threads(env: Mapping[str, str]) -> None:
    """As libraries that are loaded in this environment do."""
    omp = int(env.get("OMP_NUM_THREADS", 0)) or len(os.sched_getaffinity(0))
    blas = int(env.get("OPENBLAS_NUM_THREADS", env.get("MKL_NUM_THREADS", 0))) or omp
    if max(omp, blas) > 1:
        from threadpoolctl import threadpool_limits

        threadpool_limits({"openmp": omp, "blas": blas})


def _run(program: Sequence[str]) -> None:
    """Run the arguments after the name of the interpreter, as it does."""
    if program[1] == "-m":
        sys.argv, sys.path[0] = list(program[2:]), os.getcwd()  # noqa: PTH109 - a string
        runpy.run_module(program[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = list(program[1:]), os.path.dirname(os.path.realpath(program[1]))  # noqa: PTH120
        runpy.run_path(program[1], run_name="__main__")


def _main() -> None:
    _libc.prctl(_PR_SET_NAME, b"distopt forks", 0, 0, 0)  # else ranks would take it for one of them
    order, fds = _serve(socket.socket(fileno=int(sys.argv[1])))
    _become(order, fds)
    _run(order["program"])


if __name__ == "__main__":
    _main()
