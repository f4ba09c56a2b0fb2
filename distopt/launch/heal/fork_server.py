"""Ranks that start warm: forked from a process that has imported their modules, and has computed nothing.

`ForkServer` is the agent's side. This file is also the program of that process. Spare processes, forked in advance,
take the orders. An order is a JSON object in a memory file, sent together with the descriptors that the rank gets. A
spare is forked twice, so that the agent becomes its parent: the kernel gives it the orphans of its descendants. With
an order, it runs the script as the main module of an ordinary interpreter, with exit handlers.

A fork of a process with several threads may hang, since locks of the others stay taken. OpenMP and BLAS libraries
therefore get one thread here, and their usual number in the rank.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import select
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..end_together import siblings
from ..end_together.report import VARIABLE, supervisor
from ..launchers.distopt_run import DISTOPT_RUN
from ..processes import PR_SET_CHILD_SUBREAPER, PR_SET_NAME, die_with, prctl
from ..threads import THREAD_VARIABLES
from .modules import Installed, imports_of, script_of
from .state_slots import state_slots_in

_FORK_SECONDS = 20.0  # then the agent stops waiting for the process id of a forked rank
_REST_SECONDS = 0.5  # delay of a new spare: ranks that start have more use for the cores
_AHEAD_SECONDS = 0.1  # then another rank no longer waits for rank 0 to listen
_N_FDS = 5  # the order, and the four for the rank
# Variables whose values differ between ranks or between attempts.
_OF_RANKS = {DISTOPT_RUN.rank, DISTOPT_RUN.size, DISTOPT_RUN.local_rank, DISTOPT_RUN.local_size, DISTOPT_RUN.node}
_OF_RANKS |= {DISTOPT_RUN.address, DISTOPT_RUN.port, "GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"}


class ForkServer:
    """The process that forks the ranks of this one.

    At first it imports what the script imports at its top level. `complete` adds what a rank has imported.

    Args:
        program: the words that start a rank.
        n_spares: number of spare processes.
        env: the environment of the ranks.
        selector: waits for the answer of the process.
        warn: prints a line.

    Attributes:
        ready: whether it has imported all, and can fork.
        ended: whether it has ended, and another may take its place.
        is_importing: whether it may become ready.
        modules: the argument of `complete`.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        program: Sequence[str],
        n_spares: int,
        env: Mapping[str, str],
        selector: selectors.BaseSelector,
        warn: Callable[[str], None],
    ) -> None:
        self.ready = self.ended = False
        self.is_importing = True
        self.modules: Sequence[str] | None = None
        self._selector = selector
        self._warn = warn
        self._link, link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        fds = link.fileno(), orders.fileno()
        with link, orders:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, *map(str, fds), str(n_spares)],
                # This mark shows which processes ranks have forked.
                env={**env, **dict.fromkeys(THREAD_VARIABLES, "1"), VARIABLE: f"{os.getpid()} -1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(*fds, *state_slots_in(env)),
                start_new_session=True,
                preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509 - this process has no other thread
            )
        _send(self._link, list(program), ())
        self._selector.register(self._link, selectors.EVENT_READ, self._hear)

    def complete(self, modules: Sequence[str]) -> None:
        """Import these modules, too, in this order, and be ready; failing imports are left out.

        Args:
            modules: names of what a rank has imported; none if the ranks start again before one has reported them.
        """
        self.modules = modules
        with contextlib.suppress(OSError):  # it has ended, which the selector notices
            _send(self._link, list(modules), ())

    def fork(self, order: Mapping[str, Any], fds: Sequence[int]) -> int:
        """Have a spare become a rank.

        Args:
            order: `program`, the words that start it, and `env`.
            fds: standard input, output and error, and the pipe to its supervisor.

        Returns:
            Its process id; 0 if that has not been possible.
        """
        pid = 0
        if self.ready:
            self._orders.settimeout(_FORK_SECONDS)
            with contextlib.suppress(OSError):  # it has ended, or does not answer
                _send(self._orders, order, fds)
                pid = int(self._orders.recv(64) or b"0")
            if not pid:
                self._end()
        return pid

    def close(self) -> None:
        """End the process; idempotent."""
        self.ready, self.ended, self.is_importing = False, True, False
        if self._link.fileno() >= 0:
            self._selector.unregister(self._link)
        self._link.close()
        self._orders.close()
        self._process.kill()
        self._process.wait()

    def _hear(self) -> None:
        """It has imported all, or ended."""
        said = b""
        with contextlib.suppress(OSError):  # it has been killed
            said = self._link.recv(64)
        threads = int(said or b"0")
        if threads == 1:
            self.ready, self.is_importing = True, False
        elif self.ready:
            self._end()
        else:  # nor would another become ready
            fact = f"starts {threads - 1} threads, which a fork would lose" if threads else "has ended the process"
            self._warn(f"importing the script's modules {fact}: restarted ranks import the modules again")
            self.close()
            self.ended = False

    def _end(self) -> None:
        self._warn("the process that forks ranks has ended; ranks start cold until another has imported their modules")
        self.close()


def _send(link: socket.socket, content: Any, fds: Sequence[int]) -> None:
    with os.fdopen(os.memfd_create("distopt order"), "wb") as file:
        file.write(json.dumps(content).encode())
        file.flush()
        socket.send_fds(link, [b"!"], [file.fileno(), *fds])


