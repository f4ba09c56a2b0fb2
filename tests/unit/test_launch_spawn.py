"""spawn: exit codes, the last words, and that nothing remains, however the ranks end."""

import io
import os
import pickle
import signal
import sys
from pathlib import Path
from threading import Thread

import pytest

from distopt import launch
from distopt.errors import LaunchError, RankFailedError, UsageError
from distopt.launch import LauncherInfo
from distopt.launch.supervise.output import _MarkedStream
from distopt.launch.supervise.spawn import _report
from tests.processes import ROOT, Program

SCRIPT = str(ROOT / "tests" / "ranks" / "spawn_script.py")


def script(how: str, world_size: int = 2, env: dict[str, str] | None = None) -> Program:
    return Program([sys.executable, SCRIPT, how, str(world_size)], env)


@pytest.mark.parametrize("env", [{}, {"OMP_NUM_THREADS": "5"}], ids=["shared", "chosen by the user"])
def test_ranks_print_lines_with_marks_and_share_threads_unless_the_user_chose(env, monkeypatch):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    expected = env.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))
    ended = script("success", 2, env).end()
    assert (ended.code, ended.stderr) == (0, "")
    assert sorted(line.split(" pid ")[0] for line in ended.stdout.splitlines()) == [
        "[rank 1] rank 1 of 2",
        "rank 0 of 2",
    ]
    assert [line.split(" threads ")[1] for line in ended.stdout.splitlines()] == [expected] * 2


@pytest.mark.slow(kept=3)
@pytest.mark.sweep(rest=2)
@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("raise", 1, "ValueError: the cause"),
        ("sys.exit", 3, "left with exit code 3"),
        ("sys.exit text", 1, "left: a cause in words"),
        ("os._exit", 3, "left with exit code 3 without a traceback"),
        ("SIGKILL", 128 + 9, "was ended by SIGKILL; SIGKILL is what the kernel sends when memory runs out"),
        ("SIGSEGV", 128 + 11, "was ended by SIGSEGV"),
    ],
)
def test_failure_of_one_rank_ends_all(how, code, last):
    ended = script(how, 3).end()
    assert ended.code == code
    assert ended.stderr.startswith("rank 1 (pid ")
    assert ended.stderr.endswith(f"{last}\n")


@pytest.mark.slow
def test_the_cause_is_named_even_if_its_consequence_was_heard_first():
    ended = script("loss before its cause").end()
    assert ended.code == 3
    assert ended.stderr.endswith("left with exit code 3 without a traceback\n")


def test_traceback_is_whole_and_alone():
    lines = script("raise").end().stderr.splitlines()
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


@pytest.mark.parametrize("world_size", [0, -1, True, 2.0, "2", 10**6])
def test_unusable_world_size(world_size):
    with pytest.raises(UsageError, match=r"world.size"):
        launch.spawn(fail_in_rank_1, world_size)


# -- jobs ------------------------------------------------------------------------------------------------------------
def test_ticket_hides_its_secret():
    ticket = launch.Ticket()
    assert len(ticket.secret) == 16
    assert ticket != launch.Ticket()
    assert pickle.loads(pickle.dumps(ticket)) == ticket
    assert ticket.secret.hex() not in repr(ticket)
    assert repr(ticket.secret) not in repr(ticket)


@pytest.mark.parametrize(
    ("rank", "world_size", "message"),
    [
        (2, 2, "local_rank=2 is outside 0 ... 1"),
        (-1, 2, "local_rank=-1 is outside"),
        (0, 0, "world_size is 0; it must be an integer of at least 1"),
    ],
)
def test_multiprocess_job_checks_its_arguments(rank, world_size, message):
    with pytest.raises((LaunchError, UsageError), match=message):
        launch.MultiprocessJob(launch.Ticket(), rank, world_size)


@pytest.mark.parametrize("arguments", [(None, 0, 2), (None, None, 2), (launch.Ticket(), 0, None)])
def test_join_wants_all_three_or_none(arguments):
    with pytest.raises(LaunchError, match="ticket"):
        launch.join(*arguments)


def test_a_closed_job_says_so():
    job = launch.join(launch.Ticket(), 0, 1)
    job.close()
    job.close()
    with pytest.raises(LaunchError, match="closed"):
        job.all_gather(b"")


@pytest.mark.slow
def test_an_error_of_all_ranks_of_a_host_is_printed_once(capsys):
    ranks = [LauncherInfo("srun", rank, 3, rank, 3, f"SLURM_PROCID={rank}") for rank in range(3)]
    threads = [Thread(target=_report, args=(f"error: {info.source} is wrong", info)) for info in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _report("error: of rank 2 alone", ranks[2])
    assert capsys.readouterr().err == "error: SLURM_PROCID=0 is wrong\nerror: of rank 2 alone\n"


@pytest.mark.slow
@pytest.mark.sweep(rest=2)
@pytest.mark.parametrize(("how", "code"), [("return", 0), ("sys.exit", 3), ("raise", 1)])
def test_forked_child_does_not_act_for_its_rank(how, code):
    ended = Program([sys.executable, str(ROOT / "tests" / "ranks" / "fork_script.py"), "2", how]).end()
    assert ended.code == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["[rank 1] rank 1 has ended well", "rank 0 has ended well"]
    assert f"the child ended with {code}\n" in ended.stderr
    assert ("ValueError: of the child" in ended.stderr) == (how == "raise")
