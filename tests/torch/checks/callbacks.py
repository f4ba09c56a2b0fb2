"""Callbacks of futures, and DDP's hooks, which are made of them."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .. import hooks as ddp_hooks
from ..forked import group_with_gloo
from .ddp import network
from .ranks import Ranks, same, values


def check_callbacks_may_wait_for_collectives(r: Ranks) -> None:
    tensor, second = values(r.rank, torch.float32), values(r.rank, torch.float64)

    def go_on(_: object) -> torch.Tensor:
        dist.all_reduce(second)
        return dist.all_reduce(second, async_op=True).get_future().wait()[0]

    out = dist.all_reduce(tensor, async_op=True).get_future().then(go_on).wait()
    same(out, r.total(torch.float64) * r.size)


def check_callbacks_start_collectives(r: Ranks) -> None:
    """Collectives of callbacks have an order of their own, and are not paired with equal ones that the script calls."""
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


def check_callbacks_wait_for_their_own_future(r: Ranks) -> None:
    """It has ended; only a callback that comes later has not, and to wait for that would last for ever."""
    works = [dist.all_reduce(torch.full((5,), float(r.rank + i)), async_op=True) for i in range(20)]
    ends = [work.get_future().then(lambda f: f.wait()[0] * 2).then(lambda f: f.wait().sum()) for work in works]
    for i, end in enumerate(torch.futures.wait_all(ends)):
        same(end, torch.tensor(10.0 * sum(q + i for q in r.all)))

    if r.rank == 1:
        dist.recv(torch.empty(1), 0)  # until both callbacks are there
    future = dist.all_reduce(torch.ones(5), async_op=True).get_future()
    if r.rank == 0:
        later: list[torch.futures.Future] = []
        waits = future.then(lambda _: later[0].wait())
        later.append(future.then(lambda f: f.value()[0]))
        dist.send(torch.empty(1), 1)
        with pytest.raises(RuntimeError, match="waits for another callback that runs after it"):
            waits.wait()
        future = later[0]
    same(torch.as_tensor(future.wait()[0]).view(-1)[0], torch.tensor(float(r.size)))


def check_hooks(r: Ranks) -> None:
    """PyTorch's hooks, and one whose callbacks start collectives: the same bits on all ranks and in every run."""
    for name in ddp_hooks.HOOKS:
        for sizes in ddp_hooks.sizes_for(name).values():
            first = ddp_hooks.trained(name, r.rank, r.size, sizes)
            gathered = [torch.empty_like(first) for _ in r.all]
            dist.all_gather(gathered, first)
            for q in r.all:
                same(gathered[q], first, f"{name}: rank {q} has other parameters")
            same(ddp_hooks.trained(name, r.rank, r.size, sizes), first, f"{name}: the second run has other parameters")


def check_an_error_in_a_callback_of_a_hook(r: Ranks) -> None:
    """The error ends the backward pass of the rank that raised it, unchanged; other ranks get the sum."""

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
        same(model.module.weight.grad, torch.full((16, 16), float(r.size)))
    dist.barrier()


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
        ours, theirs = gradients(dist.group.WORLD, kind), gradients(gloo, kind)
        r.same_as_gloo(ours, theirs, kind, rtol=1e-2, atol=1e-3)  # Gloo rounds every sum
    dist.destroy_process_group(gloo)
