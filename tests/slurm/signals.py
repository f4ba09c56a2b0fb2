"""Jobs that Slurm preempts, signals or cancels come back if they should, and end with an undisturbed job's digits."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .ways import digits_of, environment, ours

if TYPE_CHECKING:
    from pathlib import Path

    from .cluster import Cluster

__all__ = ["CASES", "WHOLE_RUN", "Case", "Ending", "try_case", "undisturbed"]

OPTIONS = "--epochs 8 --batch-size 32 --checkpoint-every 100000"  # so that it is the signal that saves
WHOLE_RUN = "--epochs 14 --batch-size 64 --checkpoint-every 100000"
SECONDS = 1200.0
_SBATCH = "sbatch --parsable --output=HERE/%j.out --ntasks-per-node=1"
_TWO_NODES = f"{_SBATCH} examples/slurm/two_nodes.sbatch OPTIONS"


@dataclass(frozen=True)
class Case:
    """A job on two nodes, and what happens to it in its second epoch.

    Attributes:
        name: what it is called in the table.
        submit: the job.
        disturb: typed on the front end; JOB stands for the job's number.
        comes_back: whether it is queued again.
        quick: whether continuous integration has the time for it.
    """

    name: str
    submit: str
    disturb: str
    comes_back: bool = True
    quick: bool = False


_URGENT = "sbatch --partition=urgent --nodes=2 --exclusive --output=/dev/null --wrap 'sleep 2'"
_USR1 = "--signal=USR1 JOB"

CASES = (
    Case("preempted by a partition of higher priority", _TWO_NODES, _URGENT, quick=True),
    Case("USR1 for the job script, as by --signal=B:USR1@60", _TWO_NODES, f"scancel --batch {_USR1}"),
    Case("USR1 for the ranks, as by --signal=USR1@60", _TWO_NODES, f"scancel {_USR1}"),
    Case(
        "USR1 for the job script, which is mpiexec",
        f"{_SBATCH} --nodes=2 --requeue --open-mode=append --wrap 'exec BIN/mpiexec -n 2 -ppn 1 PYTHON SCRIPT OPTIONS'",
        f"scancel --batch {_USR1}",
    ),
    Case(
        "USR1 for the agents of distopt run",
        f"{_SBATCH} --nodes=2 --requeue --open-mode=append --wrap 'exec srun BIN/distopt run --nnodes 2 "
        "--nproc-per-node 1 --rdzv-endpoint node1:29513 SCRIPT OPTIONS'",
        f"scancel --batch {_USR1}",
    ),
    Case(
        "USR2 for submitit's ranks",
        "PYTHON examples/slurm/submit.py --nodes 2 --tasks-per-node 1 --folder HERE/submitit -- OPTIONS",
        "scancel --signal=USR2 JOB",
    ),
    Case("cancelled", _TWO_NODES, "scancel JOB", comes_back=False),
)


@dataclass(frozen=True)
class Ending:
    """What became of a job.

    Attributes:
        output: of all its runs.
        state: Slurm's word for it.
        restarts: how often it was queued again.
        seconds: from the disturbance to the end of the first run.
    """

    output: str
    state: str
    restarts: int
    seconds: float

    @property
    def resumed_at(self) -> int:
        """The step from which it went on; 0 if it did not."""
        found = re.findall(r"^Going on from \S+ \(step (\d+),", self.output, re.MULTILINE)
        return int(found[-1]) if found else 0


def undisturbed(cluster: Cluster, data: Path, options: str = OPTIONS) -> list[str]:
    """The lines of a job that nothing happens to."""
    here = cluster.here / "jobs" / f"undisturbed-{len(options)}"
    command = ours("srun --nodes=2 --ntasks-per-node=1 PYTHON SCRIPT OPTIONS", here, 2, 2, options)
    return digits_of(cluster.run(command, env=environment(data), timeout=SECONDS).stdout)


def try_case(cluster: Cluster, case: Case, data: Path, options: str = OPTIONS, at: str = "Train Epoch: 2") -> Ending:
    """Submit the job, disturb it when its output matches `at`, and wait for its end."""
    here = cluster.here / "jobs" / f"{re.sub(r'[^a-z0-9]+', '-', case.name.lower())}-{len(options)}"
    here.mkdir(parents=True)
    env = environment(data)
    submitted = cluster.run(ours(case.submit, here, 2, 2, options), env=env).stdout
    job = re.findall(r"\d+", submitted)
    if not job:
        return Ending(submitted, "not submitted", 0, 0.0)

    def output() -> str:
        return "".join(log.read_text() for log in sorted([*here.glob("*.out"), *here.glob("submitit/*_log.*")]))

    deadline = time.monotonic() + SECONDS
    while not re.search(at, output()) and time.monotonic() < deadline:
        time.sleep(0.05)
    began = time.monotonic()
    cluster.run(ours(case.disturb.replace("JOB", job[0]), here, 2, 2, OPTIONS))
    first_run, state, restarts = 0.0, "", 0
    while time.monotonic() < deadline:
        shown = cluster.run(["scontrol", "show", "job", "--oneliner", job[0]]).stdout
        state, restarts = re.findall(r"JobState=(\w+).* Restarts=(\d+)", shown)[0]
        if not first_run and state != "RUNNING":
            first_run = time.monotonic() - began
        if state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"):
            break
        time.sleep(0.2)
    return Ending(output(), state, int(restarts), first_run)
