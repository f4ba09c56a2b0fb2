"""The output of a job whose reader stands still, or whose disk is full: it is the output that suffers, not the job."""

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from tests.processes import LIMIT_SECONDS, Program

pytestmark = pytest.mark.slow(kept=1)  # seconds a case

RUN = [sys.executable, "-m", "distopt", "run", "--nproc-per-node", "2"]

# Writes without end; on SIGUSR1, creates a file, as if to save its state.
CHATTER = """
import os, signal, sys
from pathlib import Path

def save(*_):
    Path(sys.argv[1], os.environ["RANK"]).touch()

signal.signal(signal.SIGUSR1, save)
Path(__file__ + os.environ["RANK"]).touch()
while True:
    print("x" * 100, flush=True)
"""

# Writes; after SIGTERM, saves its state, and writes more than a pipe holds meanwhile.
SAVER = """
import os, signal, sys
from pathlib import Path

caught = []
signal.signal(signal.SIGTERM, lambda signum, _: caught.append(signum))
Path(__file__ + os.environ["RANK"]).touch()
while not caught:
    print("x" * 100, flush=True)
for _ in range(2000):
    print("y" * 100, flush=True)
Path(sys.argv[1], os.environ["RANK"]).touch()
"""

# Writes 60 lines to each stream, none of which may be shown, and creates a file at its end.
QUIET = """
import os, sys
from pathlib import Path

for i in range(60):
    print(f"out {i}", flush=True)
    print(f"err {i}", file=sys.stderr, flush=True)
Path(sys.argv[1], os.environ["RANK"]).touch()
"""


def redirected(how: str, command: list[str]) -> list[str]:
    return ["sh", "-c", f'exec "$@" {how}', "sh", *command]


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "ranks"
    made.mkdir()
    return made


def chatter(tmp_path, folder, how: str = "", text: str = CHATTER) -> Program:
    """A job of two ranks that write, with unread output, once there is no more room for it."""
    script = tmp_path / "chatter.py"
    script.write_text(text)
    program = Program(redirected(how, [*RUN, str(script), str(folder)]))
    room = fcntl.fcntl(program.process.stdout, fcntl.F_GETPIPE_SZ) // 2  # writes need not fill their pages
    before, since = 0, time.monotonic()
    while time.monotonic() < since + 0.5:
        (unread,) = struct.unpack("i", fcntl.ioctl(program.process.stdout, termios.FIONREAD, bytes(4)))
        if unread != before or unread < room or len([*tmp_path.glob("chatter.py?")]) < 2:
            before, since = unread, time.monotonic()
        time.sleep(0.02)
    return program


def wait_for_the_end(program: Program) -> int:
    """Without reading what it has written."""
    try:
        code = program.process.wait(LIMIT_SECONDS)
        program.assert_nothing_left()
    except subprocess.TimeoutExpired:
        pytest.fail("it does not end")
    finally:
        program.kill()
        program.process.communicate()
    return code


@pytest.mark.parametrize(
    ("how", "signum", "times"), [("", signal.SIGTERM, 1), ("2>&1", signal.SIGTERM, 1), ("2>&1", signal.SIGINT, 3)]
)
def test_a_signal_ends_a_job_whose_output_nobody_reads(tmp_path, folder, how, signum, times):
    program = chatter(tmp_path, folder, how)
    for _ in range(times):
        program.process.send_signal(signum)
        time.sleep(0.3)
    last = -signum if times > 1 else 128 + signum  # it may come when the agent is about to leave
    assert wait_for_the_end(program) in (128 + signum, last)


@pytest.mark.slow
def test_ranks_of_a_job_whose_output_nobody_reads_get_its_preemption(tmp_path, folder):
    program = chatter(tmp_path, folder)
    program.process.send_signal(signal.SIGUSR1)
    while len([*folder.iterdir()]) < 2:
        time.sleep(0.02)
    program.kill()
    program.process.communicate()


