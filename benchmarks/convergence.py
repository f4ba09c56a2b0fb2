"""The reference CNN on MNIST with each codec: accuracy per epoch, bytes per step, steps per second.

Writes the tables of docs/results/convergence.md, and its plot. The result of each run is kept as a JSON file in the
folder given by --cache, so an interrupted series resumes where it stopped. Needs the real MNIST, not generated digits,
and matplotlib.
With `--front torch`, PyTorch's DDP trains, through `distopt.torch.hook`, with each codec that has a bound.

    python -m benchmarks convergence --np 2 --epochs 10 --cache /tmp/convergence
    python -m benchmarks convergence --np 2 --epochs 10 --front torch
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distopt import device, launch, opt, tensor
from distopt.cli.values import at_least
from distopt.codecs import (
    BFloat16,
    Codec,
    CommunicationStatistics,
    ErrorFeedback,
    Fp16,
    Fp32,
    PowerSGD,
    Threshold,
    TopK,
)
from distopt.data import ShardedSampler
from distopt.errors import UsageError

from .models import CNN, sgd, train_cnn
from .output import ROOT, put, table

STEPS_PER_EPOCH = 468  # 60,000 images, 2 ranks, batch 64
PARTITION = 100_000  # elements; the model falls into two partitions


@dataclass(frozen=True)
class Sent:
    """What is sent, and how near to fp32's final accuracy it must come."""

    label: str
    codec: Codec | None  # None: partial update
    bound: float | None = None  # points
    momentum: float = 0.9  # the optimizer's
    dtype: type = np.float32  # of the activations

    @property
    def of_hooks(self) -> bool:
        """Whether `--front torch` compares it."""
        compared = self.bound is not None or isinstance(self.codec, Fp32)
        return compared and self.codec is not None and self.dtype is np.float32


def sparse() -> dict[str, Sent]:
    warm_up = TopK(0.001, warm_up_steps=STEPS_PER_EPOCH)
    codecs = {
        "topk5": ("top-K 5 %", TopK(0.05), 0.2),
        "topk1": ("top-K 1 %", TopK(0.01), 0.2),
        "topk01": ("top-K 0.1 %, warm-up", warm_up, 0.5),
        "threshold05": ("threshold 0.05", Threshold(0.05), 0.5),
        "threshold01": ("threshold 0.01", Threshold(0.01), 0.5),
    }
    fed = {name: Sent(f"{label}, error feedback", ErrorFeedback(c), b) for name, (label, c, b) in codecs.items()}
    dgc = ErrorFeedback(TopK(0.001, warm_up_steps=STEPS_PER_EPOCH, momentum=0.9))
    fed["topk01-dgc"] = Sent("top-K 0.1 %, warm-up, momentum correction", dgc, 0.5, momentum=0.0)
    bare = {f"{name}-bare": Sent(f"{label}, no feedback", c) for name, (label, c, _) in codecs.items()}
    return fed | bare


SENT = {
    "fp32": Sent("fp32", Fp32()),
    "fp16": Sent("fp16", Fp16(), 0.2),
    "bf16": Sent("bf16", BFloat16(), 0.2),
    "half": Sent("fp32, activations and weights in float16", Fp32(), 0.3, dtype=np.float16),
    "partial": Sent("partial update", None, 0.5),
    "powersgd2": Sent("PowerSGD rank 2, error feedback", ErrorFeedback(PowerSGD(2)), 0.2),
    **sparse(),
}


class TypedCNN(CNN):
    def forward(self, x):
        """As that of `CNN`, on x in the type of the model."""
        return super().forward(x if x.dtype == self.dtype else x.as_type(self.dtype))


@dataclass(frozen=True)
class Front:
    """A rank of a front end, ready to train."""

    data: train_cnn.mnist.Digits
    images: np.ndarray  # of a batch, which `step` trains
    step: Callable[[np.ndarray], object]  # with the labels
    accuracy: Callable[[], float]
    stats: Callable[[], CommunicationStatistics]
    end: Callable[[], None]


