"""A job suspended as a whole, as by Ctrl-Z, continues, however short its time-out is."""

import os
import signal
import sys
import time

import pytest

from distopt.launch import stopwatch
from distopt.launch.end_together.lifeline import Lifeline, start_server
from distopt.launch.sockets import listen
from distopt.launch.stopwatch import Stopwatch
from tests.processes import Program

MEETS = """
import socket, sys
from distopt.launch.sockets import listen
from distopt.launch.end_together.lifeline import Lifeline, start_server
key, port, timeout = bytes(32), int(sys.argv[1]), float(sys.argv[2])
if not port:
    with listen(0, 8) as listener:
        port = listener.getsockname()[1]
        server = start_server(listener, key, 2, timeout)
print(port, flush=True)
lifeline = Lifeline(0, 2, key, [("localhost", port)], timeout)
print("connected", flush=True)
lifeline._link.settimeout(None)
print(lifeline._read_line(), flush=True)
"""


def suspend(program: Program, seconds: float) -> None:
    pids = program.pids()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_server_of_a_job_that_is_suspended_while_ranks_join():
    program = Program([sys.executable, "-c", MEETS, "0", "6"])
    port, connected = program.read_lines(2)
    assert connected == "connected"
    assert len(program.pids()) == 2
    suspend(program, 7.0)
    time.sleep(0.5)  # in which a server that counts the suspension would end the job
    lifeline = Lifeline(1, 2, bytes(32), [("localhost", int(port))], 5.0)
    assert program.read_lines(1) == ["go"]
    lifeline.close()
    ended = program.end()
    assert ended.code == 0, ended.stderr


@pytest.mark.slow
def test_rank_that_is_suspended_while_it_looks_for_the_server(port):
    program = Program([sys.executable, "-c", MEETS, str(port), "6"])
    program.read_lines(1)
    time.sleep(0.3)
    suspend(program, 7.0)
    time.sleep(0.5)  # in which one that counts the suspension would give up
    with listen(port, 8) as listener:
        server = start_server(listener, bytes(32), 2, 5.0, speaks=False)
    assert program.read_lines(1) == ["connected"]
    program.kill()
    program.process.communicate()
    server.kill()
    server.wait()


@pytest.mark.slow
def test_nodes_that_are_suspended_while_they_meet(tmp_path, port):
    script = tmp_path / "script.py"
    script.write_text("import os; print('rank', os.environ['RANK'])")
    command = [sys.executable, "-m", "distopt", "run", "--nnodes", "2", "--rdzv-endpoint", f"localhost:{port}"]
    command += ["--rdzv-timeout", "12", str(script)]
    first = Program(command)
    time.sleep(1.5)
    assert first.process.poll() is None
    suspend(first, 13.0)
    time.sleep(0.3)
    second = Program(command)
    ended = [first.end(), second.end()]
    assert [one.code for one in ended] == [0, 0], ended
    assert "".join(one.stdout for one in ended).count("rank") == 3  # the second line begins with [rank 1]


WATCHED = """
import sys, time
from distopt import _core
watchdog = _core.Watchdog(float(sys.argv[1]), "late", 7, [])
print("watched", flush=True)
for _ in range(30):
    time.sleep(0.03)
watchdog.stop()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "code"), [("5", 0), ("0.6", 7)])
def test_watchdog_does_not_bark_at_a_suspension(seconds, code):
    program = Program([sys.executable, "-c", WATCHED, seconds])
    assert program.read_lines(1) == ["watched"]
    time.sleep(0.2)
    program.process.send_signal(signal.SIGSTOP)
    time.sleep(6.0 if code == 0 else 0.1)
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
    waited = Stopwatch()
    expected = 0.0
    for slice_ in (0.05, 0.1, 0.9):
        clock.now += slice_
        expected += slice_
        assert waited.seconds() == pytest.approx(expected)
    clock.now += 500.0
    assert waited.seconds() == pytest.approx(expected)
    for _ in range(9):  # peers may take a second
        clock.now += 0.1
        assert waited.seconds() == pytest.approx(expected)
    clock.now += 0.2
    waited.seconds()
    clock.now += 0.1
    assert waited.seconds() > expected
    before = waited.seconds()
    clock.now += 0.5
    assert waited.seconds() == pytest.approx(before + 0.5)
