"""Flight records: of a job that fails, readable by PyTorch's analysis; and what `distopt run --watch` shows of them."""

import json
import os
import pickle
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import HERE, ROOT, RUN, Program, end_all, mpiexec_command, on_a_terminal, patience
from tests.terminal import Terminal

SCRIPT = str(ROOT / "tests" / "ranks" / "timeline_script.py")
RECORDS = 256


def start(how: str, folder: Path, **env: str) -> Program:
    own = {"DISTOPT_FLIGHT_FOLDER": str(folder), **({"DISTOPT_TIMEOUT": f"{patience(3)}"} if how == "stall" else {})}
    return Program([*RUN, "--nproc-per-node", "3", SCRIPT, "fail", how], own | env)


def records_in(folder: Path) -> list[dict]:
    found = [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("rank_*"))]
    assert [each["rank"] for each in found] == [0, 1, 2]
    return found


def analysed(folder: Path, *options: str) -> str:
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder), *options]
    return Program(command).end(code=0).stderr


def failed(how: str, folder: Path, code: int) -> list[dict]:
    """The records of a job that fails; the agent's line says once where they are."""
    ended = start(how, folder).end(code=code)
    assert ended.agent_lines[-1].count(f"flight record in {folder}") == 1, ended.stderr
    return records_in(folder)


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("operation", "COLLECTIVE_TYPE_MISMATCH.*'all_reduce'.*'broadcast'|COLLECTIVE_TYPE_MISMATCH.*'broadcast'"),
        ("type", "COLLECTIVE_DTYPE_MISMATCH"),
        ("stall", r"missing ranks: \{1\}"),
    ],
)
def test_the_analysis_of_pytorch_names_a_mismatch_and_a_stall(tmp_path, how, found):
    last: list[str] = []
    for record in failed(how, tmp_path / "flight", 1):
        assert len(record["entries"]) == RECORDS
        numbers = [entry["collective_seq_id"] for entry in record["entries"]]
        assert numbers == list(range(numbers[0], numbers[0] + RECORDS))
        assert all(entry["state"] == "completed" for entry in record["entries"][:-2])
        last.append(record["entries"][-1]["state"])
        (place,) = record["entries"][0]["frames"]
        assert (place["name"], place["filename"]) == ("fail", SCRIPT)
        assert "world.all_reduce" in Path(SCRIPT).read_text().splitlines()[place["line"] - 1]
    # A rank may be ended, with its record written by another one, before it has come to the operation that failed.
    assert last == ["started", "completed", "started"] if how == "stall" else last.count("started") >= 2
    assert re.search(found, analysed(tmp_path / "flight"))


@pytest.mark.parametrize("how", ["SIGKILL", "raise"])
def test_a_rank_that_ends_alone_leaves_the_records_of_all(tmp_path, how):
    zero, one, two = failed(how, tmp_path / "flight", 137 if how == "SIGKILL" else 1)
    assert one["entries"][-1]["state"] == "completed"
    for other in (zero, two):
        assert (other["entries"][-1]["state"], other["entries"][-1]["count"]) == ("started", 5)
    if how == "SIGKILL":
        assert not (tmp_path / "flight" / "stacks-1.txt").exists()
    for rank in (0, 2):
        assert f'File "{SCRIPT}"' in (tmp_path / "flight" / f"stacks-{rank}.txt").read_text()


@pytest.mark.parametrize(
    ("how", "env", "code", "said"),
    [
        ("SIGQUIT", {}, 0, "has ended well"),
        ("SIGQUIT to the agent", {}, 0, "has ended well"),
        ("SIGQUIT at the end", {}, 0, "has ended well"),  # the request of another does not end a rank that ends
        ("caught", {}, 0, "has caught MismatchError"),
        ("operation", {"DISTOPT_FLIGHT_RECORDS": "0"}, 1, ""),
    ],
)
def test_records_are_written_on_request_and_not_where_nothing_fails_or_is_recorded(tmp_path, how, env, code, said):
    ended = start(how, tmp_path / "flight", **env).end(code=code)
    assert not said or ended.stdout.count(said) == 3
    if how in ("SIGQUIT", "SIGQUIT to the agent"):
        assert {record["reason"] for record in records_in(tmp_path / "flight")} == {"SIGQUIT"}
        assert all(" in fail" in (tmp_path / "flight" / f"stacks-{rank}.txt").read_text() for rank in range(3))
    else:
        assert "flight record" not in ended.stderr
        assert not (tmp_path / "flight").exists()


def test_a_record_that_cannot_be_written_is_one_notice(tmp_path):
    (tmp_path / "file").touch()
    ended = start("SIGQUIT", tmp_path / "file" / "flight").end(code=0)
    assert ended.stdout.count("has ended well") == 3
    assert ended.stderr.count("the flight record cannot be written") == 1
    assert "training goes on" in ended.stderr


@pytest.mark.slow
def test_pytorchs_variables_set_size_and_place(tmp_path):
    env = {"TORCH_FR_BUFFER_SIZE": "7", "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/trace_of_"}
    start("count", tmp_path / "flight", **env).end(code=1)
    found = [pickle.loads(path.read_bytes()) for path in sorted(tmp_path.glob("trace_of_*"))]
    assert [(record["rank"], len(record["entries"])) for record in found] == [(0, 7), (1, 7), (2, 7)]
    assert "SIZE_OR_SYNTAX_MISMATCH" in analysed(tmp_path, "--prefix", "trace_of_")


