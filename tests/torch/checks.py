"""Checks of a group on its ranks, against the results of one process. Run by test_collectives.py.

    python -m tests.torch.checks RANKS

forks RANKS ranks ("2+1": on two emulated hosts), which make a group and run every function `check_...` in turn, and
prints for each the errors of all ranks as JSON.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import math
import os
import sys
import threading
import time
import traceback
from collections import Counter
from datetime import timedelta
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.data import DataLoader, TensorDataset

import distopt.torch
from benchmarks.networks.emulation import LINK
from distopt.errors import DistoptError
from distopt.torch import join as joining
from distopt.torch.ddp.shared_buckets import WireMemory
from distopt.torch.group.queue import PendingWork
from distopt.torch.hosts import communicator as hosts

from . import hooks as ddp_hooks
from .forked import CONTEXT, group_with_gloo, join, on_emulated_host, place_of

if TYPE_CHECKING:
    from collections.abc import Callable

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
TIMEOUT_SECONDS = 60.0
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *INTEGERS, *COMPLEX, torch.bool]
MOVED = [*DTYPES, torch.float8_e4m3fn, torch.complex32]
OPS = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
    "AVG": torch.add,
}
# How a tensor of 2 x 5 x 3 elements can lie in memory.
LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "transposed": lambda t: t.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 1],
    "flat": lambda t: t.reshape(-1),
    "empty": lambda t: t[:0],
    "number": lambda t: t[1, 2, 0].clone(),
}


def values(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (2, 5, 3)) -> torch.Tensor:
    """Data of a rank, small enough for products, depending on rank and index."""
    count = torch.Size(shape).numel()
    numbers = (torch.arange(count) * (rank + 2) + rank) % 5 + 1
    if dtype == torch.bool:
        return ((numbers % 3) > 0).view(shape)
    if dtype.is_complex:
        return torch.complex(numbers.double(), (numbers % 3).double()).to(dtype).view(shape)
    return numbers.to(dtype).view(shape)


def reduced(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """The reduction as PyTorch computes it in one process; 16-bit floats are accumulated in float32."""
    dtype = parts[0].dtype
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}.get(dtype, dtype)
    if dtype in {torch.uint16, torch.uint32, torch.uint64}:
        wide = torch.int64
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = OPS[name](total, part.to(wide))
    if name == "AVG":
        total = (
            torch.view_as_complex(torch.view_as_real(total) / len(parts)) if dtype.is_complex else total / len(parts)
        )
    return total.to(dtype)


def ops_of(dtype: torch.dtype) -> list[str]:
    if dtype.is_complex:
        return ["SUM", "AVG", "PRODUCT"]
    if dtype.is_floating_point:
        return ["SUM", "PRODUCT", "MIN", "MAX", "AVG"]
    if dtype == torch.bool:
        return ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
    return ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]


def same(found: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    assert found.dtype == expected.dtype, what
    assert found.shape == expected.shape, what
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}[found.element_size()]
    one, other = (t.detach().contiguous().view(-1).view(bits) for t in (found, expected))
    assert torch.equal(one, other), f"{what}: {found} instead of {expected}"


class Ranks:
    """This rank, and the group, with so many ranks on each host."""

    def __init__(self, rank: int, counts: list[int]) -> None:
        self.rank, self.size = rank, sum(counts)
        self.counts = counts
        self.all = range(self.size)
        # How tensors lie is the same matter on one host and on several, where a call takes longer.
        self.layouts = {name: LAYOUTS[name] for name in (LAYOUTS if len(counts) == 1 else ("transposed", "empty"))}


# -- collectives ------------------------------------------------------------------------------------------------------
def check_all_reduce(r: Ranks) -> None:
    for dtype, (layout, lay) in itertools.product(DTYPES, r.layouts.items()):
        for name in ops_of(dtype):
            tensor = lay(values(r.rank, dtype))
            expected = reduced(name, [lay(values(q, dtype)) for q in r.all])
            group = dist.group.WORLD
            opts = dist.distributed_c10d.AllreduceOptions()  # dist.all_reduce refuses products of complex tensors
            opts.reduceOp = getattr(dist.ReduceOp, name)
            group.allreduce([tensor], opts).wait()
            same(tensor, expected, (dtype, layout, name))


def check_all_reduce_by_its_function(r: Ranks) -> None:
    for dtype, asynchronous in itertools.product(DTYPES, (False, True)):
        tensor = values(r.rank, dtype)
        work = dist.all_reduce(tensor, async_op=asynchronous)
        if asynchronous:
            work.wait()
            assert work.is_completed()
            assert work.is_success()
        same(tensor, reduced("SUM", [values(q, dtype) for q in r.all]), dtype)


def check_premul_sum(r: Ranks) -> None:
    tensor = values(r.rank, torch.float32)
    opts = dist.distributed_c10d.AllreduceOptions()
    opts.reduceOp = dist._make_nccl_premul_sum(0.5)
    dist.group.WORLD.allreduce([tensor], opts).wait()
    same(tensor, reduced("SUM", [values(q, torch.float32) * 0.5 for q in r.all]))
    half = dist._make_nccl_premul_sum(torch.tensor([0.5]))
    for dtype in (*FLOATS, torch.complex64):
        whole, out = torch.ones(2 * r.size, dtype=dtype), torch.zeros(2, dtype=dtype)
        dist.reduce_scatter_single(out, whole, half)
        same(out, torch.full((2,), r.size / 2, dtype=dtype), dtype)
        same(whole, torch.ones_like(whole), dtype)
    sparse = torch.eye(3).to_sparse()
    dist.all_reduce(sparse, half)
    same(sparse.to_dense(), torch.eye(3) * r.size / 2)
    with_error(ValueError, "has no meaning", dist.all_reduce, torch.ones(2, dtype=torch.int32), half)


def check_inference_mode(r: Ranks) -> None:
    """Works that another thread ends, which is not in that mode."""
    half = dist._make_nccl_premul_sum(0.5)
    with torch.inference_mode():
        sparse, dense, received = torch.eye(3).to_sparse(), torch.ones(3), torch.zeros(6)[::2]
        outs = [torch.zeros(6)[::2] for _ in r.all]
        works = [
            dist.all_reduce(sparse, async_op=True),
            dist.all_reduce(dense, half, async_op=True),
            dist.all_gather(outs, torch.ones(3), async_op=True),
            dist.irecv(received, (r.rank - 1) % r.size),
            dist.isend(torch.ones(3), (r.rank + 1) % r.size),
        ]
        futures = [work.get_future() for work in works]  # they have threads end the works
    for future in futures:
        future.wait()
    same(sparse.to_dense(), torch.eye(3) * r.size)
    same(dense, torch.full((3,), r.size / 2))
    for tensor in (*outs, received):
        same(tensor, torch.ones(3))


def check_all_reduce_of_a_parameter(r: Ranks) -> None:
    parameter = torch.nn.Parameter(values(r.rank, torch.float32))
    dist.all_reduce(parameter)
    same(parameter.detach(), reduced("SUM", [values(q, torch.float32) for q in r.all]))


def check_conjugate_tensors(r: Ranks) -> None:
    tensor = values(r.rank, torch.complex64).conj()
    outs = [torch.empty_like(values(0, torch.complex64)) for _ in r.all]
    dist.group.WORLD.allgather([outs], [tensor]).wait()
    for q, out in enumerate(outs):
        same(out, values(q, torch.complex64).conj().resolve_conj())


def check_sparse_all_reduce(r: Ranks) -> None:
    def entries(rank: int) -> torch.Tensor:
        indices = torch.tensor([[rank, 2, 2], [1, 0, rank]])
        return torch.sparse_coo_tensor(indices, values(rank, torch.float32, (3, 4)), (5, 6, 4))

    tensor = entries(r.rank)
    dist.all_reduce(tensor)
    same(tensor.to_dense(), sum((entries(q).to_dense() for q in r.all), torch.zeros(5, 6, 4)))
    with_error(ValueError, "can only be summed", dist.all_reduce, entries(r.rank), dist.ReduceOp.MAX)
    for n_sparse, n_entries, shape in (
        (1, 1, (3, 0)),  # of width 0
        (1, min(r.rank, 1), (3, 4)),  # without an entry on rank 0
        (0, 1, (4,)),  # without a sparse dimension
        (1, 0, (0, 4)),
    ):
        for dtype in (torch.float32, torch.bfloat16, torch.complex64):
            rows = torch.ones(n_entries, *shape[n_sparse:], dtype=dtype)
            indices = torch.zeros(n_sparse, n_entries, dtype=torch.int64)
            tensor = torch.sparse_coo_tensor(indices, rows, shape)
            parts = [None] * r.size
            dist.all_gather_object(parts, tensor.to_dense())
            dist.all_reduce(tensor)
            same(tensor.to_dense(), sum(parts, torch.zeros(shape, dtype=dtype)), (shape, dtype))


def check_sparse_tensors_that_differ(r: Ranks) -> None:
    """All ranks say how, and the group goes on."""
    last = r.rank == r.size - 1
    who = rf"rank 0 \(.*pid \d+\).*rank {r.size - 1} \(.*pid \d+\)"
    wider, flatter = torch.ones(3, 4 if last else 3).to_sparse(), torch.ones(3, 3).to_sparse(1 if last else 2)
    with_error(dist.DistBackendError, rf"{who}.*shape \[3, 4\]", dist.all_reduce, wider)
    with_error(dist.DistBackendError, rf"{who}.*sparse_dim 1; give all ranks the same", dist.all_reduce, flatter)
    for layout in (torch.sparse_csr, torch.sparse_csc):
        with_error(ValueError, str(layout), dist.all_reduce, torch.eye(3).to_sparse(layout=layout))
    for function, *args in ((dist.broadcast, 0), (dist.isend, (r.rank + 1) % r.size)):
        with_error(ValueError, "torch.sparse_coo cannot be sent", function, torch.eye(3).to_sparse(), *args)
    dist.barrier()


def check_reduce(r: Ranks) -> None:
    for dtype, lay, root in itertools.product(DTYPES, r.layouts.values(), r.all):
        tensor = lay(values(r.rank, dtype))
        parts = [lay(values(q, dtype)) for q in r.all]
        dist.reduce(tensor, root)
        same(tensor, reduced("SUM", parts) if r.rank == root else parts[r.rank], (dtype, root))


def check_broadcast(r: Ranks) -> None:
    for dtype, lay, root in itertools.product(MOVED, r.layouts.values(), r.all):
        tensor = lay(values(r.rank, dtype))
        dist.broadcast(tensor, root)
        same(tensor, lay(values(root, dtype)), (dtype, root))


def check_all_gather(r: Ranks) -> None:
    for dtype, lay, asynchronous in itertools.product(MOVED, r.layouts.values(), (False, True)):
        tensor = lay(values(r.rank, dtype))
        outs = [lay(values(9, dtype)) for _ in r.all]
        work = dist.all_gather(outs, tensor, async_op=asynchronous)
        if work:
            work.wait()
        for q, out in enumerate(outs):
            same(out, lay(values(q, dtype)), dtype)


def check_all_gather_of_different_sizes(r: Ranks) -> None:
    outs = [torch.zeros(q + 1) for q in r.all]
    dist.all_gather(outs, values(r.rank, torch.float32, (r.rank + 1,)))
    for q, out in enumerate(outs):
        same(out, values(q, torch.float32, (q + 1,)))


def check_all_gather_single(r: Ranks) -> None:
    for dtype in MOVED:
        expected = torch.cat([values(q, dtype) for q in r.all])
        for out in (torch.empty_like(expected), LAYOUTS["transposed"](torch.empty_like(expected))):
            dist.all_gather_single(out, LAYOUTS["strided"](values(r.rank, dtype)))
            same(out, expected, dtype)


def check_reduce_scatter(r: Ranks) -> None:
    for dtype in DTYPES:
        for name in ops_of(dtype):
            op = getattr(dist.ReduceOp, name)
            parts = [[values(q + 3 * p, dtype) for p in r.all] for q in r.all]  # of rank q, for rank p
            expected = reduced(name, [parts[q][r.rank] for q in r.all])
            out = LAYOUTS["strided"](torch.empty_like(expected))
            dist.reduce_scatter(out, [LAYOUTS["transposed"](part) for part in parts[r.rank]], op)
            same(out, expected, (dtype, name))
            whole, out = torch.cat(parts[r.rank]), torch.empty_like(expected)
            untouched = whole.clone()
            dist.reduce_scatter_single(out, whole, op)
            same(out, expected, (dtype, name))
            same(whole, untouched)


def check_reduce_scatter_of_different_sizes(r: Ranks) -> None:
    out = torch.zeros(r.rank + 1)
    dist.reduce_scatter(out, [values(r.rank, torch.float32, (p + 1,)) for p in r.all])
    same(out, reduced("SUM", [values(q, torch.float32, (r.rank + 1,)) for q in r.all]))


def check_sizes_in_a_list_that_differ(r: Ranks) -> None:
    """Of lists as long together, where the difference is behind what messages show."""
    last = r.rank == r.size - 1
    group, sizes = dist.new_group(list(r.all)), [1_000_000, 1_000_002 + last, 1_000_003 - last, *[9] * (r.size - 3)]
    parts = [torch.ones(size) for size in sizes[-r.size :]]
    with_error(dist.DistBackendError, "all ranks must", dist.reduce_scatter, parts[r.rank].clone(), parts, group=group)
    dist.destroy_process_group(group)


def check_gather(r: Ranks) -> None:
    for dtype, lay, root in itertools.product(MOVED, r.layouts.values(), r.all):
        outs = [lay(values(9, dtype)) for _ in r.all] if r.rank == root else None
        dist.gather(lay(values(r.rank, dtype)), outs, root)
        for q, out in enumerate(outs or []):
            same(out, lay(values(q, dtype)), dtype)


def check_scatter(r: Ranks) -> None:
    for dtype, lay, root in itertools.product(MOVED, r.layouts.values(), r.all):
        parts = [lay(values(root + 3 * p, dtype)) for p in r.all] if r.rank == root else None
        out = lay(values(9, dtype))
        dist.scatter(out, parts, root)
        same(out, lay(values(root + 3 * r.rank, dtype)), dtype)


def check_all_to_all(r: Ranks) -> None:
    for dtype, lay in itertools.product(MOVED, r.layouts.values()):
        outs = [lay(values(9, dtype)) for _ in r.all]
        dist.all_to_all(outs, [lay(values(r.rank + 3 * p, dtype)) for p in r.all])
        for q, out in enumerate(outs):
            same(out, lay(values(q + 3 * r.rank, dtype)), dtype)


def check_all_to_all_single(r: Ranks) -> None:
    def part(sender: int, receiver: int, dtype: torch.dtype) -> torch.Tensor:
        return values(sender + 3 * receiver, dtype, ((sender + receiver) % 3, 4))  # some have no rows

    for dtype in MOVED:
        parts = [part(r.rank, p, dtype) for p in r.all]
        expected = [part(q, r.rank, dtype) for q in r.all]
        out = torch.cat([torch.zeros_like(each) for each in expected])
        dist.all_to_all_single(out, torch.cat(parts), [len(each) for each in expected], [len(each) for each in parts])
        same(out, torch.cat(expected), dtype)
        whole = torch.cat([values(r.rank + 3 * p, dtype) for p in r.all])
        out = torch.empty_like(whole)
        dist.all_to_all_single(out, whole)
        same(out, torch.cat([values(q + 3 * r.rank, dtype) for q in r.all]), dtype)


def check_sizes(r: Ranks) -> None:
    """From no element to some MiB; ranks and chunks divide few of these."""
    world = dist.group.WORLD
    counts = 0, 1, 2, 3, 7, 1023, 16_385, 300_007, 1_500_001
    for count, dtype in itertools.product(counts, (torch.float32, torch.int64)):
        every = [values(q, dtype, (count,)) for q in r.all]
        mine, total = every[r.rank], reduced("SUM", every)
        out = mine.clone()
        dist.all_reduce(out)
        same(out, total, ("all_reduce", count, dtype))
        out = mine.clone()
        dist.broadcast(out, r.size - 1)
        same(out, every[-1], ("broadcast", count, dtype))
        out = mine.clone()
        dist.reduce(out, r.size - 1)
        same(out, total if r.rank == r.size - 1 else mine, ("reduce", count, dtype))
        out = mine.new_empty(count * r.size)
        dist.all_gather_single(out, mine, group=world)
        same(out, torch.cat(every), ("all_gather_single", count, dtype))
        back = mine.new_empty(count)
        dist.reduce_scatter_single(back, out, group=world)
        same(back, mine * r.size, ("reduce_scatter_single", count, dtype))
        turned = torch.empty_like(out)
        dist.all_to_all_single(turned, out)
        same(turned, mine.repeat(r.size), ("all_to_all_single", count, dtype))


def collectives_of(count: int, r: Ranks, group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    """Every collective, on a rank that believes that all ranks have `count` elements."""

    def parts() -> list[torch.Tensor]:
        return [torch.ones(count) for _ in r.all]

    one, whole = torch.ones(count), torch.ones(count * r.size)
    at_root = parts() if r.rank == 0 else None
    numbers, sparse = torch.ones(count, dtype=torch.uint16), torch.ones(count).to_sparse()
    return {
        "all_reduce": lambda: dist.all_reduce(one, group=group),
        "all_reduce, fold": lambda: dist.all_reduce(numbers, group=group),
        "all_reduce, sparse": lambda: dist.all_reduce(sparse, group=group),
        "all_reduce, async": lambda: dist.all_reduce(one, group=group, async_op=True).wait(),
        "reduce": lambda: dist.reduce(one, 0, group=group),
        "broadcast": lambda: dist.broadcast(one, 0, group=group),
        "broadcast from the last": lambda: dist.broadcast(one, r.size - 1, group=group),
        "all_gather": lambda: dist.all_gather(parts(), one, group=group),
        "all_gather_single": lambda: dist.all_gather_single(whole, one, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter(one, parts(), group=group),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(one, whole, group=group),
        "gather": lambda: dist.gather(one, at_root, 0, group=group),
        "scatter": lambda: dist.scatter(one, at_root, 0, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(whole, whole.clone(), group=group),
    }


def check_empty_on_one_rank(r: Ranks) -> None:
    """All ranks raise the error of a wrong count, at once: no later operation is paired with this one."""
    for at, name in enumerate(collectives_of(0, r, dist.group.WORLD)):
        group = dist.new_group(list(r.all))
        count = (4, 40_000, 3_000_000)[at % 3]
        mine = collectives_of(0 if r.rank == at % r.size else count, r, group)[name]
        with pytest.raises(dist.DistBackendError, match=r"all ranks must call|same size|same shape"):
            pytest.fail(f"{name} ended with {mine()}")
        dist.destroy_process_group(group)


def check_empty_on_all_ranks(r: Ranks) -> None:
    """Nothing to do, and an operation all the same: a rank that leaves it out is found."""
    group = dist.new_group(list(r.all))
    for name, collective in collectives_of(0, r, group).items():
        collective()
        tensor = values(r.rank, torch.float32)
        dist.all_reduce(tensor, group=group)
        same(tensor, reduced("SUM", [values(q, torch.float32) for q in r.all]), name)
    if r.rank != r.size - 1:
        dist.all_reduce(torch.ones(0), async_op=True, group=group)
    with_error(dist.DistBackendError, "all ranks must call", dist.all_reduce, torch.ones(4), dist.ReduceOp.SUM, group)
    dist.destroy_process_group(group)


def check_large_sums_of_fractions(r: Ranks) -> None:
    """The same bits everywhere, whatever the order of the sum; with two ranks there is one order only."""
    for dtype in FLOATS:
        every = [torch.randn(700_001, generator=torch.Generator().manual_seed(q)).to(dtype) for q in r.all]
        out = every[r.rank].clone()
        dist.all_reduce(out)
        first = out.clone()
        dist.broadcast(first, 0)
        same(out, first, dtype)
        if r.size == 2:
            same(out, reduced("SUM", every), dtype)
        else:
            exact = torch.stack(every).double().sum(0)
            step = torch.finfo(dtype).eps * (torch.stack(every).abs().double().sum(0) + 1e-3)
            assert bool(((out.double() - exact).abs() <= r.size * step).all()), dtype


def check_sums_in_many_chunks(r: Ranks) -> None:
    """More of them than may be on the network at the same time."""
    if len(r.counts) == 1:
        return
    every = [values(q, torch.float32, (300_007,)) for q in r.all]
    with mock.patch.multiple(hosts, _SMALLEST_CHUNK_BYTES=1 << 12, _LARGEST_CHUNK_BYTES=1 << 15):
        out = every[r.rank].clone()
        dist.all_reduce(out)
    same(out, reduced("SUM", every))


def check_three_hosts(r: Ranks) -> None:
    """Three carriers divide a sum. The ranks of this host take themselves for ranks of three."""
    if r.counts != [3]:
        return
    with (
        mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"),
        mock.patch.object(joining, "host_identity", return_value=f"host {r.rank}"),
    ):
        group = dist.new_group()
    with mock.patch.multiple(hosts, _SMALLEST_CHUNK_BYTES=1 << 12, _LARGEST_CHUNK_BYTES=1 << 15):
        for count in (1, 2, 1_000, 20_011, 300_007):
            every = [values(q, torch.float32, (count,)) for q in r.all]
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
    dist.destroy_process_group(group)


def check_bytes_between_hosts(r: Ranks) -> None:
    """Of a sum of n bytes a host sends n, whatever the number of its ranks, if they are as many on the other."""
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
    """Bytes that this host sent to the other, with headers."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith(f"{LINK}:"))


