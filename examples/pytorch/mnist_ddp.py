"""A CNN on MNIST with PyTorch's DistributedDataParallel, over distopt or, unchanged, over Gloo.

    torchrun --nproc-per-node 2 examples/pytorch/mnist_ddp.py
    distopt run --nproc-per-node 2 examples/pytorch/mnist_ddp.py
    srun, mpiexec: MASTER_ADDR=$(hostname) MASTER_PORT=29500 mpiexec -n 2 python examples/pytorch/mnist_ddp.py

`--backend gloo` runs it without distopt. The files of MNIST are read from `--data`, or where distopt keeps them.
"""

from __future__ import annotations

import argparse
import gzip
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

# What srun and mpiexec call what torchrun and `distopt run` call RANK, WORLD_SIZE.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


def images_and_labels(folder: Path, part: str) -> TensorDataset:
    """One part of MNIST, "train" or "t10k", as float32 [n, 1, 28, 28] and int64 [n]."""

    def read(name: str, header_bytes: int) -> np.ndarray:
        path = next(path for path in (folder / name, folder / f"{name}.gz") if path.exists())
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        return np.frombuffer(data, np.uint8, offset=header_bytes)

    images = torch.from_numpy(read(f"{part}-images-idx3-ubyte", 16).reshape(-1, 1, 28, 28) / np.float32(255))
    labels = torch.from_numpy(read(f"{part}-labels-idx1-ubyte", 8).astype(np.int64))
    return TensorDataset((images - 0.1307) / 0.3081, labels)


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Dropout(0.3), nn.Linear(500, 10)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="distopt", help="distopt or gloo (distopt)")
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank (64)")
    parser.add_argument("--lr", type=float, default=0.02)
    cache = Path.home() / ".cache" / "distopt" / "mnist"
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("DISTOPT_DATA_DIR", cache)))
    args = parser.parse_args()

    if args.backend == "distopt":
        import distopt.torch  # noqa: F401 - registers the backend
    rank, world_size = next((int(os.environ[r]), int(os.environ[n])) for r, n in LAUNCHERS if r in os.environ)
    dist.init_process_group(args.backend, rank=rank, world_size=world_size)

    torch.manual_seed(1)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), args.lr * world_size, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    train, test = (images_and_labels(args.data, part) for part in ("train", "t10k"))
    sampler = DistributedSampler(train, shuffle=True, seed=1)
    batches = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    torch.manual_seed(rank)  # other units drop out on every rank

    for epoch in range(args.epochs):
        start = time.perf_counter()
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(2, dtype=torch.float64)  # loss and batches
        for images, labels in batches:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1])
        schedule.step()
        correct = torch.zeros(2, dtype=torch.int64)  # and images
        model.eval()
        with torch.no_grad():
            for images, labels in DataLoader(test, 1000, sampler=range(rank, len(test), world_size)):
                correct += torch.tensor([(model.module(images).argmax(1) == labels).sum(), len(labels)])
        dist.all_reduce(total)
        dist.all_reduce(correct)
        if rank == 0:
            print(
                f"Epoch {epoch}: training loss {total[0] / total[1]:.4f}, "
                f"evaluation accuracy {correct[0] / correct[1]:.4f}, {time.perf_counter() - start:.1f} s",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
