"""Callbacks of futures, and DDP's hooks, which are made of them."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .. import hooks as ddp_hooks
from ..forked import group_with_gloo
from .ddp import network
from .ranks import Ranks, reduced, same, values


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
