"""Ranks that stay and run one program after the other: each process runs this module."""

import importlib
import os
import secrets
import subprocess
import sys
import tempfile
import traceback
from multiprocessing.connection import Client, Listener

from distopt.comm import create
from distopt.comm.shm import ShmCommunicator
from distopt.errors import StalledError
from distopt.settings import Settings
from tests.conformance.ranks import LocalJob
from tests.processes import mpiexec_command

TIMEOUT = 60.0  # seconds that a rank waits; a program that takes twice as many hangs
START = 120.0  # seconds until all ranks are there, which import everything anew


class Ranks:
    """The ranks of one transport and world size; each runs `body(communicator, program)`."""

    def __init__(self, transport, world_size, body):
        self._folder, ticket = tempfile.TemporaryDirectory(), secrets.token_hex(16)
        address = f"{self._folder.name}/ranks"
        command = [sys.executable, "-m", "instruments.fuzz.ranks", address, body, transport]
        if transport in ("shm", "small"):
            commands = [[*command, ticket, str(rank), str(world_size)] for rank in range(world_size)]
        else:
            commands = [[*mpiexec_command(world_size), *command]]
        env = os.environ | {"DISTOPT_TIMEOUT": str(TIMEOUT), "DISTOPT_STALL_WARNING": str(TIMEOUT)}
        with Listener(address, backlog=8) as listener:
            listener._listener._socket.settimeout(START)  # type: ignore[attr-defined] - or it waits for ever
            self._processes = [
                subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
                for command in commands
            ]
            ends = [listener.accept() for _ in range(world_size)]
        self._ends = [end for _, end in sorted((end.recv(), end) for end in ends)]

    def run(self, program):
        """The results of every rank's body.

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

    def kill(self):
        for process in self._processes:
            process.kill()
            process.wait()
        for end in self._ends:
            end.close()
        self._folder.cleanup()


def _communicator(transport, ticket="", rank="", world_size=""):
    if ticket:
        job = LocalJob(bytes.fromhex(ticket), int(rank), int(world_size))
        chunk = {"chunk_bytes": 4096} if transport == "small" else {}
        return ShmCommunicator(job.host_group(), job.topology, Settings.from_env(), **chunk)
    from distopt.comm.net.mpi import MpiCommunicator
    from distopt.launch.job.mpi import MpiJob
    from tests.conformance import ranks as hosts

    if transport == "mpi_small":
        return MpiCommunicator(MpiJob(), inline_bytes=64, chunk_bytes=1024)
    return create(MpiJob(), "mpi") if transport == "mpi" else create(getattr(hosts, transport)(), "hierarchical")


def _serve(address, body, *place):
    module, _, name = body.partition(":")
    function, comm = getattr(importlib.import_module(module), name), _communicator(*place)
    with Client(address) as end:
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
    _serve(*sys.argv[1:])
