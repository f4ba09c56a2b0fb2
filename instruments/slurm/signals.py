"""Jobs that Slurm preempts, signals or cancels come back if they should, and end with an undisturbed job's digits."""

import re
import time
from dataclasses import dataclass
from pathlib import Path

from .cluster import Cluster
from .ways import TEMPLATE, digits_of, environment, ours

OPTIONS = "--epochs 8 --batch-size 32 --checkpoint-every 100000"  # so that it is the signal that saves
WHOLE_RUN = "--epochs 14 --batch-size 64 --checkpoint-every 100000"
PYTORCH_WHOLE_RUN = "--log-interval 100 --digest"  # and the defaults of the example
SECONDS = 1200.0
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
_SBATCH = "sbatch --parsable --output=HERE/%j.out --ntasks-per-node=1"
_TWO_NODES = f"{_SBATCH} examples/slurm/two_nodes.sbatch OPTIONS"


@dataclass(frozen=True)
class Case:
    """A job on two nodes, and what happens to it in its second epoch, its fourth, and so on.

    Attributes:
        name: what it is called in the table.
        submit: the job.
        disturb: typed on the front end, one after the other; JOB stands for the job's number.
        comes_back: whether it is queued again.
        quick: whether continuous integration has the time for it.
        killed: whether it has no time to save, and repeats the steps since its last checkpoint.
    """

    name: str
    submit: str
    disturb: tuple[str, ...]
    comes_back: bool = True
    quick: bool = False
    killed: bool = False


_URGENT = "sbatch --partition=urgent --nodes=2 --exclusive --output=/dev/null --wrap 'sleep 2'"
_USR1 = "--signal=USR1 JOB"

CASES = (
    Case("preempted by a partition of higher priority", _TWO_NODES, (_URGENT,), quick=True),
    Case("USR1 for the job script, as by --signal=B:USR1@60", _TWO_NODES, (f"scancel --batch {_USR1}",)),
    Case("USR1 for the ranks, as by --signal=USR1@60", _TWO_NODES, (f"scancel {_USR1}",)),
    Case(
        "USR1 for the job script, which is mpiexec",
        f"{_SBATCH} --nodes=2 --requeue --open-mode=append --wrap 'exec BIN/mpiexec -n 2 -ppn 1 PYTHON SCRIPT OPTIONS'",
        (f"scancel --batch {_USR1}",),
    ),
    Case(
        "USR1 for the agents of distopt run",
        f"{_SBATCH} --nodes=2 --requeue --open-mode=append --wrap 'exec srun BIN/distopt run --nnodes 2 "
        "--nproc-per-node 1 --rdzv-endpoint node1:29513 SCRIPT OPTIONS'",
        (f"scancel --batch {_USR1}",),
    ),
    Case(
        "USR2 for submitit's ranks",
        "PYTHON examples/slurm/submit.py --nodes 2 --tasks-per-node 1 --folder HERE/submitit -- OPTIONS",
        ("scancel --signal=USR2 JOB",),
    ),
    Case("cancelled", _TWO_NODES, ("scancel JOB",), comes_back=False),
)

_PYTORCH = f"{_SBATCH} --nodes=2 examples/slurm/pytorch.sbatch OPTIONS --digest"
# A container is an environment in which the ranks find no scontrol.
_CONTAINER = f"env CONTAINER='env PATH=BIN' {_PYTORCH.replace('pytorch', 'pytorch_container')}"

PYTORCH_CASES = (
    Case("DDP over distopt: preempted, then USR1", _PYTORCH, (_URGENT, f"scancel --batch {_USR1}")),
    Case("DDP over gloo: preempted, then USR1", f"{_PYTORCH} --backend gloo", (_URGENT, f"scancel --batch {_USR1}")),
    Case(
        "DDP in a container without scontrol: USR1, then preempted", _CONTAINER, (f"scancel --batch {_USR1}", _URGENT)
    ),
    Case("DDP in a container without scontrol: cancelled", _CONTAINER, ("scancel JOB",), comes_back=False),
)

_LONG = f"{TEMPLATE} -epochs 8"
_TEMPLATE_JOB = f"{_LONG} -slurm -slurm_nnodes 2 -slurm_ncpus 1"
_KILL = "sh -c 'scancel --signal=KILL JOB; until scontrol requeue JOB; do sleep 0.5; done'"

