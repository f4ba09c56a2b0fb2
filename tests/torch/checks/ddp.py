"""DistributedDataParallel over distopt and over Gloo."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..forked import group_with_gloo
from .ranks import Ranks, reduced, same, same_on_all_ranks, values


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
        r.same_as_gloo(ours, theirs, options)
        for tensor in ours[:6]:
            same_on_all_ranks(tensor, "a parameter")
    dist.destroy_process_group(gloo)


def joined(rank: int, group: dist.ProcessGroup, *, of_all: bool) -> list[torch.Tensor]:
    model = DistributedDataParallel(network(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    with model.join(divide_by_initial_world_size=of_all):
        for _ in range(2 + rank):
            optimizer.zero_grad()
            model(torch.randn(4, 1, 8, 8, generator=generator)).square().mean().backward()
            optimizer.step()
    return [tensor.detach().clone() for tensor in model.parameters()]


def check_ddp_joins(r: Ranks) -> None:
    """Ranks with different numbers of batches; sums are divided by all ranks, or by those that still have data."""
    gloo = group_with_gloo(r.all)
    for of_all in (True, False):
        ours = joined(r.rank, dist.group.WORLD, of_all=of_all)
        r.same_as_gloo(ours, joined(r.rank, gloo, of_all=of_all), of_all)
        for tensor in ours:
            same_on_all_ranks(tensor, "a parameter")
    dist.destroy_process_group(gloo)


def reference_cnn() -> torch.nn.Module:
    """The examples' CNN: 431,080 parameters."""
    torch.manual_seed(3)
    return torch.nn.Sequential(
        *(torch.nn.Conv2d(1, 20, 5), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
        *(torch.nn.Conv2d(20, 50, 5), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
        *(torch.nn.Flatten(), torch.nn.Linear(800, 500), torch.nn.ReLU(), torch.nn.Linear(500, 10)),
    )


def trained_cnn(
    rank: int,
    group: dist.ProcessGroup,
    steps: int,
    batch: int,
    *,
    inside: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model,
    around: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model,
    **options: object,
) -> list[torch.Tensor]:
    """The parameters after some steps of DDP, with functions that change the model inside DDP and around it."""
    layers = reference_cnn()
    model = around(DistributedDataParallel(inside(layers), process_group=group, **options))
    optimizer = torch.optim.SGD(layers.parameters(), 0.02, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x, y = torch.randn(batch, 1, 28, 28, generator=generator), torch.randint(10, (batch,), generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in layers.parameters()]


def check_reference_cnn(r: Ranks) -> None:
    """DDP with all defaults."""
    gloo = group_with_gloo(r.all)
    ours, theirs = (trained_cnn(r.rank, group, steps=5, batch=8) for group in (dist.group.WORLD, gloo))
    assert sum(parameter.numel() for parameter in ours) == 431_080
    for one in ours:
        same_on_all_ranks(one, "a parameter")
    r.same_as_gloo(ours, theirs)
    dist.destroy_process_group(gloo)


def check_compiled_ddp(r: Ranks) -> None:
    """By the default compiler, the model and DDP around it."""
    gloo = group_with_gloo(r.all)
    for place in ("inside", "around"):
        compiled = {place: torch.compile, "bucket_cap_mb": 1}
        ours, theirs = (trained_cnn(r.rank, group, 20, 2, **compiled) for group in (dist.group.WORLD, gloo))
        r.same_as_gloo(ours, theirs, place)
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
