"""Ranks that stay and run one program after the other: forked, or started by mpiexec, where they run this module."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import secrets
import subprocess
import sys
import tempfile
import traceback
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from distopt.comm import create
from distopt.comm.shm import ShmCommunicator
from distopt.errors import StalledError
from distopt.settings import Settings
from tests.conformance.ranks import LocalJob
from tests.processes import mpiexec_command

TIMEOUT = 4.0  # seconds that a rank waits; a program that takes twice as many hangs
# Backends, and what numbers of ranks they have: shared memory and MPI with their usual and with small chunks, and both.
BACKENDS = {
    "shm": (1, 2, 3, 4, 5),
    "small": (2, 3, 5),
    "mpi": (2, 3),
    "mpi_small": (2, 3),
    "blocks": (4,),
    "round_robin": (4,),
}

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["numpy", "distopt.comm.shm", "tests.fuzz.ranks"])


class Ranks:
    """The ranks of one backend and world size, each of which runs `body(communicator, program)`."""

    def __init__(self, backend: str, world_size: int, body: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        address, key, ticket = str(Path(self._folder.name) / "ranks"), secrets.token_bytes(16), secrets.token_bytes(16)
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        with Listener(address, "AF_UNIX", backlog=8, authkey=key) as listener:
            listener._listener._socket.settimeout(15 * TIMEOUT)  # type: ignore[attr-defined] - or it waits for ever
            if backend in ("shm", "small"):
                for rank in range(world_size):
                    args = (address, key, body, backend, ticket, rank, world_size)
                    self._processes.append(_context.Process(target=_local_rank, args=args, daemon=True))
                    self._processes[-1].start()
            else:
                args = [sys.executable, "-m", "tests.fuzz.ranks", address, key.hex(), body, backend]
                env = os.environ | {"DISTOPT_TIMEOUT": str(TIMEOUT), "DISTOPT_STALL_WARNING": str(TIMEOUT)}
                self._processes.append(
                    subprocess.Popen(
                        [*mpiexec_command(world_size), *args],
                        env=env,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.STDOUT,
                    )
                )
            ends = [listener.accept() for _ in range(world_size)]
            self._ends = [end for _, end in sorted((end.recv(), end) for end in ends)]

    def run(self, program: Any) -> list[Any]:
        """What every rank's body has returned.

        Raises:
            StalledError: a rank gives no answer.
            AssertionError: a rank has raised an error.
        """
        for end in self._ends:
            end.send(program)
        results, errors = [], []
        for rank, end in enumerate(self._ends):
            if not end.poll(2 * TIMEOUT):
                raise StalledError(f"rank {rank} gives no answer")
            try:
                result, error = end.recv()
            except EOFError:
                result, error = None, "its process has ended"
            results.append(result)
            errors += [f"rank {rank}: {error}"] if error else []
        assert not errors, "\n".join(errors)
        return results

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join() if hasattr(process, "join") else process.wait()
        for end in self._ends:
            end.close()
        self._folder.cleanup()


def _local_rank(address: str, key: bytes, body: str, backend: str, ticket: bytes, rank: int, world_size: int) -> None:
    job, settings = LocalJob(ticket, rank, world_size), Settings(timeout=TIMEOUT, stall_warning=TIMEOUT)
    chunk = {"chunk_bytes": 4096} if backend == "small" else {}
    _serve(ShmCommunicator(job.host_group(), job.topology, settings, **chunk), address, key, body)


def _serve(comm: Any, address: str, key: bytes, body: str) -> None:
    module, _, name = body.partition(":")
    function = getattr(importlib.import_module(module), name)
    with Client(address, authkey=key) as end:
        end.send(comm.topology.rank)
        while True:
            try:
                program = end.recv()
            except EOFError:
                os._exit(0)
            try:
                end.send((function(comm, program), None))
            except Exception:
                end.send((None, traceback.format_exc()))


if __name__ == "__main__":
    from distopt.comm.mpi.communicator import MpiCommunicator
    from distopt.launch.join.mpi import MpiJob
    from tests.conformance import fake_hosts

    address, key, body, backend = sys.argv[1:]
    if backend == "mpi_small":
        comm: Any = MpiCommunicator(MpiJob(), inline_bytes=64, chunk_bytes=1024)
    elif backend == "mpi":
        comm = create(MpiJob(), "mpi")
    else:
        comm = create(getattr(fake_hosts, backend)(), "hierarchical")
    _serve(comm, address, bytes.fromhex(key), body)
