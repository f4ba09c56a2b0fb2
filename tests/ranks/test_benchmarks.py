"""Every benchmark, and every command with one that README and docs name, in seconds: the smallest sizes come last."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks import network
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.networks.emulation import two_hosts
from benchmarks.networks.far import Link, far_hosts
from tests.conformance.ranks import has_ucx
from tests.digits import write_digits
from tests.processes import ROOT, Program, or_skipped

pytestmark = pytest.mark.slow

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]
COMMAND = re.compile(r"python -m benchmarks ([a-z].*)")

# Options that make a run short; {NAME}: see `files`.
SHORT = {
    "all-reduce": "-b 1K -e 1K -n 2 --turns 1 --peers= --sizes 1K",
    "train": "--batch-size 2 -n 1 -w 0 --turns 1 --peers=",
    "pytorch": "--only cnn --rounds 1 --steps 1",
    "never-slower": "--only small,mpi-2x1,torch-2x1-1KiB,ucx-1KiB,torch-4x1-1KiB,ucx-2x1-1KiB --turns 1 --profile",
    "kernels": "--count 1000 -n 1 --peers=",
    "scale": "--model resnet18 --image-size 32 --batch-size 2 --steps 1 --warm-up 0 --repeats 1 --only distopt,apart "
    "--json {results} --plot {plot} --output {page}",
    "collectives": "--only 2x1,1gbit,all_reduce --sizes 1K --samples 1 --peers= --results {results} --output {page}",
    "network": "--steps 1 --rates 1gbit --output {page}",
    "language": "--only gloo,sparse-loco --hosts 2 --rate 1000 --steps 4 --sync-every 2 --test-every 2 --batch-size 1 "
    "--model tiny --test-samples 1 --plot {plot}",
    "distance": "--hosts 2,3 --delay 2 --rate 1000 --sizes 1KiB --turns 1 --load 0 --loss 0 --output {page}",
    "hosts": "--tokens 1",  # for the command of the page
    "overlap": "--cases 1 --repeats 1 --wait 0.2",
    "startup": "--rounds 1",
    "killed": "--times 1",
    "churn": "--only ddp,diloco,gloo --hosts 2 --seconds 12 --every 3 --away 1 --output {page}",
    "serving": "--only tiny --rounds 1 --tokens 2 --output {page}",
    "recorder": "--steps 30 --batch-size 2",
    "checks": "--rounds 1",
    "checkpoint": "--pairs 1 --every 2 --data-dir {digits}",
    "convergence": "--epochs 1 --batch-size 32 --only fp32 half partial topk1-bare --data-dir {digits} --cache {cache} "
    "--output {page}",
    "convergence --front torch": "--epochs 1 --batch-size 32 --only fp32 topk1 --data-dir {digits} --cache {cache} "
    "--output {page}",
    "memory": "--steps 20 --batch-size 2 --only distopt",
    "step-profile": "--steps 5 --batch-size 4",
    "gpu": "--elements 1000 --selected-from 1000 --write {page}",
}
# tests/unit/test_bench.py runs these and look at their results.
IN_UNIT_TESTS = {"all-reduce", "train", "kernels"}
AS_ROOT = {"churn", "collectives", "network", "never-slower", "overlap", "startup"}
FAR_APART = {"distance", "hosts", "language"}
ON_GPUS = {"gpu"}


def documented() -> list[str]:
    """The words after `python -m benchmarks` in the pages' blocks of commands and in their text, each once."""
    found = set()
    for page in PAGES:
        text = re.sub(r"<!--.*?-->", "", page.read_text())
        blocks = re.findall(r"```sh\n(.*?)```", text, re.S)
        lines = [line.partition("  #")[0] for block in blocks for line in block.splitlines()]
        quoted = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
        matches = [COMMAND.search(" ".join(command.split())) for command in (*lines, *quoted)]
        found |= {match[1] for match in matches if match}
    return sorted(found)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """The files that `SHORT` names."""
    folder = tmp_path_factory.mktemp("files")
    digits = write_digits(folder / "digits", 384, 100)
    page = folder / "page.md"
    pages = ("network.md", "faults.md", "gpu.md", "convergence.md", "scaling.md", "language.md")
    page.write_text("".join((ROOT / "docs" / "results" / name).read_text() for name in pages))
    names = {"results": "results.json", "cache": "cache", "plot": "plot.png"}
    return {"digits": digits, "page": page, **{name: folder / file for name, file in names.items()}}


