"""Three hosts, and bytes on the network."""

import os
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.networks.emulation import LINK
from distopt.comm.net import ucx
from distopt.torch import store_job

from .ranks import Ranks, reduced, same


def check_three_hosts(r: Ranks) -> None:
    """Three carriers divide a sum, of more chunks than may be under way. Ranks believe to be on hosts of their own."""
    if r.counts != [3]:
        return
    with (
        mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"),
        mock.patch.object(store_job, "host_identity", return_value=f"host {r.rank}"),
        mock.patch.multiple(ucx, _FAR_CHUNK_BYTES=1 << 12, _NEAR_CHUNK_BYTES=1 << 12),
    ):
        group = r.group()
    for count in (1, 2, 1_000, 20_011, 300_007):
        every = r.each(shape=(count,))
        for kind in ("SUM", "MAX"):
            out = every[r.rank].clone()
            dist.all_reduce(out, getattr(dist.ReduceOp, kind), group=group)
            same(out, reduced(kind, every), count)
        out = torch.empty(3 * count)
        dist.all_gather_single(out, every[r.rank], group=group)
        same(out, torch.cat(every), count)
        part = torch.empty(count)
        dist.reduce_scatter_single(part, torch.cat(every).mul_(r.rank + 1), group=group)
        same(part, every[r.rank] * 6, count)
        dist.broadcast(part, 1, group=group)
        same(part, every[1] * 6, count)


def check_bytes_between_hosts(r: Ranks) -> None:
    """In a sum of n bytes a host sends n bytes, with any number of ranks a host, if both have the same."""
    if len(set(r.counts)) != 1 or len(r.counts) != 2:
        return
    tensor = torch.ones(1 << 20)
    dist.all_reduce(tensor)
    sent = []
    for _ in range(5):
        dist.barrier()
        before = sent_bytes()
        dist.all_reduce(tensor)
        dist.barrier()
        sent.append((sent_bytes() - before) / tensor.nbytes)
    assert 1.0 <= min(sent) < 1.1, f"{sent} times the bytes of the tensor"  # TCP may send some again


def sent_bytes() -> int:
    """The number of bytes, with headers, that this host has sent to the other."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith(f"{LINK}:"))