@pytest.mark.slow
def test_ranks_of_a_job_whose_output_nobody_reads_may_write_while_they_save(tmp_path, folder):
    program = chatter(tmp_path, folder, text=SAVER)
    program.process.send_signal(signal.SIGTERM)
    assert wait_for_the_end(program) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1"]


@pytest.mark.slow
def test_a_failed_rank_ends_a_job_whose_output_nobody_reads(tmp_path, folder):
    program = chatter(tmp_path, folder)
    ranks = [
        pid for pid, command in program.pids().items() if f"chatter.py {folder}" in command and " run " not in command
    ]
    os.kill(max(ranks), signal.SIGKILL)
    assert wait_for_the_end(program) == 137


@pytest.mark.slow
def test_a_slow_reader_gets_every_line(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("for i in range(20_000): print(f'{i} ' + 'x' * 50)\n")
    program = Program([*RUN, str(script)])
    time.sleep(2.0)  # long enough for the pipes to be full
    lines = program.end().stdout.splitlines()
    for mark in ("", "[rank 1] "):
        numbers = [int(found[1]) for line in lines if (found := re.fullmatch(rf"{re.escape(mark)}(\d+) x+", line))]
        assert numbers == [*range(20_000)]


@pytest.mark.parametrize("stream", ["stdout", "stderr", "both streams"])
def test_a_job_goes_on_whose_output_finds_no_room(tmp_path, folder, stream):
    """One notice, where there is room for it, and the number of lost lines."""
    script = tmp_path / "script.py"
    script.write_text(QUIET)
    how = {"stdout": ">/dev/full", "stderr": "2>/dev/full", "both streams": ">/dev/full 2>&1"}[stream]
    ended = Program(redirected(how, [*RUN, str(script), str(folder)])).end()
    assert ended.code == 0, ended
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1"]
    shown = {"stdout": ended.stderr, "stderr": ended.stdout, "both streams": ""}[stream].splitlines()
    if stream == "both streams":
        assert (ended.stdout, ended.stderr) == ("", "")
        return
    lines = [line for line in shown if "distopt run: " not in line]
    name = "err" if stream == "stdout" else "out"
    assert sorted(lines) == sorted(f"{mark}{name} {i}" for i in range(60) for mark in ("", "[rank 1] "))
    if stream == "stdout":
        notices = [line for line in shown if "distopt run: " in line]
        assert len([line for line in notices if "No space left on device" in line]) == 1
        assert any(re.search(r"\b120 lines\b", line) for line in notices), notices


@pytest.mark.slow
def test_log_files_are_whole_though_what_is_shown_finds_no_room(tmp_path, folder):
    script = tmp_path / "script.py"
    script.write_text(QUIET)
    run = [*RUN, "--log-dir", str(tmp_path / "logs"), str(script), str(folder)]
    ended = Program(redirected(">/dev/full", run)).end()
    assert ended.code == 0, ended
    for rank in "01":
        (log,) = (tmp_path / "logs").glob(f"*/attempt_0/{rank}/stdout.log")
        assert log.read_text().splitlines() == [f"out {i}" for i in range(60)]


def test_a_failure_has_its_exit_code_though_its_message_finds_no_room(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('a line', flush=True)\nraise SystemExit(7)\n")
    ended = Program(redirected(">/dev/full 2>&1", [*RUN, str(script)])).end()
    assert (ended.code, ended.stdout, ended.stderr) == (7, "", "")


def test_rank_0_asks_at_a_terminal(tmp_path):
    script = tmp_path / "ask.py"
    script.write_text("import os\nif os.environ['RANK'] == '0': print('hello', input('name? '))\n")
    terminal, end = pty.openpty()
    agent = subprocess.Popen([*RUN, str(script)], stdin=end, stdout=end, stderr=end, start_new_session=True)
    os.close(end)
    shown = b""
    with contextlib.suppress(OSError):  # Linux: the process at the other end has ended
        while part := os.read(terminal, 4096):
            shown += part
            if shown == b"name? ":
                os.write(terminal, b"Ann\n")
    os.close(terminal)
    assert agent.wait() == 0
    assert shown.replace(b"\r\n", b"\n") == b"name? Ann\nhello Ann\n"
