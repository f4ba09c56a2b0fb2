"""Libraries that start from PyTorch's groups, over Gloo and over distopt: equal parameters to the last bit, or tokens.

    python -m tests.torch.libraries

runs those that are installed with two ranks each, by the recipes of docs/guide/pytorch.md, and prints a line for each.
Then it runs scripts by which libraries test themselves, as they are, under torchrun: with `DISTOPT_AS_GLOO=1`, too. No
part of continuous integration. With `--rank` it is one of the ranks.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIZE = 2
# test_metrics needs a hub. In test_distributed_data_loop ranks call other collectives: Gloo hangs, distopt says so.
SUITES = [f"accelerate.test_utils.scripts.{name}" for name in ("test_ops", "test_sync", "test_script")]
SUITE_SECONDS = 300


def main() -> int:
    failed = 0
    for name in RECIPES:
        if importlib.util.find_spec(name.partition(" ")[0]) is None:
            print(f"{name}: not installed")
            continue
        digests = [run(name, backend) for backend in ("gloo", "distopt")]
        found = {digest for each in digests for digest in each}
        agree = len(found) == 1 and "failed" not in found
        failed += not agree
        print(f"{name}: {'the same results' if agree else f'Gloo {digests[0]}, distopt {digests[1]}'}", flush=True)
    for name in SUITES:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            print(f"{name}: not installed")
            continue
        gloo, ours = (run_suite(name, as_gloo) for as_gloo in ("0", "1"))
        failed += ours is None and gloo is not None
        seconds = ("failed" if each is None else f"{each:.1f} s" for each in (gloo, ours))
        print(f"{name}: Gloo {next(seconds)}, distopt in its place {next(seconds)}", flush=True)
    return 1 if failed else 0


def run_suite(name: str, as_gloo: str) -> float | None:
    """Seconds; None if it fails."""
    words = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    variables = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "DISTOPT_AS_GLOO": as_gloo}
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [*words, f"--nproc-per-node={SIZE}", "-m", name],
            env=os.environ | variables,
            capture_output=True,
            timeout=SUITE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    return None if done.returncode else time.perf_counter() - began


def run(name: str, backend: str) -> list[str]:
    """The last word of each rank; "failed" for one that failed."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {"WORLD_SIZE": str(SIZE), "OMP_NUM_THREADS": "1"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # accelerate looks whether they are there
        ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.torch.libraries", "--rank", name, backend, folder],
                env=os.environ | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(SIZE)
        ]
        outputs = [process.communicate(timeout=600)[0].split() for process in ranks]
        return [o[-1] if o and not process.returncode else "failed" for o, process in zip(outputs, ranks, strict=True)]


def rank_main(name: str, backend: str, folder: str) -> None:
    import torch
    import torch.distributed as dist

    import distopt.torch  # noqa: F401 - registers the backend

    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1))
    x = torch.randn(64, 20)
    tokens = RECIPES[name](model, torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), folder, backend)
    assert dist.get_backend() == backend
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(tokens or f"{total:.17g}")
    dist.barrier()
    dist.destroy_process_group()


def accelerate(model: object, data: object, folder: str, backend: str) -> None:
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    wrapped, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), loader)
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(wrapped(inputs), targets))
        optimizer.step()


def transformers(model: object, data: object, folder: str, backend: str) -> None:
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


def generation(model: object, data: object, folder: str, backend: str) -> str:
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


def lightning(model: object, data: object, folder: str, backend: str) -> None:
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
        accelerator="cpu", devices=SIZE, strategy=DDPStrategy(process_group_backend=backend), max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Regression(), torch.utils.data.DataLoader(data, batch_size=8))


RECIPES = {
    "accelerate": accelerate,
    "transformers": transformers,
    "transformers generate": generation,
    "lightning": lightning,
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(*sys.argv[2:])
    else:
        sys.exit(main())
