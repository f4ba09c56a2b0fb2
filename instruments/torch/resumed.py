"""A job that may be killed or preempted at any moment; prints what it ends with, to the bit.

    distopt run --nproc-per-node 2 -m instruments.torch.resumed --backend gloo --folder F --steps 60

Batch normalisation, dropout, AdamW, a cosine schedule, a GradScaler or bfloat16, and two workers that load.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from distopt import codecs
from distopt.torch import Checkpoint, DiLoCo, DistOpt, ResumableSampler, hook

DDP = ("ddp", "zero", "hook")
LOCAL = {  # options of DiLoCo
    "diloco": {"sync_every": 6},
    "sparse-diloco": {"sync_every": 6, "fragments": 2, "fragment_sync_delay": 1},
}


class Network(nn.Module):
    """Registers its layers in another order than that of their use, so that DDP lays out its buckets anew."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(400, 10)
        self.first = nn.Conv2d(1, 16, 5, stride=2)
        self.norm = nn.BatchNorm2d(16)
        self.middle = nn.Linear(16 * 12 * 12, 400)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.norm(self.first(images))).flatten(1)
        return self.last(functional.dropout(functional.relu(self.middle(hidden)), 0.3, self.training))


def digest(*objects) -> str:
    """Of all that is in state dictionaries, in order."""
    sums = hashlib.blake2b(digest_size=8)

    def add(value) -> None:
        if isinstance(value, dict):
            for key, each in value.items():
                add(key)
                add(each)
        elif isinstance(value, (list, tuple)):
            for each in value:
                add(each)
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            sums.update(local.detach().numpy().tobytes())
        else:
            sums.update(repr(value).encode())

    for each in objects:
        add(each.state_dict())
    return sums.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="distopt")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=7)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step (0)")
    parser.add_argument("--until", type=Path, default="", help="a file: when it exists, there are no pauses any more")
    parser.add_argument("--precision", choices=["scaled", "bfloat16"], default="scaled")
    parser.add_argument("--static-graph", action="store_true")
    parser.add_argument("--by", choices=[*DDP, "fsdp", "dist-opt", *LOCAL], default="ddp")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of an update; each counts as a step (1)")
    parser.add_argument("--end", nargs=2, metavar=("SIGNAL", "STEP"), help="on rank 1, in this step")
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model, more = Network(), {}
    codec = codecs.create("top-k", ratio=0.02, error_feedback=True)
    if args.by in DDP:
        model = DistributedDataParallel(model, bucket_cap_mb=1, broadcast_buffers=False, static_graph=args.static_graph)
    elif args.by == "fsdp":
        model = fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if args.by == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
    elif args.by == "hook":
        more["hook"], function = hook(model, codec)
        model.register_comm_hook(more["hook"], function)
    elif args.by == "dist-opt":
        optimizer = DistOpt(optimizer, model.named_parameters(), codec=codec)
    elif args.by in LOCAL:
        outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)
        sent = codec if args.by == "sparse-diloco" else "fp32"
        more["local"] = DiLoCo(model, optimizer, outer, codec=sent, **LOCAL[args.by])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    scaler = torch.amp.GradScaler("cpu", enabled=args.precision == "scaled", growth_interval=10)
    images = torch.randn(960, 1, 28, 28, generator=torch.Generator().manual_seed(5))
    labels = images.flatten(1)[:, :10].argmax(1)
    data = TensorDataset(images, labels)
    sampler = ResumableSampler(data, 16, seed=2)
    generator = torch.Generator().manual_seed(6 + rank)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=2, prefetch_factor=4, generator=generator)
    torch.manual_seed(100 + rank)

    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "sampler": sampler}
    parts["generator"] = generator
    checkpoint = Checkpoint(args.folder, every=args.every, preemptible=True, **parts, **more)
    if resumed := checkpoint.resume():
        print(f"resuming from step {resumed.step}", flush=True)
    while checkpoint.steps < args.steps:
        sampler.set_epoch(checkpoint.epoch)
        for batch, truth in loader:
            if checkpoint.steps % args.accumulate == 0:
                optimizer.zero_grad()
            updates = (checkpoint.steps + 1) % args.accumulate == 0
            with contextlib.nullcontext() if updates else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bfloat16"):
                    loss = functional.cross_entropy(model(batch), truth)
                scaler.scale(loss).backward()
            if updates:
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
            if args.end and rank == 1 % size and checkpoint.steps == int(args.end[1]):
                os.kill(os.getpid(), signal.Signals[args.end[0]])
            time.sleep(0 if args.until.is_file() else args.pause)
            checkpoint.step()
            if checkpoint.steps % 10 == 0 and rank == 0:
                print(f"step {checkpoint.steps}", flush=True)
            if checkpoint.steps == args.steps:
                break
        else:
            checkpoint.save(checkpoint.epoch + 1)
    checkpoint.close()
    time.sleep(0.01 * rank)  # lines in order
    own = optimizer.optim if args.by == "zero" else optimizer
    drawn = int(generator.get_state().to(torch.int64).sum())
    ends = digest(model, own, scheduler, scaler, *more.values())
    print(f"rank {rank} ends with {ends} {loss.item():.6f} {drawn}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
