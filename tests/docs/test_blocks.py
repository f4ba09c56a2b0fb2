"""Every block of Python and every command of README and docs runs, or stands here with the reason why not."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS
from tests.processes import ROOT

from .blocks import PAGES, Block, blocks, blocks_of, commands_of, missing_lines, run, with_outputs

SHARP = "docs/guide/sharp-bits.md"
TWO_RANKS = ["distopt", "run", "--nproc-per-node", "2"]

# Blocks of Python without the title of a file run one after the other: by a test that asserts more, or below, after
# these lines.
RUN_ELSEWHERE = {
    "README.md": "tests/unit/test_docs.py",
    "docs/guide/training.md": "tests/unit/test_docs.py",
    "docs/guide/collectives.md": "tests/ranks/test_world.py",
    "docs/guide/checkpoints.md": "tests/unit/test_checkpoint.py",
}
TORCH = """
import torch
from torch.nn.parallel import DistributedDataParallel
import distopt.torch
import torch.distributed as dist
dist.init_process_group("distopt")
"""
SETUP = {
    "docs/guide/pytorch.md": f"""{TORCH}
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
data = TensorDataset(torch.randn(256, 1, 5, 5), torch.zeros(256))
adam = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 10)
""",
    "docs/guide/codecs.md": f"""{TORCH}
import distopt.codecs
net, model = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
loss_function = torch.nn.CrossEntropyLoss()
batches = [(torch.randn(4, 5), torch.tensor([0, 1, 2, 0])) for _ in range(3)]
""",
    "docs/guide/one_hash.md": f"""{TORCH}
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(5, 3)
loss_function = torch.nn.CrossEntropyLoss()
data = TensorDataset(torch.randn(100, 5), torch.randint(0, 3, (100,)))
""",
    "docs/guide/template.md": f"""
