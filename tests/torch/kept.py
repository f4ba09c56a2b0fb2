"""Two ranks that use a DTensor, whose group PyTorch keeps until the process ends. Run by test_launch.py."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import distopt.torch  # noqa: F401 - registers the backend

if __name__ == "__main__":
    torch.set_num_threads(1)
    child = os.fork()
    dist.init_process_group("distopt", init_method=f"file://{sys.argv[1]}", rank=0 if child else 1, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0)
    assert torch.equal(distribute_tensor(whole, mesh, [Shard(0)]).full_tensor(), whole)
    dist.destroy_process_group()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
