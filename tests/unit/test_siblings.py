"""A rank's conclusions from the processes that its parent started beside it."""

import logging
import multiprocessing
import pickle
import subprocess
import sys
import time

import pytest

from distopt import launch
from distopt.errors import LaunchError
from distopt.launch.end_together import siblings
from distopt.launch.end_together.siblings import Absence
from tests.processes import Program
from tests.unit.refusals import refused

WATCHED = """
import sys
from distopt import _core
from distopt.launch.end_together.siblings import ends_of_siblings
with ends_of_siblings() as ends:
    watchdog = _core.Watchdog(600.0, "late", 7, [(fd, f"{pid} has ended") for pid, fd in ends.items()])
    print(len(ends), flush=True)
    sys.stdin.read()
    watchdog.stop()
"""

ORPHAN = """
import multiprocessing, os, subprocess, sys, time
from distopt.launch.end_together.parent import end_with_parent
def child(launched=False):
    end_with_parent(launched=launched)
    print(os.getpid(), flush=True)
    time.sleep(1000)
if __name__ == "__main__":
    if sys.argv[1] == "child":
        child(launched=True)
    elif sys.argv[1] == "launcher":
        subprocess.run([sys.executable, __file__, "child"])
    else:
        multiprocessing.get_context(sys.argv[1]).Process(target=child).start()
"""


@pytest.fixture
def seen(monkeypatch):
    running, zombies = {101, 102}, set()
    monkeypatch.setattr(siblings, "_seen", set(running))
    monkeypatch.setattr(siblings, "_siblings", lambda: (set(running), set(zombies)))
    return running, zombies


def check(absence, absent=2, **arguments):
    for _ in range(2):
        absence.check("rank 1 is absent", absent, patience=0.0, **arguments)
        time.sleep(0.001)


def test_an_absence_needs_evidence_patience_and_one_warning_and_those_that_have_come_do_not_count(seen, caplog):
    running, zombies = seen
    check(Absence(all_started=True))
    running.remove(101)
    check(Absence(all_started=True), absent=1)
    check(Absence(), absent=1)
    running ^= {101, 102}
    check(Absence(), absent=1, present={102})
    refused(LaunchError, "", lambda: check(Absence(all_started=True), absent=1, present={101}))
    running.add(102)
    check(Absence(), absent=3)
    refused(LaunchError, "and a process of this job has ended", lambda: check(Absence(all_started=True), absent=3))
    absence = Absence(0.0)
    with caplog.at_level(logging.WARNING, "distopt"):
        check(absence)
    (warning,) = caplog.messages
    assert warning.startswith("rank 1 is absent for 0.0 s now")
    running.remove(102)
    for unreaped in (set(), {102}):
        zombies.update(unreaped)
        error = r"rank 1 is absent, and a process of this job \(pid 102\) has ended"
        refused(LaunchError, error, lambda: check(Absence()))
    running.clear()
    for _ in range(3):
        Absence().check("nobody", 2, patience=60.0)


def test_siblings_are_children_of_one_parent_and_tickets_count_them():
    script = "import time; from distopt.launch.end_together import siblings as s; "
    script += "print(*s._siblings()[0], flush=True); time.sleep(99)"
    first = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
    assert first.stdout.readline() == "\n"
    second = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert second.stdout.readline() == f"{first.pid}\n"
    for process in (first, second, other):
        process.kill()
        process.communicate()
    ticket = launch.Ticket()
    assert pickle.loads(pickle.dumps(ticket)).handed_out == 0
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=leave_with, args=(ticket,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [1, 2]


def leave_with(ticket) -> None:
    sys.exit(ticket.handed_out)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_watchdog_ends_its_process_when_a_sibling_has_ended(stopped):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    programs = []
    for others in range(2):
        programs.append(subprocess.Popen([sys.executable, "-c", WATCHED], text=True, **pipes))
        assert programs[-1].stdout.readline() == f"{others}\n"
    first, second = programs
    with second:
        if stopped:
            second.stdin.close()
        else:
            first.kill()
        code, stderr = second.wait(200.0), second.stderr.read()
    first.kill()
    first.communicate()
    assert (code, stderr) == ((0, "") if stopped else (7, f"{first.pid} has ended"))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver", "launcher"])
def test_a_rank_does_not_outlive_its_parent(method, tmp_path):
    (tmp_path / "program.py").write_text(ORPHAN)
    program = Program([sys.executable, str(tmp_path / "program.py"), method]).ready(1)
    program.process.kill()
    program.end()  # asserts that nothing remains
