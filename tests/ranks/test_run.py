"""`distopt run` on one host: its ranks, their output, how they end together, and how they start again."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.processes import BY_VARIABLES, HERE, LAUNCHED, RUN, Program, end_all
from tests.ranks.test_launchers import on_this_host

KILLED = "was ended by SIGKILL; SIGKILL is what the kernel sends when memory runs out"


def start(n: int, *words: str, options: tuple[str, ...] = ()) -> Program:
    return Program([*RUN, "--nproc-per-node", str(n), *options, *words])


def mark_of(rank: int) -> str:
    """At the start of the lines of a rank."""
    return f"[rank {rank}] " if rank else ""


def test_variables_and_a_secret_of_each_job():
    ended = end_all(start(3, BY_VARIABLES, "variables") for _ in range(2))
    lines = sorted(re.sub(r"^\[rank \d\] ", "", line) for line in ended[0].stdout.splitlines())
    assert [json.loads(line) for line in lines] == [[q, 3, str(q), "3", "0", "1", "127.0.0.1"] for q in range(3)]
    secrets = [{line.split()[-1] for line in one.stderr.splitlines()} for one in ended]
    assert [len(each) for each in secrets] == [1, 1]
    assert secrets[0] != secrets[1]


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("n", [3, 1])
def test_ranks_meet_without_mpi(n):
    ended = start(n, LAUNCHED, "ok").end(code=0)
    expected = [mark_of(rank) + line for rank, line in enumerate(on_this_host(n, "single" if n == 1 else "shm"))]
    assert sorted(ended.stdout.splitlines()) == sorted(expected)


def test_the_port_of_pytorchs_store_is_kept():
    """The kernel does not reassign it, but a store, which sets SO_REUSEADDR, can listen there."""
    said = sorted(start(1, BY_VARIABLES, "port").end().stdout.splitlines())
    assert said == ["with SO_REUSEADDR 0: Address already in use", "with SO_REUSEADDR 1: listens"]


def test_output_is_in_whole_marked_lines_and_in_files(tmp_path):
    ended = start(3, BY_VARIABLES, "lines", options=("--log-dir", str(tmp_path), "--rdzv-id", "j")).end(code=0)
    (job,) = tmp_path.iterdir()
    assert re.fullmatch("j_[0-9a-f]{8}", job.name)
    for name, shown in (("stdout", ended.stdout), ("stderr", ended.stderr)):
        assert len(shown.splitlines()) == 3 * 60
        for rank in range(3):
            lines = [f"{rank}:{i} {chr(97 + rank) * (i * 37 % 211)}" for i in range(60)]
            own = [line for line in shown.splitlines() if line.startswith(f"{mark_of(rank)}{rank}:")]
            assert own == [mark_of(rank) + line for line in lines]
            assert (job / "attempt_0" / str(rank) / f"{name}.log").read_text().splitlines() == lines


def test_any_program_has_torchruns_variables_and_its_output_is_where_it_is_asked_for(tmp_path):
    line = "echo out $RANK $ROLE_RANK $ROLE_NAME $ROLE_WORLD_SIZE $GROUP_RANK; echo err $RANK >&2"
    options = ["--log-dir", str(tmp_path), "-r", "0:1,1:3", "-t", "1:1", "--role", "trainer", "--no-python"]
    ended = start(2, "sh", "-c", line, options=options).end()
    assert (ended.stdout, ended.stderr) == ("[rank 1] out 1 1 trainer 2 0\n", "err 0\n")
    files = {str(path.relative_to(tmp_path)).partition("/")[2]: path.read_text() for path in tmp_path.rglob("*.log")}
    assert files == {
        "attempt_0/0/stdout.log": "out 0 0 trainer 2 0\n",
        "attempt_0/1/stdout.log": "out 1 1 trainer 2 0\n",
        "attempt_0/1/stderr.log": "err 1\n",
    }


def test_output_that_is_redirected_without_a_folder_goes_to_one_that_is_named():
    ended = start(1, "sh", "-c", "echo out", options=["-r", "1", "--no-python"]).end()
    folder = Path(re.fullmatch("distopt run: output goes to files in (.+)\n", ended.stderr)[1])
    (log,) = folder.rglob("*.log")
    assert (ended.stdout, log.name, log.read_text()) == ("", "stdout.log", "out\n")
    shutil.rmtree(folder)


@pytest.mark.slow(kept=2)
@pytest.mark.parametrize(
    ("script", "how", "code", "text"),
    [
        (BY_VARIABLES, "exit 7", 7, "left with exit code 7"),
        (LAUNCHED, "SIGKILL", 137, KILLED),
        (LAUNCHED, "raise", 1, "left with exit code 1: ValueError: the cause"),
        (BY_VARIABLES, "child", 137, KILLED),
    ],
)
def test_one_death_ends_all_and_is_told_in_one_line(script, how, code, text):
    (line,) = start(3, script, how).end(code=code).agent_lines
    record = r"(; flight record in \S+)?"
    assert re.fullmatch(rf"distopt run: rank 2 on {re.escape(HERE)} \(pid \d+\) {re.escape(text)}{record}", line)


@pytest.mark.parametrize(("whom", "code"), [pytest.param("a rank", 137, marks=pytest.mark.slow), ("the agent", -9)])
def test_deaf_ranks_end_with_a_killed_rank_or_agent(whom, code):
    program = start(2, BY_VARIABLES, "deaf")
    line, _ = program.read_lines(2)
    os.kill(int(line.split()[-2]) if whom == "a rank" else program.process.pid, signal.SIGKILL)
    program.end(code=code)


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_end_ranks_that_do_not_handle_them(signum):
    program = start(2, BY_VARIABLES, "stay", options=("--max-restarts", "3")).ready()
    ended = program.end_by(signum, 128 + signum)
    assert ended.stderr.splitlines()[-1] == f"distopt run: {signum.name}: all 2 ranks have ended"
    assert "attempt" not in ended.stderr


@pytest.mark.slow
def test_signals_reach_ranks_that_save_their_states(tmp_path):
    program = start(2, BY_VARIABLES, "save", str(tmp_path)).ready()
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        program.process.send_signal(signum)
        assert sorted(program.read_lines(2)) == [f"[rank 1] got {signum.name}", f"got {signum.name}"]
    program.end_by(signal.SIGTERM, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.slow(kept=2)
@pytest.mark.parametrize(("restarts", "code"), [(1, 139), (2, 0), (3, 0)])
def test_restarts(restarts, code):
    ended = start(2, BY_VARIABLES, "fail twice", options=("--max-restarts", str(restarts))).end(code=code)
    attempts = sorted({line.split()[-1] for line in ended.stdout.splitlines()})
    assert attempts == ["0", "1", "2"][: restarts + 1]
    again = re.findall(r"was ended by SIGSEGV; starting all ranks again \((\d) of (\d)\)", ended.stderr)
    assert again == [(str(i + 1), str(restarts)) for i in range(min(restarts, 2))]


def test_version_of_either_program():
    ended = Program([sys.executable, "-m", "distopt", "--version"]).end()
    assert re.fullmatch(r"distopt \d+\.\d+\.\d+\S*\n", ended.stdout)
