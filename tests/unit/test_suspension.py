"""A job suspended as a whole, as by Ctrl-Z, continues, however short its time-out is."""

import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from distopt.launch import stopwatch
from distopt.launch.end_together.lifeline import Lifeline, start_server
from distopt.launch.sockets import listen
from distopt.launch.stopwatch import Stopwatch
from tests.processes import Program, end_all, free_port

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

WATCHED = """
import sys, time
from distopt import _core
watchdog = _core.Watchdog(float(sys.argv[1]), "late", 7, [])
print("watched", flush=True)
for _ in range(30):
    time.sleep(0.03)
watchdog.stop()
"""


def suspend(seconds: float, *programs: Program) -> None:
    pids = [pid for program in programs for pid in program.pids()]
    for number, pause in ((signal.SIGSTOP, seconds), (signal.SIGCONT, 0.0)):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(pause)


@pytest.mark.slow
def test_a_suspension_while_ranks_join_look_for_their_server_or_nodes_meet(tmp_path, port):
    script = tmp_path / "script.py"
    script.write_text("import os; print('rank', os.environ['RANK'])")
    command = [sys.executable, "-m", "distopt", "run", "--nnodes", "2", "--rdzv-endpoint", f"localhost:{free_port()}"]
    command += ["--rdzv-timeout", "12", str(script)]
    joins, looks = (Program([sys.executable, "-c", MEETS, str(at), "10"]) for at in (0, port))
    first = Program(command)
    served, connected = joins.read_lines(2)
    assert (connected, len(joins.pids())) == ("connected", 2)
    looks.read_lines(1)
    time.sleep(1.5)
    assert first.process.poll() is None
    suspend(13.0, joins, looks, first)
    time.sleep(0.5)  # in which one that counts the suspension would give up, or end the job
    lifeline = Lifeline(1, 2, bytes(32), [("localhost", int(served))], 5.0)
    assert joins.read_lines(1) == ["go"]
    lifeline.close()
    with listen(port, 8) as listener:
        server = start_server(listener, bytes(32), 2, 5.0, speaks=False)
    assert looks.read_lines(1) == ["connected"]
    looks.kill()
    looks.process.communicate()
    server.kill()
    server.wait()
    ended = end_all([joins, first, Program(command)])
    assert "".join(one.stdout for one in ended).count("rank") == 3  # the second line begins with [rank 1]


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


def test_stopwatch_counts_slices_and_no_suspension(monkeypatch):
    now = 100.0
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(monotonic=lambda: now))
    waited = Stopwatch()
    # A suspension, after which peers may take a second.
    for later, expected in [(0.05, 0.05), (0.1, 0.15), (0.9, 1.05), (500.0, 1.05), *[(0.1, 1.05)] * 9]:
        now += later
        assert waited.seconds() == pytest.approx(expected)
    now += 0.2
    waited.seconds()
    now += 0.1
    before = waited.seconds()
    assert before > 1.05
    now += 0.5
    assert waited.seconds() == pytest.approx(before + 0.5)
