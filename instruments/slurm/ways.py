"""Every way to start ranks under Slurm trains to the same digits, and what two nodes exchange goes over the wire."""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.data import idx, mnist

from .cluster import LINK, Cluster

ROOT = Path(__file__).parents[2]
SCRIPT, DDP = "examples/mnist_slurm.py", "examples/pytorch/mnist_ddp.py"
TEMPLATE = "PYTHON examples/template/train.py -batch_size 32 -log_every 10 -out HERE"
BIN = Path(sys.executable).parent
GRADIENT_BYTES = 4 * 431_080  # of the CNN, which is the same in PyTorch
MOST_WIRE = 1.1  # times what must go over the wire
TRAIN, TEST, BATCH, EPOCHS = 3000, 1000, 32, 2
OPTIONS = f"--epochs {EPOCHS} --batch-size {BATCH}"
SECONDS = 600.0


@dataclass(frozen=True)
class Way:
    """A way to start ranks.

    Attributes:
        name: what it is called in the table.
        nodes: of the cluster.
        command: typed on the front end; for the names in it see `ours`.
        quick: whether continuous integration has the time for it.
        backend: of PyTorch's job.
        most_wire: may go over the wire, times what must.
    """

    name: str
    nodes: int
    command: str
    quick: bool = False
    backend: str = ""
    most_wire: float = MOST_WIRE

    @property
    def by_mpi(self) -> bool:
        """Whether MPI connects the ranks."""
        return "mpiexec" in self.command or "--mpi=pmi2" in self.command


_ON_TWO = "--nodes=2 --ntasks-per-node=PER_NODE"
_ONE_AGENT_EACH = "srun --nodes=2 --ntasks-per-node=1 --cpus-per-task=PER_NODE"
_SUBMIT = "sbatch --wait --output=HERE/%j.out"

WAYS = (
    Way("sbatch, one node", 1, f"{_SUBMIT} --ntasks-per-node=RANKS examples/slurm/one_node.sbatch OPTIONS", True),
    Way("srun, one node", 1, "srun --nodes=1 --ntasks=RANKS PYTHON SCRIPT OPTIONS"),
    Way("sbatch", 2, f"{_SUBMIT} --ntasks-per-node=PER_NODE examples/slurm/two_nodes.sbatch OPTIONS", True),
    Way("srun", 2, f"srun {_ON_TWO} PYTHON SCRIPT OPTIONS"),
    Way("srun --mpi=pmi2", 2, f"srun --mpi=pmi2 {_ON_TWO} PYTHON SCRIPT OPTIONS", True),
    Way("srun --mpi=pmix", 2, f"srun --mpi=pmix {_ON_TWO} PYTHON SCRIPT OPTIONS", True),
    Way(
        "torchrun",
        2,
        f"{_ONE_AGENT_EACH} sh -c 'exec BIN/torchrun --nnodes 2 --nproc-per-node PER_NODE --node-rank $SLURM_NODEID "
        "--master-addr node1 --master-port 29511 SCRIPT OPTIONS'",
    ),
    Way(
        "distopt run",
        2,
        f"{_ONE_AGENT_EACH} BIN/distopt run --nnodes 2 --nproc-per-node PER_NODE --rdzv-endpoint node1:29512 "
        "SCRIPT OPTIONS",
        True,
    ),
    Way(
        "mpiexec in sbatch",
        2,
        f"{_SUBMIT} {_ON_TWO} --wrap 'exec BIN/mpiexec -n RANKS -ppn PER_NODE PYTHON SCRIPT OPTIONS'",
    ),
    Way(
        "submitit",
        2,
        "PYTHON examples/slurm/submit.py --wait --nodes 2 --tasks-per-node PER_NODE --folder HERE/submitit -- OPTIONS",
    ),
)


def _pytorch_ways(backend: str, most_wire: float) -> tuple[Way, ...]:
    """DDP over a backend, by commands as people type them on every node."""
    options = f"OPTIONS --digest --backend {backend}"
    script, port = "examples/slurm/pytorch.sbatch", 29520 if backend == "gloo" else 29530
    commands = {
        ("sbatch, one node", 1): f"{_SUBMIT} --ntasks-per-node=RANKS {script} {options}",
        ("sbatch", 2): f"{_SUBMIT} {_ON_TWO} {script} {options}",
        ("torchrun with c10d's rendezvous", 2): (
            f"{_ONE_AGENT_EACH} PYTHON -m torch.distributed.run --nnodes 2 --nproc-per-node PER_NODE "
            f"--rdzv_backend c10d --rdzv_endpoint node1:{port} --rdzv-id 7 DDP {options}"
        ),
        ("distopt run", 2): (
            f"{_ONE_AGENT_EACH} BIN/distopt run --nnodes 2 --nproc-per-node PER_NODE "
            f"--rdzv-endpoint node1:{port + 1} DDP {options}"
        ),
        ("by hand", 2): (
            f"srun {_ON_TWO} sh -c 'exec PYTHON DDP {options} --init-method tcp://node1:{port + 2} --world-size RANKS "
            "--rank $SLURM_PROCID'"
        ),
    }
    return tuple(
        Way(f"{name}, {backend}", nodes, command, name == "sbatch" and backend == "distopt", backend, most_wire)
        for (name, nodes), command in commands.items()
    )


