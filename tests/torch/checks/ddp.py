"""DistributedDataParallel over distopt and over Gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..forked import group_with_gloo
from .ranks import Ranks, reduced, same, values


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
