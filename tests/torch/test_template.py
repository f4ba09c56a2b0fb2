"""examples/template: its command lines, files added to it, jobs that resume, and errors of one line."""

import os
import pickle
import re
import shutil
import signal
import socket
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from distopt.errors import UsageError
from tests.events import scalars
from tests.processes import ROOT, Ended, Program, end_all, mpiexec_command, patience

torch = pytest.importorskip("torch")
pytest.importorskip("submitit")
pytest.importorskip("tensorboardX")
pytest.importorskip("tensorboard")

TEMPLATE = ROOT / "examples" / "template"
STEPS = 12  # of an epoch of two ranks
OPTIONS = "-dataset synthetic -samples 192 -batch_size 8 -epochs 2 -log_every 3"


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules of the template, which have names of others' modules, too."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(TEMPLATE))
    yield SimpleNamespace(**{name: import_module(name) for name in ("options", "loop", "train", "slurm")})
    for name in set(sys.modules) - before:
        if str(TEMPLATE) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for Slurm, which has no partition x: `sbatch` keeps the script, in the file that is returned."""
    folder, kept = tmp_path / "bin", tmp_path / "script"
    folder.mkdir()
    for name, script in {
        "srun": "",
        "sbatch": f'cp "$1" {kept}; if grep -q partition=x "$1"; then echo no partition x >&2; exit 1; fi; '
        "echo Submitted batch job 7",
        "sinfo": "echo 'main (nodes node1)'; echo 'urgent (nodes node2)'",
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return kept


# -- what a command line becomes ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("-cpus 2", {0: "cpu", 1: "cpu"}),
        ("--gpus 0,3", {0: "cuda:0", 1: "cuda:3"}),
        ("-cpus 2 -dist_url tcp://a:29500 -nnodes 2 -node_rank 1", {2: "cpu", 3: "cpu"}),
        ("-gpus 6,7 -dist_url tcp://a:29500 -nnodes 2 -node_rank 1", {2: "cuda:6", 3: "cuda:7"}),
    ],
)
def test_ranks_of_a_command(command, ranks, project, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    args = project.options.parse("", [*command.split(), "-fp16"])
    started = {}
    monkeypatch.setattr(project.loop, "run", lambda *of: started.update({of[0]: (str(of[2]), of[1])}))
    for local_rank in range(2):
        project.train.run_here(local_rank, len(args.gpus) or args.cpus, args)
    assert started == {rank: (device, 2 * args.nnodes) for rank, device in ranks.items()}
    assert args.backend == ("nccl" if args.gpus else "distopt")
    assert args.dist_url == ("tcp://a:29500" if args.nnodes == 2 else "")


@pytest.mark.parametrize("what", ["cpus", "gpus"])
def test_the_submitted_job(what, project, cluster, tmp_path):
    command = f"-slurm -slurm_nnodes 2 -slurm_n{what} 8 -slurm_partition main -slurm_nodelist node1,node2 -lr 0.5"
    args = project.options.parse("", [*command.split(), "-arch", "convnet", "-out", str(tmp_path)])
    project.slurm.submit(args)
    settings = re.findall(r"^#SBATCH --(\S*)$", cluster.read_text(), re.MULTILINE)
    logs = f"{tmp_path}/submitit/%j_0_log"
    assert sorted(settings) == sorted(
        f"job-name=convnet-mnist nodes=2 ntasks-per-node=8 cpus-per-task=1 partition=main nodelist=node1,node2 time=60 "
        f"signal=USR2@60 requeue open-mode=append output={logs}.out error={logs}.err wckey=submitit".split()
        + (["gpus-per-node=8"] if what == "gpus" else [])
    )
    assert f"export PYTHONPATH={TEMPLATE}:$PYTHONPATH\n" in cluster.read_text()
    rank = pickle.loads((tmp_path / "submitit" / "7_submitted.pkl").read_bytes()).function
    assert rank.args.lr == 0.5
    assert rank.args.backend == ("nccl" if what == "gpus" else "distopt")
    assert rank.checkpoint().function is rank


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("-arch cnm", "-arch: there is no 'cnm' in .*/archs; there are cnn, convnet"),
        ("-dataset mnits", "-dataset: there is no 'mnits' in .*/datasets; there are mnist, synthetic"),
        ("-trainer x", "-trainer: there is no 'x' in .*/trainers; there are classifier"),
        ("-gpus 0,9", "-gpus: there is no 0, 9; this machine has no GPU that PyTorch can use; -cpus N trains without"),
        ("-nnodes 2", "-dist_url: '' is not tcp://HOST:PORT of node 0, the same on all nodes"),
        ("-dist_url tcp://a:PORT", r"-dist_url: port \d+ of .*: Address already in use; port \d+ is free"),
        ("-tb -tb_port PORT", r"-tb_port: port \d+ of .*: Address already in use; port \d+ is free"),
        ("-data /nowhere", r"unrecognized arguments: -data /nowhere \(see -help\)"),
        ("-epochs x", r"argument -epochs/--epochs: invalid int value: 'x' \(see -help\)"),
    ],
)
def test_errors_say_what_there_is(command, said, project, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        with pytest.raises(UsageError, match=f"^{said}$"):
            project.options.parse("", command.replace("PORT", str(other.getsockname()[1])).split())


def test_slurm_may_refuse_a_job_or_be_absent(project, cluster, tmp_path, capfd, monkeypatch):
    args = project.options.parse("", ["-slurm", "-slurm_partition", "x", "-out", str(tmp_path)])
    with pytest.raises(UsageError, match=r"^no partition x; there are main \(nodes node1\), urgent \(nodes node2\)$"):
        project.slurm.submit(args)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="there is no Slurm here"):
        project.options.parse("", ["-slurm"])


# -- jobs --------------------------------------------------------------------------------------------------------------
def started(command: str, out: Path, template: Path = TEMPLATE) -> Program:
    words = [sys.executable, str(template / "train.py"), *command.split(), "-out", str(out)]
    return Program(words, {"OMP_NUM_THREADS": "1"})


def run(command: str, out: Path, template: Path = TEMPLATE) -> Ended:
    return started(command, out, template).end()


def digits_of(output: str) -> list[str]:
    return re.findall(r"^(?:Train Epoch|Train set|Test set|Digest of the parameters): .*$", output, re.MULTILINE)


ARCH = """
from torch import nn
def add_options(parser):
    parser.add_argument("-code", type=int, default=3)