# Gloo's ring of 2 x 2 ranks sends one and a half gradients from node to node.
PYTORCH_WAYS = (*_pytorch_ways("distopt", MOST_WIRE), *_pytorch_ways("gloo", 1.5 * MOST_WIRE))

_ON_SLURM = f"{TEMPLATE} -epochs {EPOCHS} -slurm -slurm_nnodes 2 -slurm_ncpus PER_NODE -slurm_wait"
# As typed in a terminal of each node, which knows nothing of Slurm.
_BY_HAND = (
    f"{_ONE_AGENT_EACH} bash -c 'node=$SLURM_NODEID; unset ${{!SLURM@}}; exec {TEMPLATE} -epochs {EPOCHS} "
    "-cpus PER_NODE -dist_url tcp://node1:29540 -nnodes 2 -node_rank $node'"
)

TEMPLATE_WAYS = (
    Way("-cpus", 1, f"{TEMPLATE} -epochs {EPOCHS} -cpus RANKS"),
    Way("-dist_url, on each node", 2, _BY_HAND),
    Way("-slurm", 2, f"{_ON_SLURM} -slurm_partition main -slurm_nodelist node1,node2", True),
    Way("-slurm -backend gloo", 2, f"{_ON_SLURM} -backend gloo", backend="gloo", most_wire=1.5 * MOST_WIRE),
)


@dataclass(frozen=True)
class Outcome:
    """A way's outcome.

    Attributes:
        output: of the job.
        code: exit code of the command.
        wire_bytes: what the node sent that sent less; Slurm's own messages included.
    """

    output: str
    code: int
    wire_bytes: int


def small_mnist(source: str | None, folder: Path) -> Path:
    """The first digits of MNIST as files, so that a job takes seconds."""
    digits = mnist.load(source)
    folder.mkdir()
    for name, images, labels, count in (
        ("train", digits.train_x, digits.train_y, TRAIN),
        ("t10k", digits.test_x, digits.test_y, TEST),
    ):
        (folder / f"{name}-images-idx3-ubyte").write_bytes(idx.encode(images[:count, 0]))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(idx.encode(labels[:count].astype(np.uint8)))
    return folder


def environment(data: Path, *, by_mpi: bool = False) -> dict[str, str]:
    """Of all jobs. The two nodes share a kernel, and MPI would find the ways past the wire."""
    return {
        **({"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": LINK} if by_mpi else {}),
        "DISTOPT_DATA_DIR": str(data),
        "PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }


def ours(command: str, here: Path, ranks: int, nodes: int, options: str) -> list[str]:
    """The words of a command in which names stand for this machine's paths, and for numbers of ranks."""
    names = {
        "PYTHON": sys.executable,
        "SCRIPT": SCRIPT,
        "DDP": DDP,
        "OPTIONS": f"{options} --checkpoint {here}/checkpoint",
        "BIN": BIN,
        "HERE": here,
        "RANKS": ranks,
        "PER_NODE": ranks // nodes,
    }
    return shlex.split(re.sub(rf"\b({'|'.join(names)})\b", lambda name: str(names[name[0]]), command))


def digits_of(output: str) -> list[str]:
    """The lines of losses and of accuracy, and those of parameters."""
    return re.findall(r"^(?:Train Epoch|Test set|Digest of the parameters): .*$", output, re.MULTILINE)


def least_wire_bytes(ranks: int) -> int:
    """The least that a node must send to another: one gradient in every step."""
    return EPOCHS * (TRAIN // (BATCH * ranks)) * GRADIENT_BYTES


def try_way(cluster: Cluster, way: Way, data: Path, ranks: int) -> Outcome:
    """Run it."""
    here = cluster.here / "jobs" / f"{re.sub(r'[^a-z0-9]+', '-', way.name)}-{ranks}"
    here.mkdir(parents=True)
    before = cluster.bytes_sent()
    done = cluster.run(
        ours(way.command, here, ranks, way.nodes, OPTIONS), env=environment(data, by_mpi=way.by_mpi), timeout=SECONDS
    )
    after = cluster.bytes_sent()
    logs = sorted([*here.glob("*.out"), *here.glob("submitit/*_log.out"), *here.glob("submitit/*_log.err")])
    output = done.stdout + "".join(log.read_text() for log in logs)
    return Outcome(output, done.returncode, min(after[node] - before[node] for node in before))
