"""Every collective against what one process computes."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from .ranks import DTYPES, FLOATS, LAYOUTS, MOVED, Ranks, ops_of, reduced, same, same_on_all_ranks, values, with_error


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
        same(tensor, r.total(dtype), dtype)


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


def check_all_reduce_of_a_parameter(r: Ranks) -> None:
    parameter = torch.nn.Parameter(values(r.rank, torch.float32))
    dist.all_reduce(parameter)
    same(parameter.detach(), r.total())


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
    same(out, r.total(shape=(r.rank + 1,)))


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
    """From no element to some MiB; few of these counts divide by the number of ranks or chunks."""
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
    """A call of every collective, with `count` elements a rank."""

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
    """All ranks raise the error of different counts, instead of pairing this operation with a later one."""
    for at, name in enumerate(collectives_of(0, r, dist.group.WORLD)):
        group = dist.new_group(list(r.all))
        count = (4, 40_000, 3_000_000)[at % 3]
        mine = collectives_of(0 if r.rank == at % r.size else count, r, group)[name]
        # A broadcast has ended on a host that has received all.
        calls = [mine, partial(dist.barrier, group=group)] if name.startswith("broadcast") else [mine]
        with pytest.raises(dist.DistBackendError, match=r"all ranks must call|same size|same shape"):
            pytest.fail(f"{name} ended with {[call() for call in calls]}")
        dist.destroy_process_group(group)


def check_empty_on_all_ranks(r: Ranks) -> None:
    """An operation on nothing is an operation: a rank that does not call it gets an error."""
    group = dist.new_group(list(r.all))
    for name, collective in collectives_of(0, r, group).items():
        collective()
        tensor = values(r.rank, torch.float32)
        dist.all_reduce(tensor, group=group)
        same(tensor, r.total(), name)
    if r.rank != r.size - 1:
        dist.all_reduce(torch.ones(0), async_op=True, group=group)
    with_error(dist.DistBackendError, "all ranks must call", dist.all_reduce, torch.ones(4), dist.ReduceOp.SUM, group)
    dist.destroy_process_group(group)


def check_large_sums_of_fractions(r: Ranks) -> None:
    """The same bits on all ranks. Two ranks have only one order of summing, so their bits are known."""
    for dtype in FLOATS:
        every = [torch.randn(700_001, generator=torch.Generator().manual_seed(q)).to(dtype) for q in r.all]
        out = every[r.rank].clone()
        dist.all_reduce(out)
        same_on_all_ranks(out, dtype)
        if r.size == 2:
            same(out, reduced("SUM", every), dtype)
        else:
            exact = torch.stack(every).double().sum(0)
            step = torch.finfo(dtype).eps * (torch.stack(every).abs().double().sum(0) + 1e-3)
            assert bool(((out.double() - exact).abs() <= r.size * step).all()), dtype


def check_coalesced(r: Ranks) -> None:
    tensors = [values(r.rank, torch.float32), values(r.rank + 1, torch.float32, (7,))]
    dist.all_reduce_coalesced(tensors)
    for i, tensor in enumerate(tensors):
        same(tensor, r.total(shape=tuple(tensor.shape), offset=i))
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
        expected = r.total(shape=(3 * r.size,))
        same(out, expected.view(r.size, 3)[r.rank])


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
