"""How a supervisor interprets the ends of its ranks, by reports, codes and signals; and the path of their output."""

import contextlib
import fcntl
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distopt.errors import CommunicatorClosedError, PeerLostError, TransportError
from distopt.launch.sockets import handle_events
from distopt.launch.supervise.output import Output, Relay
from distopt.launch.supervise.program import Program
from distopt.launch.supervise.ranks import Failure, LocalRanks, Rank, first_of
from tests.processes import LIMIT_SECONDS

RAISES = "import distopt.launch, distopt.errors as e; raise "
FOREIGN = "raise ValueError('foreign')"
LATE = "import atexit, pathlib, time; atexit.register(lambda: (pathlib.Path({!r}).touch(), time.sleep(60))); " + RAISES


class Node:
    """Ranks that run Python code, each under a supervisor as an agent has it."""

    def __init__(self, *codes: str) -> None:
        self._selector = selectors.DefaultSelector()
        self.ranks = LocalRanks(self._selector)
        self._outputs = [Output(fd, self._selector, print) for fd in (1, 2)]
        for rank, code in enumerate(codes):
            words = [sys.executable, "-c", code]
            self.ranks.add(Program(rank, words, dict(os.environ), Path(), [(True, False)] * 2, self._outputs))

    def wait(self, done) -> None:
        until = time.monotonic() + LIMIT_SECONDS
        while not done():
            assert time.monotonic() < until
            handle_events(self._selector, 0.1)
            self.ranks.poll()

    def close(self) -> None:
        self.ranks.close()
        for output in self._outputs:
            output.close()
        self._selector.close()


@pytest.fixture
def node(capfd):
    with contextlib.ExitStack() as made:
        yield lambda *codes: made.enter_context(contextlib.closing(Node(*codes)))
    capfd.readouterr()


@pytest.mark.parametrize(
    ("code", "exit_code", "error", "is_consequence"),
    [
        (RAISES + "ValueError('a\\nb')", 1, "ValueError: a", False),
        (RAISES + "e.PeerLostError('peer')", 1, "distopt.errors.PeerLostError: peer", True),
        (RAISES + "RuntimeError('of it') from e.TransportError('MPI failed: x')", 1, "RuntimeError: of it", True),
        (FOREIGN, 1, "ValueError: foreign", False),
        # Stderr is not a report.
        ("class PeerLostError(Exception): __module__ = 'distopt.errors'\nraise PeerLostError('x')", 1, "x", False),
        ("raise SystemExit(7)", 7, "", False),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 143, "was ended by SIGTERM", False),
    ],
)
def test_one_end(node, code, exit_code, error, is_consequence):
    ranks = node(code)
    ranks.wait(lambda: not ranks.ranks.running)
    (failure,) = ranks.ranks.failures
    assert (failure.code, failure.is_consequence) == (exit_code, is_consequence)
    assert failure.text.endswith(error)
    assert f"(pid {ranks.ranks.ranks[0].pid})" in failure.text


@pytest.mark.slow
def test_what_the_supervisor_has_ended_is_a_consequence_unless_it_has_reported_its_own_failure(node, tmp_path):
    """Also the process that fails, but sleeps before its end, ends by SIGTERM."""
    failing, deaf = tmp_path / "failing", tmp_path / "deaf"
    late = LATE.format(str(failing)) + "ValueError('late')"
    is_deaf = "import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    is_deaf += f"pathlib.Path({str(deaf)!r}).touch(); time.sleep(60)"
    waits = f"from pathlib import *; import time\nwhile not all(path.exists() for path in {[failing, deaf]}): "
    waits += "time.sleep(0.01)\nraise SystemExit(3)"
    one = node(late, is_deaf, "import time; time.sleep(60)", waits)
    one.wait(lambda: one.ranks.failures)
    one.ranks.end(1.0)
    by_rank = {failure.rank: failure for failure in one.ranks.failures}
    ends = {rank: (failure.code, failure.is_consequence) for rank, failure in by_rank.items()}
    assert ends == {0: (1, False), 1: (137, True), 2: (143, True), 3: (3, False)}
    assert by_rank[0].text.endswith("failed: ValueError: late")
    assert first_of(one.ranks.failures).rank == 3  # the first that has ended


def test_processes_that_a_rank_has_started_do_not_report_for_it(node):
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], close_fds=False)"
    ranks = node(f"import sys; sys.argv.append({RAISES + 'ValueError(0)'!r}); {code}")
    ranks.wait(lambda: not ranks.ranks.running)
    assert ranks.ranks.failures == []
    assert ranks.ranks.ranks[0].said == {}