def of_nn(rank: int, sent: Sent, args: argparse.Namespace, _: Path) -> Front:
    optimizer = opt.DistOpt(sgd(sent.momentum), codec=sent.codec or Fp32(), partition_elements=PARTITION)
    data = train_cnn.mnist.load(args.data_dir, rank=rank, exchange=optimizer.communicator.all_gather_bytes)
    device.get_default_device().SetRandSeed(args.seed)
    images = tensor.Tensor((args.batch_size, *data.train_x.shape[1:]))
    cnn = TypedCNN()
    cnn.partial, cnn.dtype = sent.codec is None, sent.dtype
    cnn.set_optimizer(optimizer)
    cnn.compile([images], is_train=True)

    def accuracy() -> float:
        optimizer.synchronize()
        found = train_cnn.evaluate(cnn, data, optimizer)[1]
        cnn.train()
        return found

    def step(labels: np.ndarray) -> None:
        cnn(images, tensor.from_numpy(labels))

    cnn.train()
    return Front(data, images.array, step, accuracy, optimizer.stats, optimizer.communicator.barrier)


def of_torch(rank: int, sent: Sent, args: argparse.Namespace, store: Path) -> Front:
    import torch
    import torch.distributed as dist

    from distopt.torch import hook

    from .peers.ranks.networks_torch import cnn

    dist.init_process_group("distopt", store=dist.FileStore(str(store), args.np), rank=rank, world_size=args.np)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    data = train_cnn.mnist.load(args.data_dir, rank=rank)
    model = torch.nn.parallel.DistributedDataParallel(cnn(tuned=True))
    state, function = hook(model, sent.codec)
    model.register_comm_hook(state, function)
    optimizer = torch.optim.SGD(model.parameters(), **sgd(sent.momentum).values)
    images = torch.empty(args.batch_size, *data.train_x.shape[1:])

    def step(labels: np.ndarray) -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), torch.from_numpy(labels).long()).backward()
        optimizer.step()

    @torch.no_grad()
    def accuracy() -> float:
        x, y = (torch.from_numpy(each[rank :: args.np]) for each in (train_cnn.normalize(data.test_x), data.test_y))
        correct = (model.module(x).argmax(1) == y).sum()
        dist.all_reduce(correct)
        return correct.item() / len(data.test_x)

    return Front(data, images.numpy(), step, accuracy, state.stats, dist.destroy_process_group)


FRONTS = {"nn": of_nn, "torch": of_torch}


def train(rank: int, world_size: int, name: str, args: argparse.Namespace, result: Path) -> None:
    front = FRONTS[args.front](rank, SENT[name], args, result.with_suffix(".store"))
    data = front.data
    sampler = ShardedSampler(len(data.train_x), world_size, rank, args.batch_size, seed=args.seed)
    noise = np.random.default_rng((args.seed, rank))
    accuracies, seconds = [], 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        for chosen in sampler:
            train_cnn.random_shift(data.train_x[chosen], front.images, noise, 2)
            front.step(data.train_y[chosen])
        seconds += time.perf_counter() - start
        accuracies.append(front.accuracy())
    stats = front.stats()
    if rank == 0:
        record = {
            "accuracies": accuracies,
            "steps_per_second": stats.steps / seconds,
            "bytes_per_step": stats.total.wire_bytes / stats.steps,
            "dense_bytes_per_step": stats.total.dense_bytes / stats.steps,
            "fell_back": stats.total.fell_back,
        }
        result.write_text(json.dumps(record))
    front.end()


def record_of(name: str, args: argparse.Namespace) -> dict:
    """The record of a run, from the cache or from a run."""
    settings = {"np": args.np, "epochs": args.epochs, "batch_size": args.batch_size, "seed": args.seed}
    settings |= {"front": args.front, "sent": repr(SENT[name])}
    file = args.cache / f"{args.front}-{name}.json"
    if file.exists():
        record = json.loads(file.read_text())
        if record["settings"] == settings:
            return record
    new = file.with_suffix(".new")
    new.with_suffix(".store").unlink(missing_ok=True)  # of a run that was ended
    launch.spawn(train, args.np, (name, args, new))
    record = {"settings": settings, **json.loads(new.read_text())}
    new.write_text(json.dumps(record))
    new.rename(file)
    return record


