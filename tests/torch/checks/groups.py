"""Groups: names, splits, abilities, devices."""

import itertools
import os
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from ..forked import group_with_gloo
from .ddp import trained
from .ranks import VERSION, Ranks, open_files, reduced, same, values, with_error


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
        same(outs or [], [values(q, torch.float32, (3,)) for q in ranks] if outs else [])
        dist.destroy_process_group(group)


def check_many_groups(r: Ranks) -> None:
    """Groups that have been destroyed leave no descriptor and no thread behind."""

    def cycle() -> None:
        group = dist.new_group(list(r.all))
        tensor = torch.ones(100)
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        dist.destroy_process_group(group)

    cycle()
    dist.barrier()
    before, threads = open_files(), threading.active_count()
    for _ in range(int(os.environ.get("GROUPS", "15"))):
        cycle()
    dist.barrier()
    assert open_files() <= before + 2, f"{before} descriptors, then {open_files()}"
    assert threading.active_count() <= threads, threading.enumerate()


def check_many_live_groups(r: Ranks) -> None:
    """400 of them, as sharded models make, use no more than 800 of the 1,024 files that a process may have open."""
    before = open_files()
    groups = [r.group() for _ in range(20)]
    dist.barrier()
    assert open_files() <= before + 40 + 2, f"20 groups use {open_files() - before} descriptors"
    for group in groups:
        tensor = values(r.rank, torch.float32, (3,))
        dist.all_reduce(tensor, group=group)
        same(tensor, r.total(shape=(3,)))


def check_names_and_abilities(r: Ranks) -> None:
    """The answers to PyTorch's questions, by the group and, from 2.14 on, by its backend for C++."""
    group = r.group(group_desc="of tests")
    assert dist.get_backend(group) == "distopt"
    assert group.group_desc == "of tests"
    assert group.name() == "distopt", group.name()
    assert functional._resolve_group_name(group) == group.group_name
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
    """Collectives through the operators of C++, which look for a backend."""
    if VERSION < (2, 14):
        return
    group, mine = dist.group.WORLD.boxed(), values(r.rank, torch.float32)
    tensor, outs = mine.clone(), [torch.zeros_like(mine) for _ in r.all]
    if VERSION >= (2, 15):  # before, Python cannot name a reduction to C++
        torch.ops.c10d.allreduce_([tensor], group, dist.ReduceOp(dist.ReduceOp.SUM).boxed(), None, False, 20_000)
        same(tensor, r.total())
    torch.ops.c10d.gather_([outs] if r.rank == 0 else [], [mine], group, 0, False, 20_000)
    if r.rank == 0:
        same(outs, r.each())


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


def check_debug_detail(r: Ranks) -> None:
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = group_with_gloo(r.all, "distopt")  # a wrapper of PyTorch's would use Gloo
        ours = trained(r.rank, group)
    finally:
        dist.set_debug_level(level)
    same(ours, trained(r.rank, dist.group.WORLD))
    dist.destroy_process_group(group)


def check_devices(r: Ranks) -> None:
    """With a backend for another device the group serves CPU tensors, and refuses others in words."""
    text = "distopt serves CPU tensors, not those on meta; make a group for these"
    for backend in ("cpu:distopt", "cpu:distopt,cuda:gloo", "cuda:gloo,cpu:distopt"):
        group = group_with_gloo(r.all, backend)
        tensor = values(r.rank, torch.float32)
        dist.all_reduce(tensor, group=group)
        same(tensor, r.total(), backend)
        there = torch.ones(3, device="meta")
        with_error(ValueError, text, dist.broadcast, there, 0, group)
        with_error(ValueError, text, dist.send, there, (r.rank + 1) % r.size, group)
        with_error(RuntimeError, "CPU tensors, not those on cuda", group._get_backend, torch.device("cuda"))
        dist.destroy_process_group(group)
