"""Inherited conditions: closed streams, ignored signals, an incomplete /proc."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distopt.comm import shm
from distopt.errors import UsageError
from distopt.launch.mpi_quirks import shortened
from distopt.launch.processes import caught_signals, waitable_children
from tests.processes import ROOT, Ended, Program, end_all, mpiexec_command
from tests.unit.refusals import refused
from tests.unit.threads import in_threads

STARTS = ["launch.main", "distopt run", "mpiexec"]
IGNORES_SIGCHLD = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.argv[1], sys.argv[1:])
"""


def run(start: str, folder: Path, *words: str, through: str = "", closed: str = "", code: int = 0) -> Ended:
    """Run the script on two ranks from a shell. `closed`: redirections of launch.main, the agent, or each MPI rank.

    `through`: a program in Python, to which the command line is passed.
    """
    ranks = "2" if start == "launch.main" else "0"
    program = [sys.executable, *(("-m", "distopt", "run", "--nproc-per-node", "2") if start == "distopt run" else ())]
    starter = [sys.executable, "-c", through] if through else []
    script = str(ROOT / "tests" / "ranks" / "environment_script.py")
    line = f"exec {shlex.join([*starter, *program, script, ranks, str(folder), *words])} {closed}"
    (ended,) = end_all([Program([*(mpiexec_command(2) if start == "mpiexec" else []), "sh", "-c", line])], code)
    said = {path.name: path.read_text() for path in folder.iterdir()}
    assert code or said == dict.fromkeys("01", "[1.0, 3.0, 5.0, 7.0, 9.0]")
    return ended


@pytest.mark.slow(rest=4)
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("start", STARTS)
def test_streams_that_are_closed_from_the_start(start, closed, tmp_path):
    ended = run(start, tmp_path, closed=closed)
    assert (">&-" not in closed.split()) == ("a line of rank 0" in ended.stdout)
    assert "Traceback" not in ended.stderr


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("start", STARTS)
def test_sigchld_that_is_ignored_and_a_failure_whose_streams_are_closed(start, tmp_path):
    run(start, tmp_path, through=IGNORES_SIGCHLD)
    run(start, tmp_path, "fail", closed=">&- 2>&-", code=1)


def test_sigchld_stays_as_it_was_and_cannot_be_changed_by_a_thread():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with waitable_children():
            assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
        in_threads(lambda: refused(UsageError, "SIGCHLD is ignored", waitable_children().__enter__))
    finally:
        signal.signal(signal.SIGCHLD, before)
    with waitable_children():
        assert signal.getsignal(signal.SIGCHLD) is before


@pytest.mark.parametrize("content", [None, "", "MemTotal: 5 kB\nMemFree: 3 kB\n", "nonsense", "MemAvailable:\n"])
def test_memory_where_proc_meminfo_says_nothing(content, monkeypatch, tmp_path):
    (tmp_path / "proc").mkdir()
    if content is not None:
        (tmp_path / "proc" / "meminfo").write_text(content)
    monkeypatch.setattr(shm, "Path", lambda path: tmp_path / path[1:])
    assert shm.available_bytes() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_long_texts_keep_both_ends():
    assert shortened("x" * 65536) == "x" * 65536
    for size in (65537, 10**6):
        text = shortened("begin" + "x" * (size - 8) + "end")
        assert len(text) <= 65536
        assert (text[:6], text[-4:]) == ("beginx", "xend")
        kept = text.count("x") + 8
        assert f"\n... {size - kept:,} characters are left out ...\n" in text


@pytest.mark.parametrize("last", [False, True])
def test_signals_that_were_caught_have_their_earlier_effect_afterwards_or_none(last):
    def handler(*_):
        raise ZeroDivisionError

    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(number, handler) for number in numbers]
    try:
        with caught_signals(numbers, last=last) as (caught, wake):
            assert caught == []
            signal.raise_signal(signal.SIGUSR2)
            signal.raise_signal(signal.SIGUSR1)
            assert caught == [signal.SIGUSR2, signal.SIGUSR1]
            assert os.read(wake, 100) == b"!!"
        assert {signal.getsignal(number) for number in numbers} == {signal.SIG_IGN if last else handler}
    finally:
        for number, one in zip(numbers, before, strict=True):
            signal.signal(number, one)


UNDER_FIRE = """
import os, signal, time
from distopt.launch.processes import ignore

signal.signal(signal.SIGTERM, lambda *_: None)  # the first may come at once
own, sender = os.getpid(), os.fork()
while not sender:
    os.kill(own, signal.SIGTERM)
end = time.monotonic() + 3
while time.monotonic() < end:
    signal.signal(signal.SIGTERM, lambda *_: None)
    ignore(signal.SIGTERM)
os.kill(sender, signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_signal_that_comes_while_it_begins_to_be_ignored_prints_nothing():
    assert subprocess.run([sys.executable, "-c", UNDER_FIRE], capture_output=True, text=True, check=True).stderr == ""
