"""A rank under mpiexec that ends with code 0 while others are at work: no success, and named."""

import re

import pytest

from tests.processes import ROOT, Ended, mpiexec

SCRIPT = str(ROOT / "tests" / "ranks" / "early_exit_script.py")


def run(n: int, backend: str, how: str, where: str) -> Ended:
    return mpiexec(n, SCRIPT, how, where, env={"DISTOPT_BACKEND": backend, "DISTOPT_TIMEOUT": "30"})


@pytest.mark.slow(kept=1)
@pytest.mark.sweep(rest=3)
@pytest.mark.parametrize("how", ["os._exit", "exit of C"])
@pytest.mark.parametrize("where", ["between steps", "after the last step"])
@pytest.mark.parametrize(("n", "backend"), [(2, "shm"), (3, "shm"), (2, "mpi"), (3, "mpi")])
def test_rank_that_leaves_with_0_before_the_others(n, backend, where, how):
    ended = run(n, backend, how, where)
    pid = ended.stdout.split()[0]
    assert ended.code != 0
    assert "done" not in ended.stdout
    name = {"os._exit": r"os\._exit\(0\)", "exit of C": r"exit\(0\) of C"}[how]
    assert re.search(rf"^rank {n - 1} on \S+ \(pid {pid}\) left by {name} before", ended.stderr, re.M), ended.stderr
    others = set(re.findall(r"rank (\d) on \S+ \(pid \d+\) (?:left|has ended)", ended.stderr))
    assert others == {str(n - 1)}


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(("n", "backend"), [(2, "shm"), (3, "mpi")])
def test_rank_that_nothing_in_it_can_hold_is_named_by_another_process(n, backend):
    ended = run(n, backend, "_exit of C", "after the last step")  # the code is mpiexec's
    pid = ended.stdout.split()[0]
    named = re.findall(r"^rank (\d) on \S+ \(pid (\d+)\) has ended before the others", ended.stderr, re.M)
    assert named == [(str(n - 1), pid)], ended.stderr


@pytest.mark.slow
@pytest.mark.sweep(rest=2)
@pytest.mark.parametrize(
    ("how", "where"), [("os._exit", "after close"), ("return", "after close"), ("return", "after the last step")]
)
@pytest.mark.parametrize(("n", "backend"), [(2, "mpi"), (3, "shm")])
def test_rank_that_leaves_as_it_should_is_not_accused(n, backend, how, where):
    ended = run(n, backend, how, where)
    assert ended.code == 0, ended.stderr
    assert ended.stdout.count("done") == n - 1
    assert not ended.stderr