def check_coalesced(r: Ranks) -> None:
    tensors = [values(r.rank, torch.float32), values(r.rank + 1, torch.float32, (7,))]
    dist.all_reduce_coalesced(tensors)
    for i, tensor in enumerate(tensors):
        same(tensor, reduced("SUM", [values(q + i, torch.float32, tuple(tensor.shape)) for q in r.all]))
    for asynchronous in (False, True):
        outs = [torch.zeros(r.size * 7), torch.zeros(r.size * 3, dtype=torch.float64)]
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            dist.all_gather_single(outs[0], values(r.rank, torch.float32, (7,)))
            dist.all_gather_single(outs[1], values(r.rank, torch.float64, (3,)))
        if asynchronous:
            manager.wait()
        same(outs[0], torch.cat([values(q, torch.float32, (7,)) for q in r.all]))
        same(outs[1], torch.cat([values(q, torch.float64, (3,)) for q in r.all]))
        out = torch.zeros(3)
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            dist.reduce_scatter_single(out, values(r.rank, torch.float32, (3 * r.size,)))
        if asynchronous:
            manager.wait()
        expected = reduced("SUM", [values(q, torch.float32, (3 * r.size,)) for q in r.all])
        same(out, expected.view(r.size, 3)[r.rank])


def check_coalesced_lists_that_differ(r: Ranks) -> None:
    """In length: all ranks raise, though the next call has a tensor of the same size."""
    with_error(ValueError, "the list is empty", dist.group.WORLD.allreduce_coalesced, [], coalesced_options())
    group = dist.new_group(list(r.all))
    ours = [torch.ones(4) for _ in range(1 + (r.rank == 0))]
    with pytest.raises(dist.DistBackendError, match=r"1 of 1\)"):
        group.allreduce_coalesced(ours, coalesced_options()).wait()
    dist.destroy_process_group(group)


