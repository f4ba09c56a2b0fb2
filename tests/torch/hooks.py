"""Communication hooks of DDP, and training by each; `checks/callbacks.py` compares the bits."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as default
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel

import distopt.torch  # noqa: F401 - registers the backend

with warnings.catch_warnings():  # PyTorch's own: it imports what it deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook as zero
    from torch.distributed.optim import ZeroRedundancyOptimizer

SIZES = {"equal": (12,) * 8, "different": (12, 5, 40, 3, 64, 12, 7, 30)}  # of layers, each with a bucket of its own
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


def sizes_for(name: str) -> dict[str, Sequence[int]]:
    """Sizes of the layers to train with a hook, by name; equal ones could be mistaken for each other."""
    if name.startswith("late"):
        return {"large": LARGE}
    return SIZES if name in ("adding", "power_sgd") else {"equal": SIZES["equal"]}


def trained(name: str, rank: int, world_size: int, sizes: Sequence[int], group: Any = None) -> torch.Tensor:
    """Collective. The parameters after some steps by a hook."""
    group = group or dist.group.WORLD
    torch.manual_seed(7)
    widths = (*sizes, sizes[0])
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
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
