"""`distopt run` on one host: its ranks, their output, how they end together, and how they start again."""

import json
import os
import re
import shutil
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.processes import ROOT, Program

RUN = [sys.executable, "-m", "distopt", "run"]
RECORD = r"(; flight record in \S+)?"
SCRIPT = str(ROOT / "tests" / "ranks" / "run_script.py")
LAUNCHED = str(ROOT / "tests" / "ranks" / "launched_script.py")
MAIN = str(ROOT / "tests" / "ranks" / "launched_main.py")
HOST = os.uname().nodename


def start(n: int, *words: str, options: tuple[str, ...] = (), env: dict[str, str] | None = None) -> Program:
    return Program([*RUN, "--nproc-per-node", str(n), *options, *words], env)


def last_line(text: str) -> str:
    return text.splitlines()[-1]


def test_variables_and_a_secret_of_each_job():
    ended = [start(3, SCRIPT, "variables").end() for _ in range(2)]
    assert [one.code for one in ended] == [0, 0], ended
    lines = sorted(re.sub(r"^\[rank \d\] ", "", line) for line in ended[0].stdout.splitlines())
    assert [json.loads(line) for line in lines] == [[q, 3, str(q), "3", "0", "1", "127.0.0.1"] for q in range(3)]
    secrets = [{line.split()[-1] for line in one.stderr.splitlines()} for one in ended]
    assert [len(each) for each in secrets] == [1, 1]
    assert secrets[0] != secrets[1]


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_ranks_meet_without_mpi(n):
    ended = start(n, LAUNCHED, "ok").end()
    assert ended.code == 0, ended.stderr
    transport = "single" if n == 1 else "shm"
    marks = ["", *(f"[rank {rank}] " for rank in range(1, n))]
    expected = [
        f"{marks[rank]}rank {rank} of {n}, {rank} of {n} on {HOST}: LaunchedJob {transport} mpi=False"
        for rank in range(n)
    ]
    assert sorted(ended.stdout.splitlines()) == sorted(expected)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is absent")
def test_scripts_of_pytorch_run_as_they_are():
    ended = start(2, SCRIPT, "torch").end()
    assert sorted(ended.stdout.splitlines()) == [f"{mark}sum 3 of 2, elastic True" for mark in ("[rank 1] ", "")]


def test_the_port_of_the_store_is_kept_for_it():
    """The kernel does not reassign it, but PyTorch's store, which sets SO_REUSEADDR, can listen there."""
    ended = start(1, SCRIPT, "port").end()
    assert ended.stdout.splitlines() == ["with SO_REUSEADDR 0: Address already in use", "with SO_REUSEADDR 1: listens"]


def test_output_is_in_whole_marked_lines_and_in_files(tmp_path):
    ended = start(3, SCRIPT, "lines", options=("--log-dir", str(tmp_path), "--rdzv-id", "j")).end()
    assert ended.code == 0
    (job,) = tmp_path.iterdir()
    assert re.fullmatch("j_[0-9a-f]{8}", job.name)
    for name, shown in (("stdout", ended.stdout), ("stderr", ended.stderr)):
        assert len(shown.splitlines()) == 3 * 60
        for rank in range(3):
            mark = f"[rank {rank}] " if rank else ""
            lines = [f"{rank}:{i} {chr(97 + rank) * (i * 37 % 211)}" for i in range(60)]
            assert [line for line in shown.splitlines() if line.startswith(f"{mark}{rank}:")] == [
                mark + line for line in lines
            ]
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
        (SCRIPT, "exit 7", 7, "left with exit code 7"),
        (LAUNCHED, "SIGKILL", 137, "was ended by SIGKILL; SIGKILL is what the kernel sends when memory runs out"),
        (LAUNCHED, "raise", 1, "left with exit code 1: ValueError: the cause"),
        (SCRIPT, "child", 137, "was ended by SIGKILL; SIGKILL is what the kernel sends when memory runs out"),
    ],
)
def test_one_death_ends_all_and_is_told_in_one_line(script, how, code, text):
    ended = start(3, script, how).end()
    assert ended.code == code
    told = [line for line in ended.stderr.splitlines() if line.startswith("distopt run: ")]
    assert len(told) == 1
    assert re.fullmatch(rf"distopt run: rank 2 on {re.escape(HOST)} \(pid \d+\) {re.escape(text)}{RECORD}", told[0])


@pytest.mark.slow
def test_deaf_ranks_are_killed():
    program = start(2, SCRIPT, "deaf")
    line, _ = program.read_lines(2)
    pid = int(line.split()[-2])
    os.kill(pid, signal.SIGKILL)
    assert program.end().code == 137


def test_ranks_end_with_a_killed_agent():
    program = start(2, SCRIPT, "deaf")
    program.read_lines(2)
    program.process.kill()
    assert program.end().code == -signal.SIGKILL


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_end_ranks_that_do_not_handle_them(signum):
    program = start(2, SCRIPT, "stay", options=("--max-restarts", "3"))
    program.read_lines(2)
    program.process.send_signal(signum)
    ended = program.end()
    assert ended.code == 128 + signum
    assert last_line(ended.stderr) == f"distopt run: {signum.name}: all 2 ranks have ended"
    assert "attempt" not in ended.stderr


@pytest.mark.slow
def test_signals_reach_ranks_that_save_their_states(tmp_path):
    program = start(2, SCRIPT, "save", str(tmp_path))
    program.read_lines(2)
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        program.process.send_signal(signum)
        said = sorted(program.read_lines(2))
        assert said == [f"[rank 1] got {signum.name}", f"got {signum.name}"]
    program.process.send_signal(signal.SIGTERM)
    ended = program.end()
    assert ended.code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.slow(kept=2)
@pytest.mark.parametrize(("restarts", "code"), [(1, 139), (2, 0), (3, 0)])
def test_restarts(restarts, code):
    ended = start(2, SCRIPT, "fail twice", options=("--max-restarts", str(restarts))).end()
    assert ended.code == code
    attempts = sorted({line.split()[-1] for line in ended.stdout.splitlines()})
    assert attempts == ["0", "1", "2"][: restarts + 1]
    again = re.findall(r"was ended by SIGSEGV; starting all ranks again \((\d) of (\d)\)", ended.stderr)
    assert again == [(str(i + 1), str(restarts)) for i in range(min(restarts, 2))]


def test_restarted_ranks_go_on_from_their_checkpoint(tmp_path):
    results = {}
    for name in ("undisturbed", "killed"):
        folder, results[name] = tmp_path / name, tmp_path / f"{name} results"
        results[name].mkdir()
        job = ("tests.ranks.checkpoint_job", "2", str(folder), "plain", "3", str(results[name]))
        program = start(2, *job, options=("--max-restarts", "1", "-m"))
        if name == "killed":
            program.read_lines(1)
            os.kill(max(pid for pid, command in program.pids().items() if " -m tests.ranks" in command), signal.SIGKILL)
        ended = program.end()
        assert ended.code == 0, ended
        assert ("starting all ranks again (1 of 1)" in ended.stderr) == (name == "killed")
    assert "resuming from step" in ended.stdout
    for rank in range(2):
        one, other = (np.load(folder / f"{rank}.npz") for folder in results.values())
        assert one.files == other.files
        assert [name for name in one.files if not np.array_equal(one[name], other[name], equal_nan=True)] == []


def test_version_of_either_program():
    ended = Program([sys.executable, "-m", "distopt", "--version"]).end()
    assert re.fullmatch(r"distopt \d+\.\d+\.\d+\S*\n", ended.stdout)
