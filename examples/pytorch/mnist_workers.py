"""MNIST on workers that come and go: each trains on its own, and DiLoCo averages what they have learned.

    distopt run --heal --workers rank --nproc-per-node 3 examples/pytorch/mnist_workers.py
    distopt run --heal --workers node --nnodes 1:8 --rdzv-endpoint HOST:29400 examples/pytorch/mnist_workers.py

Kill a worker, unplug a machine, or run the same line on another one: the others train on, and a worker that comes
copies what they hold. With `--checkpoint DIR` it resumes on any number of workers.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import distopt.torch
from distopt import codecs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data import mnist


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10)),
    )


def scaled(images: torch.Tensor) -> torch.Tensor:
    return (images.float() / 255 - 0.1307) / 0.3081


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--averages", type=int, default=50, help="until training ends (50)")
    parser.add_argument("--sync-every", type=int, default=20, metavar="STEPS", help="from one average to the next (20)")
    parser.add_argument("--codec", choices=["fp32", "fp16", "top-k"], default="fp32", help="of what is sent (fp32)")
    parser.add_argument("--min-workers", type=int, default=1, help="that take part in an average (1)")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per rank and step (64)")
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="after each step (0)")
    parser.add_argument("--checkpoint", metavar="DIR", help="resume from there, and save after each average")
    parser.add_argument("--data", metavar="DIR", help="where MNIST is (default: as examples/data/mnist.py says)")
    args = parser.parse_args()
    dist.init_process_group("distopt")  # the ranks of this worker alone
    torch.manual_seed(1)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    digits = mnist.load(args.data, rank=dist.get_rank())
    train_x, train_y = torch.from_numpy(digits.train_x), torch.from_numpy(digits.train_y).long()
    model = network()
    forward = nn.parallel.DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.5, nesterov=True)
    codec = codecs.create("top-k", ratio=0.05, error_feedback=True) if args.codec == "top-k" else args.codec
    local = distopt.torch.DiLoCo(
        model,
        inner,
        outer,
        sync_every=args.sync_every,
        codec=codec,
        min_workers=args.min_workers,
        averages=args.averages,
    )
    checkpoint = distopt.torch.Checkpoint(
        args.checkpoint, every=args.sync_every, replicated=False, model=forward, inner=inner, local=local
    )
    checkpoint.resume()
    # Every worker draws other batches, also one that starts again.
    drawing = torch.Generator().manual_seed(1_000_003 * local.worker + dist.get_rank())
    while not local.finished:
        chosen = torch.randint(len(train_x), (args.batch_size,), generator=drawing)
        inner.zero_grad()
        loss = functional.cross_entropy(forward(scaled(train_x[chosen])), train_y[chosen])
        loss.backward()
        inner.step()
        checkpoint.step()
        time.sleep(args.pause)
        if local.steps % args.sync_every == 0 and dist.get_rank() == 0:
            print(f"worker {local.worker} (pid {os.getpid()}): step {local.steps}, loss {loss:.3f}", flush=True)
    checkpoint.close()
    model.load_state_dict(local.average())
    if dist.get_rank() == 0:
        with torch.no_grad():
            guessed = model(scaled(torch.from_numpy(digits.test_x))).argmax(1)
        accuracy = (guessed == torch.from_numpy(digits.test_y).long()).float().mean().item()
        digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()
        print(f"worker {local.worker} ends with {accuracy:.2%}, digest {digest[:16]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
