"""The processes of one candidate: started once, queried many times, idle in between.

Candidates take turns within one run, so changes in the machine's speed affect all of them. While one is measured, the
ranks of the others sleep in `recv` and use no core.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from distopt.errors import DistoptError

from ..networks.site import Site

_START_SECONDS = 60.0  # after which a candidate whose ranks have not all come is left out
_REQUEST_SECONDS = 600.0  # after which a candidate that has not answered is left out
_END_SECONDS = 5.0  # after which ranks that have not ended are killed
_TOKEN_SECONDS = 2.0  # after which a connection that has not said who it is is dropped
_POLL_SECONDS = 0.2  # from one look for ended ranks to the next
_STDERR_LINES = 3

# The package `ranks` is loaded by path under its own name: a peer's environment has no distopt, and adding the folder
# that contains distopt to its path could make it import another environment's NumPy. `sys.path` is passed only when
# distopt itself is measured.
BOOT = (
    "import sys, importlib.util as u; sys.path[:] = {path!r} or sys.path; "
    "s = u.spec_from_file_location('ranks', {init!r}); m = u.module_from_spec(s); sys.modules['ranks'] = m; "
    "s.loader.exec_module(m); m.main(sys.argv[1:])"
)


class CrewError(DistoptError, RuntimeError):
    """A candidate could not be started, or failed while it was measured; the message gives the reason."""


def rank_command(python: str | None = None) -> list[str]:
    """The command that runs a rank with `python`, or by default with this interpreter and its `sys.path`."""
    init = str(Path(__file__).parent / "ranks" / "__init__.py")
    if python is not None:  # isolated mode: PYTHONPATH may point to packages of another environment
        return [python, "-I", "-c", BOOT.format(path=[], init=init)]
    path = [entry or str(Path.cwd()) for entry in sys.path]
    return [sys.executable, "-c", BOOT.format(path=path, init=init)]


class Crew:
    """A context manager around the ranks of one candidate.

    Args:
        module: module of the `ranks` package that answers the requests.
        rank: the command that runs one rank, see `rank_command`.
        site: where the ranks run. If they cannot reach this process by a Unix socket, they must be able to resolve this
            host's name.
        launcher: command to put in front of it (see `Site.by_mpi`); if empty, the ranks are started one by one.
        env: environment variables to add for the ranks, besides those of the site.

    Attributes:
        folder: temporary folder of this crew.
    """

    def __init__(
        self,
        module: str,
        rank: Sequence[str],
        site: Site,
        launcher: Sequence[str] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        self._world_size = site.world_size
        self._folder = tempfile.TemporaryDirectory(prefix="distopt-bench-")
        self.folder = Path(self._folder.name)
        self._token = secrets.token_hex(16) if site.by_tcp else ""
        self._listener = socket.create_server(("", 0)) if site.by_tcp else socket.socket(socket.AF_UNIX)
        if site.by_tcp:
            self._address = f"{self._token}@{socket.gethostname()}:{self._listener.getsockname()[1]}"
        else:
            self._address = str(self.folder / "socket")
            self._listener.bind(self._address)

        def words(number: int) -> list[str]:
            return [*rank, module, self._address, str(number), str(site.world_size)]

        if launcher:
            self._commands = [[*launcher, *words(-1)]]
        else:
            self._commands = [site.by_hand(number, words(number)) for number in range(site.world_size)]
        # One thread per rank, so that all candidates have the same resources.
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._env = {**os.environ, **threads, **site.variables, **(env or {})}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[tuple[socket.socket, TextIO]] = []

    def __enter__(self) -> Crew:
        """Start the ranks.

        Raises:
            CrewError: not all ranks started.
        """
        try:
            with self._listener as listener, (self.folder / "stderr").open("wb") as stderr:
                listener.listen(self._world_size)
                for command in self._commands:
                    self._processes.append(self._start(command, stderr.fileno()))
                self._accept(listener)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Send `request` to all ranks and return their answers, in rank order once the ranks are known.

        Raises:
            CrewError: a rank answered with an error, ended, or did not answer in time.
        """
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + _REQUEST_SECONDS
        with selectors.DefaultSelector() as selector:
            for number, (connection, _) in enumerate(self._lines):
                try:
                    connection.sendall(json.dumps(request).encode() + b"\n")
                except OSError:
                    raise CrewError(self._reason("a rank has left")) from None
                selector.register(connection, selectors.EVENT_READ, number)
            while len(answers) < self._world_size:
                if time.monotonic() > deadline:
                    raise CrewError(self._reason(f"no answer within {_REQUEST_SECONDS:g} s"))
                for key, _ in selector.select(_POLL_SECONDS):
                    line = ""
                    with contextlib.suppress(OSError):
                        line = self._lines[key.data][1].readline()
                    answer = json.loads(line) if line else {"error": "a rank ended while it was measured"}
                    if "error" in answer:
                        raise CrewError(self._reason(str(answer["error"])))
                    answers[key.data] = answer
        ordered = [answers[number] for number in range(self._world_size)]
        if all("rank" in answer for answer in ordered):  # the first answers identify the ranks
            order = sorted(range(self._world_size), key=lambda number: ordered[number]["rank"])
            self._lines = [self._lines[number] for number in order]
            ordered = [ordered[number] for number in order]
        return ordered

    def _start(self, command: list[str], stderr: int) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env=self._env,
                cwd=self.folder,  # so that no file in the user's folder shadows a module
                start_new_session=True,
            )
        except OSError as error:
            raise CrewError(f"cannot start {command[0]}: {error.strerror}") from error

    def _accept(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + _START_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while len(self._lines) < self._world_size:
                if selector.select(_POLL_SECONDS):
                    connection, _ = listener.accept()
                    if self._is_ours(connection):
                        self._lines.append((connection, connection.makefile("r")))
                elif any(process.poll() is not None for process in self._processes):
                    raise CrewError(self._reason("a rank ended before it was ready"))
                elif time.monotonic() > deadline:
                    raise CrewError(self._reason(f"only {len(self._lines)} ranks came up"))

    def _is_ours(self, connection: socket.socket) -> bool:
        connection.settimeout(_TOKEN_SECONDS)
        token = b""
        with contextlib.suppress(OSError):
            while len(token) < len(self._token) and (part := connection.recv(len(self._token) - len(token))):
                token += part
        if not hmac.compare_digest(token, self._token.encode()):
            connection.close()
            return False
        connection.settimeout(None)
        return True

    def _reason(self, fact: str) -> str:
        lines = (self.folder / "stderr").read_text(errors="replace").split("\n")
        said = [" ".join(line.split()) for line in lines if line.strip(" -\t")][-_STDERR_LINES:]
        return "; ".join([fact, *said])

    def _end(self) -> None:
        for connection, reader in self._lines:  # the ranks exit when they are closed
            reader.close()
            connection.close()
        deadline = time.monotonic() + (_END_SECONDS if self._lines else 0.0)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):  # and what mpiexec may have left behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._folder.cleanup()