# -- in that process --------------------------------------------------------------------------------------------------
def _receive(link: socket.socket) -> tuple[Any, list[int]]:
    """The content and the descriptors; the process ends if the agent has closed the link."""
    _, fds, *_ = socket.recv_fds(link, 1, _N_FDS)
    if not fds:
        os._exit(0)
    content = json.loads(Path(f"/proc/self/fd/{fds[0]}").read_bytes())
    os.close(fds[0])
    return content, fds[1:]


def _import(modules: Sequence[str], finder: Installed) -> None:
    """Import the modules, without an initialization of MPI, which is the rank's.

    Where the import of mpi4py.MPI would initialize it, the import is refused here.
    """
    finder.refused = set() if "mpi4py.MPI" in modules else {"mpi4py.MPI"}
    if "mpi4py.MPI" in modules:
        importlib.import_module("mpi4py").rc(initialize=False, finalize=False)
    sys.meta_path.insert(0, finder)
    for name in modules:
        # Errors, and SystemExit too, are left to the rank: it imports the module again, and reports why that fails.
        with contextlib.suppress(BaseException):
            importlib.import_module(name)
    sys.meta_path.remove(finder)


def _serve(link: socket.socket, orders: socket.socket, n_spares: int) -> tuple[dict[str, Any], list[int]]:
    """Import the modules and fork spares; return in each that takes an order, with it and its descriptors."""
    agent = os.getppid()
    script, folder = script_of(_receive(link)[0])
    for name in _OF_RANKS:
        os.environ.pop(name, None)  # copies of the environment may be made
    if not _is_path_safe():
        del sys.path[0]  # the working directory, whose modules would take the places of installed ones
    finder = Installed(folder, _OF_RANKS)
    _import(imports_of(script, folder), finder)
    _import(_receive(link)[0], finder)
    gc.freeze()  # a collection in a rank would write to every object, and so copy most pages
    link.send(b"%d" % len(os.listdir("/proc/self/task")))  # noqa: PTH208 - their number
    spares: list[int] = []  # for each, a pipe that it closes when it takes an order or ends
    while True:
        rest = _REST_SECONDS if len(spares) < n_spares else None
        ready, _, _ = select.select(spares or [orders.fileno()], [], [], rest)
        if spares and ready:
            for fd in ready:
                spares.remove(fd)
                os.close(fd)
            continue
        source, sink = os.pipe()
        if child := os.fork():
            os.waitpid(child, 0)
            os.close(sink)
            spares.append(source)
            continue
        between = os.getpid()
        if os.fork():
            os._exit(0)
        prctl(PR_SET_NAME, b"distopt spare")
        link.close()  # so that the agent notices the end of the process
        while os.getppid() == between:
            time.sleep(0.0002)
        order, fds = _receive(orders)
        if os.getppid() != agent:  # in a sandbox without subreapers
            orders.send(b"0")
            os._exit(1)
        die_with(agent)
        os.setsid()
        orders.send(b"%d" % os.getpid())
        orders.close()
        for fd in (source, sink, *spares):
            os.close(fd)
        return order, fds


def _become(order: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Make this process the rank, up to running its script."""
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
        os.close(fd)
    prctl(PR_SET_NAME, Path(sys.executable).name.encode())
    siblings.note_running()
    os.environ.clear()
    os.environ.update(order["env"])
    supervisor.open(fds[3])
    supervisor.hook()
    random.seed()
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    if torch := sys.modules.get("torch"):
        torch.seed()
        if order["env"][DISTOPT_RUN.rank] != "0":
            _let_listen(order["env"])
    _use_threads(order["env"])


def _let_listen(env: Mapping[str, str]) -> None:
    """Wait until rank 0 listens: a client of PyTorch's store that is refused tries again only 250 to 750 ms later."""
    end = time.monotonic() + _AHEAD_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(OSError):  # not yet
            address = env[DISTOPT_RUN.address], int(env[DISTOPT_RUN.port])
            socket.create_connection(address, _AHEAD_SECONDS).close()
            return
        time.sleep(_AHEAD_SECONDS / 100)


def _use_threads(env: Mapping[str, str]) -> None:
    """Use as many threads as libraries that are loaded in this environment would."""
    omp = int(env.get("OMP_NUM_THREADS", 0)) or len(os.sched_getaffinity(0))
    blas = int(env.get("OPENBLAS_NUM_THREADS", env.get("MKL_NUM_THREADS", 0))) or omp
    if max(omp, blas) > 1:
        from threadpoolctl import threadpool_limits

        threadpool_limits({"openmp": omp, "blas": blas})


def _run(program: Sequence[str]) -> None:
    """Run the script or module of a command, as its interpreter would."""
    if program[1] == "-m":
        sys.argv, folder = list(program[2:]), os.getcwd()  # noqa: PTH109 - a string
    else:
        sys.argv, folder = list(program[1:]), os.path.dirname(os.path.realpath(program[1]))  # noqa: PTH120
    if not _is_path_safe():
        sys.path.insert(0, folder)
    if program[1] == "-m":
        runpy.run_module(program[2], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[1], run_name="__main__")


def _is_path_safe() -> bool:
    """Whether `sys.path` begins with neither the script's folder nor the working directory: python -P, from 3.11 on."""
    return bool(getattr(sys.flags, "safe_path", False))


def _main() -> None:
    prctl(PR_SET_NAME, b"distopt forks")  # so that ranks do not take it for one of them
    link, orders, n_spares = map(int, sys.argv[1:])
    order, fds = _serve(socket.socket(fileno=link), socket.socket(fileno=orders), n_spares)
    _become(order, fds)
    _run(order["program"])


if __name__ == "__main__":
    _main()
