"""Wrong arguments and ranks that disagree: the errors, and groups that work afterwards."""

import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from .collectives import check_a_sum_of_a_parameter
from .ranks import Ranks, same, with_error


def check_sparse_tensors_that_differ(r: Ranks) -> None:
    """All ranks raise an error with the difference, and the group works afterwards."""
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


def check_quantized_tensors(r: Ranks) -> None:
    """Their scales would not be sent, so that ranks with other ones would read other numbers."""
    tensor = torch.quantize_per_tensor(torch.arange(4.0), 0.5 + r.rank, 0, torch.quint8)
    for function, *args in ((dist.broadcast, 0), (dist.all_gather, tensor), (dist.isend, (r.rank + 1) % r.size)):
        given = [tensor] * r.size if function is dist.all_gather else tensor
        with_error(ValueError, r"quantized.*int_repr\(\)", function, given, *args)
    dist.barrier()


def check_timeouts_without_end(r: Ranks) -> None:
    """Ten thousand years, which exceed what Python's waits take, and the longest, which PyTorch makes negative."""
    long = timedelta(days=3_650_000)
    group = r.group(timeout=long)
    total = torch.full((3,), float(r.rank))
    dist.all_reduce(total, group=group, async_op=True).wait(long)
    same(total, torch.full((3,), float(sum(r.all))))
    if r.size > 1:
        received = torch.zeros(3)
        sent = dist.isend(total + r.rank, (r.rank + 1) % r.size, group=group)
        dist.irecv(received, (r.rank - 1) % r.size, group=group).wait(long)
        sent.wait(long)
        same(received, total + (r.rank - 1) % r.size)
    dist.monitored_barrier(group, long)
    with_error(ValueError, "positive one of less than 292 years", dist.new_group, list(r.all), timeout=timedelta.max)


def check_sizes_in_a_list_that_differ(r: Ranks) -> None:
    """Lists of the same total size. The sizes differ after the part of the label that messages show."""
    last = r.rank == r.size - 1
    group, sizes = r.group(), [1_000_000, 1_000_002 + last, 1_000_003 - last, *[9] * (r.size - 3)]
    parts = [torch.ones(size) for size in sizes[-r.size :]]
    with_error(dist.DistBackendError, "all ranks must", dist.reduce_scatter, parts[r.rank].clone(), parts, group=group)


def check_coalesced_lists_that_differ(r: Ranks) -> None:
    """Lists of different lengths: all ranks raise an error, though the next tensor has the same size."""
    options = dist.distributed_c10d.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp.SUM
    with_error(ValueError, "the list is empty", dist.group.WORLD.allreduce_coalesced, [], options)
    group = r.group()
    ours = [torch.ones(4) for _ in range(1 + (r.rank == 0))]
    with_error(dist.DistBackendError, r"1 of 1\)", lambda: group.allreduce_coalesced(ours, options).wait())


def check_a_rank_that_does_not_join(r: Ranks) -> None:
    """The others name it after the timeout of the new group, which is shorter than the store's."""
    last = r.size - 1
    if r.rank != last:
        text = rf"rank {last} \(host .*, pid \d+\) did not join the group of ranks .* within 2 s"
        split = partial(dist.group.WORLD.split_group, group_name="not all")
        with_error(dist.DistBackendError, text, split, list(r.all), timedelta(seconds=2))


def check_nan(r: Ranks) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DIST_NAN_CHECK", "1")
        group = r.group()
    good, bad = torch.ones(r.size), torch.tensor([1.0] * (r.size - 1) + [float("nan")])
    outs, text = [bad.clone() for _ in r.all], f"NaN found in input tensor of rank {r.rank}"
    with_error(RuntimeError, text, dist.all_reduce, bad, dist.ReduceOp.SUM, group)
    with_error(RuntimeError, text, dist.all_gather, outs, bad, group)
    with_error(RuntimeError, text, dist.reduce_scatter_single, torch.ones(1), bad, dist.ReduceOp.SUM, group)
    with_error(RuntimeError, text, dist.send, bad, (r.rank + 1) % r.size, group)
    dist.all_gather(outs, good, group)  # NaN may lie where results will
    same(outs, [good] * r.size)
    dist.all_to_all_single(torch.full((r.size,), float("nan")), good, group=group)
    dist.all_reduce(bad)


def check_monitored_barrier(r: Ranks) -> None:
    for timeout in (None, timedelta(seconds=60), 60.0):
        dist.monitored_barrier(timeout=timeout)
    dist.monitored_barrier(r.gloo)
    time.sleep(2.5 if r.rank == 1 else 0)
    text = r"Rank 1 failed to pass monitoredBarrier .* rank 1 \(host"
    with_error(dist.DistBackendError, text, dist.monitored_barrier, timeout=timedelta(seconds=1))
    dist.barrier()
    world, text = dist.group.WORLD, r"Ranks? 1.* failed to pass monitoredBarrier"
    world.monitored_barrier(timedelta(seconds=60), wait_all_ranks=True)
    if r.rank == 0:
        with_error(dist.DistBackendError, text, world.monitored_barrier, timedelta(seconds=0.2), True)
    else:
        world._barriers += 1
    world.monitored_barrier(timedelta(seconds=60))


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
    check_a_sum_of_a_parameter(r)  # and nothing has changed


def scatter_from(root: int) -> object:
    opts = dist.distributed_c10d.ScatterOptions()
    opts.rootRank = root
    return opts