def test_the_last_to_blame_and_errors_that_are_consequences():
    crashed, raised = Failure(0, 128 + signal.SIGSEGV, ""), Failure(1, 1, "")
    assert first_of([crashed, raised]) is crashed
    assert first_of([crashed, raised], between_hosts=True) is raised
    assert all(kind.is_consequence for kind in (CommunicatorClosedError, PeerLostError, TransportError))


def test_a_rank_that_ends_while_it_is_looked_at_is_not_stopped():
    class Ending(Rank):
        def _poll(self) -> None:
            """It ends right after this."""

    rank = Ending(0)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        rank.pid = process.pid
        assert not rank.stopped
    os.close(rank.sink)
    rank.release()


@pytest.fixture
def shown():
    """Where lines are shown, and a function that returns what has been shown."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 20)
    selector = selectors.DefaultSelector()
    output = Output(write, selector, lambda text: os.write(2, f"{text}\n".encode()))

    def seen():
        with contextlib.suppress(BlockingIOError):
            return os.read(read, 1 << 20)
        return b""

    yield output, seen
    output.close()
    selector.close()
    os.close(read)
    os.close(write)


def test_whole_lines_with_marks_and_a_copy_without(shown, tmp_path):
    target, seen = shown
    relay = Relay(target, b"[rank 7] ", (tmp_path / "log").open("wb", buffering=0))
    for written, expected in [
        (b"one\ntw", b"[rank 7] one\n"),
        (b"o\n\nthree", b"[rank 7] two\n[rank 7] \n"),
        (b"\r 5%\r", b"[rank 7] three\r[rank 7]  5%\r"),
        (b"end", b""),
    ]:
        os.write(relay.sink, written)
        assert relay.pass_on()
        assert seen() == expected
    with pytest.raises(BlockingIOError):
        relay.pass_on()
    os.close(relay.sink)
    assert not relay.pass_on()
    relay.finish()
    relay.finish()
    assert seen() == b"[rank 7] end\n"
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n\nthree\r 5%\rend\n"


def test_a_prompt_is_shown_at_once_and_ended_by_lines_of_others(shown, tmp_path):
    target, seen = shown
    asks = Relay(target, copy=(tmp_path / "log").open("wb", buffering=0), prompts=True)
    other = Relay(target, b"[rank 1] ")
    for relay, written, expected in [
        (asks, b"one\nname", b"one\nname"),
        (asks, b"? ", b"? "),
        (other, b"half a", b""),
        (asks, b"hello\n", b"hello\n"),
        (other, b" line\n", b"[rank 1] half a line\n"),
        (asks, b"(Pdb) ", b"(Pdb) "),
        (other, b"two\n", b"\n[rank 1] two\n"),
        (asks, b"41\n(Pdb) ", b"41\n(Pdb) "),
    ]:
        os.write(relay.sink, written)
        relay.pass_on()
        assert seen() == expected
    for relay in (asks, other):
        os.close(relay.sink)
        relay.finish()
    assert seen() == b"\n"
    assert (tmp_path / "log").read_bytes() == b"one\nname? hello\n(Pdb) 41\n(Pdb) \n"


def test_long_lines_are_shown_early_and_the_last_exception_is_known(shown):
    target, seen = shown
    relay = Relay(target)
    for _ in range(3):
        os.write(relay.sink, b"x" * 30_000)
        relay.pass_on()
    assert seen() == b"x" * 90_000
    os.close(relay.sink)
    relay.finish()
    target, _ = shown
    relay = Relay(target)
    os.write(relay.sink, b"Traceback (most recent call last):\n  File 1\nKeyError: 'a'\nDuring\n\n")
    os.write(relay.sink, b"Traceback (most recent call last):\n  File 2\n    f()\nValueError: b\nlast words\n")
    os.close(relay.sink)
    relay.finish()
    assert relay.error == "ValueError: b"


def test_a_full_disk_costs_the_copy_only(shown, capfd):
    target, seen = shown
    relay = Relay(target, b"", open("/dev/full", "wb", buffering=0))  # noqa: PTH123, SIM115
    for line in (b"one\n", b"two\n"):
        os.write(relay.sink, line)
        relay.pass_on()
    os.close(relay.sink)
    relay.finish()
    assert seen() == b"one\ntwo\n"
    assert capfd.readouterr().err == ("cannot write /dev/full (No space left on device); what follows is shown only\n")