TEMPLATE_CASES = (
    Case("killed, and queued again, twice", f"{_TEMPLATE_JOB} -save_every 3", (_KILL, _KILL), killed=True),
    Case(
        "preempted, then USR2 for submitit's ranks",
        f"{_TEMPLATE_JOB} -save_every 100000",
        (_URGENT, "scancel --signal=USR2 JOB"),
    ),
)


@dataclass(frozen=True)
class Ending:
    """The outcome of a job.

    Attributes:
        output: of all its runs.
        state: Slurm's word for it.
        restarts: how often it was queued again.
        seconds: from each disturbance to the end of that run.
    """

    output: str
    state: str
    restarts: int
    seconds: tuple[float, ...]

    @property
    def resumed_at(self) -> list[str]:
        """The steps from which it resumed."""
        return re.findall(r"^Resuming from \S+ \(step (\d+),", self.output, re.MULTILINE)


def undisturbed(cluster: Cluster, data: Path, options: str = OPTIONS) -> list[str]:
    """The lines of a job that nothing happens to."""
    here = cluster.here / "jobs" / f"undisturbed-{len(options)}"
    command = ours("srun --nodes=2 --ntasks-per-node=1 PYTHON SCRIPT OPTIONS", here, 2, 2, options)
    return digits_of(cluster.run(command, env=environment(data), timeout=SECONDS).stdout)


def undisturbed_ddp(
    cluster: Cluster, data: Path, ranks: int, backend: str, options: str = f"{OPTIONS} --digest"
) -> list[str]:
    """As `undisturbed`, of PyTorch's DDP."""
    here = cluster.here / "jobs" / f"undisturbed-{ranks}-{backend}-{len(options)}"
    here.mkdir(parents=True)
    job = "--nodes=2 --ntasks-per-node=PER_NODE examples/slurm/pytorch.sbatch OPTIONS --backend"
    command = ours(f"sbatch --wait --output=HERE/out {job} {backend}", here, ranks, 2, options)
    cluster.run(command, env=environment(data), timeout=SECONDS)
    return digits_of((here / "out").read_text())


def undisturbed_template(cluster: Cluster, data: Path) -> list[str]:
    """As `undisturbed`, of the project to start from, on one node."""
    here = cluster.here / "jobs" / "undisturbed-template"
    command = ours(f"{_LONG} -cpus 2", here, 2, 1, "")
    return digits_of(cluster.run(command, env=environment(data), timeout=SECONDS).stdout)


def try_case(
    cluster: Cluster, case: Case, data: Path, options: str = OPTIONS, at: str = "Train Epoch: EPOCH"
) -> Ending:
    """Submit the job, disturb it when its output matches `at`, and wait for its end."""
    here = cluster.here / "jobs" / f"{re.sub(r'[^a-z0-9]+', '-', case.name.lower())}-{len(options)}"
    here.mkdir(parents=True)
    env = environment(data)
    submitted = cluster.run(ours(case.submit, here, 2, 2, options), env=env).stdout
    job = re.findall(r"\d+", submitted)
    if not job:
        return Ending(submitted, "not submitted", 0, ())

    def output() -> str:
        return "".join(log.read_text() for log in sorted([*here.glob("*.out"), *here.glob("submitit/*_log.*")]))

    def state_of() -> tuple[str, int]:
        shown = cluster.run(["scontrol", "show", "job", "--oneliner", job[0]]).stdout
        if not (found := re.search(r"JobState=(\w+).* Restarts=(\d+)", shown)):
            raise RuntimeError(f"scontrol does not show job {job[0]}: {shown.strip()}")
        return found[1], int(found[2])

    deadline, seconds = time.monotonic() + SECONDS, []
    for number, command in enumerate(case.disturb):
        while not re.search(at.replace("EPOCH", str(2 + 2 * number)), output()) and time.monotonic() < deadline:
            time.sleep(0.05)
        began = time.monotonic()
        cluster.run(ours(command.replace("JOB", job[0]), here, 2, 2, OPTIONS))
        while state_of() == ("RUNNING", number) and time.monotonic() < deadline:
            time.sleep(0.2)
        seconds.append(time.monotonic() - began)
    while (state := state_of()[0]) not in ENDED and time.monotonic() < deadline:
        time.sleep(0.2)
    return Ending(output(), state, state_of()[1], tuple(seconds))
