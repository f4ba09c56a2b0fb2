"""Run programs of several processes, and make sure that nothing of them remains."""

import contextlib
import fcntl
import functools
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

ROOT = Path(__file__).parents[1]
HERE = os.uname().nodename
RUN = [sys.executable, "-m", "distopt", "run"]
# Scripts of ranks: for any launcher; for the variables of `distopt run` alone.
LAUNCHED, BY_VARIABLES = (str(ROOT / "tests" / "ranks" / f"{name}_script.py") for name in ("launched", "run"))
_MARK = "DISTOPT_TEST_RUN"
# Then what a test has started is taken to hang, on a busy machine, too; pytest's own limit, which is later, says less.
LIMIT_SECONDS = 560.0
_REMAIN_SECONDS = 100.0  # then a process is taken to remain; those of tests sleep for longer
_HELD: list[socket.socket] = []
_PROGRAMS: list["Program"] = []  # that the running test has started


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def agent_lines(self) -> list[str]:
        """The agents' lines, without the notice that another node is slow to come."""
        return re.findall("^distopt run: (?!waiting for the other nodes).*", self.stderr, re.MULTILINE)


def heed_signals() -> None:
    """Undo what a shell's "&" or nohup have this process ignore: programs inherit it, and tests send them signals."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def patience(seconds: float) -> float:
    """How long a test waits that has to wait to the end: `seconds`, and longer where processes queue for cores.

    For what only a hang or a fault makes long, there is LIMIT_SECONDS. Twice as long at least, since the test's own
    processes are still to come, and others may.
    """
    average, _, _, processes, _ = Path("/proc/loadavg").read_text().split()
    queue = max(float(average), float(processes.partition("/")[0]))  # the average is a minute late
    return seconds * max(2.0, queue / (os.cpu_count() or 1))


def free_port() -> int:
    """A free TCP port, which the kernel assigns to no other process before this one ends; servers can listen there.

    A bound socket that does not listen reserves it: it can be shared only by a server that names the port and sets
    SO_REUSEADDR.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    _HELD.append(holder)
    return holder.getsockname()[1]


class Program:
    """A started program. All its processes carry a mark in their environment, by which strays are found."""

    def __init__(self, command: list[str], env: dict[str, str] | None = None) -> None:
        self._mark = f"{_MARK}={uuid4().hex}"
        name, _, value = self._mark.partition("=")
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **(env or {}), name: value},
            start_new_session=True,
        )
        _PROGRAMS.append(self)

    def end(self, seconds: float = LIMIT_SECONDS, *, code: int | None = None) -> Ended:
        """Wait for the end. Fails the test if it does not come within `seconds`, if a process remains, or by `code`."""
        try:
            stdout, stderr = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            try:
                stdout, stderr = self.process.communicate(timeout=60.0)
            except subprocess.TimeoutExpired as held:  # by a process without the mark
                stdout, stderr = held.output, held.stderr
            pytest.fail(f"no end within {seconds:.0f} s\n{stdout}\n{stderr}")
        self.assert_nothing_left()
        ended = Ended(self.process.returncode, stdout, stderr)
        assert code in (None, ended.code), ended
        return ended

    def end_by(self, signum: signal.Signals, code: int | None = None) -> Ended:
        """Send the signal to the started process, and wait for the end."""
        self.process.send_signal(signum)
        return self.end(code=code)

    def assert_nothing_left(self) -> None:
        began = time.monotonic()
        while left := self.pids():
            if time.monotonic() > began + _REMAIN_SECONDS:
                self.kill()
                pytest.fail(f"processes remain: {left}")
            time.sleep(0.02)

    def pids(self) -> dict[int, str]:
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # noqa: PERF203 - ended, or another user's
                continue
        return found

    def kill(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):  # ended
                os.kill(pid, signal.SIGKILL)

    def read_lines(self, count: int) -> list[str]:
        assert self.process.stdout is not None
        return [self.process.stdout.readline().rstrip("\n") for _ in range(count)]

    def ready(self, count: int = 2) -> "Program":
        """Itself, once it has written so many lines."""
        self.read_lines(count)
        return self


