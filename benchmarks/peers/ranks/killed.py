"""One rank of PyTorch's DDP that is killed, or whose node is lost, for `python -m benchmarks killed`.

    torchrun --nproc-per-node 2 killed.py FOLDER EVERY         saves by torch.save, as torchrun's guide has it
    distopt run --heal --nproc-per-node 2 killed.py            needs no files

Prints its process id, and rank 0 each step when it is done.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

SECONDS = 0.05  # a step, at least


def main() -> None:
    folder, every = (Path(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) > 1 else (None, 0)
    if folder is None:
        from distopt.torch import Checkpoint
    torch.set_num_threads(1)
    dist.init_process_group("gloo" if folder else "distopt")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10)))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1 + rank)
    step = 0
    if folder is None:
        checkpoint = Checkpoint(None, model=model, optimizer=optimizer)
        checkpoint.resume()
        step = checkpoint.steps
    elif (path := folder / "last.pt").exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    print(f"rank {rank} is {os.getpid()}", flush=True)
    while True:
        began = time.monotonic()
        optimizer.zero_grad()
        model(torch.randn(16, 400)).square().mean().backward()
        optimizer.step()
        step += 1
        if folder is None:
            checkpoint.step()
        elif rank == 0 and step % every == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(saved, folder / "part")
            (folder / "part").replace(folder / "last.pt")
        time.sleep(max(SECONDS - (time.monotonic() - began), 0.0))
        if rank == 0:
            print(f"step {step}", flush=True)


if __name__ == "__main__":
    main()
