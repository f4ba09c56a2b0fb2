"""`distopt run --watch`: what it shows of jobs with a slow rank, a late one, one that is killed, and of two nodes."""

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import ROOT, Program, free_port, on_a_terminal
from tests.terminal import Terminal

SCRIPT = str(ROOT / "tests" / "ranks" / "watch_script.py")
RUN = [sys.executable, "-m", "distopt", "run", "--watch=json"]
BATCH = {"nn": 16, "torch": 8}


def rows_until(program: Program, enough: Callable[[dict], bool]) -> list[dict]:
    """The rows until one, which is the last, is enough; fails if the job ends before."""
    rows: list[dict] = []
    other: list[str] = []
    assert program.process.stderr is not None
    for line in program.process.stderr:
        if not line.startswith('{"time": '):
            other.append(line)
            continue
        rows.append(json.loads(line))
        if enough(rows[-1]):
            return rows
    program.kill()
    pytest.fail(f"{rows[-8:]}\n{''.join(other)}")


def front_of(name: str) -> str:
    if name == "torch":
        pytest.importorskip("torch")
    return name


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("front", ["nn", "torch"])
def test_a_slow_rank_is_named_and_its_steps_are_counted(tmp_path, front):
    program = Program([*RUN, "--nproc-per-node", "2", SCRIPT, front_of(front), str(tmp_path / "end"), "slow", "1"])

    def named(row: dict) -> bool:  # on a busy machine, the other rank may be the slower one for a while
        slow = (row["rank"], row["state"]) == (1, "running; the others wait for it")
        return slow and row["samples_per_s"] is not None

    row = rows_until(program, named)[-1]
    assert row["host"] == os.uname().nodename
    assert row["memory_bytes"] > 10_000_000
    assert row["samples_per_s"] == pytest.approx(BATCH[front] * row["steps_per_s"], rel=0.5, abs=BATCH[front])
    (tmp_path / "end").touch()
    ended = program.end()
    assert ended.code == 0, ended.stderr
    last = [json.loads(line) for line in ended.stderr.splitlines() if line.startswith("{")][-2:]
    ends = [(row["rank"], row["state"], row["memory_bytes"]) for row in last]
    assert ends == [(0, "ended", None), (1, "ended", None)]
    assert last[0]["steps"] == last[1]["steps"] > row["steps"] - 2


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("front", ["nn", "torch"])
def test_a_late_rank_is_named_by_those_that_wait_for_it(tmp_path, front):
    program = Program([*RUN, "--nproc-per-node", "3", SCRIPT, front_of(front), str(tmp_path / "end"), "late", "2"])
    waits = re.compile(r"waiting for rank 2 in (all_reduce|broadcast) #\d+")
    rows = rows_until(program, lambda row: row["rank"] == 1 and waits.fullmatch(row["state"]))
    late = [row for row in rows if row["rank"] == 2]  # before it is, it may have waited for others
    assert not [
        row
        for row in late
        if (row["steps"] or 0) == (late[-1]["steps"] or 0) > 10 and row["state"].startswith("waiting")
    ]
    (tmp_path / "end").touch()
    assert program.end().code == 0


def test_a_rank_that_is_stopped_and_one_that_is_killed(tmp_path):
    program = Program([*RUN, "--nproc-per-node", "2", SCRIPT, "nn", str(tmp_path / "end")])
    rows_until(program, lambda row: row["steps"])
    (rank,) = [pid for pid in program.pids() if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    os.kill(rank, signal.SIGSTOP)
    rows_until(program, lambda row: row["rank"] == 1 and row["state"] == "stopped")
    rows_until(program, lambda row: row["rank"] == 0 and row["state"].startswith("waiting for rank 1 in "))
    os.kill(rank, signal.SIGKILL)
    rows_until(program, lambda row: row["rank"] == 1 and row["state"] == "was ended by SIGKILL")
    assert program.end().code == 137


def test_the_node_that_owns_the_endpoint_shows_the_ranks_of_all(tmp_path):
    options = ["--nproc-per-node", "2", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    words = [SCRIPT, "nn", str(tmp_path / "end"), "late", "3"]
    nodes = [Program([*RUN, *options, "--rdzv-backend", "static", "--node-rank", str(n), *words]) for n in range(2)]
    seen: set[int] = set()

    def enough(row: dict) -> bool:
        if re.fullmatch(r"waiting for rank 3 in all_reduce #\d+", row["state"]):
            seen.add(row["rank"])
        return seen == {0, 1, 2}

    rows_until(nodes[0], enough)
    (tmp_path / "end").touch()
    ended = [node.end() for node in nodes]
    assert [each.code for each in ended] == [0, 0]
    assert '"rank"' not in ended[1].stderr


def test_a_terminal_keeps_the_table_below_the_output(tmp_path):
    words = [SCRIPT, "nn", str(tmp_path / "end"), "prints"]
    command = ["-m", "distopt", "run", "--nproc-per-node", "2", "--watch", *words]
    env = {"PYTHONPATH": str(ROOT), "TERM": "xterm", "WATCH_SECONDS": "4"}
    code, shown = on_a_terminal(command, env)
    assert code == 0
    assert shown.count("\x1b[J") > 3
    assert "\x1b[?25l" not in shown  # the cursor stays visible
    assert shown.endswith("\x1b[?7h")  # and long lines are not cut afterwards
    terminal = Terminal(24, 120)
    terminal.feed(shown.encode())
    head, first, second = terminal.lines[-3:]
    assert head.split() == ["rank", "host", "steps", "steps/s", "samples/s", "wait", "memory", "state"]
    assert [line.split()[0] for line in (first, second)] == ["0", "1"]
    assert [line.rstrip().endswith("ended") for line in (first, second)] == [True, True]
    assert [line for line in terminal.lines if line.lstrip().startswith("rank  ")] == [head]


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_without_sequences_gets_lines(tmp_path, term):
    command = ["-m", "distopt", "run", "--watch", SCRIPT, "nn", str(tmp_path / "end")]
    code, shown = on_a_terminal(command, {"PYTHONPATH": str(ROOT), "TERM": term, "WATCH_SECONDS": "2"})
    assert code == 0
    assert "\x1b" not in shown
    lines = shown.splitlines()
    assert all(re.match(rf"distopt run: rank 0 on {os.uname().nodename}: \w+", line) for line in lines)
    assert re.search(r": ended, \d+ steps, ", lines[-1])


def test_other_programs_are_shown_without_steps():
    ended = Program([*RUN, "-m", "this"]).end()
    assert ended.code == 0
    (row,) = [json.loads(line) for line in ended.stderr.splitlines()][-1:]
    assert (row["state"], row["steps"], row["wait_share"]) == ("ended", None, None)


def test_what_cannot_be_watched_is_refused():
    ended = Program([*RUN, SCRIPT, "nn", "end"], {"TORCH_FR_BUFFER_SIZE": "0"}).end()
    assert (ended.code, ended.stderr.count("\n")) == (2, 1)
    assert "--watch reads flight records; unset" in ended.stderr