@pytest.mark.slow(rest=1)
@pytest.mark.parametrize("how", ["operation", "stall"])
def test_over_mpi(tmp_path, how):
    timeout = f"{patience(3) if how == 'stall' else 120}"
    env = {"DISTOPT_TRANSPORT": "mpi", "DISTOPT_FLIGHT_FOLDER": str(tmp_path), "DISTOPT_TIMEOUT": timeout}
    ended = Program([*mpiexec_command(3), sys.executable, SCRIPT, "fail", how], env).end()
    assert ended.code != 0
    assert f"flight record in {tmp_path}" in ended.stderr
    records_in(tmp_path)
    assert re.search("COLLECTIVE_TYPE_MISMATCH" if how == "operation" else r"missing ranks: \{1\}", analysed(tmp_path))


# -- jobs that are watched: with a slow rank, a late one, one that is killed, and of two nodes --------------------
WATCHED = [*RUN, "--watch=json", "--nproc-per-node"]
BATCH = {"nn": 16, "ddp": 8}


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


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("front", ["nn", "ddp"])
def test_a_slow_rank_is_named_and_its_steps_are_counted(tmp_path, front):
    if front == "ddp":
        pytest.importorskip("torch")
    program = Program([*WATCHED, "2", SCRIPT, front, str(tmp_path / "end"), "slow", "1"])

    def named(row: dict) -> bool:  # on a busy machine, the other rank may be the slower one for a while
        slow = (row["rank"], row["state"]) == (1, "running; the others wait for it")
        return slow and row["samples_per_s"] is not None

    row = rows_until(program, named)[-1]
    assert row["host"] == HERE
    assert row["memory_bytes"] > 10_000_000
    assert row["samples_per_s"] == pytest.approx(BATCH[front] * row["steps_per_s"], rel=0.5, abs=BATCH[front])
    (tmp_path / "end").touch()
    last = [json.loads(line) for line in program.end(code=0).stderr.splitlines() if line.startswith("{")][-2:]
    ends = [(row["rank"], row["state"], row["memory_bytes"]) for row in last]
    assert ends == [(0, "ended", None), (1, "ended", None)]
    assert last[0]["steps"] == last[1]["steps"] > row["steps"] - 2


def test_a_rank_that_is_stopped_and_one_that_is_killed(tmp_path):
    program = Program([*WATCHED, "2", SCRIPT, "nn", str(tmp_path / "end")])
    rows_until(program, lambda row: row["steps"])
    (rank,) = [pid for pid in program.pids() if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    os.kill(rank, signal.SIGSTOP)
    rows_until(program, lambda row: row["rank"] == 1 and row["state"] == "stopped")
    rows_until(program, lambda row: row["rank"] == 0 and row["state"].startswith("waiting for rank 1 in "))
    os.kill(rank, signal.SIGKILL)
    rows_until(program, lambda row: row["rank"] == 1 and row["state"] == "was ended by SIGKILL")
    program.end(code=137)


def test_a_late_rank_is_named_by_those_that_wait_for_it_where_the_owner_shows_the_ranks_of_all_nodes(tmp_path, port):
    meet = ["2", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-backend", "static"]
    words = [SCRIPT, "nn", str(tmp_path / "end"), "late", "3"]
    nodes = [Program([*WATCHED, *meet, "--node-rank", str(n), *words]) for n in range(2)]
    seen: set[int] = set()

    def enough(row: dict) -> bool:
        if re.fullmatch(r"waiting for rank 3 in all_reduce #\d+", row["state"]):
            seen.add(row["rank"])
        return seen == {0, 1, 2}

    late = [row for row in rows_until(nodes[0], enough) if row["rank"] == 3]
    last = [row["state"] for row in late if (row["steps"] or 0) == (late[-1]["steps"] or 0) > 10]
    assert not any(state.startswith("waiting") for state in last)  # before, it may have waited for others
    (tmp_path / "end").touch()
    assert '"rank"' not in end_all(nodes)[1].stderr


def test_a_terminal_keeps_the_table_below_the_output(tmp_path):
    command = [*RUN[1:], "--nproc-per-node", "2", "--watch", SCRIPT, "nn", str(tmp_path / "end"), "prints"]
    code, shown = on_a_terminal(command, {"PYTHONPATH": str(ROOT), "TERM": "xterm", "WATCH_SECONDS": "3"})
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
    command = [*RUN[1:], "--watch", SCRIPT, "nn", str(tmp_path / "end")]
    code, shown = on_a_terminal(command, {"PYTHONPATH": str(ROOT), "TERM": term, "WATCH_SECONDS": "2"})
    assert code == 0
    assert "\x1b" not in shown
    lines = shown.splitlines()
    assert all(re.match(rf"distopt run: rank 0 on {HERE}: \w+", line) for line in lines)
    assert re.search(r": ended, \d+ steps, ", lines[-1])


def test_other_programs_are_shown_without_steps():
    row = json.loads(Program([*WATCHED, "1", "-m", "this"]).end(code=0).stderr.splitlines()[-1])
    assert (row["state"], row["steps"], row["wait_share"]) == ("ended", None, None)


def test_what_cannot_be_watched_is_refused():
    ended = Program([*WATCHED, "1", SCRIPT, "nn", "end"], {"TORCH_FR_BUFFER_SIZE": "0"}).end(code=2)
    assert ended.stderr.count("\n") == 1
    assert "--watch reads flight records; unset" in ended.stderr
