"""spawn: exit codes, the last words, and that nothing remains, however the ranks end."""

import io
import os
import pickle
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from distopt import launch
from distopt.errors import LaunchError, RankFailedError, UsageError
from distopt.launch import LauncherInfo
from distopt.launch.supervise.output import _MarkedStream
from distopt.launch.supervise.spawn import _report
from tests.processes import ROOT, Program
from tests.unit.refusals import refused
from tests.unit.threads import in_threads

TICKET, SILENT = launch.Ticket(), "left with exit code 3 without a traceback"


def script(how: str, world_size: int = 2, env: dict[str, str] | None = None) -> Program:
    return Program([sys.executable, str(ROOT / "tests" / "ranks" / "spawn_script.py"), how, str(world_size)], env)


@pytest.mark.parametrize("env", [{}, {"OMP_NUM_THREADS": "5"}], ids=["shared", "chosen by the user"])
def test_ranks_print_lines_with_marks_and_share_threads_unless_the_user_chose(env, monkeypatch):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    expected = env.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))
    ended = script("success", 2, env).end()
    assert (ended.code, ended.stderr) == (0, "")
    lines = sorted(ended.stdout.splitlines())
    assert [line.split(" pid ")[0] for line in lines] == ["[rank 1] rank 1 of 2", "rank 0 of 2"]
    assert [line.split(" threads ")[1] for line in lines] == [expected] * 2


@pytest.mark.slow(kept=3, rest=2)
@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("raise", 1, "ValueError: the cause"),
        ("sys.exit", 3, "left with exit code 3"),
        ("sys.exit text", 1, "left: a cause in words"),
        ("os._exit", 3, SILENT),
        pytest.param("loss before its cause", 3, SILENT, marks=pytest.mark.sweep(rest=9)),
        ("SIGKILL", 128 + 9, "was ended by SIGKILL; SIGKILL is what the kernel sends when memory runs out"),
        ("SIGSEGV", 128 + 11, "was ended by SIGSEGV"),
    ],
)
def test_failure_of_one_rank_ends_all(how, code, last):
    """The cause is named even if its consequence was heard first, and a traceback is whole and alone."""
    ended = script(how, 2 if how == "loss before its cause" else 3).end()
    assert ended.code == code
    assert ended.stderr.startswith("rank 1 (pid ") or how == "loss before its cause"
    assert ended.stderr.endswith(f"{last}\n")
    if how == "raise":
        lines = ended.stderr.splitlines()
        assert lines[0].endswith(") failed:")
        assert lines[1] == "Traceback (most recent call last):"
        assert [line.split(", in ")[1] for line in lines if line.startswith("  File ")] == ["work", "match_end"]
        assert lines[-1] == "ValueError: the cause"


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("whole_group", [False, True], ids=["parent only", "as a terminal does"])
def test_signal_to_the_parent_ends_all_in_one_line(signum, code, whole_group):
    program = script("wait")
    program.read_lines(2)
    (os.killpg if whole_group else os.kill)(program.process.pid, signum)
    ended = program.end()
    assert (ended.code, ended.stderr) == (code, f"{signum.name}: all 2 ranks have been ended\n")


def test_signal_while_the_ranks_start():
    program = script("wait", 3)
    while len(program.pids()) < 3:
        assert program.process.poll() is None
    os.killpg(program.process.pid, signal.SIGTERM)
    assert program.end().code in (143, -signal.SIGTERM)


def test_every_line_of_the_others_is_marked():
    stream = io.StringIO()
    marked = _MarkedStream(stream, "[rank 1] ")
    assert marked.write("a\nb") + marked.write("c") + marked.write("") + marked.write("\n\nd\n") == 8
    assert stream.getvalue() == "[rank 1] a\n[rank 1] bc\n[rank 1] \n[rank 1] d\n"
    assert marked.getvalue() == stream.getvalue()  # all else is the stream's


def fail_in_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("in rank 1")


def test_spawn_raises_what_the_first_failing_rank_said():
    with pytest.raises(RankFailedError, match="in rank 1") as caught:
        launch.spawn(fail_in_rank_1, 2)
    error = caught.value
    assert (error.rank, error.exit_code) == (1, 1)
    assert "Traceback" in error.details
    assert str(pickle.loads(pickle.dumps(error))) == error.details


def write_rank(rank: int, world_size: int, folder: str) -> None:
    Path(folder, str(rank)).write_text(str(world_size))


@pytest.mark.slow
def test_spawn_leaves_the_process_as_it_was(tmp_path):
    before = (dict(os.environ), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    for _ in range(2):
        launch.spawn(write_rank, 2, (str(tmp_path),))
    assert (dict(os.environ), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "2", "1": "2"}


def test_tickets_hide_their_secret_and_closed_jobs_say_so():
    ticket = launch.Ticket()
    assert len(ticket.secret) == 16
    assert ticket != launch.Ticket()
    assert pickle.loads(pickle.dumps(ticket)) == ticket
    assert ticket.secret.hex() not in repr(ticket)
    assert repr(ticket.secret) not in repr(ticket)
    job = launch.join(launch.Ticket(), 0, 1)
    job.close()
    job.close()
    refused(LaunchError, "closed", job.all_gather, b"")


@pytest.mark.parametrize(
    ("error", "message", "call", "arguments"),
    [
        (LaunchError, "local_rank=2 is outside 0 ... 1", launch.MultiprocessJob, (TICKET, 2, 2)),
        (LaunchError, "local_rank=-1 is outside", launch.MultiprocessJob, (TICKET, -1, 2)),
        (UsageError, "world_size is 0; it must be an integer of at least 1", launch.MultiprocessJob, (TICKET, 0, 0)),
        *((LaunchError, "ticket", launch.join, each) for each in ((None, 0, 2), (None, None, 2), (TICKET, 0, None))),
        *((UsageError, "world.size", launch.spawn, (fail_in_rank_1, n)) for n in (0, -1, True, 2.0, "2", 10**6)),
    ],
)
def test_unusable_arguments(error, message, call, arguments):
    refused(error, message, call, *arguments)


@pytest.mark.slow
def test_an_error_of_all_ranks_of_a_host_is_printed_once(capsys):
    ranks = [LauncherInfo("srun", rank, 3, rank, 3, f"SLURM_PROCID={rank}") for rank in range(3)]
    in_threads(*(partial(_report, f"error: {info.source} is wrong", info) for info in ranks))
    _report("error: of rank 2 alone", ranks[2])
    assert capsys.readouterr().err == "error: SLURM_PROCID=0 is wrong\nerror: of rank 2 alone\n"
