"""A job that is suspended as a whole, as by Ctrl-Z, goes on, however short its time-out is."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from distopt.launch import stopwatch
from distopt.launch.stopwatch import Stopwatch
from tests.processes import ROOT, Program, start_mpiexec

SCRIPT = str(ROOT / "tests" / "ranks" / "suspended_script.py")
ENV = {"DISTOPT_TIMEOUT": "2.5", "DISTOPT_STALL_WARNING": "2"}


@pytest.mark.parametrize("where", ["join", "collective"])
@pytest.mark.parametrize("start", ["launch.main", "mpiexec"])
def test_job_that_is_suspended_for_longer_than_the_timeout(start, where):
    if start == "mpiexec":
        program = start_mpiexec(2, SCRIPT, "0", where, env=ENV)
    else:
        program = Program([sys.executable, SCRIPT, "2", where], ENV)
    (line,) = program.read_lines(1)
    assert "is late" in line
    time.sleep(0.3)
    pids = program.pids()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3.5)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    ended = program.end()
    assert ended.code == 0, ended.stderr
    assert ended.stdout.count("[1.0, 3.0, 5.0, 7.0, 9.0]") == 2
    assert not ended.stderr


def test_rank_that_alone_is_suspended_is_named():
    program = Program([sys.executable, SCRIPT, "2", "collective"], ENV)
    (line,) = program.read_lines(1)
    late = int(line.removeprefix("[rank 1] ").split()[0])
    os.kill(late, signal.SIGSTOP)
    began = time.monotonic()
    ended = program.end()
    assert ended.code != 0
    assert time.monotonic() - began > 1.0
    assert "no answer within 2.5 s" in ended.stderr
    assert f"pid {late})" in ended.stderr


WATCHED = """
import sys, time
from distopt import _core
watchdog = _core.Watchdog(float(sys.argv[1]), "late", 7, [])
print("watched", flush=True)
for _ in range(30):
    time.sleep(0.03)
watchdog.stop()
"""


@pytest.mark.parametrize(("seconds", "code"), [("2.5", 0), ("0.6", 7)])
def test_watchdog_does_not_bark_at_a_suspension(seconds, code):
    program = Program([sys.executable, "-c", WATCHED, seconds])
    assert program.read_lines(1) == ["watched"]
    time.sleep(0.2)
    program.process.send_signal(signal.SIGSTOP)
    time.sleep(3.5 if code == 0 else 0.1)
    program.process.send_signal(signal.SIGCONT)
    ended = program.end()
    assert (ended.code, ended.stderr) == (code, "late" if code else "")


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_stopwatch_counts_slices_and_no_suspension(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stopwatch, "time", clock)
    watch = Stopwatch()
    expected = 0.0
    for slice_ in (0.05, 0.1, 0.9):
        clock.now += slice_
        expected += slice_
        assert watch.seconds() == pytest.approx(expected)
    clock.now += 500.0
    assert watch.seconds() == pytest.approx(expected)
    for _ in range(9):  # peers may take a second
        clock.now += 0.1
        assert watch.seconds() == pytest.approx(expected)
    clock.now += 0.2
    watch.seconds()
    clock.now += 0.1
    assert watch.seconds() > expected
    before = watch.seconds()
    clock.now += 0.5
    assert watch.seconds() == pytest.approx(before + 0.5)
