"""Libraries over PyTorch that ask for Gloo, as they are: over Gloo, and with DISTOPT_AS_GLOO=1 over distopt.

    python -m tests.torch.libraries [--rounds 3] [--sources FOLDER] [--only WORD]

runs tests that libraries ship, by torchrun or by pytest, and short scripts that use a library as its documentation
does, where its wheel and its source on the package index have no tests of groups. All run with two ranks, and differ
in the variable alone. It prints a table: how each ended, and the least seconds of `--rounds` runs, which take turns.
Scripts also have to end with equal results to the last bit, or equal tokens. `make torch-libraries` installs the
versions of `libraries.txt`, and unpacks the sources of accelerate and ignite into the folder that `--sources` names;
without it, tests by pytest are left out. No part of continuous integration. With `--rank` it is one of the ranks.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SIZE = 2
SECONDS = 600  # then what runs has hung
OF_ACCELERATE = "accelerate.test_utils.scripts"
# In test_distributed_data_loop ranks call other collectives: Gloo hangs, distopt raises an error. The script
# test_metrics reads a data set from a hub. The sources of torchmetrics, Lightning, DeepSpeed and sentence-transformers
# on the package index have no tests of groups.
MODULES = [f"{OF_ACCELERATE}.{name}" for name in ("test_ops", "test_sync", "test_script", "test_distributed_data_loop")]
# Paths in the unpacked sources, and further words for pytest: ignite's tests run in each of two workers of xdist.
EACH = ["-m", "distributed", "--dist=each", "--tx", f"{SIZE}*popen//python={sys.executable}"]
FILES: dict[str, list[str]] = {
    f"accelerate-1.15.0/tests/{name}.py": []
    for name in ("test_cpu", "test_grad_sync", "test_scheduler", "test_metrics")
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
    suites: dict[str, Callable[[str], Ended]] = {name: lambda a, name=name: run_module(name, a) for name in MODULES}
    if args.sources:
        suites |= {name: lambda a, name=name: run_file(args.sources, name, a) for name in FILES}
    suites |= {f"script: {name}": lambda a, name=name: run_recipe(name, a) for name in RECIPES}
    print("| | version | Gloo | distopt | Gloo, s | distopt, s | distopt / Gloo |\n|---|---|---|---|---|---|---|")
    failed = 0
    for name, run in suites.items():
        if args.only not in name:
            continue
        package = re.split(r"[-. ]", name.removeprefix("script: "))[0]
        try:
            found = version({"ignite": "pytorch-ignite", "pytorch_ignite": "pytorch-ignite"}.get(package, package))
        except PackageNotFoundError:
            print(f"| {name} | not installed |", flush=True)
            continue
        ended: dict[str, list[Ended]] = {"0": [], "1": []}
        for _ in range(args.rounds):
            for as_gloo, each in ended.items():
                each.append(run(as_gloo))
        # One failed run counts as failed.
        gloo, ours = (min(each, key=lambda e: (e.is_good, e.seconds)) for each in ended.values())
        equal = len({e.results for each in ended.values() for e in each}) == 1
        failed += gloo.is_good and not (ours.is_good and equal)
        ratio = f"{ours.seconds / gloo.seconds:.2f}" if gloo.is_good and ours.is_good else ""
        differ = "" if equal or not gloo.is_good else ", other results"
        seconds = f"{gloo.seconds:.1f} | {ours.seconds:.1f}"
        print(f"| {name} | {found} | {gloo.said} | {ours.said}{differ} | {seconds} | {ratio} |", flush=True)
    return 1 if failed else 0


def run_module(name: str, as_gloo: str) -> Ended:
    """A module that torchrun starts."""
    return execute(["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={SIZE}", "-m", name], as_gloo)[0]


def run_file(sources: Path, name: str, as_gloo: str) -> Ended:
    """Tests by pytest, in the folder of their library."""
    folder, path = name.split("/", 1)
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=200", *FILES[name], path]
    size = {"WORLD_SIZE": str(SIZE)} if FILES[name] is EACH else {}
    ended, output = execute(words, as_gloo, sources / folder, **size)
    counts = re.findall(r"\d+ (?:passed|failed|skipped|error)", output.splitlines()[-1]) if output else []
    return ended._replace(said=", ".join(sorted(counts, key=lambda each: each.split()[1])) or ended.said)


def run_recipe(name: str, as_gloo: str) -> Ended:
    """A function of this file, as the program of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={SIZE}"]
        ended, output = execute([*start, str(Path(__file__)), "--rank", name, folder], as_gloo)
    results = re.findall(r"^result (\d+) (.*)$", output, re.MULTILINE)
    groups = {"0": "ProcessGroup", "1": "DistoptProcessGroup"}
    if ended.said == "passed" and set(re.findall(r"^group (\w+)$", output, re.MULTILINE)) != {groups[as_gloo]}:
        return ended._replace(said="another group")
    return ended._replace(results=str(sorted(results)))


def execute(words: list[str], as_gloo: str, folder: Path = ROOT, **more: str) -> tuple[Ended, str]:
    """Run Python with `words`; how it ended, and its output."""
    # DeepSpeed compiles an extension once, and a run that is killed meanwhile leaves a lock there.
    variables = {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    variables["TORCH_EXTENSIONS_DIR"] = str(ROOT / "build" / "torch-extensions")
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", *words],
        env=os.environ | variables | {"DISTOPT_AS_GLOO": as_gloo} | more,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output = process.communicate(timeout=SECONDS)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 15)  # torchrun ends its ranks
            return Ended("hangs", "", SECONDS), ""
    seconds = time.perf_counter() - began
    return Ended("failed" if process.returncode else "passed", "", seconds), output


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
    sys.stdout.write(f"\ngroup {type(dist.group.WORLD).__name__}\n")
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


RECIPES: dict[str, Callable[..., str | None]] = {
    "accelerate": accelerate,
    "transformers": transformers,
    "transformers generate": generation,
    "lightning": lightning,
    "torchmetrics": torchmetrics,
    "ignite": ignite,
    "deepspeed ZeRO 0": zero(0),
    "deepspeed ZeRO 1": zero(1),
    "deepspeed ZeRO 2": zero(2),
    "monai": monai,
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(*sys.argv[2:])
    else:
        sys.exit(main())
