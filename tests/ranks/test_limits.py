"""Limits of the system that a job comes up against: told with their names and cures, and without tracebacks."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, Program, remove_group

pytestmark = pytest.mark.slow(kept=1)  # seconds a case

SCRIPT = str(ROOT / "tests" / "ranks" / "launched_script.py")
MAIN = str(ROOT / "tests" / "ranks" / "launched_main.py")
SHORT = {"DISTOPT_TIMEOUT": "60"}

# Arrays of more than 100 KiB in shared memory.
LARGE = """
from distopt import comm, launch

def train(rank, n):
    comm.create(launch.join()).empty(1 << 20)

if __name__ == "__main__":
    launch.main(train, 2)
"""


def started(launcher: str, n: int) -> list[str]:
    if launcher == "launch.main":
        return [sys.executable, MAIN, str(n)]
    return [sys.executable, "-m", "distopt", "run", "--nproc-per-node", str(n), SCRIPT, "ok"]


def limited(limit: str, command: list[str]) -> list[str]:
    return ["sh", "-c", f'ulimit {limit} && exec "$@"', "sh", *command]


@pytest.mark.sweep(rest=2)
@pytest.mark.parametrize(
    ("launcher", "files"), [("launch.main", 24), ("launch.main", 32), *(("distopt run", n) for n in (8, 12, 24))]
)
def test_too_few_open_files(launcher, files):
    ended = Program(limited(f"-n {files}", started(launcher, 8)), SHORT).end()
    assert ended.code not in (0, 143), ended
    assert "Traceback" not in ended.stderr
    assert "ulimit -n" in ended.stderr


@pytest.mark.parametrize("launcher", ["launch.main", "distopt run"])
def test_two_ranks_need_few_open_files(launcher):
    ended = Program(limited("-n 32", started(launcher, 2))).end()
    assert ended.code == 0, ended


@pytest.fixture
def few_processes():
    """A control group of 8 processes and threads: the start of a command line that enters it."""
    roots = [Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")]
    group = None
    for root in roots:
        try:
            (root / "cgroup.procs").read_text()
            group = root / f"distopt-test-{os.getpid()}"
            group.mkdir()
            (group / "pids.max").write_text("8")
            break
        except OSError:
            if group is not None and group.is_dir():
                group.rmdir()
            group = None
    if group is None:
        pytest.skip("control groups of processes are not ours to make")
    yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    remove_group(group)


@pytest.mark.parametrize("launcher", ["launch.main", "distopt run"])
def test_too_few_processes(few_processes, launcher):
    ended = Program([*few_processes, *started(launcher, 8)], SHORT).end()
    assert ended.code not in (0, 143), ended
    assert "Traceback" not in ended.stderr
    assert re.search(r"pids\.max|ulimit -u", ended.stderr)


@pytest.mark.slow
def test_too_small_files(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LARGE)
    ended = Program(limited("-f 100", [sys.executable, str(script)])).end()
    assert ended.code == 1
    assert "bytes of shared memory for the ranks of this host: File too large" in ended.stderr
    assert "ulimit -f" in ended.stderr
    assert "enlarge /dev/shm" not in ended.stderr
