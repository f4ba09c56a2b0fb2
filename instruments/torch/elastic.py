"""A job of PyTorch in shards, whose ranks and hosts may come and go; prints as `instruments.faults.healed` does.

distopt run --heal --nproc-per-node 1:2 -m instruments.torch.elastic ddp --steps 100
"""

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distopt.torch
from instruments.faults.healed import SHARDS, begin, come, end, options

from .resumed import digest


def main() -> None:
    parser = options()
    parser.add_argument("by", choices=["dist-opt", "ddp", "plain"], help="plain: DDP without shards")
    parser.add_argument("--backend", default="distopt")
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3000), nn.Dropout(0.2),
        nn.Linear(3000, 4),
    )  # fmt: skip
    sgd = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    parts = {"model": net, "optimizer": sgd}
    shards, model, step = None if args.by == "plain" else SHARDS, net, sgd
    if args.by != "dist-opt":
        parts["model"] = model = DistributedDataParallel(net)
    if args.by == "plain":
        parts["schedule"] = schedule = torch.optim.lr_scheduler.StepLR(sgd, 7, 0.97)
    elif args.by == "ddp":
        parts["hook"], function = distopt.torch.hook(model, shards=SHARDS, seed=5)
        model.register_comm_hook(parts["hook"], function)
        cut = parts["hook"]
    else:
        places = {"named_parameters": net.named_parameters(), "model": net}
        cut = step = parts["optimizer"] = distopt.torch.DistOpt(sgd, shards=SHARDS, seed=5, **places)
    torch.manual_seed(100 + rank)
    images = torch.randn(args.samples, 1, 8, 8, generator=torch.Generator().manual_seed(5))
    labels = images.flatten(1)[:, :4].argmax(1)
    sampler = distopt.torch.ResumableSampler(len(images), 2, seed=2, shards=shards)
    checkpoint = distopt.torch.Checkpoint(args.folder, every=args.every, sampler=sampler, **parts)
    resumed = come(checkpoint, rank, size)
    for epoch in itertools.count(checkpoint.epoch):
        sampler.set_epoch(epoch)
        for chosen in sampler:
            begin(args, checkpoint, rank, resumed)
            for part in [chosen] if shards is None else cut.shards(chosen):
                nn.functional.cross_entropy(model(images[part]), labels[part]).backward()
            step.step()
            if shards is None:
                sgd.zero_grad()
                schedule.step()
            end(args, checkpoint, rank, epoch)
            if checkpoint.steps >= args.steps:
                break
        if checkpoint.steps >= args.steps:
            break
    checkpoint.close()
    print(f"ends with {digest(net, sgd)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