import sys
sys.path.insert(0, {str(ROOT / "examples" / "template")!r})
""",
}
# Blocks of Python that do not run: the page, the title or a line, and the reason.
NOT_RUN = {
    ("docs/guide/codecs.md", "min_workers=1"): "needs --workers; examples/pytorch/mnist_workers.py is tested",
    ("docs/guide/horovod.md", "before.py"): "needs Horovod",
    ("docs/guide/pytorch.md", "before.py"): "a rank over Gloo aborts at its end now and then on a busy machine",
    ("docs/guide/singa.md", "train.py"): "needs SINGA; it runs after the page's command has changed its imports",
    ("docs/guide/pytorch.md", "accelerator = Accelerator(cpu=True)"): "needs accelerate: make torch-libraries",
    (SHARP, "class Counting(Net):"): "needs a GPU; tests/ranks/test_gpu_emulated.py counts replays",
    (SHARP, "# count in the loop, or read sgd.step_counter"): "the same",
}
# Commands that do not run here: a pattern, and the reason.
COMMANDS = {
    r"make [a-z-]+": "README's are in .ci/run; the others are targets of the Makefile",
    r"(time |sudo |DISTOPT_STREAMS=\d )*(\S*/)?python -m benchmarks [a-z]": "see tests/ranks/test_benchmarks.py",
    r"python3? -m venv|\S*/python -m pip|pip install|\. \.venv/bin/activate|distopt doctor$": "installs from an index",
    r"sbatch |srun |python examples/slurm/": "needs Slurm: make slurm runs these jobs",
    r"torchrun --standalone .* before.py": "see before.py above; a test below compares it with after.py, which runs",
    r"torchrun --nnodes|distopt run --nnodes": "needs two hosts: tests/ranks/test_run_hosts.py emulates them",
    r"python (script|examples/pytorch/mnist_ddp).py": "the same, in tests/torch",
    r"distopt run .*--timeline|distopt timeline ": "trains MNIST: tests/ranks/test_timeline.py has others",
    r"DISTOPT_HASH=every distopt run|distopt diff ": "compares two trainings: tests/unit/test_diff.py",
    r"distopt run .*--heal": "waits for a fault: tests/ranks/test_heal.py",
    r"((DISTOPT_DEVICE=cpu )?python|mpiexec .* python) examples/mnist_": "minutes: make mnist and make examples",
    r"python instruments/gpu|python3 first_gpu.py": "needs a GPU: make first-gpu",
    r"(python|distopt run .*) train.py .*-": "examples/template: tests/torch and make slurm run them",
    r"(python|mpiexec -n 2 python) train_(cnn|mpi|multiprocess).py": "needs SINGA's scripts: make singa",
    r"(\.venv/bin/)?python -m ((tests|instruments)\.|pytest )": "minutes: see docs/reference/testing.md",
    r"(distopt run .*|python )examples/pytorch/language/serve.py": "loads a model: tests/torch/test_language.py",
    r"export (DISTOPT|GLOO)_[A-Z_]+=": "sets a variable",
    r"wg genkey|sudo (wg|ip) |  peer KEY": "needs WireGuard on two hosts",
}


def files_of(page: str) -> dict[str, str]:
    """The files of a page by name."""
    return {block.title: block.text for block in blocks_of(page) if block.title.endswith(".py")}


def is_run(page: str, command: str) -> bool:
    """Whether a command needs the files of its page alone, and this host."""
    files = files_of(page)
    if not files or re.search(r"--nnodes|torchrun --standalone", command):
        return False
    named = [word for word in re.findall(r"[\w./*-]+\.py\b", command) if word != "*.py"]
    helps = re.match(r"export FARM_|sed -i|distopt run .*-m tests.conformance.run", command)
    return set(named) <= set(files) and bool(named or helps)


def runs_of(page: str) -> list[tuple[Block, str]]:
    """The blocks of commands of a page that run, each with the output that the page shows."""
    return [
        (block, output)
        for block, output in with_outputs(page)
        if block.language == "sh" and all(is_run(page, command) for command in commands_of(block))
    ]


def reasons(block: Block) -> list[tuple[str, str]]:
    """The entries of `NOT_RUN` that a block of Python has."""
    return [key for key in NOT_RUN if key[0] == block.page and (key[1] == block.title or key[1] in block.text)]


def require_packages(*texts: str) -> None:
    """Skip where an extra is not installed that a page uses."""
    for word, package in (("import torch", "torch"), ("mpiexec", "mpi4py")):
        if any(word in text for text in texts):
            pytest.importorskip(package)


@pytest.mark.slow(kept=2)
@pytest.mark.parametrize("page", [page for page in PAGES if runs_of(page)])
def test_the_files_of_a_page_run_and_print_what_it_shows(page, tmp_path):
    require_packages(*(block.text for block in blocks_of(page)))
    for name, text in files_of(page).items():
        (tmp_path / name).write_text(text)
    for block, output in runs_of(page):
        ended = run(["bash", "-euc", block.text], tmp_path)
        assert ended.code == 0, f"{block.place}: {ended.stderr}"
        assert not missing_lines(output, ended.stdout), f"{block.place} printed {ended.stdout!r}"


@pytest.mark.slow
@pytest.mark.parametrize("page", SETUP)
def test_the_blocks_of_a_page_run_one_after_the_other(page, tmp_path):
    own = [block for block in blocks_of(page) if block.language == "python" and not block.title and not reasons(block)]
    assert own
    require_packages("import torch")
    (tmp_path / "page.py").write_text("\n".join([SETUP[page], *(block.text for block in own)]))
    ended = run([*TWO_RANKS, "page.py"], tmp_path)
    assert ended.code == 0, ended.stderr


def test_the_command_of_the_page_changes_singas_script_into_the_one_after():
    page = "docs/guide/singa.md"
    before, after = files_of(page)["train.py"], files_of(page)["after.py"]
    (command,) = [c for block in blocks_of(page) for c in commands_of(block) if c.startswith("sed ")]
    change = ["sed", "-E", shlex.split(command)[3]]
    assert subprocess.run(change, input=before, capture_output=True, text=True, check=True).stdout == after


def test_the_script_of_pytorch_differs_in_the_backend_alone():
    before, after = (files_of("docs/guide/pytorch.md")[name] for name in ("before.py", "after.py"))
    assert before.replace('"gloo"', '"distopt"') == after


# -- sharp bits --------------------------------------------------------------------------------------------------------
JOB = "def train(rank, world_size):\n    print(f'rank {rank} of {world_size}')\n"


def examples() -> list[tuple[Block, str, str]]:
    """Each example of the page, with the lines before it and the output that the page shows."""
    before, found = "", []
    for block, output in with_outputs(SHARP):
        if block.title.startswith("before"):
            before = block.text
        elif block.language == "python" and not reasons(block):
            found.append((block, before, output))
    return found


@pytest.mark.slow(kept=2)
@pytest.mark.parametrize("example", examples(), ids=lambda example: f"{example[0].line}-{example[0].title}")
def test_a_sharp_bit_does_what_the_page_says(example, tmp_path):
    block, before, output = example
    require_packages(before)
    (tmp_path / "job.py").write_text(JOB)  # which a cell writes
    alone = "launch." in block.text  # starts ranks itself
    (tmp_path / "example.py").write_text(block.text if alone else before + block.text)
    command = ["python", "example.py"] if alone else [*TWO_RANKS, "example.py"]
    ended = run(["python", "-c", block.text] if "a cell" in block.text else command, tmp_path)
    assert not missing_lines(output, ended.stdout + ended.stderr), ended.stdout + ended.stderr
    if block.title == "DO NOT":
        assert output, "the page shows no effect"
    else:
        assert (ended.code, ended.stderr) == (0, "")


# -- nothing is left out -----------------------------------------------------------------------------------------------
def test_every_block_of_python_runs_or_has_a_reason():
    left, used = [], set()
    for block in blocks("python"):
        ast.parse(block.text)
        used |= {*reasons(block)}
        is_file = block.title.endswith(".py") and bool(runs_of(block.page))
        in_order = not block.title and (block.page in SETUP or block.page in RUN_ELSEWHERE)
        if not (reasons(block) or is_file or in_order or block.page == SHARP):
            left.append(block.place)
    assert not left
    assert used == set(NOT_RUN)


def test_the_tests_elsewhere_name_the_pages_that_they_run():
    for page, test in RUN_ELSEWHERE.items():
        assert any(block.language == "python" for block in blocks_of(page)), page
        assert Path(page).name in (ROOT / test).read_text()


def test_every_command_runs_or_has_a_reason():
    left, used, makefile = [], set(), (ROOT / "Makefile").read_text()
    options = subprocess.run([sys.executable, "-m", "distopt", "run", "-h"], capture_output=True, text=True, check=True)
    for block in [*blocks("sh"), *blocks("bash")]:  # those of bash are parts of job scripts
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
        for command in commands_of(block) if block.language == "sh" else ():
            if is_run(block.page, command):
                continue
            known = [pattern for pattern in COMMANDS if re.match(pattern, command)]
            used |= {*known}
            left += [] if known else [f"{block.place}: {command}"]
            if target := re.match(r"make ([a-z-]+)", command):
                assert re.search(rf"^{target[1]}:", makefile, re.M), command
            if benchmark := re.search(r"-m benchmarks ([a-z-]+)", command):
                assert benchmark[1] in BENCHMARKS, command
            if own := re.search(r"distopt run (.*?)\S+\.py", command):
                assert all(option in options.stdout for option in re.findall(r"--[a-z-]+", own[1])), command
            for path in re.findall(r"\b(?:examples|instruments|tests)/[\w./-]+", command):
                assert (ROOT / path).exists(), command
    assert not left
    assert used == set(COMMANDS)


@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_hidden_from_these_tests(page):
    """By another language, a fence in a list, or indentation."""
    text = (ROOT / page).read_text()
    assert {block.language for block in blocks_of(page)} <= {"python", "sh", "bash", "text", "diff"}
    assert len(re.findall(r"^\s*```", text, re.M)) == 2 * len(blocks_of(page))
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    assert not re.search(r"^[^ -].*\n\n    \S", prose, re.M)
