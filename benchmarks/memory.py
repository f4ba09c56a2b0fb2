"""Resident memory of a training rank over many steps of the reference CNN, distopt beside PyTorch DDP over Gloo.

Rss counts every page that the process has mapped and touched, shared ones too; Pss divides these among the processes
that share them. The largest of the ranks is printed, after the first steps and then at even distances.

    python benchmarks/memory.py --np 2 --batch-size 64 --steps 2000
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

FIRST_STEPS, SAMPLES = 10, 8


def resident_mib() -> tuple[float, float]:
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(fields["Rss"].split()[0]) / 1024, int(fields["Pss"].split()[0]) / 1024


def sample(step, count: int, result: Path) -> None:
    """Write (steps done, Rss, Pss) at several moments."""
    rows = []
    for done in range(1, count + 1):
        step()
        if done == FIRST_STEPS or done % max(count // SAMPLES, 1) == 0:
            rows.append((done, *resident_mib()))
    result.write_text(json.dumps(rows))


def batch(size: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rank)
    return rng.standard_normal((size, 1, 28, 28), dtype=np.float32), rng.integers(0, 10, size).astype(np.int32)


def distopt_rank(rank: int, world_size: int, ticket, size: int, steps: int, folder: str) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from train_cnn import CNN

    from distopt import opt, tensor

    sgd = opt.DistOpt(opt.SGD(lr=0.005, momentum=0.9, weight_decay=1e-5), ticket, rank, world_size)
    x, y = (tensor.from_numpy(array) for array in batch(size, rank))
    net = CNN()
    net.set_optimizer(sgd)
    net.compile([x], is_train=True, use_graph=True)
    sample(lambda: net(x, y), steps, Path(folder, str(rank)))
    sgd.communicator.barrier()


def torch_rank(rank: int, world_size: int, store: str, size: int, steps: int, folder: str) -> None:
    import torch
    from torch import distributed, nn

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    images, labels = batch(size, rank)
    x, y = torch.from_numpy(images), torch.from_numpy(labels).long()
    layers = [nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10)]
    net = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    sgd = torch.optim.SGD(net.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-5)
    criterion = nn.CrossEntropyLoss()

    def step() -> None:
        sgd.zero_grad()
        criterion(net(x), y).backward()
        sgd.step()

    sample(step, steps, Path(folder, str(rank)))
    distributed.destroy_process_group()


def run_distopt(args: argparse.Namespace, folder: str) -> None:
    from distopt import launch, singa_wrap

    launch.spawn(distopt_rank, args.np, (singa_wrap.NcclIdHolder(), args.batch_size, args.steps, folder))


def run_torch(args: argparse.Namespace, folder: str) -> None:
    import torch.multiprocessing as processes

    with tempfile.TemporaryDirectory() as meeting:
        arguments = (args.np, f"file://{meeting}/store", args.batch_size, args.steps, folder)
        processes.spawn(torch_rank, args=arguments, nprocs=args.np)


PEERS = {"distopt": run_distopt, "torch-ddp": run_torch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2, help="ranks")
    parser.add_argument("--batch-size", type=int, default=64, help="samples a rank")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--only", choices=PEERS, help="measure one of the two")
    args = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"

    for name in [args.only] if args.only else PEERS:
        with tempfile.TemporaryDirectory() as folder:
            PEERS[name](args, folder)
            ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
        print(f"{name}: largest of {args.np} ranks, batch {args.batch_size}")
        print(f"{'steps':>8} {'Rss MiB':>9} {'Pss MiB':>9}")
        for rows in zip(*ranks, strict=True):
            print(f"{rows[0][0]:8} {max(row[1] for row in rows):9.1f} {max(row[2] for row in rows):9.1f}", flush=True)


if __name__ == "__main__":
    main()