def build(args, data):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, args.code), nn.Linear(args.code, 16))
"""
DATA_SET = """
import torch
from parts import Data
from torch.utils.data import TensorDataset
def build(args):
    rows = torch.randn(96, 4, generator=torch.Generator().manual_seed(1)).repeat(1, 4).view(96, 1, 4, 4)
    return Data(TensorDataset(rows[:64]), TensorDataset(rows[64:]), (1, 4, 4), 0)
"""
TRAINER = """
from loop import Trainer
class Autoencoder(Trainer):
    def measure(self, network, batch):
        difference = network(batch[0]) - batch[0].flatten(1)
        return {"loss": difference.square().mean(), "largest difference": difference.abs().max()}
build = Autoencoder
"""


@pytest.mark.slow(kept=1)
def test_one_new_file_each(tmp_path):
    """In a copy of the folder, which stands alone."""
    template = tmp_path / "mine"
    shutil.copytree(TEMPLATE, template, ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in {"archs/tiny": ARCH, "datasets/rows": DATA_SET, "trainers/autoencoder": TRAINER}.items():
        (template / f"{path}.py").write_text(text)
    command = "-cpus 2 -arch tiny -code 4 -dataset rows -trainer autoencoder -epochs 12 -batch_size 8 -lr 0.3"
    ended = run(command, tmp_path / "runs", template)
    assert ended.code == 0, ended.stderr
    losses = [float(loss) for loss in re.findall(r"Test set: .* loss (\S+), largest difference", ended.stdout)]
    assert len(losses) == 12
    assert losses[-1] < 0.1 * losses[0], losses


@pytest.fixture
def whole(once, tmp_path) -> list[str]:
    """The digits of an undisturbed run."""
    return once("template", lambda: digits_of(run(f"{OPTIONS} -cpus 2", tmp_path / "whole").stdout))


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("way", ["by hand", "distopt run", "torchrun", "mpiexec"])
def test_every_start_gives_the_same_digits(way, whole, tmp_path, port):
    """Ranks of a launcher would each choose a port of their own, and wait for each other for ever."""
    python = [sys.executable, "-W", "ignore"]
    train = [str(TEMPLATE / "train.py"), *OPTIONS.split(), "-out", str(tmp_path)]
    if way == "by hand":
        place = f"-cpus 1 -backend gloo -dist_url tcp://127.0.0.1:{port} -nnodes 2 -node_rank".split()
        commands = [[*python, *train, *place, str(rank)] for rank in range(2)]
    else:
        launcher = {
            "distopt run": [*python, "-m", "distopt", "run"],
            "torchrun": [*python, "-m", "torch.distributed.run", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-backend=c10d"],
        }
        words = [*launcher[way], "--nproc-per-node", "2"] if way in launcher else [*mpiexec_command(2), *python]
        commands = [[*words, *train, "-cpus", "2"]]
    ended, *others = end_all([Program(command, {"OMP_NUM_THREADS": "1"}) for command in commands])
    assert len(whole) == 2 * (STEPS // 3 + 2) + 1
    assert digits_of(ended.stdout) == whole
    assert all(other.stdout == "" for other in others)
    for rank in range(2):
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert f"Rank {rank} of 2" in log
        assert digits_of(log)[-1] == whole[-1]


@pytest.mark.slow
def test_a_peer_that_never_comes_is_named_and_not_waited_for_longer(tmp_path, port):
    place = f"-cpus 1 -timeout 12 -dist_url tcp://127.0.0.1:{port} -nnodes 2 -node_rank 0"
    ended = run(f"{OPTIONS} {place}", tmp_path)
    assert ended.code != 0
    assert f"Rank 0 waits for all 2 ranks at tcp://127.0.0.1:{port}" in ended.stdout


@pytest.mark.slow
@pytest.mark.sweep  # tests/torch/test_checkpoint.py kills and preempts jobs in continuous integration
def test_a_job_that_was_killed_and_preempted_ends_with_the_same_digits(tmp_path, port):
    """With bfloat16, batch normalization, AdamW's moments, a loader's worker and TensorBoard's numbers."""
    options = f"-cpus 2 {OPTIONS} -epochs 3 -fp16 -arch convnet -optimizer adamw -lr 0.01 -workers 1 -tb"
    options += f" -tb_port {port}"
    out, said = tmp_path / "runs", ""
    whole = run(options, out)
    assert whole.code == 0, whole.stderr
    board = scalars(out / "board")
    killed = started(f"{options} -reset -save_every 4", out)
    said += read_until(killed, "[96/192]")
    killed.kill()
    killed.process.communicate()
    preempted = started(f"{options} -save_every 100", out)
    said += read_until(preempted, "Train Epoch")  # the ranks agree after so few steps that it is not too late
    os.kill(preempted.process.pid, signal.SIGTERM)
    left = preempted.end()
    assert left.code == 128 + signal.SIGTERM, said + left.stdout + left.stderr
    last = run(options, out)
    assert "Resuming from" in last.stdout
    assert set(digits_of(said + left.stdout + last.stdout)) == set(digits_of(whole.stdout))
    log = (out / "logs" / "rank-0.log").read_text()
    assert set(digits_of(log)) == set(digits_of(whole.stdout))
    assert log.count("Digest") == 1  # -reset has removed that of the first job
    after = scalars(out / "board")
    for numbers in (board, after):
        for name in [name for name in numbers if name.startswith("speed/")]:
            assert list(numbers.pop(name)) == list(range(3, 3 * STEPS + 1, 3))
    assert after == board
    each = {f"{part} set/{what}" for part in ("train", "test") for what in ("loss", "accuracy")}
    assert set(board) == {"train/loss", "train/learning rate", *each}


