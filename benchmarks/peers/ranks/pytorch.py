"""One rank of `python -m benchmarks pytorch`: process groups of Gloo and of distopt in one process, in turns."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import distopt.torch  # noqa: F401 - registers the backend
from benchmarks.models.resnet import in_torch

from .train import interface_bytes
from .train_torch import network
from .transports import join_torch

NOTHING = "nothing"  # the candidate that does not communicate
# Batch size, shape of an input, and what makes the model.
MODELS: dict[str, tuple[int, tuple[int, ...], Callable[[], nn.Module]]] = {
    "cnn": (64, (1, 28, 28), network),
    "resnet18": (8, (3, 64, 64), lambda: in_torch((2, 2, 2, 2), expansion=1)),
    "mlp": (16, (2048,), lambda: nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(6)))),
}


def prepare(setup: dict[str, Any], rank: int, world_size: int) -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:
    """A description of this rank, and a function that measures."""
    join_torch(setup, rank, world_size)
    groups = {"gloo": distributed.group.WORLD, "distopt": distributed.new_group(backend="distopt")}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if "model" in request:
            nets = {name: _Training(request["model"], group, rank) for name, group in {NOTHING: None, **groups}.items()}
            found = measure(request, {name: net.step for name, net in nets.items()})
            return {**found, "parameters": {name: net.parameters() for name, net in nets.items() if name != NOTHING}}
        sums = {name: _Sum(request["bytes"] // 4, group, rank) for name, group in groups.items()}
        found = measure(request, {name: one.run for name, one in sums.items()})
        return {**found, "wrong": {name: one.wrong(world_size) for name, one in sums.items()}}

    return {"rank": rank, "about": f"torch {torch.__version__}"}, answer


def measure(request: dict[str, Any], calls: dict[str, Callable[[], None]]) -> dict[str, Any]:
    """Collective. Time `rounds` rounds in which every one of `calls` runs `times` times, after an untimed one.

    Returns:
        "seconds": by name, a list for every round; "interface_bytes": by name, the median over rounds, for one call.
    """
    seconds: dict[str, list[list[float]]] = {name: [] for name in calls}
    sent: dict[str, list[float]] = {name: [] for name in calls}
    names, times = [*calls], request["times"]
    for number in range(request["rounds"] + 1):
        names = names[1:] + names[:1]
        for name in names:
            calls[name]()
            distributed.barrier()
            before, spent = interface_bytes(request["interface"]), []
            for _ in range(times):
                start = time.perf_counter()
                calls[name]()
                spent.append(time.perf_counter() - start)
            distributed.barrier()
            if number:  # all have run before
                seconds[name].append(spent)
                sent[name].append((interface_bytes(request["interface"]) - before) / times)
    return {"seconds": seconds, "interface_bytes": {name: median(values) for name, values in sent.items()}}


class _Sum:
    """An all-reduce in a group."""

    def __init__(self, count: int, group: Any, rank: int) -> None:
        self._numbers = torch.arange(count, dtype=torch.float32) % 7 + rank
        self._tensor, self._group = torch.zeros(count), group  # which stays zero

    def run(self) -> None:
        distributed.all_reduce(self._tensor, group=self._group)

    def wrong(self, world_size: int) -> int:
        """Collective. Number of wrong elements in one more sum."""
        self._tensor.copy_(self._numbers)
        distributed.all_reduce(self._tensor, group=self._group)
        rank = distributed.get_rank()
        expected = (self._numbers - rank) * world_size + sum(range(world_size))
        return int((self._tensor != expected).sum())


class _Training:
    """A model with DistributedDataParallel over a group, with all defaults; without one, nothing is communicated."""

    def __init__(self, name: str, group: Any, rank: int) -> None:
        batch, shape, make = MODELS[name]
        torch.manual_seed(0)
        self._net = DistributedDataParallel(make(), process_group=group) if group else without_communication(make())
        self._sgd = torch.optim.SGD(self._net.parameters(), lr=0.001)
        torch.manual_seed(1 + rank)
        self._x, self._y = torch.randn(batch, *shape), torch.randint(10, (batch,))

    def step(self) -> None:
        self._sgd.zero_grad()
        nn.functional.cross_entropy(self._net(self._x), self._y).backward()
        self._sgd.step()

    def parameters(self) -> str:
        """Local. A digest."""
        rows = [param.detach().numpy().tobytes() for param in self._net.parameters()]
        return hashlib.sha256(b"".join(rows)).hexdigest()[:16]


def without_communication(model: nn.Module) -> DistributedDataParallel:
    """The model with all that DDP does, but for bytes that move: its all-reduce leaves gradients as they are."""
    net = DistributedDataParallel(model, broadcast_buffers=False)
    net.register_comm_hook(None, lambda _, bucket: _as_it_is(bucket.buffer()))
    return net


def _as_it_is(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
