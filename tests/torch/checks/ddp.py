"""DistributedDataParallel over distopt and over Gloo."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .ranks import Ranks, reduced, same, same_on_all_ranks, values


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.Linear(288, 10)
    )


def loss_of(model: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(data[0]), data[1])


def learn(model: torch.nn.Module, optimizer: Any, data: tuple[torch.Tensor, torch.Tensor], **options: bool) -> None:
    """A step with a batch and its labels, and with the options of `zero_grad`."""
    optimizer.zero_grad(**options)
    loss_of(model, data).backward()
    optimizer.step()


def drawn(generator: torch.Generator, count: int = 4, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, and labels of ten classes."""
    return torch.randn(count, 1, size, size, generator=generator), torch.randint(10, (count,), generator=generator)


def reference_cnn() -> torch.nn.Module:
    """The examples' CNN: 431,080 parameters."""
    torch.manual_seed(3)
    return torch.nn.Sequential(
        *(torch.nn.Conv2d(1, 20, 5), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
        *(torch.nn.Conv2d(20, 50, 5), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
        *(torch.nn.Flatten(), torch.nn.Linear(800, 500), torch.nn.ReLU(), torch.nn.Linear(500, 10)),
    )


def trained(
    rank: int,
    group: dist.ProcessGroup,
    *,
    net: Callable[[], torch.nn.Module] = network,
    batches: Iterable[tuple[int, int]] = ((4, 8),) * 6,
    join: dict[str, bool] | None = None,
    inside: Callable[[Any], torch.nn.Module] = lambda model: model,
    around: Callable[[Any], torch.nn.Module] = lambda ddp: ddp,
    **options: Any,
) -> list[torch.Tensor]:
    """Parameters and buffers after steps of DDP with batches of so many images of this size.

    Functions change the model `inside` DDP and `around` it. `join` has the options of DDP's context of this name.
    """
    layers = net()
    ddp = DistributedDataParallel(inside(layers), process_group=group, **{"bucket_cap_mb": 0.005, **options})
    model, optimizer = around(ddp), torch.optim.SGD(layers.parameters(), 0.02, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    with contextlib.nullcontext() if join is None else ddp.join(**join):
        for step, sizes in enumerate(batches):
            data = drawn(generator, *sizes)
            if step == 3 and model is ddp and join is None:
                with ddp.no_sync():
                    loss_of(model, data).backward()
            learn(model, optimizer, data, set_to_none=step % 2 == 0)
    return [tensor.detach().clone() for tensor in (*layers.parameters(), *layers.buffers())]


def check_ddp(r: Ranks) -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}):
        ours = trained(r.rank, dist.group.WORLD, **options)
        r.same_as_gloo(ours, trained(r.rank, r.gloo, **options), options)
        same_on_all_ranks(ours[:6], "a parameter")


def check_ddp_joins(r: Ranks) -> None:
    """Ranks with different numbers of batches; sums are divided by all ranks, or by those that still have data."""
    for of_all in (True, False):
        options = {"batches": [(4, 8)] * (2 + r.rank), "join": {"divide_by_initial_world_size": of_all}}
        ours, theirs = (trained(r.rank, group, **options)[:6] for group in (dist.group.WORLD, r.gloo))
        r.same_as_gloo(ours, theirs, of_all)
        same_on_all_ranks(ours, "a parameter")


def check_compiled_ddp(r: Ranks) -> None:
    """By the default compiler, the model and DDP around it."""
    for place in ("inside", "around"):
        options = {place: torch.compile, "net": reference_cnn, "batches": [(2, 28)] * 20, "bucket_cap_mb": 1}
        ours, theirs = (trained(r.rank, group, **options) for group in (dist.group.WORLD, r.gloo))
        r.same_as_gloo(ours, theirs, place)


def check_compiled_collectives(r: Ranks) -> None:
    @torch.compile(backend="eager")
    def step(tensor: torch.Tensor) -> torch.Tensor:
        doubled = tensor * 2
        work = dist.all_reduce(doubled, async_op=True)
        work.wait()
        dist.all_reduce(doubled)
        return doubled + 1

    own = values(r.rank, torch.float32)
    same(step(own), reduced("SUM", [each * 2 for each in r.each()]) * r.size + 1)