def coalesced_options() -> object:
    opts = dist.distributed_c10d.AllreduceCoalescedOptions()
    opts.reduceOp = dist.ReduceOp.SUM
    return opts


def check_objects(r: Ranks) -> None:
    def data(q: int) -> dict[str, object]:
        return {"rank": q, "text": "x" * (10 * q), "tensor": [q] * q}

    gathered = [None] * r.size
    dist.all_gather_object(gathered, data(r.rank))
    assert gathered == [data(q) for q in r.all]
    objects = [data(1) if r.rank == 1 else None, 5 if r.rank == 1 else None]
    dist.broadcast_object_list(objects, 1)
    assert objects == [data(1), 5]
    out = [None]
    dist.scatter_object_list(out, [data(q) for q in r.all] if r.rank == 0 else None, 0)
    assert out == [data(r.rank)]
    gathered = [None] * r.size if r.rank == 1 else None
    dist.gather_object(data(r.rank), gathered, 1)
    assert gathered == ([data(q) for q in r.all] if r.rank == 1 else None)


def check_functional(r: Ranks) -> None:
    mine = values(r.rank, torch.float32, (2 * r.size, 3))
    every = [values(q, torch.float32, (2 * r.size, 3)) for q in r.all]
    world = dist.group.WORLD
    total = reduced("SUM", every)
    same(functional.all_reduce(mine, "sum", world).wait(), total)
    same(functional.all_gather_tensor(mine, 0, world).wait(), torch.cat(every))
    same(functional.reduce_scatter_tensor(mine, "sum", 0, world).wait(), total.view(r.size, 2, 3)[r.rank])
    same(functional.broadcast(mine, 1, world).wait(), every[1])
    same(
        functional.all_to_all_single(mine, None, None, world).wait(),
        torch.cat([part.view(r.size, 2, 3)[r.rank] for part in every]),
    )
    first, second = functional.all_reduce_coalesced([mine, mine[0]], "max", world)
    same(first.wait(), reduced("MAX", every))
    same(second.wait(), reduced("MAX", [part[0] for part in every]))
    (out,) = functional.all_gather_into_tensor_coalesced([mine], world)
    same(out.wait(), torch.cat(every))
    (out,) = functional.reduce_scatter_tensor_coalesced([mine], "sum", [0], world)
    same(out.wait(), total.view(r.size, 2, 3)[r.rank])


def check_messages(r: Ranks) -> None:
    after, before = (r.rank + 1) % r.size, (r.rank - 1) % r.size
    for dtype, lay in itertools.product(MOVED, r.layouts.values()):
        out = lay(values(9, dtype))
        sent = dist.isend(lay(values(r.rank, dtype)), after, tag=7)
        work = dist.irecv(out, before, tag=7)
        work.wait()
        sent.wait()
        same(out, lay(values(before, dtype)), dtype)
    large = [torch.zeros(3_000_001), torch.zeros(5)]
    ops = [
        dist.P2POp(dist.isend, torch.full((5,), 5.0 + r.rank), after, tag=1),
        dist.P2POp(dist.isend, torch.full((3_000_001,), 1.5 + r.rank), after, tag=2),
        dist.P2POp(dist.irecv, large[0], before, tag=2),
        dist.P2POp(dist.irecv, large[1], before, tag=1),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(large[0], torch.full((3_000_001,), 1.5 + before))
    same(large[1], torch.full((5,), 5.0 + before))


def check_empty_messages(r: Ranks) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        ours = [dist.isend(torch.ones(0, dtype=dtype), (r.rank + 1) % r.size)]
        ours += [dist.irecv(torch.ones(0, 3, dtype=dtype), (r.rank - 1) % r.size)]
        for work in ours:
            work.wait()
    dist.barrier()


def check_messages_from_anyone(r: Ranks) -> None:
    if r.rank == 0:
        sources = set()
        for _ in range(r.size - 1):
            out = torch.zeros(3)
            source = dist.recv(out)
            same(out, values(source, torch.float32, (3,)))
            sources.add(source)
        assert sources == set(range(1, r.size))
    else:
        dist.send(values(r.rank, torch.float32, (3,)), 0)


def check_messages_move_without_waiting(r: Ranks) -> None:
    """A large message arrives though the sender does nothing more with the group; and its future tells."""
    if r.rank == 0:
        works = [dist.isend(torch.full((2_000_000,), 2.5), q) for q in range(1, r.size)]
        world = dist.group.WORLD
        world.monitored_barrier(timedelta(seconds=30))
        # As Gloo's own, those between hosts say so after `wait` only.
        assert on_emulated_host() or all(work.is_completed() for work in works)
    else:
        out = torch.zeros(2_000_000)
        work = dist.irecv(out, 0)
        future = work.get_future()  # of a thread, beside which this one waits
        work.wait()
        (found,) = future.wait()
        same(found, torch.full((2_000_000,), 2.5))
        dist.group.WORLD.monitored_barrier(timedelta(seconds=30))


def check_messages_of_several_threads(r: Ranks) -> None:
    """Threads that wait for messages do not keep others from sending them."""
    peer = (r.rank + 1) % r.size, (r.rank - 1) % r.size
    outs = [torch.zeros(1000) for _ in range(4)]
    threads = [threading.Thread(target=dist.recv, args=(out, peer[1], None, tag)) for tag, out in enumerate(outs)]
    for thread in threads:
        thread.start()
    dist.barrier()
    for tag in (3, 1, 0, 2):
        dist.send(torch.full((1000,), float(tag)), peer[0], tag=tag)
    for tag, (thread, out) in enumerate(zip(threads, outs, strict=True)):
        thread.join()
        same(out, torch.full((1000,), float(tag)))


# -- works, futures, threads -------------------------------------------------------------------------------------------
def check_tensors_can_be_resized(r: Ranks) -> None:
    """After every collective and message, as FSDP and hooks of DDP do with storages that they free and fill again."""
    after, before = (r.rank + 1) % r.size, (r.rank - 1) % r.size
    root = r.rank == 0

    def exchange(tensor: torch.Tensor, other: torch.Tensor, source: int | None) -> None:
        sent = dist.isend(tensor, after)
        dist.irecv(other, source).wait()
        sent.wait()

    def coalesced(tensor: torch.Tensor, other: torch.Tensor) -> None:
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, after), dist.P2POp(dist.irecv, other, before)])
        for work in works:
            work.wait()

    def product(tensor: torch.Tensor) -> None:
        opts = dist.distributed_c10d.AllreduceOptions()
        opts.reduceOp = dist.ReduceOp.PRODUCT
        dist.group.WORLD.allreduce([tensor], opts).wait()

    calls: dict[str, Callable[..., object]] = {
        "all_reduce": lambda x, *_: dist.all_reduce(x),
        "all_reduce, async": lambda x, *_: dist.all_reduce(x, async_op=True).wait(),
        "product": lambda x, *_: product(x),
        "reduce": lambda x, *_: dist.reduce(x, 0),
        "broadcast": lambda x, *_: dist.broadcast(x, 0),
        "all_gather": lambda x, _, parts, __: dist.all_gather(parts, x),
        "all_gather_single": lambda x, _, __, whole: dist.all_gather_single(whole, x),
        "all_gather_single, async": lambda x, _, __, whole: dist.all_gather_single(whole, x, async_op=True).wait(),
        "gather": lambda x, _, parts, __: dist.gather(x, parts if root else None, 0),
        "scatter": lambda x, _, parts, __: dist.scatter(x, parts if root else None, 0),
        "reduce_scatter": lambda x, _, parts, __: dist.reduce_scatter(x, parts),
        "reduce_scatter_single": lambda x, _, __, whole: dist.reduce_scatter_single(x, whole),
        "all_to_all": lambda _, __, parts, ___: dist.all_to_all([torch.empty_like(x) for x in parts], parts),
        "all_to_all_single": lambda _, __, ___, whole: dist.all_to_all_single(torch.empty_like(whole), whole),
        "message": lambda x, other, *_: exchange(x, other, before),
        "batch_isend_irecv": lambda x, other, *_: coalesced(x, other),
    }
    if r.size == 2 and len(r.counts) == 1:
        calls["message from anyone"] = lambda x, other, *_: exchange(x, other, None)
    dtypes = (torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64)
    for dtype, (name, call) in itertools.product(dtypes, calls.items()):
        x, other = values(r.rank, dtype), values(r.rank, dtype)
        parts, whole = [values(q, dtype) for q in r.all], values(r.rank, dtype, (r.size * 2, 5, 3))
        call(x, other, parts, whole)
        for tensor in (x, other, *parts, whole):
            kept = tensor.clone()
            tensor.resize_(1000)
            same(tensor[: kept.numel()], kept.view(-1), (dtype, name))
            tensor.untyped_storage().resize_(0)
            tensor.untyped_storage().resize_(4000)
    sparse = values(r.rank, torch.float32).to_sparse()
    dist.all_reduce(sparse)
    sparse.coalesce().values().resize_(1000)
    empty = torch.ones(30)
    empty.untyped_storage().resize_(0)
    with_error(ValueError, "is empty", dist.all_reduce, empty)


