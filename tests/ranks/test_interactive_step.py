"""The shell of `salloc` is a step of one task (LaunchParameters=use_interactive_step) in a job of several: no rank."""

import os
import shlex
import sys

import pytest

from tests.processes import ROOT, Program, mpiexec_command
from tests.ranks.test_launchers import said, slurm

pytestmark = pytest.mark.slow(kept=1)  # seconds a case

SCRIPT = str(ROOT / "tests" / "ranks" / "launched_script.py")
MAIN = str(ROOT / "tests" / "ranks" / "launched_main.py")
HERE = os.uname().nodename


def interactive(nodes: int = 1) -> dict[str, str]:
    """The variables of the shell: those of the job for 4 tasks on so many nodes, and those of its own step."""
    per_node = f"{4 // nodes}" if nodes == 1 else f"{4 // nodes}(x{nodes})"
    return {
        **slurm(0, 4, "here", 1),
        **dict.fromkeys(("SLURM_STEP_ID", "SLURM_STEPID"), "4294967290"),
        **dict.fromkeys(("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"), "1"),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(nodes)),
        "SLURM_NPROCS": "4",
        "SLURM_TASKS_PER_NODE": per_node,
    }


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_script_is_a_job_of_one_rank(nodes):
    ended = Program([sys.executable, SCRIPT, "ok"], interactive(nodes)).end()
    assert ended.code == 0, ended
    (line,) = said(ended.stdout)
    assert line.startswith(f"rank 0 of 1, 0 of 1 on {HERE}: ")
    # As outside any step: the user has asked for 4 tasks.
    assert f"srun python {shlex.quote(SCRIPT)} ok" in ended.stderr


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("launcher", ["distopt run", "main", "mpiexec"])
def test_launchers_start_their_ranks(launcher, nodes):
    command, how = {
        "distopt run": (
            [sys.executable, "-m", "distopt", "run", "--nproc-per-node", "2", SCRIPT, "ok"],
            "LaunchedJob shm",
        ),
        "main": ([sys.executable, MAIN, "2"], ""),
        "mpiexec": ([*mpiexec_command(2), sys.executable, SCRIPT, "ok"], "MpiJob shm"),
    }[launcher]
    ended = Program(command, interactive(nodes)).end()
    assert ended.code == 0, ended
    told = sorted(line.removeprefix("[rank 1] ") for line in ended.stdout.splitlines())
    assert len(told) == 2
    for rank, line in enumerate(told):
        expected = f"rank {rank} of 2, {rank} of 2 on {HERE}: {how} mpi=" if how else f"rank {rank} of 2: sum 3"
        assert line.startswith(expected)


def test_tasks_that_srun_starts_from_there_are_the_ranks_of_their_step():
    """srun overwrites the variables of the step, and those of the job that it changes."""
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEPID": "0", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NPROCS": "2"}
    environments = [{**interactive(), **slurm(rank, 2, "here", 1), **step} for rank in range(2)]
    ended = [program.end() for program in [Program([sys.executable, SCRIPT, "ok"], env) for env in environments]]
    assert [one.code for one in ended] == [0, 0], ended
    assert [said(one.stdout) for one in ended] == [
        [f"rank {rank} of 2, {rank} of 2 on {HERE}: LaunchedJob shm mpi=False"] for rank in range(2)
    ]
