r"""A small language model trained by several ranks on CPUs, over fast and slow links.

    distopt run --nproc-per-node 2 examples/pytorch/language/train.py
    distopt run --nproc-per-node 2 examples/pytorch/language/train.py --way diloco-top-k --steps 300

Workers that come and go, on any number of nodes; a lost one ends no other:

    distopt run --heal --workers node --nnodes 1:8 --rdzv-endpoint HOST:29400 \
        examples/pytorch/language/train.py --way diloco-top-k --min-workers 1

Samples are drawn by seed, worker and step, and a step has no other randomness: no rank has states of its own to save.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from model import TINY, LanguageModel, loss_of
from text import Text
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import distopt.torch
from distopt import codecs

# Registers a hook at DDP.
Hook = Callable[[DistributedDataParallel], Any]


def power_sgd(ddp: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


HOOKS: dict[str, Hook] = {
    "ddp": lambda _: None,
    "ddp-fp16": lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "ddp-power-sgd": power_sgd,
    "hook-fp16": lambda ddp: ddp.register_comm_hook(*distopt.torch.hook(ddp, "fp16")),
    "hook-top-k": lambda ddp: ddp.register_comm_hook(
        *distopt.torch.hook(ddp, "top-k", ratio=0.01, error_feedback=True)
    ),
}
LOCAL: dict[str, codecs.Codec] = {
    "diloco": codecs.create("fp32"),
    "diloco-top-k": codecs.create("top-k", ratio=0.05, error_feedback=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=[*HOOKS, *LOCAL], default="ddp")
    parser.add_argument("--backend", choices=["distopt", "gloo"], default="distopt", help="of the process group")
    parser.add_argument("--steps", type=int, default=300, help="(300)")
    parser.add_argument("--batch-size", type=int, default=8, help="samples per rank and step (8)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="of AdamW (0.003)")
    parser.add_argument("--sync-every", type=int, default=100, help="steps from one average to the next (100)")
    parser.add_argument("--min-workers", type=int, help="of a job by --workers: fewer wait for others")
    parser.add_argument("--test-every", type=int, default=50, metavar="STEPS", help="(50)")
    parser.add_argument("--seed", type=int, default=1, help="of parameters and samples (1)")
    parser.add_argument("--checkpoint", metavar="DIR", help="folder of files to resume from")
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model, text = LanguageModel(TINY), Text(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, betas=(0.9, 0.95))
    net: nn.Module = model
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    stream, local = dist.get_rank(), None
    if args.way in HOOKS or (args.min_workers and dist.get_world_size() > 1):
        net = ddp = DistributedDataParallel(model)
        HOOKS.get(args.way, HOOKS["ddp"])(ddp)
    if args.way in LOCAL:
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        options = {"sync_every": args.sync_every, "codec": LOCAL[args.way], "min_workers": args.min_workers}
        local = distopt.torch.DiLoCo(model, optimizer, outer, averages=args.steps // args.sync_every, **options)
        parts["diloco"] = local
        if args.min_workers:  # every worker has other samples, also one that starts again
            stream += local.worker * dist.get_world_size()
    checkpoint = distopt.torch.Checkpoint(args.checkpoint, replicated=local is None, **parts)
    checkpoint.resume()
    counting: Any = checkpoint if local is None else local  # a worker that joins goes on at the others' step
    validation, began = text.validation(), time.perf_counter()
    while not (local.finished if local is not None else counting.steps >= args.steps):
        optimizer.zero_grad()
        loss_of(net, text.batch(stream, counting.steps, args.batch_size)).backward()
        optimizer.step()
        checkpoint.step()
        if counting.steps % args.test_every == 0:
            with torch.no_grad():
                found = loss_of(model, validation).item()
            if dist.get_rank() == 0:
                print(f"step {counting.steps}: loss {found:.4f}, {time.perf_counter() - began:.1f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