@contextlib.contextmanager
def or_skipped(hosts: contextlib.AbstractContextManager[Any]) -> Iterator[Any]:
    """The emulated hosts; where they cannot be made, the test is skipped."""
    from benchmarks.networks.emulation import HostsUnavailableError

    try:
        with hosts as made:
            yield made
    except HostsUnavailableError as error:
        pytest.skip(f"no such hosts: {error}")


@contextlib.contextmanager
def control_group(name: str, value: str) -> Iterator[Path]:
    """A control group, of either version, with this setting; where none can be made, the test is skipped."""
    for root in (Path("/sys/fs/cgroup") / controllers for controllers in ("pids", "unified", "")):
        group = root / f"distopt-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                (group / name).write_text(value)
            except OSError:
                group.rmdir()
            else:
                break
    else:
        pytest.skip(f"control groups with {name} are not ours to make")
    yield group
    while group.exists():  # for a moment, the kernel still counts a process that has ended
        with contextlib.suppress(OSError):
            group.rmdir()
        time.sleep(0.02)


def kill_programs() -> None:
    """End what a test has left as it failed: others would wait for cores, and one of them would get its warnings."""
    while _PROGRAMS:
        program = _PROGRAMS.pop()
        if program.process.returncode is None:
            program.kill()
            program.process.communicate(timeout=60.0)


def end_all(programs: Iterable[Program], codes: int | list[int] = 0) -> list[Ended]:
    """The ends of programs that run beside each other, which all have this exit code, or each its own."""
    ended = [program.end() for program in list(programs)]
    assert [one.code for one in ended] == ([codes] * len(ended) if isinstance(codes, int) else codes), ended
    return ended


def on_a_terminal(arguments: Sequence[str | Path], env: dict[str, str] | None = None) -> tuple[int, str]:
    """Run `python *arguments` with a terminal of 120 columns as stderr: the exit code, and what the terminal got."""
    own, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=terminal, env={**os.environ, **(env or {})}) as it:
        os.close(terminal)
        shown = ""
        try:
            while text := os.read(own, 1 << 16):
                shown += text.decode()
        except OSError:  # at the end
            os.close(own)
        except BaseException:  # the limit of the test
            it.kill()
            raise
    return it.returncode, shown


def mpiexec(n: int, *args: str, env: dict[str, str] | None = None) -> Ended:
    """Run `python *args` on `n` ranks of this host under the mpiexec that belongs to mpi4py's library."""
    return start_mpiexec(n, *args, env=env).end()


def start_mpiexec(n: int, *args: str, env: dict[str, str] | None = None) -> Program:
    return Program([*mpiexec_command(n), sys.executable, *args], env)


def started_by(launcher: str, *words: str, n: int = 2) -> list[str]:
    """The command line by which "mpiexec", "distopt run" or the script's own "launch.main" starts `n` ranks."""
    if launcher == "launch.main":
        return [sys.executable, *words]
    command = [*RUN, "--nproc-per-node", str(n)] if launcher == "distopt run" else [*mpiexec_command(n), sys.executable]
    return [*command, *words]


def mpiexec_codes(code: int) -> set[int]:
    """The codes that mpiexec may end with after a rank that ends with `code`.

    MPICH's joins the wait statuses of all ranks by "or": a rank that it had to kill makes that the signal.
    """
    return {code} if is_open_mpi() else {code, signal.SIGKILL}


def mpiexec_command(n: int) -> list[str]:
    """The start of a command line for `n` ranks of this host."""
    if find_spec("mpi4py") is None:
        pytest.skip("mpi4py is absent: pip install mpi4py mpich")
    command = [_mpiexec_path()]
    if is_open_mpi():
        variables = [
            "OMPI_ALLOW_RUN_AS_ROOT=1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
            "OMPI_MCA_pml=ob1",
            "OMPI_MCA_btl=self,sm,tcp",
        ]
        command = ["env", *variables, *command, "--oversubscribe"]
    return [*command, "-n", str(n)]


def _mpiexec_path() -> str:
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else "mpiexec"


@functools.cache
def is_open_mpi() -> bool:
    """Whether the mpiexec in use is Open MPI's; otherwise it is MPICH's."""
    done = subprocess.run([_mpiexec_path(), "--version"], capture_output=True, text=True, check=True)
    return "Open MPI" in done.stdout