def read_until(program: Program, text: str) -> str:
    assert program.process.stdout is not None
    said = ""
    while text not in said:
        line = program.process.stdout.readline()
        assert line, said
        said += line
    return said


@pytest.mark.slow
def test_the_page_is_served_while_the_job_runs(tmp_path, port):
    program = started(f"-cpus 1 {OPTIONS} -epochs 10000 -tb -tb_port {port}", tmp_path)
    read_until(program, "Test set: epoch 1")
    page, seen = f"http://localhost:{port}/data/plugin/scalars/tags", ""
    while "train/loss" not in seen:
        assert program.process.poll() is None
        with suppress(OSError):  # not yet
            seen = urllib.request.urlopen(page, timeout=patience(60)).read().decode()
    os.kill(program.process.pid, signal.SIGTERM)
    program.end()  # and leaves no server


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "said"),
    [("-arch x", "there is no 'x'"), ("-cpus 2 -data_dir /nowhere", "/nowhere has no train-images")],
)
def test_errors_are_one_line(command, said, tmp_path):
    ended = run(command, tmp_path)
    assert ended.code == 2, ended
    (line,) = ended.stderr.splitlines()
    assert said in line


def test_it_is_short():
    files = [path for path in TEMPLATE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(len(path.read_text().splitlines()) for path in files) <= 760