def run_short(words: str, files: dict[str, Path]) -> Program:
    """Start a benchmark with the words of a page, then those of `SHORT`."""
    name = words.split(maxsplit=1)[0]
    if name in AS_ROOT or "--emulate" in words:
        require_hosts()
    if name in FAR_APART:
        pytest.importorskip("torch")
        with or_skipped(far_hosts(2, Link(0.0, 1e6), "-probe")):
            pass
    if name == "distance" and not has_ucx():
        pytest.skip("UCX is absent: pip install libucx-cu12")
    if name in {"convergence", "scale"}:
        pytest.importorskip("matplotlib")
    words = words.replace("2xN", "2x1").replace(".venv/bin/python", sys.executable)
    own = SHORT[f"{name} --front torch" if "--front torch" in words else name].format(**files)
    return Program([sys.executable, "-m", "benchmarks", *words.split(), *own.split()])


def require_hosts() -> None:
    pytest.importorskip("mpi4py", exc_type=ImportError)
    with or_skipped(two_hosts("-probe")):
        pass


def test_every_benchmark_is_here_and_in_its_readme():
    assert {words.split()[0] for words in SHORT} == set(BENCHMARKS)
    table = (ROOT / "benchmarks" / "README.md").read_text()
    assert all(re.search(rf"^\| [^|]*\b{name}\b[^|]* \|", table, re.M) for name in BENCHMARKS)
    modules = {path.stem.replace("_", "-") for path in (ROOT / "benchmarks").glob("*.py")}
    assert modules - {"--init--", "--main--", "models", "options", "output"} == set(BENCHMARKS)


def test_the_pages_name_commands_that_exist():
    commands = documented()
    assert len(commands) >= 20
    assert {words.split()[0] for words in commands} <= set(BENCHMARKS)
    text = "\n".join(page.read_text() for page in PAGES)
    assert not re.search(r"python benchmarks/|distopt bench", text)


@pytest.mark.sweep(rest=4)
@pytest.mark.parametrize(
    "words",
    [
        *sorted({*BENCHMARKS} - {"network", "hosts"} - ON_GPUS - IN_UNIT_TESTS),
        *(pytest.param(words, marks=pytest.mark.sweep) for words in documented() if words not in BENCHMARKS),
    ],
)
def test_a_benchmark_runs(words, files):
    if words.split()[0] in {"network", "hosts", *ON_GPUS}:
        pytest.skip("see the tests below, and for hosts test_far_hosts.py")
    if "--pytorch" in words or words.split()[0] in {"scale", "serving"}:
        pytest.importorskip("torch")
    assert run_short(words, files).end(code=0).stdout


@pytest.mark.parametrize(
    ("rows", "peers"),
    [
        (["fp32"], ["PyTorch DDP fp32"]),
        pytest.param(["fp32", "partial update", "PowerSGD rank 2"], list(network.DDP), marks=pytest.mark.sweep),
    ],
)
def test_training_steps_between_hosts(files, monkeypatch, peers_here, rows, peers):
    require_hosts()
    monkeypatch.setattr(network, "SENT", {row: network.SENT[row] for row in rows})
    monkeypatch.setattr(network, "DDP", {row: network.DDP[row] for row in peers})
    assert main(["network", *SHORT["network"].format(**files).split()]) == 0
    table = re.findall(r"^\| ([^|]*?) \|", files["page"].read_text().partition("network: end")[0], re.M)
    assert table == ["sent", "---", *rows, *peers]


def test_without_a_gpu_the_reason_is_given(files):
    if shutil.which("nvidia-smi"):
        pytest.skip("there is one")
    ended = run_short("gpu", files).end(code=1)
    assert "the benchmark measures on a GPU: " in ended.stderr
