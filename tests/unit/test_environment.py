"""Inherited conditions: closed streams, ignored signals, an incomplete /proc."""

import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from distopt.comm import shm
from distopt.errors import UsageError
from distopt.launch.mpi_quirks import shortened
from distopt.launch.processes import caught_signals, waitable_children
from tests.processes import ROOT, Ended, Program, mpiexec_command

SCRIPT = str(ROOT / "tests" / "ranks" / "environment_script.py")
STARTS = ["launch.main", "distopt run", "mpiexec"]


IGNORES_SIGCHLD = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.argv[1], sys.argv[1:])
"""


def run(start: str, folder: Path, *words: str, through: str = "", closed: str = "") -> Ended:
    """Run the script on two ranks from a shell. `closed`: redirections of launch.main, the agent, or each MPI rank.

    `through`: a program in Python, to which the command line is passed.
    """
    ranks = "2" if start == "launch.main" else "0"
    program = [sys.executable, *(("-m", "distopt", "run", "--nproc-per-node", "2") if start == "distopt run" else ())]
    starter = [sys.executable, "-c", through] if through else []
    line = f"exec {shlex.join([*starter, *program, SCRIPT, ranks, str(folder), *words])} {closed}"
    launcher = mpiexec_command(2) if start == "mpiexec" else []
    return Program([*launcher, "sh", "-c", line]).end()


def assert_trained(folder: Path) -> None:
    said = {path.name: path.read_text() for path in folder.iterdir()}
    assert said == dict.fromkeys("01", "[1.0, 3.0, 5.0, 7.0, 9.0]")


@pytest.mark.slow
@pytest.mark.sweep(rest=4)
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("start", STARTS)
def test_streams_that_are_closed_from_the_start(start, closed, tmp_path):
    ended = run(start, tmp_path, closed=closed)
    assert ended.code == 0, ended.stderr
    assert_trained(tmp_path)
    assert (">&-" not in closed.split()) == ("a line of rank 0" in ended.stdout)
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize("start", STARTS)
def test_a_failure_whose_streams_are_closed_has_its_exit_code(start, tmp_path):
    assert run(start, tmp_path, "fail", closed=">&- 2>&-").code == 1


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("start", STARTS)
def test_sigchld_that_is_ignored(start, tmp_path):
    ended = run(start, tmp_path, through=IGNORES_SIGCHLD)
    assert ended.code == 0, ended.stderr
    assert_trained(tmp_path)


def test_sigchld_stays_as_it_was_and_cannot_be_changed_by_a_thread():
    refused = []

    def elsewhere() -> None:
        with pytest.raises(UsageError, match="SIGCHLD is ignored") as caught, waitable_children():
            pass
        refused.append(caught.value)

    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with waitable_children():
            assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert refused
    finally:
        signal.signal(signal.SIGCHLD, before)
    with waitable_children():
        assert signal.getsignal(signal.SIGCHLD) is before


@pytest.mark.parametrize("content", [None, "", "MemTotal: 5 kB\nMemFree: 3 kB\n", "nonsense", "MemAvailable:\n"])
def test_memory_where_proc_meminfo_says_nothing(content, monkeypatch, tmp_path):
    class Elsewhere:
        def __init__(self, path: str) -> None:
            self.path = tmp_path / path[1:]

        def __truediv__(self, name: str) -> Path:
            return self.path / name

        def read_text(self) -> str:
            return self.path.read_text()

    (tmp_path / "proc").mkdir()
    if content is not None:
        (tmp_path / "proc" / "meminfo").write_text(content)
    monkeypatch.setattr(shm, "Path", Elsewhere)
    assert shm.available_bytes() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_long_texts_keep_both_ends():
    assert shortened("x" * 65536) == "x" * 65536
    for size in (65537, 10**6):
        text = shortened("begin" + "x" * (size - 8) + "end")
        assert len(text) <= 65536
        assert text.startswith("beginx")
        assert text.endswith("xend")
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
    ended = subprocess.run([sys.executable, "-c", UNDER_FIRE], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
