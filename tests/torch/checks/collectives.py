"""Every collective against what one process computes."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from .ranks import DTYPES, FLOATS, LAYOUTS, MOVED, Ranks, ops_of, reduced, same, values, with_error


def all_reduce(tensor: torch.Tensor, op: object) -> None:
    """By the group, as `dist.all_reduce` refuses products of complex tensors."""
    opts = dist.distributed_c10d.AllreduceOptions()
    opts.reduceOp = op
    dist.group.WORLD.allreduce([tensor], opts).wait()


def check_reductions(r: Ranks) -> None:
    for dtype, (layout, lay) in itertools.product(DTYPES, r.layouts.items()):
        parts = [lay(each) for each in r.each(dtype)]
        for name in ops_of(dtype):
            tensor = lay(values(r.rank, dtype))
            call = all_reduce if dtype.is_complex else dist.all_reduce
            call(tensor, getattr(dist.ReduceOp, name))
            same(tensor, reduced(name, parts), (dtype, layout, name))
        for root in r.all:
            tensor = lay(values(r.rank, dtype))
            dist.reduce(tensor, root)
            same(tensor, reduced("SUM", parts) if r.rank == root else parts[r.rank], (dtype, layout, root))


def check_a_sum_of_a_parameter(r: Ranks) -> None:
    parameter = torch.nn.Parameter(values(r.rank, torch.float32))
    work = dist.all_reduce(parameter, async_op=True)
    work.wait()
    assert work.is_completed()
    assert work.is_success()
    same(parameter, r.total())


def check_premul_sum(r: Ranks) -> None:
    tensor = values(r.rank, torch.float32)
    all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    same(tensor, reduced("SUM", [each * 0.5 for each in r.each()]))
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


def check_conjugate_tensors(r: Ranks) -> None:
    tensor = values(r.rank, torch.complex64).conj()
    outs = [torch.empty_like(values(0, torch.complex64)) for _ in r.all]
    dist.group.WORLD.allgather([outs], [tensor]).wait()
    same(outs, [each.conj().resolve_conj() for each in r.each(torch.complex64)])


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


def check_moves(r: Ranks) -> None:
    for dtype, lay in itertools.product(MOVED, r.layouts.values()):
        mine, every = lay(values(r.rank, dtype)), [lay(each) for each in r.each(dtype)]

        def blank(dtype: torch.dtype = dtype, lay: Callable = lay) -> list[torch.Tensor]:
            return [lay(values(9, dtype)) for _ in r.all]

        for root in r.all:
            is_root, tensor, outs = r.rank == root, lay(values(r.rank, dtype)), blank()
            dist.broadcast(tensor, root)
            same(tensor, every[root], ("broadcast", dtype, root))
            dist.gather(mine, outs if is_root else None, root)
            same(outs, every if is_root else blank(), ("gather", dtype, root))
            dist.scatter(tensor, [lay(values(root + 3 * p, dtype)) for p in r.all] if is_root else None, root)
            same(tensor, lay(values(root + 3 * r.rank, dtype)), ("scatter", dtype, root))
        for asynchronous in (False, True):
            outs = blank()
            work = dist.all_gather(outs, mine, async_op=asynchronous)
            if work:
                work.wait()
            same(outs, every, ("all_gather", dtype))
        outs = blank()
        dist.all_to_all(outs, [lay(values(r.rank + 3 * p, dtype)) for p in r.all])
        same(outs, [lay(each) for each in r.each(dtype, offset=3 * r.rank)], ("all_to_all", dtype))


def check_different_sizes(r: Ranks) -> None:
    outs, parts = [torch.zeros(q + 1) for q in r.all], [values(q, torch.float32, (q + 1,)) for q in r.all]
    dist.all_gather(outs, parts[r.rank])
    same(outs, parts)
    dist.reduce_scatter(outs[r.rank], [values(r.rank, torch.float32, (p + 1,)) for p in r.all])
    same(outs[r.rank], r.total(shape=(r.rank + 1,)))


def check_all_gather_single(r: Ranks) -> None:
    for dtype in MOVED:
        expected = torch.cat(r.each(dtype))
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
            dist.reduce_scatter_single(out, whole, op)
            same([out, whole], [expected, torch.cat(parts[r.rank])], (dtype, name))


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
        same(out, torch.cat(r.each(dtype, offset=3 * r.rank)), dtype)


def check_sizes(r: Ranks) -> None:
    """From no element to some MiB; few of these counts divide by the number of ranks or chunks."""
    last, counts = r.size - 1, (0, 1, 2, 3, 7, 1023, 16_385, 300_007)
    for count, dtype in itertools.product(counts, (torch.float32, torch.int64)):
        every = r.each(dtype, (count,))
        mine, whole, total = every[r.rank], torch.cat(every), reduced("SUM", every)
        for call, out, args, expected in (
            (dist.all_reduce, mine.clone(), (), total),
            (dist.broadcast, mine.clone(), (last,), every[-1]),
            (dist.reduce, mine.clone(), (last,), total if r.rank == last else mine),
            (dist.all_gather_single, torch.empty_like(whole), (mine,), whole),
            (dist.reduce_scatter_single, torch.empty_like(mine), (whole,), mine * r.size),
            (dist.all_to_all_single, torch.empty_like(whole), (whole,), mine.repeat(r.size)),
        ):
            call(out, *args)
            same(out, expected, (call.__name__, count, dtype))


def calls_of(
    r: Ranks, one: torch.Tensor, parts: list[torch.Tensor], whole: torch.Tensor, group: dist.ProcessGroup | None = None
) -> dict[str, Callable[[], object]]:
    """A call of every collective: with a tensor, as many as there are ranks, and one of their size."""
    at_root = parts if r.rank == 0 else None
    return {
        "all_reduce": lambda: dist.all_reduce(one, group=group),
        "all_reduce, async": lambda: dist.all_reduce(one, group=group, async_op=True).wait(),
        "reduce": lambda: dist.reduce(one, 0, group=group),
        "broadcast": lambda: dist.broadcast(one, 0, group=group),
        "broadcast from the last": lambda: dist.broadcast(one, r.size - 1, group=group),
        "all_gather": lambda: dist.all_gather(parts, one, group=group),
        "all_gather_single": lambda: dist.all_gather_single(whole, one, group=group),
        "all_gather_single, async": lambda: dist.all_gather_single(whole, one, group=group, async_op=True).wait(),
        "reduce_scatter": lambda: dist.reduce_scatter(one, parts, group=group),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(one, whole, group=group),
        "gather": lambda: dist.gather(one, at_root, 0, group=group),
        "scatter": lambda: dist.scatter(one, at_root, 0, group=group),
        "all_to_all": lambda: dist.all_to_all([torch.empty_like(part) for part in parts], parts, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
    }


def calls_of_ones(count: int, r: Ranks, group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    """The same with `count` elements a rank, and sums by other ways."""
    numbers, sparse = torch.ones(count, dtype=torch.uint16), torch.ones(count).to_sparse()
    return {
        **calls_of(r, torch.ones(count), [torch.ones(count) for _ in r.all], torch.ones(count * r.size), group),
        "all_reduce, fold": lambda: dist.all_reduce(numbers, group=group),
        "all_reduce, sparse": lambda: dist.all_reduce(sparse, group=group),
    }


def check_empty_on_one_rank(r: Ranks) -> None:
    """All ranks raise the error of different counts, instead of pairing this operation with a later one."""
    for at, name in enumerate(calls_of_ones(0, r, dist.group.WORLD)):
        group = r.group()
        count = (4, 40_000, 3_000_000)[at % 3]
        mine = calls_of_ones(0 if r.rank == at % r.size else count, r, group)[name]
        # A broadcast has ended on a host that has received all.
        calls = [mine, partial(dist.barrier, group=group)] if name.startswith("broadcast") else [mine]
        with pytest.raises(dist.DistBackendError, match=r"all ranks must call|same size|same shape"):
            pytest.fail(f"{name} ended with {[call() for call in calls]}")


def check_empty_on_all_ranks(r: Ranks) -> None:
    """An operation on nothing is an operation: a rank that does not call it gets an error."""
    group = r.group()
    for name, collective in calls_of_ones(0, r, group).items():
        collective()
        tensor = values(r.rank, torch.float32)
        dist.all_reduce(tensor, group=group)
        same(tensor, r.total(), name)
    if r.rank != r.size - 1:
        dist.all_reduce(torch.ones(0), async_op=True, group=group)
    with_error(dist.DistBackendError, "all ranks must call", dist.all_reduce, torch.ones(4), dist.ReduceOp.SUM, group)


def check_coalesced(r: Ranks) -> None:
    tensors = [values(r.rank, torch.float32), values(r.rank + 1, torch.float32, (7,))]
    dist.all_reduce_coalesced(tensors)
    for i, tensor in enumerate(tensors):
        same(tensor, r.total(shape=tuple(tensor.shape), offset=i))
    for asynchronous in (False, True):
        outs = [torch.zeros(r.size * 7), torch.zeros(r.size * 3, dtype=torch.float64), torch.zeros(3)]
        with dist._coalescing_manager(async_ops=asynchronous) as gathers:
            dist.all_gather_single(outs[0], values(r.rank, torch.float32, (7,)))
            dist.all_gather_single(outs[1], values(r.rank, torch.float64, (3,)))
        with dist._coalescing_manager(async_ops=asynchronous) as scatters:
            dist.reduce_scatter_single(outs[2], values(r.rank, torch.float32, (3 * r.size,)))
        if asynchronous:
            gathers.wait()
            scatters.wait()
        part = r.total(shape=(3 * r.size,)).view(r.size, 3)[r.rank]
        same(outs, [torch.cat(r.each(shape=(7,))), torch.cat(r.each(torch.float64, (3,))), part])


def check_objects(r: Ranks) -> None:
    every = [{"rank": q, "text": "x" * (10 * q), "tensor": [q] * q} for q in r.all]
    mine, gathered, one = every[r.rank], [None] * r.size, [None]
    dist.all_gather_object(gathered, mine)
    assert gathered == every
    objects = [mine, 5] if r.rank == 1 else [None, None]
    dist.broadcast_object_list(objects, 1)
    assert objects == [every[1], 5]
    dist.scatter_object_list(one, every if r.rank == 0 else None, 0)
    assert one == [mine]
    gathered = [None] * r.size if r.rank == 1 else None
    dist.gather_object(mine, gathered, 1)
    assert gathered == (every if r.rank == 1 else None)


def check_functional(r: Ranks) -> None:
    every, world = r.each(shape=(2 * r.size, 3)), dist.group.WORLD
    mine, whole, total = every[r.rank], torch.cat(every), reduced("SUM", every)
    part, parts = total.view(r.size, 2, 3)[r.rank], [each.view(r.size, 2, 3)[r.rank] for each in every]
    of_lists = [*functional.all_reduce_coalesced([mine, mine[0]], "max", world)]
    of_lists += functional.all_gather_into_tensor_coalesced([mine], world)
    of_lists += functional.reduce_scatter_tensor_coalesced([mine], "sum", [0], world)
    maxima = [reduced("MAX", every), reduced("MAX", [each[0] for each in every])]
    for found, expected in (
        (functional.all_reduce(mine, "sum", world), total),
        (functional.all_gather_tensor(mine, 0, world), whole),
        (functional.reduce_scatter_tensor(mine, "sum", 0, world), part),
        (functional.broadcast(mine, 1, world), every[1]),
        (functional.all_to_all_single(mine, None, None, world), torch.cat(parts)),
        *zip(of_lists, [*maxima, whole, part], strict=True),
    ):
        same(found.wait(), expected)
