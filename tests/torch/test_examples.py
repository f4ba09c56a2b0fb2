"""examples/pytorch: mnist_ddp.py started as its docstring says; the tokens of tensor_parallel.py."""

import re
import socket
import sys
from collections.abc import Callable

import pytest

from tests.digits import write_digits
from tests.processes import ROOT, Program, end_all, mpiexec_command

pytest.importorskip("torch")

SCRIPT = str(ROOT / "examples" / "pytorch" / "mnist_ddp.py")
STEPS = 20  # of an epoch of two ranks
OPTIONS = ["--epochs", "2", "--batch-size", "16", "--log-interval", "1", "--digest"]
BY_AGENT = [sys.executable, "-m", "distopt", "run", "--nproc-per-node", "2", SCRIPT, *OPTIONS]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of all jobs. They train on few digits."""
    folder = write_digits(tmp_path_factory.mktemp("digits"), 2 * 16 * STEPS, 200)
    return {"DISTOPT_DATA_DIR": str(folder), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def undisturbed(env: dict[str, str], once: Callable[..., list[str]]) -> list[str]:
    return once("mnist_ddp", lambda: digits_of(run([BY_AGENT], env)))


def run(commands: list[list[str]], env: dict[str, str]) -> str:
    """The commands beside each other, as on several nodes; what they say."""
    return "".join(each.stdout + each.stderr for each in end_all(Program(command, env) for command in commands))


def digits_of(output: str) -> list[str]:
    """The lines of losses and accuracies, and that of the parameters."""
    return re.findall(r"^(?:Train Epoch|Test set|Digest of the parameters): .*$", output, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "backend"), [("by hand", "distopt"), ("torchrun on two nodes", "gloo"), ("mpiexec", "distopt")]
)
def test_every_start_gives_the_same_digits(
    way: str, backend: str, port: int, env: dict[str, str], undisturbed: list[str]
) -> None:
    options = [*OPTIONS, "--backend", backend]
    if way == "mpiexec":
        env = {**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        commands = [[*mpiexec_command(2), sys.executable, SCRIPT, *options]]
    elif way == "by hand":
        place = ["--init-method", f"tcp://127.0.0.1:{port}", "--world-size", "2"]
        commands = [[sys.executable, SCRIPT, *place, "--rank", str(rank), *options] for rank in range(2)]
    else:
        place = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{port}", "--rdzv-id", "7"]
        commands = 2 * [[*TORCHRUN, "--nnodes", "2", *place, SCRIPT, *options]]
    said = run(commands, env)
    assert len(undisturbed) == 2 * (STEPS + 1) + 1
    assert digits_of(said) == undisturbed
    for rank in range(2):
        there = f"on {socket.gethostname()} where there are 0 allocated GPUs per node."
        assert f"Hello from rank {rank} of 2 {there}" in said


@pytest.mark.slow
def test_one_rank_needs_no_launcher(env: dict[str, str]) -> None:
    said = run([[sys.executable, SCRIPT, *OPTIONS, "--backend", "gloo"]], env)
    assert "Hello from rank 0 of 1" in said
    assert len(digits_of(said)) == 2 * (2 * STEPS + 1) + 1


@pytest.mark.slow
def test_tensor_parallel_ranks_find_the_tokens_of_one_rank() -> None:
    options = ["--hidden", "256", "--layers", "3", "--tokens", "20"]
    script = [str(ROOT / "examples" / "pytorch" / "tensor_parallel.py"), *options]
    ways = {
        "1 ranks over gloo": [*script, "--backend", "gloo"],
        "4 ranks over distopt": ["-m", "distopt", "run", "--nproc-per-node", "4", *script],
    }
    said = {way: run([[sys.executable, *words]], {"OMP_NUM_THREADS": "1"}) for way, words in ways.items()}
    tokens = [re.findall(r"^Tokens: (.*)$", text, re.MULTILINE) for text in said.values()]
    assert len(tokens[0]) == 1
    assert len(set(tokens[0][0].split())) > 5, "other tokens, not one again and again"
    assert all(each == tokens[0] for each in tokens), tokens
    for way, text in said.items():
        assert re.search(rf"^{way}: \d+\.\d tokens/s$", text, re.MULTILINE), text