def rows(records: dict[str, dict]) -> Iterator[list[str]]:
    reference = records["fp32"]["accuracies"][-1]
    for name, record in records.items():
        final, bound = record["accuracies"][-1], SENT[name].bound
        points = 100 * (final - reference)
        verdict = "" if bound is None else f"{bound} {'held' if points >= -bound else '**missed**'}"
        share = record["bytes_per_step"] / record["dense_bytes_per_step"]
        sent = [f"{record['bytes_per_step'] / 1e3:.1f} kB", f"{100 * share:.2f} %"]
        speed = f"{record['steps_per_second']:.0f}"
        yield [SENT[name].label, f"{100 * final:.2f} %", f"{points:+.2f}", verdict, *sent, speed]


def plot_errors(errors: dict[str, Sequence[float]], labels: dict[str, str], path: Path) -> None:
    """Plot the test error (%) after each epoch, by codec: those named "...-bare" in a panel of their own, fp32 in both."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")  # drawn without a display
    panels = figure.subplots(1, 2, sharey=True)
    for axes, title, bare in zip(panels, ("dense, and error feedback", "no feedback"), (False, True), strict=True):
        for name, error in errors.items():
            if name == "fp32" or name.endswith("-bare") == bare:
                style = {"color": "black", "linewidth": 2} if name == "fp32" else {"linewidth": 1}
                axes.plot(range(1, len(error) + 1), error, label=labels[name], **style)
        axes.set(title=title, xlabel="epoch", yscale="log")
        axes.legend(fontsize=7)
        axes.grid(visible=True, which="both", alpha=0.3)
    panels[0].set_ylabel("test error (%)")
    figure.savefig(path, dpi=110)


def write(records: dict[str, dict], args: argparse.Namespace) -> None:
    final = ["sent", "test accuracy", "points from fp32", "bound", "sent per step and rank", "of dense", "steps/s"]
    job = f"{args.np} ranks, {args.epochs} epochs, batch size {args.batch_size} per rank, seed {args.seed}"
    results = [
        f"{job}; {platform.system()} {platform.machine()}, Python {platform.python_version()}.",
        table(final, rows(records)),
    ]
    if args.front == "torch":
        put(args.output, "convergence --front torch", "\n\n".join(results))
        return
    errors = {name: 100 * (1 - np.array(record["accuracies"])) for name, record in records.items()}
    plot_errors(errors, {name: SENT[name].label for name in records}, args.output.with_suffix(".png"))
    put(args.output, "convergence", "\n\n".join(results))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--np", type=at_least(1), default=2, metavar="N", help="ranks (2)")
    parser.add_argument("--epochs", type=at_least(1), default=10, metavar="N", help="(10)")
    parser.add_argument("--batch-size", type=at_least(1), default=64, metavar="N", help="samples per rank (64)")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="(0)")
    parser.add_argument("--front", choices=FRONTS, default="nn", help="what trains (nn); torch has codecs with a bound")
    parser.add_argument("--only", nargs="+", choices=SENT, help="these alone; the page then needs fp32 too")
    parser.add_argument("--data-dir", help="folder with MNIST's four files")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "convergence", help="folder for finished runs")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/results/convergence.md", help="page with the marks")


def run(args: argparse.Namespace) -> None:
    names = [name for name in SENT if args.front == "nn" or SENT[name].of_hooks]
    if others := sorted({*(args.only or ())} - {*names}):
        raise UsageError(f"--front torch does not compare {', '.join(others)}, only {', '.join(names)}")
    args.cache.mkdir(parents=True, exist_ok=True)
    records = {}
    for name in args.only or names:
        record = records[name] = record_of(name, args)
        print(f"{name}: {record['accuracies'][-1]:.4f}, {record['steps_per_second']:.1f} steps/s", flush=True)
    if "fp32" in records:
        write(records, args)