def check_works_end_in_order(r: Ranks) -> None:
    tensor, ends = values(r.rank, torch.float32), []
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(5)]
    futures = [work.get_future().then(lambda _, i=i: ends.append(i)) for i, work in enumerate(works)]
    works[-1].wait()
    assert all(work.is_completed() for work in works)
    torch.futures.wait_all(futures)
    expected = reduced("SUM", [values(q, torch.float32) for q in r.all]) * r.size**4
    same(tensor, expected)
    assert ends == sorted(ends)
    same(works[0].result()[0], expected)
    same(works[0].get_future().wait()[0], expected)


def check_ranks_differ_in_what_shares_memory(r: Ranks) -> None:
    """The second sum of every other rank needs the result of its first; the third needs nothing."""
    own = [[values(3 * q + i, torch.float32) for i in range(3)] for q in r.all]
    first = reduced("SUM", [each[0] for each in own])
    second = reduced("SUM", [first if q % 2 else own[q][1] for q in r.all])
    tensors = own[r.rank]
    tensors[1] = tensors[0] if r.rank % 2 else tensors[1]
    out = torch.empty(r.size)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    works.append(dist.all_gather_single(out, torch.full((1,), float(r.rank)), async_op=True))
    last = values(r.rank, torch.float32, (99_999,))
    works.append(dist.all_reduce(last, async_op=True))
    for work in works:
        work.wait()
    same(tensors[1], second)
    same(tensors[2], reduced("SUM", [values(3 * q + 2, torch.float32) for q in r.all]))
    same(out, torch.arange(float(r.size)))
    same(last, reduced("SUM", [values(q, torch.float32, (99_999,)) for q in r.all]))


def check_operations_in_flight(r: Ranks) -> None:
    """As in a backward pass: buckets are reduced while others are computed, and waited for in any order."""
    sizes = [3, 262_144, 70_001, 1, 0, 524_289, 4096]
    other = dist.new_group(list(r.all))
    for turn in range(4):
        tensors = [values(r.rank + i, torch.float32, (size,)) for i, size in enumerate(sizes)]
        works, ends = [], []
        for i, tensor in enumerate(tensors):
            works.append(dist.all_reduce(tensor, async_op=True, group=other if i % 3 == 2 else None))
            works[-1].get_future().then(lambda _, i=i, ends=ends: ends.append(i))
            torch.randn(60, 60) @ torch.randn(60, 60)
        gathered = torch.empty(5 * r.size)
        dist.all_gather_single(gathered, values(r.rank, torch.float32, (5,)))
        same(gathered, torch.cat([values(q, torch.float32, (5,)) for q in r.all]))
        for work in works if turn % 2 else works[::-1]:
            work.wait()
        for i, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
            same(tensor, reduced("SUM", [values(q + i, torch.float32, (size,)) for q in r.all]), (turn, i))
        torch.futures.wait_all([work.get_future() for work in works])
        assert [i for i in ends if i % 3 != 2] == [0, 1, 3, 4, 6], ends
    dist.destroy_process_group(other)


def check_an_operation_goes_on_without_a_wait(r: Ranks) -> None:
    """It ends while the rank that started it computes."""
    for _ in range(3):
        works = [dist.all_reduce(torch.ones(200_000), async_op=True) for _ in range(3)]
        deadline = time.monotonic() + 30
        while not all(work.is_completed() for work in works):
            assert time.monotonic() < deadline
            torch.randn(50, 50) @ torch.randn(50, 50)
        dist.barrier()


def check_callbacks_may_wait_for_collectives(r: Ranks) -> None:
    tensor, second = values(r.rank, torch.float32), values(r.rank, torch.float64)

    def go_on(_: object) -> torch.Tensor:
        dist.all_reduce(second)
        return dist.all_reduce(second, async_op=True).get_future().wait()[0]

    out = dist.all_reduce(tensor, async_op=True).get_future().then(go_on).wait()
    same(out, reduced("SUM", [values(q, torch.float64) for q in r.all]) * r.size)


def check_callbacks_start_collectives(r: Ranks) -> None:
    """What callbacks call has an order of its own: equal sizes of the script's calls must not meet it."""
    groups = [dist.group.WORLD, dist.new_group(list(r.all))]
    for turn in range(4):
        firsts, seconds, thirds = ([torch.full((7,), float(r.rank + i)) for i in range(8)] for _ in range(3))
        futures = []
        for i, (first, second, third) in enumerate(zip(firsts, seconds, thirds, strict=True)):

            def go_on(_: object, i: int = i, second: torch.Tensor = second) -> object:
                time.sleep(1e-3 * ((i + r.rank) % 3))
                if i % 3 == 0:
                    dist.all_reduce(second, group=groups[i % 2])
                    return None
                return dist.all_reduce(second, group=groups[i % 2], async_op=True).get_future().wait()

            work = dist.all_reduce(first, group=groups[turn % 2], async_op=True)
            if (r.rank + turn) % 2:
                time.sleep(2e-3)  # so that it has ended here when its callback is added
            futures.append(work.get_future().then(go_on))
            dist.all_reduce(third, group=groups[i % 2], async_op=i % 2 == 0)
        for future in futures[:: 1 if r.rank else -1]:
            future.wait()
        dist.barrier(groups[0])
        dist.barrier(groups[1])
        for i in range(8):
            expected = torch.full((7,), sum(float(q + i) for q in r.all))
            for tensors in (firsts, seconds, thirds):
                same(tensors[i], expected, (turn, i))
    dist.destroy_process_group(groups[1])


def check_callbacks_of_callbacks(r: Ranks) -> None:
    """Each level has an order of its own, up to a limit that is said in words."""

    def descend(level: int) -> torch.futures.Future[int]:
        tensor = torch.full((3,), float(r.rank + level))

        def go_on(_: object) -> int:
            same(tensor, torch.full((3,), sum(float(q + level) for q in r.all)))
            return descend(level - 1).wait() + 1 if level else 0

        return dist.all_reduce(tensor, async_op=True).get_future().then(go_on)

    assert [descend(3).wait() for _ in range(3)] == [3] * 3
    with pytest.raises(Exception, match="a callback of an operation that a callback has called"):
        descend(20).wait()


def check_callbacks_wait_for_each_other(r: Ranks) -> None:
    """A callback may wait for the callbacks of a later operation."""
    tensors = [torch.full((5,), float(r.rank + i)) for i in range(2)]
    first, second = (dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors)
    later = second.then(lambda future: future.value()[0] * 2)
    same(first.then(lambda _: later.wait()).wait(), torch.full((5,), 2.0 * sum(q + 1 for q in r.all)))


def check_hooks(r: Ranks) -> None:
    """Those of PyTorch, and one whose callbacks start collectives: the same bits on all ranks and in every run."""
    for name in ddp_hooks.HOOKS:
        for sizes in ddp_hooks.sizes_for(name).values():
            first = ddp_hooks.trained(name, r.rank, r.size, sizes)
            gathered = [torch.empty_like(first) for _ in r.all]
            dist.all_gather(gathered, first)
            for q in r.all:
                same(gathered[q], first, f"{name}: rank {q} has other parameters")
            same(ddp_hooks.trained(name, r.rank, r.size, sizes), first, f"{name}: the second run has other parameters")


