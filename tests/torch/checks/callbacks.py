"""Callbacks of futures, and DDP's hooks, which are made of them."""

import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as default
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel

from .ddp import trained
from .ranks import Ranks, same, same_on_all_ranks, values

with warnings.catch_warnings():  # PyTorch's own: it imports what it deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook as zero
    from torch.distributed.optim import ZeroRedundancyOptimizer


def check_callbacks_may_wait_for_collectives(r: Ranks) -> None:
    tensor, second = values(r.rank, torch.float32), values(r.rank, torch.float64)

    def go_on(_: object) -> torch.Tensor:
        dist.all_reduce(second)
        return dist.all_reduce(second, async_op=True).get_future().wait()[0]

    out = dist.all_reduce(tensor, async_op=True).get_future().then(go_on).wait()
    same(out, r.total(torch.float64) * r.size)


def check_callbacks_start_collectives(r: Ranks) -> None:
    """Collectives of callbacks have an order of their own, and are not paired with equal ones that the script calls."""
    groups = [dist.group.WORLD, r.group()]
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
            same((firsts[i], seconds[i], thirds[i]), [expected] * 3, (turn, i))


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


# -- hooks -------------------------------------------------------------------------------------------------------------
SIZES = [(12,) * 8, (12, 5, 40, 3, 64, 12, 7, 30)]  # of layers, each with a bucket of its own
LARGE = (150, 140, 170)  # of layers whose buckets move into wire memory before the `late` hooks begin
STEPS, LATE, LATE_STEPS = 6, 40, 46


def adding(state, bucket):
    """A hook whose callbacks call collectives, and look at what comes back."""
    index, group = bucket.index(), state

    def go_on(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        number = torch.full((12,), float(100 * index + dist.get_rank(group)))
        dist.all_reduce(number, group=group)
        expected = sum(100 * index + q for q in range(group.size()))
        assert bool((number == expected).all()), f"{number.tolist()} instead of {expected}"
        return future.value()[0].div_(group.size())

    return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(go_on)


def _orthogonalize(matrices: torch.Tensor, epsilon: float = 0) -> None:
    _orthogonalize_batch(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)


# PyTorch 2.13's batched hook gives it a matrix, where it asserts a batch of them, over Gloo, too.
_orthogonalize_batch, power_sgd._orthogonalize = power_sgd._orthogonalize, _orthogonalize


def _power_sgd(group: Any, hook: Any, start: int = 2) -> tuple[object, Any]:
    return power_sgd.PowerSGDState(
        group, matrix_approximation_rank=1, start_powerSGD_iter=start, min_compression_rate=1
    ), hook


# Of each: state and function by the group. The quantization hooks want the results of all_gather as NCCL gives them, in
# one tensor; over Gloo they fail with the same IndexError as here. PyTorch refuses `zero_step` over Gloo, too.
HOOKS: dict[str, Callable[[Any], tuple[object, Any]]] = {
    "allreduce": lambda group: (group, default.allreduce_hook),
    "fp16": lambda group: (group, default.fp16_compress_hook),
    "power_sgd": lambda group: _power_sgd(group, power_sgd.powerSGD_hook),
    "batched_power_sgd": lambda group: _power_sgd(group, power_sgd.batched_powerSGD_hook),
    "late_batched_power_sgd": lambda group: _power_sgd(group, power_sgd.batched_powerSGD_hook, LATE),
    "fp16_power_sgd": lambda group: _power_sgd(group, default.fp16_compress_wrapper(power_sgd.powerSGD_hook)),
    "post_local_sgd": lambda group: (local_sgd.PostLocalSGDState(group, group, 3), local_sgd.post_localSGD_hook),
    "zero_step": lambda group: (group, zero.hook_with_zero_step),
    "zero_step_interleaved": lambda group: (group, zero.hook_with_zero_step_interleaved),
    "adding": lambda group: (group, adding),
}


def trained_by(name: str, rank: int, sizes: Sequence[int]) -> torch.Tensor:
    """Collective. The parameters after some steps by a hook."""
    group = dist.group.WORLD
    torch.manual_seed(7)
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise((*sizes, sizes[0]))]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group, bucket_cap_mb=1e-4)
    state, hook = HOOKS[name](group)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if name.startswith("zero"):
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, process_group=group, overlap_with_ddp=True, lr=0.01
        )
        state, hook = group, hook(default.allreduce_hook, model, optimizer)
    model.register_comm_hook(state, hook)
    for step in range(LATE_STEPS if name.startswith("late") else STEPS):
        optimizer.zero_grad()
        torch.manual_seed(100 * rank + step)
        model(torch.randn(4, sizes[0])).square().sum().backward()
        if (step + rank) % 2:
            time.sleep(1e-3)  # ranks come to the next step at different times
        if not name.startswith("zero"):  # whose hooks update
            optimizer.step()
    return torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])


def check_hooks(r: Ranks) -> None:
    """PyTorch's hooks, and one whose callbacks start collectives: the same bits on all ranks and in every run."""
    for name in HOOKS:
        # Layers of one size could be mistaken for each other.
        several = [LARGE] if name.startswith("late") else SIZES if name in ("adding", "power_sgd") else SIZES[:1]
        for sizes in several:
            first = trained_by(name, r.rank, sizes)
            same_on_all_ranks(first, name)
            same(trained_by(name, r.rank, sizes), first, f"{name}: the second run has other parameters")


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
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):

        def register(ddp: DistributedDataParallel, kind: dist.BuiltinCommHookType = kind) -> DistributedDataParallel:
            ddp._register_builtin_comm_hook(kind)
            return ddp

        ours, theirs = (trained(r.rank, group, around=register) for group in (dist.group.WORLD, r.gloo))
        r.same_as_gloo(ours, theirs, kind, rtol=1e-2, atol=1e-3)  # Gloo rounds every sum
