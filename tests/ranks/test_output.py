"""The output of a job whose reader stands still, or whose disk is full: it is the output that suffers, not the job."""

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path

import pytest

from tests.processes import LIMIT_SECONDS, RUN, Program

pytestmark = pytest.mark.slow(kept=1)  # seconds a case

# Writes without end. If it saves, it does so after SIGTERM, and writes more than a pipe holds meanwhile.
CHATTER = """
import os, signal, sys
from pathlib import Path

caught = []
if {saves}:
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


def unread(program: Program, folder: Path) -> Program:
    """Once there is no more room for the output of ranks that write."""
    room = fcntl.fcntl(program.process.stdout, fcntl.F_GETPIPE_SZ) // 2  # writes need not fill their pages
    before, since = 0, time.monotonic()
    while time.monotonic() < since + 0.5:
        (now,) = struct.unpack("i", fcntl.ioctl(program.process.stdout, termios.FIONREAD, bytes(4)))
        if now != before or now < room or len([*folder.parent.glob("script.py?")]) < 2:
            before, since = now, time.monotonic()
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
def test_a_signal_ends_a_job_whose_output_nobody_reads(run, folder, how, signum, times):
    program = unread(run(CHATTER.format(saves=False), streams=how), folder)
    for _ in range(times):
        program.process.send_signal(signum)
        time.sleep(0.3)
    last = -signum if times > 1 else 128 + signum  # it may come when the agent is about to leave
    assert wait_for_the_end(program) in (128 + signum, last)


@pytest.mark.slow
def test_ranks_of_a_job_whose_output_nobody_reads_may_write_while_they_save(run, folder):
    program = unread(run(CHATTER.format(saves=True)), folder)
    program.process.send_signal(signal.SIGTERM)
    assert wait_for_the_end(program) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1"]


@pytest.mark.slow
def test_a_failed_rank_ends_a_job_whose_output_nobody_reads(run, folder):
    program = unread(run(CHATTER.format(saves=False)), folder)
    words = {pid: command for pid, command in program.pids().items() if f"script.py {folder}" in command}
    os.kill(max(pid for pid, command in words.items() if " run " not in command), signal.SIGKILL)
    assert wait_for_the_end(program) == 137


@pytest.mark.slow
def test_a_slow_reader_gets_every_line(run):
    program = run("for i in range(20_000): print(f'{i} ' + 'x' * 50)\n")
    time.sleep(2.0)  # long enough for the pipes to be full
    lines = program.end().stdout.splitlines()
    for mark in ("", "[rank 1] "):
        numbers = [int(found[1]) for line in lines if (found := re.fullmatch(rf"{re.escape(mark)}(\d+) x+", line))]
        assert numbers == [*range(20_000)]


@pytest.mark.parametrize("stream", ["stdout", "stderr", "both streams"])
def test_a_job_goes_on_whose_output_finds_no_room(run, folder, stream):
    """One notice, where there is room for it, and the number of lost lines."""
    how = {"stdout": ">/dev/full", "stderr": "2>/dev/full", "both streams": ">/dev/full 2>&1"}[stream]
    ended = run(QUIET, streams=how).end(code=0)
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
def test_log_files_are_whole_though_what_is_shown_finds_no_room(run, tmp_path):
    run(QUIET, streams=">/dev/full", options=["--log-dir", str(tmp_path / "logs")]).end(code=0)
    for rank in "01":
        (log,) = (tmp_path / "logs").glob(f"*/attempt_0/{rank}/stdout.log")
        assert log.read_text().splitlines() == [f"out {i}" for i in range(60)]


def test_a_failure_has_its_exit_code_though_its_message_finds_no_room(run):
    ended = run("print('a line', flush=True)\nraise SystemExit(7)\n", streams=">/dev/full 2>&1").end()
    assert (ended.code, ended.stdout, ended.stderr) == (7, "", "")


def test_rank_0_asks_at_a_terminal(script):
    path = script("import os\nif os.environ['RANK'] == '0': print('hello', input('name? '))\n")
    terminal, end = pty.openpty()
    command = [*RUN, "--nproc-per-node", "2", path]
    agent = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, start_new_session=True)
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