def check_an_error_in_a_callback_of_a_hook(r: Ranks) -> None:
    """It ends the backward pass as what it is, on the rank that has it."""

    def hook(state, bucket):  # DDP compares annotations with types
        def fail(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            if r.rank == 0:
                raise LookupError("a bug of the hook")
            return future.value()[0]

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(fail)

    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    model.register_comm_hook(None, hook)
    loss = model(torch.ones(1, 16)).sum()
    if r.rank == 0:
        with pytest.raises(LookupError, match="a bug of the hook"):
            loss.backward()
    else:
        loss.backward()
    dist.barrier()


def check_orders_of_waiting(r: Ranks) -> None:
    """Ranks may wait for the operations of several groups in different orders, or for none while another rank does."""
    groups = [dist.group.WORLD, dist.new_group(list(r.all))]
    for size in (5, 300_000):
        for turn in range(6):
            tensors = [values(r.rank + turn + i, torch.float32, (size,)) for i in range(4)]
            works = [
                dist.all_reduce(tensor, group=groups[i % 2], async_op=True) if i < 2 else None
                for i, tensor in enumerate(tensors)
            ]
            if turn % 3 == r.rank % 3:
                dist.all_reduce(tensors[2], group=groups[turn % 2])
            for work in works[:: 1 if r.rank % 2 else -1]:
                if work is not None:
                    work.wait()
            if turn % 3 != r.rank % 3:
                dist.all_reduce(tensors[2], group=groups[turn % 2])
            for i, tensor in enumerate(tensors[:3]):
                parts = [values(q + turn + i, torch.float32, (size,)) for q in r.all]
                same(tensor, reduced("SUM", parts), (size, turn))
    dist.destroy_process_group(groups[1])


def check_threads(r: Ranks) -> None:
    """Groups are independent of each other, whatever the order in which threads use them."""
    groups = [dist.new_group(list(r.all)) for _ in range(4)]
    errors: list[BaseException] = []

    def work(group: dist.ProcessGroup, i: int) -> None:
        try:
            for step in range(30):
                tensor = values(r.rank + i + step, torch.float32)
                handle = dist.all_reduce(tensor, group=group, async_op=step % 3 == 0)
                if handle:
                    handle.wait()
                same(tensor, reduced("SUM", [values(q + i + step, torch.float32) for q in r.all]))
        except BaseException as error:
            errors.append(error)

    order = list(enumerate(groups))
    if r.rank % 2:
        order.reverse()
    threads = [threading.Thread(target=work, args=(group, i)) for i, group in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for group in groups:
        dist.destroy_process_group(group)


def check_threads_in_one_group(r: Ranks) -> None:
    """Calls of several threads at the same time are carried out one by one; here all are alike."""
    tensors = [torch.ones(1000) for _ in range(40)]
    threads = [
        threading.Thread(target=lambda part: [dist.all_reduce(tensor) for tensor in part], args=(tensors[i::4],))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for tensor in tensors:
        same(tensor, torch.full((1000,), float(r.size)))


# -- groups ------------------------------------------------------------------------------------------------------------
def check_groups(r: Ranks) -> None:
    for ranks in itertools.chain.from_iterable(itertools.combinations(r.all, n) for n in range(1, r.size + 1)):
        group = dist.new_group(list(ranks))
        if r.rank not in ranks:
            assert group == dist.GroupMember.NON_GROUP_MEMBER
            continue
        tensor = values(r.rank, torch.float32)
        dist.all_reduce(tensor, group=group)
        same(tensor, reduced("SUM", [values(q, torch.float32) for q in ranks]), ranks)
        dist.broadcast(tensor, ranks[-1], group=group)
        outs = [torch.empty(3) for _ in ranks] if r.rank == ranks[-1] else None
        dist.gather(values(r.rank, torch.float32, (3,)), outs, ranks[-1], group=group)
        for q, out in zip(ranks, outs or [], strict=False):
            same(out, values(q, torch.float32, (3,)))
        dist.destroy_process_group(group)


def check_many_groups(r: Ranks) -> None:
    """Groups that have been destroyed leave no descriptor and no thread behind."""

    def cycle() -> None:
        group = dist.new_group(list(r.all))
        tensor = torch.ones(100)
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        dist.destroy_process_group(group)

    def used() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    cycle()
    dist.barrier()
    before, threads = used(), threading.active_count()
    for _ in range(int(os.environ.get("GROUPS", "40"))):
        cycle()
    dist.barrier()
    assert used() <= before + 2, f"{before} descriptors, then {used()}"
    assert threading.active_count() <= threads, threading.enumerate()


def check_names(r: Ranks) -> None:
    group = dist.new_group(list(r.all), group_desc="of tests")
    assert dist.get_backend(group) == "distopt"
    assert group.group_desc == "of tests"
    assert group.name() == "distopt", group.name()
    assert functional._resolve_group_name(group) == group.group_name
    dist.destroy_process_group(group)


def check_abilities(r: Ranks) -> None:
    """PyTorch's queries of the group and, from 2.14 on, of the backend that C++ knows."""
    group = dist.group.WORLD
    asked = [group]
    if VERSION >= (2, 14):
        asked.append(dist.ProcessGroup._get_backend(group, torch.device("cpu")))
    for each in asked:
        assert each.supports_splitting
        for name in ("coalescing", "shrinking", "reconfigure", "window"):
            assert not getattr(each, f"supports_{name}"), name
        assert each.getBackendName() == "distopt"
        each._set_sequence_number_for_group()
        before = each._get_sequence_number_for_group()
        numbers = [None] * r.size
        dist.all_gather_object(numbers, before)
        assert len(set(numbers)) == 1
        dist.barrier()
        dist.all_reduce(torch.ones(2), async_op=True).wait()
        assert each._get_sequence_number_for_group() == before + 4  # the objects are two
    assert group._device_types == [torch.device("cpu")]
    group.eager_connect_single_device(torch.device("cpu"))


def check_calls_of_cpp(r: Ranks) -> None:
    """Through the operators of C++, which look for a backend."""
    if VERSION < (2, 14):
        return
    group, mine = dist.group.WORLD.boxed(), values(r.rank, torch.float32)
    tensor, outs = mine.clone(), [torch.zeros_like(mine) for _ in r.all]
    if VERSION >= (2, 15):  # before, Python cannot name a reduction to C++
        torch.ops.c10d.allreduce_([tensor], group, dist.ReduceOp(dist.ReduceOp.SUM).boxed(), None, False, 20_000)
        same(tensor, reduced("SUM", [values(q, torch.float32) for q in r.all]))
    torch.ops.c10d.gather_([outs] if r.rank == 0 else [], [mine], group, 0, False, 20_000)
    if r.rank == 0:
        for q, out in enumerate(outs):
            same(out, values(q, torch.float32))


def check_split_group(r: Ranks) -> None:
    kept = list(r.all)[1:]
    group = dist.group.WORLD.split_group(kept, timedelta(seconds=20), group_name="split", group_desc="of a test")
    if r.rank == 0:
        assert group is None
    else:
        assert (group.group_name, group.group_desc) == ("split", "of a test")
        assert (group.rank(), group.size()) == (r.rank - 1, r.size - 1)
        tensor = values(r.rank, torch.float32)
        group.allreduce([tensor]).wait()
        same(tensor, reduced("SUM", [values(q, torch.float32) for q in kept]))
        group.shutdown()
    if VERSION >= (2, 15):  # before, PyTorch splits groups of CUDA tensors only
        group = dist.split_group(None, [kept, [0]])
        tensor = values(r.rank, torch.float32)
        dist.all_reduce(tensor, group=group)
        same(tensor, reduced("SUM", [values(q, torch.float32) for q in (kept if r.rank else [0])]))
        dist.destroy_process_group(group)


def check_a_rank_that_does_not_join(r: Ranks) -> None:
    """The others name it when the time-out of the new group is over, not that of the store."""
    last = r.size - 1
    if r.rank != last:
        text = rf"rank {last} \(host .*, pid \d+\) did not join the group of ranks .* within 0.5 s"
        split = partial(dist.group.WORLD.split_group, group_name="not all")
        with_error(dist.DistBackendError, text, split, list(r.all), timedelta(seconds=0.5))


def check_nan(r: Ranks) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DIST_NAN_CHECK", "1")
        group = dist.new_group(list(r.all))
    good, bad = torch.ones(r.size), torch.tensor([1.0] * (r.size - 1) + [float("nan")])
    outs, text = [bad.clone() for _ in r.all], f"NaN found in input tensor of rank {r.rank}"
    with_error(RuntimeError, text, dist.all_reduce, bad, dist.ReduceOp.SUM, group)
    with_error(RuntimeError, text, dist.all_gather, outs, bad, group)
    with_error(RuntimeError, text, dist.reduce_scatter_single, torch.ones(1), bad, dist.ReduceOp.SUM, group)
    with_error(RuntimeError, text, dist.send, bad, (r.rank + 1) % r.size, group)
    dist.all_gather(outs, good, group)  # NaN may lie where results will
    for out in outs:
        same(out, good)
    dist.all_to_all_single(torch.full((r.size,), float("nan")), good, group=group)
    dist.destroy_process_group(group)
    dist.all_reduce(bad)


def check_profiler(r: Ranks) -> None:
    """Records have the names of Gloo's, and end with the calls: works may outlive the profile. Gloo leaves none."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.destroy_process_group(dist.new_group(list(r.all)))
        dist.all_reduce(torch.ones(3))
        work = dist.all_reduce(torch.ones(3), async_op=True)
        time.sleep(0.1 if r.rank == 1 else 0)
        work.wait()
        work.get_future().wait()
        dist.all_gather([torch.ones(3) for _ in r.all], torch.ones(3))
        dist.barrier()
        late = [dist.irecv(torch.ones(3), (r.rank - 1) % r.size), dist.all_reduce(torch.ones(3), async_op=True)]
    records = [event for event in profile.events() if event.name.startswith("distopt:")]
    dist.send(torch.ones(3), (r.rank + 1) % r.size)
    for work in late:
        work.wait()
    expected = {"distopt:all_reduce": 3, "distopt:all_gather": 1, "distopt:barrier": 1, "distopt:receive": 1}
    assert Counter(event.name for event in records) == expected
    assert not any(event.is_async for event in records), "a record has ended after its call"
    assert not any("gloo" in event.name for event in profile.events())


def check_debug_detail(r: Ranks) -> None:
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = group_with_gloo(r.all, "distopt")  # a wrapper of PyTorch's would use Gloo
        ours = trained(r.rank, group)
    finally:
        dist.set_debug_level(level)
    for one, other in zip(ours, trained(r.rank, dist.group.WORLD), strict=True):
        same(one, other)
    dist.destroy_process_group(group)


def check_devices(r: Ranks) -> None:
    """With a backend for another device the group serves CPU tensors, and refuses others in words."""
    text = "distopt serves CPU tensors, not those on meta; make a group for these"
    for backend in ("cpu:distopt", "cpu:distopt,cuda:gloo", "cuda:gloo,cpu:distopt"):
        group = group_with_gloo(r.all, backend)
        tensor = values(r.rank, torch.float32)
        dist.all_reduce(tensor, group=group)
        same(tensor, reduced("SUM", [values(q, torch.float32) for q in r.all]), backend)
        there = torch.ones(3, device="meta")
        with_error(ValueError, text, dist.broadcast, there, 0, group)
        with_error(ValueError, text, dist.send, there, (r.rank + 1) % r.size, group)
        with_error(RuntimeError, "CPU tensors, not those on cuda", group._get_backend, torch.device("cuda"))
        dist.destroy_process_group(group)


def check_monitored_barrier_by_its_function(r: Ranks) -> None:
    for timeout in (None, timedelta(seconds=20), 20.0):
        dist.monitored_barrier(timeout=timeout)
    gloo = group_with_gloo(r.all)
    dist.monitored_barrier(gloo)
    dist.destroy_process_group(gloo)
    time.sleep(0.6 if r.rank == 1 else 0)
    with pytest.raises(dist.DistBackendError, match=r"Rank 1 failed to pass monitoredBarrier .* rank 1 \(host"):
        dist.monitored_barrier(timeout=timedelta(seconds=0.2))
    dist.barrier()


def check_monitored_barrier(r: Ranks) -> None:
    world = dist.group.WORLD
    world.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)
    if r.rank == 0:
        with_error(dist.DistBackendError, r"Ranks? 1.* failed to pass monitoredBarrier", world.monitored_barrier,
                   timedelta(seconds=0.2), True)  # fmt: skip
    else:
        world._barriers += 1
    world.monitored_barrier(timedelta(seconds=20))


def check_wrong_arguments(r: Ranks) -> None:
    world = dist.group.WORLD
    with_error(ValueError, "has no meaning", dist.all_reduce, torch.ones(2), dist.ReduceOp.BAND)
    with_error(ValueError, "has no meaning", dist.all_reduce, torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG)
    with_error(ValueError, "parts of", dist.all_gather_single, torch.ones(r.size), torch.ones(2))
    with_error(ValueError, "parts of", dist.reduce_scatter_single, torch.ones(2), torch.ones(r.size))
    with_error(ValueError, "tensors for", dist.all_gather, [torch.ones(1)] * (r.size + 1), torch.ones(1))
    with_error(ValueError, "rows", dist.all_to_all_single, torch.ones(r.size + 1), torch.ones(r.size + 1))
    with_error(ValueError, "splits", dist.all_to_all_single, torch.ones(4), torch.ones(4), [1] * r.size, [9] * r.size)
    with_error(ValueError, "tensors for", world.scatter, [torch.ones(1)], [[]], scatter_from(r.rank))
    apart = [torch.ones(2) for _ in r.all], [torch.ones(2 + q) for q in r.all]
    with_error(ValueError, "3 elements", dist.all_gather, apart[0], torch.ones(3))
    with_error(ValueError, "1 elements", dist.reduce_scatter, torch.ones(1), apart[1])
    with_error(ValueError, "3 elements", world.gather, [apart[0]], [torch.ones(3)], scatter_from(r.rank))
    with_error(ValueError, "1 elements", world.scatter, [torch.ones(1)], [apart[1]], scatter_from(r.rank))
    check_all_reduce_by_its_function(r)  # and nothing has changed


def scatter_from(root: int) -> object:
    opts = dist.distributed_c10d.ScatterOptions()
    opts.rootRank = root
    return opts


def with_error(kind: type[BaseException], text: str, function: object, *args: object, **named: object) -> None:
    with pytest.raises(kind, match=text) as caught:
        function(*args, **named)
    assert not isinstance(caught.value, DistoptError), "users of PyTorch catch PyTorch's kinds of error"


# -- what uses groups --------------------------------------------------------------------------------------------------
def network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.Linear(288, 10)
    )


def trained(rank: int, group: dist.ProcessGroup, **options: object) -> list[torch.Tensor]:
    model = DistributedDataParallel(network(), process_group=group, bucket_cap_mb=0.005, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        x, y = torch.randn(4, 1, 8, 8, generator=generator), torch.randint(10, (4,), generator=generator)
        if step == 3:
            with model.no_sync():
                torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def check_ddp(r: Ranks) -> None:
    gloo = group_with_gloo(r.all)
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}):
        ours = trained(r.rank, dist.group.WORLD, **options)
        theirs = trained(r.rank, gloo, **options)
        for one, other in zip(ours, theirs, strict=True):
            if r.size == 2:  # with more ranks Gloo sums in another order
                same(one, other, options)
            else:
                torch.testing.assert_close(one, other)
        for tensor in ours[:6]:
            first = tensor.clone()
            dist.broadcast(first, 0)
            same(tensor, first, "parameters differ between ranks")
    dist.destroy_process_group(gloo)


def reference_cnn() -> torch.nn.Module:
    """The examples' CNN: 431,080 parameters."""
    torch.manual_seed(3)
    return torch.nn.Sequential(
        *(torch.nn.Conv2d(1, 20, 5), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
        *(torch.nn.Conv2d(20, 50, 5), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
        *(torch.nn.Flatten(), torch.nn.Linear(800, 500), torch.nn.ReLU(), torch.nn.Linear(500, 10)),
    )


def check_reference_cnn(r: Ranks) -> None:
    """DDP with all defaults."""
    gloo = group_with_gloo(r.all)
    results = []
    for group in (dist.group.WORLD, gloo):
        model = DistributedDataParallel(reference_cnn(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
        generator = torch.Generator().manual_seed(r.rank)
        for _ in range(5):
            x, y = torch.randn(8, 1, 28, 28, generator=generator), torch.randint(10, (8,), generator=generator)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    assert sum(parameter.numel() for parameter in results[0]) == 431_080
    for one, other in zip(*results, strict=True):
        first = one.clone()
        dist.broadcast(first, 0)
        same(one, first, "parameters differ between ranks")
        if r.size == 2:
            same(one, other)
        else:  # Gloo sums in another order
            torch.testing.assert_close(one, other)
    dist.destroy_process_group(gloo)


def moved_storages(group: dist.ProcessGroup) -> int:
    """How many storages have moved into the wire memory of `group`."""
    wire = group._lanes.first.wire
    return sum(seen.has_memory and seen.memory is None for seen in wire._seen.values()) if wire else 0


class Checkpointed(torch.nn.Module):
    """The reference CNN, with activations computed anew in the backward pass, and a layer that not every rank uses."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self._layers, self._last, self._reentrant = reference_cnn(), torch.nn.Linear(10, 10), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint_sequential(self._layers, 3, x.requires_grad_(), use_reentrant=self._reentrant)
        return self._last(y) if self._reentrant or x.sum() > 0 else y


def steps_of_ddp(
    rank: int,
    groups: list[dist.ProcessGroup],
    net: Callable[[], torch.nn.Module] = reference_cnn,
    *,
    clears: bool = True,
    clips: bool = False,
    **options: object,
) -> list[torch.Tensor]:
    """A rank's result after training as users do: parameters, and the last gradients."""
    kept, arrays = [], []
    models = [DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.5, **options) for group in groups]
    optimizers = [torch.optim.SGD(model.parameters(), 0.02, momentum=0.9) for model in models]
    generator = torch.Generator().manual_seed(rank)
    for step in range(22):
        x, y = torch.randn(2, 1, 28, 28, generator=generator), torch.randint(10, (2,), generator=generator)
        for model, optimizer in zip(models, optimizers, strict=True):
            if step == 20:
                with model.no_sync():
                    torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.zero_grad(set_to_none=clears)
            torch.nn.functional.cross_entropy(model(x), y).backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            # PyTorch does not know these views, which must stay readable when the bucket moves.
            arrays.append(np.from_dlpack(next(model.parameters()).grad))
    assert all(math.isfinite(array.sum()) for array in arrays)
    for model in models:
        kept += [
            tensor.detach().clone() for one in model.parameters() for tensor in (one, one.grad) if tensor is not None
        ]
    return kept


def check_buckets_in_wire_memory(r: Ranks) -> None:
    gloo, other, before = group_with_gloo(r.all), dist.new_group(list(r.all)), moved_storages(dist.group.WORLD)
    for options in (
        {"clips": True},
        {"clears": False, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {
            "net": partial(Checkpointed, reentrant=False),
            "find_unused_parameters": True,
            "gradient_as_bucket_view": True,
        },
        {"net": partial(Checkpointed, reentrant=True), "gradient_as_bucket_view": True},
        {"net": partial(Checkpointed, reentrant=True), "static_graph": True},
    ):
        ours = steps_of_ddp(r.rank, [dist.group.WORLD, other], **options)
        theirs = steps_of_ddp(r.rank, [gloo], **options)
        for one, its in zip(ours, theirs * 2, strict=True):
            first = one.clone()
            dist.broadcast(first, 0)
            same(one, first, (options, "differs between ranks"))
            if r.size == 2:
                same(one, its, options)
            else:  # Gloo sums in another order
                torch.testing.assert_close(one, its, rtol=1e-3, atol=1e-4)
    if min(r.counts) > 1:
        assert (wire := other._lanes.first.wire) is not None
        assert moved_storages(dist.group.WORLD) >= before
        assert sum(map(len, wire._free.values())) > 0, "the memory of discarded models has not come back"
    dist.destroy_process_group(gloo)
    dist.destroy_process_group(other)


def sum_in_backward(buffer: torch.Tensor) -> None:
    """Collective. Reduce as a hook does."""
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: dist.all_reduce(buffer, async_op=True) and None)
    x.sum().backward()


def agree_anew() -> None:
    """Collective. Have ranks agree on moves as often as in a new group."""
    lane = dist.group.WORLD._lanes.first
    if lane.wire is not None:
        lane.wire = WireMemory(lane.communicator, lane._post, TIMEOUT_SECONDS)


def check_memory_seen_elsewhere_stays(r: Ranks) -> None:
    """By an array, another process or a file: what they read is what is reduced, by rank 0 alone or by all."""
    count, folder = 20_000, TemporaryDirectory()

    def mapped() -> tuple[torch.Tensor, torch.Tensor]:
        array = np.memmap(Path(folder.name, "buffer"), np.float32, "w+", shape=count)
        return torch.from_numpy(array), torch.from_numpy(array)

    def shared() -> tuple[torch.Tensor, torch.Tensor]:
        buffer = torch.zeros(count).share_memory_()
        other = torch.UntypedStorage._new_shared_fd_cpu(*buffer.untyped_storage()._share_fd_cpu_())
        return buffer, torch.tensor([]).set_(other)

    def of_array() -> tuple[torch.Tensor, torch.Tensor]:
        array = np.zeros(count, np.float32)
        return torch.from_numpy(array), torch.from_numpy(array)

    def of_file() -> tuple[torch.Tensor, torch.Tensor]:
        path = str(Path(folder.name, "file"))
        buffer = torch.from_file(path, shared=True, size=count)
        return buffer, torch.from_file(path, shared=True, size=count)

    for (kind, make), alone in itertools.product(
        {"memmap": mapped, "share_memory_": shared, "array": of_array, "file": of_file}.items(), (True, False)
    ):
        agree_anew()
        exports = r.rank == 0 or not alone
        buffer, seen = make() if exports else (torch.zeros(count),) * 2
        for step in range(26):
            buffer.fill_(r.rank + step)
            sum_in_backward(buffer)
            expected = torch.full((count,), float(sum(q + step for q in r.all)))
            same(buffer, expected, (kind, alone, step))
            same(seen, expected, (kind, alone, step))
    # At any step: also between the ranks' agreement and the move. Another array keeps what it reads, too.
    for at, alone in itertools.product((0, 5, 7, 8, 9, 12, 15, 16, 17, 20), (True, False)):
        agree_anew()
        buffer, array = torch.zeros(count), None
        for step in range(28):
            if step == at and (r.rank == 0 or not alone):
                array = buffer.numpy()
            buffer.fill_(r.rank + step)
            sum_in_backward(buffer)
            expected = torch.full((count,), float(sum(q + step for q in r.all)))
            same(buffer, expected, (at, alone, step))
            assert array is None or (array == expected.numpy()).all(), (at, alone, step)
        if at == 20 and min(r.counts) > 1:
            assert moved_storages(dist.group.WORLD) == 1


def check_arrays_of_gradients_stay_valid(r: Ranks) -> None:
    model = DistributedDataParallel(torch.nn.Linear(300, 200), gradient_as_bucket_view=True)
    for step in range(40):
        model.zero_grad(set_to_none=False)
        model(torch.full((2, 300), 1.0 + step)).sum().backward()
        if step == 3:
            array = model.module.weight.grad.numpy()
        if step > 3:
            assert (array == 2.0 * (1 + step)).all(), (step, array[0, 0])
            same(model.module.weight.grad, torch.full((200, 300), 2.0 * (1 + step)))


def check_data_loader_workers(r: Ranks) -> None:
    """Forked ones share the buckets' memory with their rank; spawned ones import this file."""
    groups = dist.new_group(list(r.all)), group_with_gloo(r.all)
    models = [DistributedDataParallel(reference_cnn(), process_group=group) for group in groups]
    optimizers = [torch.optim.SGD(model.parameters(), 0.02, momentum=0.9) for model in models]
    generator = torch.Generator().manual_seed(r.rank)
    images, labels = torch.randn(40, 1, 28, 28, generator=generator), torch.randint(10, (40,), generator=generator)
    for method in ("spawn", "fork"):
        for x, y in DataLoader(TensorDataset(images, labels), 2, num_workers=1, multiprocessing_context=method):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    assert (moved_storages(groups[0]) > 0) == (min(r.counts) > 1)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        if r.size == 2:
            same(one, other)
        else:  # Gloo sums in another order
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    for group in groups:
        dist.destroy_process_group(group)


def check_memory_outlives_the_group(r: Ranks) -> None:
    for _ in range(2):
        group = dist.new_group(list(r.all))
        model = DistributedDataParallel(reference_cnn(), process_group=group, gradient_as_bucket_view=True)
        for _ in range(20):
            model(torch.ones(1, 1, 28, 28)).sum().backward()
        assert (moved_storages(group) > 0) == (min(r.counts) > 1)
        grads = [parameter.grad for parameter in model.parameters()]
        before = [grad.clone() for grad in grads]
        dist.destroy_process_group(group)
        if r.rank % 2:
            del model
            gc.collect()
        for grad, kept in zip(grads, before, strict=True):
            same(grad, kept)
        grads[0].fill_(r.rank)
        same(grads[0], torch.full_like(before[0], r.rank))


def check_discarded_models(r: Ranks) -> None:
    def cycle() -> None:
        model = DistributedDataParallel(torch.nn.Linear(300, 200), gradient_as_bucket_view=True)
        for _ in range(18):
            model(torch.ones(2, 300)).sum().backward()

    def used() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().splitlines()
        return sum("memfd" in line for line in maps), len(list(Path("/proc/self/fd").iterdir()))

    agree_anew()
    for _ in range(3):
        cycle()
    before = used()
    for _ in range(int(os.environ.get("MODELS", "20"))):
        cycle()
    # How many models have memory at a time depends on where they end between two agreements.
    assert all(now <= then + 2 for now, then in zip(used(), before, strict=True)), (used(), before)


def check_abandoned_backward_pass(r: Ranks) -> None:
    """The work it started does not reach the gradients of the next."""

    class Break(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("half-way")

    layers = [torch.nn.Linear(150, 150, bias=False) for _ in range(4)]
    for trial in range(3):
        model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.05, gradient_as_bucket_view=True)
        for step in range(12):
            x = torch.full((1, 150), float(r.rank + step + trial))
            model.zero_grad()
            model(x).sum().backward()
            local = []
            for q in r.all:
                grads = torch.autograd.grad(
                    torch.nn.Sequential(*layers)(torch.full((1, 150), float(q + step + trial))).sum(),
                    list(model.parameters()),
                )
                local.append(grads)
            for parameter, *grads in zip(model.parameters(), *local, strict=True):
                torch.testing.assert_close(parameter.grad, sum(grads) / r.size)
        broken = torch.nn.Sequential(*layers[:2], Breaking(Break), *layers[2:])
        model = DistributedDataParallel(broken, bucket_cap_mb=0.05)
        for _ in range(1 + trial % 2):
            with pytest.raises(ArithmeticError, match="half-way"):
                model(torch.ones(1, 150)).sum().backward()
            model = DistributedDataParallel(broken, bucket_cap_mb=0.05)


class Breaking(torch.nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function.apply(x)


def check_backward_without_a_thread(r: Ranks) -> None:
    """On one host, the thread of a backward pass also carries out its operations."""
    if len(r.counts) > 1:  # a thread keeps the network busy
        return
    carry_out, threads = PendingWork.carry_out, []

    def recorded(work: PendingWork) -> None:
        if work.in_backward:
            threads.append(threading.get_ident())
        carry_out(work)

    group = dist.new_group(list(r.all))
    model = DistributedDataParallel(network(), process_group=group, bucket_cap_mb=0.005)
    with mock.patch.object(PendingWork, "carry_out", recorded):
        for _ in range(5):
            model(torch.ones(2, 1, 8, 8)).sum().backward()
    assert set(threads) == {threading.get_ident()}
    assert len(threads) >= 5
    dist.destroy_process_group(group)


def normalized(dtype: torch.dtype) -> torch.nn.Module:
    """A network with batch normalization of every kind."""
    torch.manual_seed(5)
    layers = (
        *(torch.nn.BatchNorm2d(3, momentum=None), torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()),
        *(torch.nn.Conv2d(4, 5, 2), torch.nn.BatchNorm2d(5, affine=False), torch.nn.Flatten(), torch.nn.Linear(45, 6)),
        *(torch.nn.BatchNorm1d(6, track_running_stats=False), torch.nn.Linear(6, 3)),
    )
    return torch.nn.Sequential(torch.nn.Sequential(*layers[:4]), *layers[4:]).to(dtype)


def batch_of(ranks: range, step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of these ranks, of different sizes, one after the other; means are large beside deviations."""
    generators = [(q, torch.Generator().manual_seed(100 * step + q)) for q in ranks]
    x = [torch.randn(3 + 2 * q, 3, 6, 6, generator=g, dtype=torch.float64) * 0.5 + 3 + q for q, g in generators]
    return torch.cat(x).to(dtype), torch.cat([torch.randint(3, (3 + 2 * q,), generator=g) for q, g in generators])


def check_sync_batch_norm(r: Ranks) -> None:
    """DDP as one rank that has all ranks' batches."""
    gloo = group_with_gloo(r.all)
    cross_entropy, own = torch.nn.functional.cross_entropy, range(r.rank, r.rank + 1)
    weight = len(batch_of(own, 0, torch.float32)[0]) * r.size / len(batch_of(range(r.size), 0, torch.float32)[0])
    for dtype, group, memory in (
        (torch.float64, None, torch.contiguous_format),
        (torch.float32, None, torch.channels_last),
        (torch.float32, gloo, torch.contiguous_format),
    ):
        model, whole = normalized(dtype).to(memory_format=memory), normalized(dtype)
        keys = [*model.state_dict()]
        model = distopt.torch.SyncBatchNorm.convert_sync_batchnorm(model, group)
        assert [*model.state_dict()] == keys
        assert sum(isinstance(layer, distopt.torch.SyncBatchNorm) for layer in model.modules()) == 4
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.0005, broadcast_buffers=False)
        first, second = (torch.optim.SGD(net.parameters(), 0.05, momentum=0.5) for net in (model, whole))
        for step in range(5):
            x, y = batch_of(own, step, dtype)
            first.zero_grad()
            (cross_entropy(ddp(x.to(memory_format=memory)), y) * weight).backward()
            first.step()
            x, y = batch_of(range(r.size), step, dtype)
            second.zero_grad()
            cross_entropy(whole(x), y).backward()
            second.step()
        tolerance = 1e-10 if dtype == torch.float64 else 1e-3
        for (name, found), expected in zip(model.state_dict().items(), whole.state_dict().values(), strict=True):
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
            of_first = found.clone()
            dist.broadcast(of_first, 0)
            same(found, of_first, name)
        if r.rank == 0:  # evaluation is local; the last normalization has no running statistics
            x, _ = batch_of(own, 9, dtype)
            torch.testing.assert_close(model.eval()(x), whole.eval()(x), rtol=10 * tolerance, atol=10 * tolerance)
    dist.destroy_process_group(gloo)


def check_sync_batch_norm_gradients(r: Ranks) -> None:
    """Beside central differences: of this rank's loss, where a group has no other; and of the sum over all ranks."""
    groups = [dist.new_group([q]) for q in r.all]
    layer = distopt.torch.SyncBatchNorm(3, dtype=torch.float64, process_group=groups[r.rank])
    x = (torch.randn(2 + r.rank, 3, 4, dtype=torch.float64) + r.rank).requires_grad_()
    layer.weight.data.uniform_(0.5, 2)

    def normal(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, x)

    assert torch.autograd.gradcheck(normal, (x, layer.weight, layer.bias))
    layer.process_group = None
    factors = torch.cos(torch.arange(x.numel(), dtype=torch.float64) * (r.rank + 1)).view_as(x)

    def loss() -> torch.Tensor:
        return (layer(x).square() * factors).sum()

    loss().backward()
    for owner in r.all:
        for i in range((2 + owner) * 12):
            sums = []
            for change in (1e-6, -1e-6):
                with torch.no_grad():
                    before = x.clone()
                    x.view(-1)[i:][:1] += change * (r.rank == owner)
                    total = loss()
                    x.copy_(before)
                dist.all_reduce(total)
                sums.append(total.item())
            if r.rank == owner:
                assert x.grad is not None
                assert x.grad.view(-1)[i].item() == pytest.approx((sums[0] - sums[1]) / 2e-6, rel=1e-5, abs=1e-6)
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def check_sync_batch_norm_of_an_empty_batch(r: Ranks) -> None:
    """Of all ranks but the last one, whose statistics and gradients are as without the others."""
    whole = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layer, local = (kind(3, dtype=torch.float64) for kind in (distopt.torch.SyncBatchNorm, torch.nn.BatchNorm1d))
    x = (whole if r.rank == r.size - 1 else whole[:0]).clone().requires_grad_()
    alone = whole.clone().requires_grad_()
    for each, input_ in ((layer, x), (local, alone)):
        each(input_).pow(3).sum().backward()
    dist.all_reduce(layer.weight.grad)
    torch.testing.assert_close(layer.weight.grad, local.weight.grad)
    torch.testing.assert_close(layer.running_var, local.running_var)
    torch.testing.assert_close(x.grad, alone.grad[: len(x)])


def check_sync_batch_norm_of_16_bits(r: Ranks) -> None:
    x = (torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(r.rank)) + r.rank).bfloat16().requires_grad_()
    layer = distopt.torch.SyncBatchNorm(3)
    y = layer(x)
    assert y.dtype == torch.bfloat16
    y.square().sum().backward()
    parts = [torch.empty_like(x) for _ in r.all]
    dist.all_gather(parts, x.detach())
    whole = torch.nn.functional.batch_norm(torch.cat(parts).float(), None, None, training=True)
    torch.testing.assert_close(y.float(), whole[4 * r.rank :][:4], rtol=2e-2, atol=2e-2)
    assert torch.isfinite(x.grad).all()
    with_error(ValueError, r"expected an input \[N, 3, ...\], got \[4, 2\]", layer, torch.zeros(4, 2))


def check_compiled_ddp(r: Ranks) -> None:
    """By the default compiler, the model and DDP around it."""

    def trained_by(group: dist.ProcessGroup, *, around: bool) -> list[torch.Tensor]:
        layers = reference_cnn()
        inner = layers if around else torch.compile(layers)
        model = DistributedDataParallel(inner, process_group=group, bucket_cap_mb=1)
        model, optimizer = torch.compile(model) if around else model, torch.optim.SGD(layers.parameters(), 0.02)
        generator = torch.Generator().manual_seed(r.rank)
        for _ in range(20):
            x, y = torch.randn(2, 1, 28, 28, generator=generator), torch.randint(10, (2,), generator=generator)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return [parameter.detach() for parameter in layers.parameters()]

    gloo = group_with_gloo(r.all)
    for around in (False, True):
        for one, other in zip(*(trained_by(group, around=around) for group in (dist.group.WORLD, gloo)), strict=True):
            if r.size == 2:
                same(one, other, around)
            else:  # Gloo sums in another order
                torch.testing.assert_close(one, other)
    dist.destroy_process_group(gloo)


def check_compiled_collectives(r: Ranks) -> None:
    @torch.compile(backend="eager")
    def step(tensor: torch.Tensor) -> torch.Tensor:
        doubled = tensor * 2
        work = dist.all_reduce(doubled, async_op=True)
        work.wait()
        dist.all_reduce(doubled)
        return doubled + 1

    own = values(r.rank, torch.float32)
    same(step(own), reduced("SUM", [values(q, torch.float32) * 2 for q in r.all]) * r.size + 1)


def check_builtin_hooks(r: Ranks) -> None:
    """Hooks in C++, which ask for futures that hold a C++ list."""

    def gradients(group: dist.ProcessGroup, kind: dist.BuiltinCommHookType) -> list[torch.Tensor]:
        # The model goes before its group is destroyed: if it holds the last reference to a group of Gloo, PyTorch 2.13
        # joins Gloo's threads with the interpreter lock held, for which they may wait.
        model = DistributedDataParallel(network(), process_group=group)
        generator = torch.Generator().manual_seed(r.rank)
        model._register_builtin_comm_hook(kind)
        for _ in range(3):
            model(torch.randn(4, 1, 8, 8, generator=generator)).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    gloo = group_with_gloo(r.all)
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        for one, other in zip(gradients(dist.group.WORLD, kind), gradients(gloo, kind), strict=True):
            if r.size == 2:  # with more ranks Gloo sums in another order, and rounds every sum
                same(one, other, kind)
            else:
                torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
    dist.destroy_process_group(gloo)


def check_power_sgd_hook(r: Ranks) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = DistributedDataParallel(network())
    state = powerSGD_hook.PowerSGDState(dist.group.WORLD, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(5):
        model(torch.randn(4, 1, 8, 8)).square().mean().backward()
    for parameter in model.parameters():
        first = parameter.grad.clone()
        dist.broadcast(first, 0)
        same(parameter.grad, first)


def check_fsdp(r: Ranks) -> None:
    from torch.distributed.fsdp import fully_shard

    results = []
    for group in (dist.new_group(list(r.all)), group_with_gloo(r.all)):
        mesh = dist.DeviceMesh.from_group(group, "cpu")
        model = network()
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        generator = torch.Generator().manual_seed(r.rank)
        for _ in range(4):
            x, y = torch.randn(4, 1, 8, 8, generator=generator), torch.randint(10, (4,), generator=generator)
            torch.nn.functional.cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        results.append([parameter.full_tensor().detach() for parameter in model.parameters()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def check_fsdp_of_16_bits(r: Ranks) -> None:
    """FSDP of PyTorch 1 frees and fills the storages of parameters in each pass; with Gloo's results."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

    bits16 = MixedPrecision(param_dtype=torch.bfloat16)
    gloo = group_with_gloo(r.all)
    for options in (
        {"mixed_precision": bits16},
        {"mixed_precision": bits16, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"mixed_precision": MixedPrecision(torch.bfloat16, torch.bfloat16), "use_orig_params": True},
    ):
        results = []
        for group in (dist.group.WORLD, gloo):
            torch.manual_seed(3)
            layers = torch.nn.Linear(30, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10)
            layers = [FullyShardedDataParallel(layer, group, device_id=torch.device("cpu"), **options)
                      if isinstance(layer, torch.nn.Linear) else layer for layer in layers]  # fmt: skip
            model = FullyShardedDataParallel(
                torch.nn.Sequential(*layers), group, device_id=torch.device("cpu"), **options
            )
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            generator = torch.Generator().manual_seed(r.rank)
            for _ in range(4):
                x, y = torch.randn(4, 30, generator=generator), torch.randint(10, (4,), generator=generator)
                torch.nn.functional.cross_entropy(model(x).float(), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            with FullyShardedDataParallel.summon_full_params(model):
                results.append([parameter.detach().clone() for parameter in model.parameters()])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
    dist.destroy_process_group(gloo)


def check_dtensor(r: Ranks) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (r.size,))
    whole = values(1, torch.float32, (2 * r.size, 3 * r.size))
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    same(rows.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()]).to_local(), whole)
    same((rows @ rows.t()).full_tensor(), whole @ whole.t())
    partial = dist.tensor.DTensor.from_local(whole, mesh, [Partial()])
    same(partial.redistribute(mesh, [Shard(0)]).full_tensor(), whole * r.size)


def check_checkpoint(r: Ranks) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor

    folder = [TemporaryDirectory() if r.rank == 0 else None]
    path = [folder[0].name if folder[0] else None]
    dist.broadcast_object_list(path, 0)
    mesh = dist.init_device_mesh("cpu", (r.size,))
    whole = values(1, torch.float32, (2 * r.size, 3))
    dcp.save({"x": distribute_tensor(whole, mesh, [Shard(0)]), "step": 7}, checkpoint_id=path[0])
    state = {"x": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(1)]), "step": 0}
    dcp.load(state, checkpoint_id=path[0])
    same(state["x"].full_tensor(), whole)
    assert state["step"] == 7
    dist.barrier()


# -- running -----------------------------------------------------------------------------------------------------------
CHECKS = {name.removeprefix("check_"): function for name, function in list(globals().items()) if name[:6] == "check_"}
# A compiler's processes, and hooks of C++, are not for every run: `make torch` has them.
BY_MAKE_TORCH = ("compiled_ddp", "compiled_collectives", "builtin_hooks")


def rank_main(rank: int, method: str, counts: list[int], names: list[str], out: Queue[tuple[int, str, str]]) -> None:
    faulthandler.dump_traceback_later(float(os.environ.get("HANGS_AFTER", "200")), exit=True)
    join(rank, sum(counts), method, TIMEOUT_SECONDS)
    for name in names:
        error = ""
        try:
            CHECKS[name](Ranks(rank, counts))
        except BaseException:
            error = traceback.format_exc()
        try:
            dist.barrier()
        except BaseException:  # the next check has a new group
            error = error or traceback.format_exc()
            dist.destroy_process_group()
            join(rank, sum(counts), method, TIMEOUT_SECONDS, f" after {name}")
        out.put((rank, name, error))
    dist.destroy_process_group()


def main() -> None:
    names = os.environ.get("CHECKS", ",".join(CHECKS)).split(",")
    out: Queue[tuple[int, str, str]] = CONTEXT.Queue()
    errors: dict[str, dict[int, str]] = {}
    with place_of(sys.argv[1]) as place:
        method = place.method()
        place.keep_store(method)
        ranks = place.start(rank_main, method, place.counts, names, out)
        threading.Thread(target=lambda: ([process.join() for process in ranks], out.put(None)), daemon=True).start()
        while (entry := out.get()) is not None:
            rank, name, error = entry
            errors.setdefault(name, {})[rank] = error
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
