"""The flight record of a job that fails: of all ranks, and readable by PyTorch's analysis."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, Ended, Program, mpiexec_command, patience

SCRIPT = str(ROOT / "tests" / "ranks" / "timeline_script.py")
RUN = [sys.executable, "-m", "distopt", "run", "--nproc-per-node", "3"]
RECORDS = 256


def start(how: str, folder: Path, **env: str) -> Program:
    own = {"DISTOPT_FLIGHT_FOLDER": str(folder), **({"DISTOPT_TIMEOUT": f"{patience(3)}"} if how == "stall" else {})}
    return Program([*RUN, SCRIPT, "fail", how], own | env)


def records_in(folder: Path) -> list[dict]:
    found = [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("rank_*"))]
    assert [each["rank"] for each in found] == [0, 1, 2]
    return found


def analysed(folder: Path, *options: str) -> str:
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def named_once(ended: Ended, folder: Path) -> None:
    """The agent's line says where the record is."""
    told = [line for line in ended.stderr.splitlines() if line.startswith("distopt run: ")]
    assert told[-1].count(f"flight record in {folder}") == 1, ended.stderr


@pytest.mark.slow(kept=1)
@pytest.mark.sweep(rest=2)
@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("operation", "COLLECTIVE_TYPE_MISMATCH.*'all_reduce'.*'broadcast'|COLLECTIVE_TYPE_MISMATCH.*'broadcast'"),
        ("count", "SIZE_OR_SYNTAX_MISMATCH"),
        ("type", "COLLECTIVE_DTYPE_MISMATCH"),
        ("stall", r"missing ranks: \{1\}"),
    ],
)
def test_the_analysis_of_pytorch_names_a_mismatch_and_a_stall(tmp_path, how, found):
    ended = start(how, tmp_path / "flight").end()
    assert ended.code == 1
    named_once(ended, tmp_path / "flight")
    last: list[str] = []
    for record in records_in(tmp_path / "flight"):
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
    ended = start(how, tmp_path / "flight").end()
    assert ended.code == (137 if how == "SIGKILL" else 1)
    named_once(ended, tmp_path / "flight")
    zero, one, two = records_in(tmp_path / "flight")
    assert one["entries"][-1]["state"] == "completed"
    for other in (zero, two):
        assert (other["entries"][-1]["state"], other["entries"][-1]["count"]) == ("started", 5)
    if how == "SIGKILL":
        assert not (tmp_path / "flight" / "stacks-1.txt").exists()
    for rank in (0, 2):
        assert f'File "{SCRIPT}"' in (tmp_path / "flight" / f"stacks-{rank}.txt").read_text()


@pytest.mark.parametrize("how", ["SIGQUIT", "SIGQUIT to the agent"])
def test_sigquit_writes_the_records_of_all_and_training_goes_on(tmp_path, how):
    ended = start(how, tmp_path / "flight").end()
    assert ended.code == 0, ended.stderr
    assert ended.stdout.count("has ended well") == 3
    assert {record["reason"] for record in records_in(tmp_path / "flight")} == {"SIGQUIT"}
    stacks = [(tmp_path / "flight" / f"stacks-{rank}.txt").read_text() for rank in range(3)]
    assert all(" in fail" in each for each in stacks)


def test_a_rank_that_ends_is_not_ended_by_the_request_of_another(tmp_path):
    ended = start("SIGQUIT at the end", tmp_path / "flight").end()
    assert ended.code == 0, ended.stderr
    assert not (tmp_path / "flight").exists()


def test_an_error_that_the_script_catches_writes_nothing(tmp_path):
    ended = start("caught", tmp_path / "flight").end()
    assert ended.code == 0, ended.stderr
    assert ended.stdout.count("has caught MismatchError") == 3
    assert "flight record" not in ended.stderr
    assert not (tmp_path / "flight").exists()


def test_a_record_that_cannot_be_written_is_one_notice(tmp_path):
    (tmp_path / "file").touch()
    ended = start("SIGQUIT", tmp_path / "file" / "flight").end()
    assert ended.code == 0
    assert ended.stdout.count("has ended well") == 3
    assert ended.stderr.count("the flight record cannot be written") == 1
    assert "training goes on" in ended.stderr


def test_without_records_there_is_no_folder(tmp_path):
    for variable in ("DISTOPT_FLIGHT_RECORDS", "TORCH_FR_BUFFER_SIZE"):
        ended = start("operation", tmp_path / "flight", **{variable: "0"}).end()
        assert ended.code == 1
        assert "flight record" not in ended.stderr
        assert not (tmp_path / "flight").exists()


def test_pytorchs_variables_set_size_and_place(tmp_path):
    env = {"TORCH_FR_BUFFER_SIZE": "7", "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/trace_of_"}
    assert start("count", tmp_path / "flight", **env).end().code == 1
    found = [pickle.loads(path.read_bytes()) for path in sorted(tmp_path.glob("trace_of_*"))]
    assert [(record["rank"], len(record["entries"])) for record in found] == [(0, 7), (1, 7), (2, 7)]
    assert "SIZE_OR_SYNTAX_MISMATCH" in analysed(tmp_path, "--prefix", "trace_of_")


@pytest.mark.slow
@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize("how", ["operation", "stall"])
def test_over_mpi(tmp_path, how):
    timeout = f"{patience(3) if how == 'stall' else 120}"
    env = {"DISTOPT_TRANSPORT": "mpi", "DISTOPT_FLIGHT_FOLDER": str(tmp_path), "DISTOPT_TIMEOUT": timeout}
    ended = Program([*mpiexec_command(3), sys.executable, SCRIPT, "fail", how], env).end()
    assert ended.code != 0
    assert f"flight record in {tmp_path}" in ended.stderr
    records_in(tmp_path)
    assert re.search("COLLECTIVE_TYPE_MISMATCH" if how == "operation" else r"missing ranks: \{1\}", analysed(tmp_path))
