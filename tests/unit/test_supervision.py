"""How a supervisor interprets the ends of its ranks: their reports, exit codes, and its own signals."""

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
from distopt.launch.supervise.output import Output
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
def node():
    made = []

    def make(*codes: str) -> Node:
        made.append(Node(*codes))
        return made[-1]

    yield make
    for one in made:
        one.close()


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
def test_one_end(node, capfd, code, exit_code, error, is_consequence):
    ranks = node(code)
    ranks.wait(lambda: not ranks.ranks.running)
    (failure,) = ranks.ranks.failures
    assert (failure.code, failure.is_consequence) == (exit_code, is_consequence)
    assert failure.text.endswith(error)
    assert f"(pid {ranks.ranks.ranks[0].pid})" in failure.text
    capfd.readouterr()


@pytest.mark.slow
def test_a_rank_that_the_supervisor_ends_while_it_fails_keeps_its_reason(node, capfd, tmp_path):
    """Its process ends by SIGTERM; its error and exit code are still those that it has reported."""
    failing = str(tmp_path / "failing")
    waits = f"import pathlib, time\nwhile not pathlib.Path({failing!r}).exists(): time.sleep(0.01)\n"
    one = node(LATE.format(failing) + "ValueError('late')", waits + FOREIGN)
    one.wait(lambda: one.ranks.failures)
    one.ranks.end(5.0)
    assert first_of(one.ranks.failures).rank == 1  # the first that has ended
    by_rank = {failure.rank: failure for failure in one.ranks.failures}
    assert by_rank[0].text.endswith("failed: ValueError: late")
    assert (by_rank[0].code, by_rank[0].is_consequence) == (1, False)
    capfd.readouterr()


@pytest.mark.slow
def test_what_the_supervisor_has_ended_is_a_consequence(node, capfd, tmp_path):
    is_deaf = f"import pathlib, signal, time; path = pathlib.Path({str(tmp_path / 'deaf')!r})\n"
    deaf = is_deaf + "signal.signal(signal.SIGTERM, signal.SIG_IGN); path.touch(); time.sleep(60)"
    waits = is_deaf + "while not path.exists(): time.sleep(0.01)\nraise SystemExit(3)"
    ranks = node(waits, "import time; time.sleep(60)", deaf)
    ranks.wait(lambda: ranks.ranks.failures)
    ranks.ranks.end(1.0)
    codes = {failure.rank: (failure.code, failure.is_consequence) for failure in ranks.ranks.failures}
    assert codes == {0: (3, False), 1: (143, True), 2: (137, True)}
    assert first_of(ranks.ranks.failures).rank == 0
    capfd.readouterr()


def test_processes_that_a_rank_has_started_do_not_report_for_it(node, capfd):
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], close_fds=False)"
    ranks = node(f"import sys; sys.argv.append({RAISES + 'ValueError(0)'!r}); {code}")
    ranks.wait(lambda: not ranks.ranks.running)
    assert ranks.ranks.failures == []
    assert ranks.ranks.ranks[0].said == {}
    capfd.readouterr()


def test_crash_between_hosts_is_the_last_to_blame():
    crashed, raised = Failure(0, 128 + signal.SIGSEGV, ""), Failure(1, 1, "")
    assert first_of([crashed, raised]) is crashed
    assert first_of([crashed, raised], between_hosts=True) is raised


def test_errors_that_follow_from_another_ranks_end():
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
