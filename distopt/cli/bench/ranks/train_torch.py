"""The reference CNN in PyTorch, under DistributedDataParallel over Gloo; without it for one process."""

from __future__ import annotations

import math
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import distributed, nn

from .train import Trainer, synthetic_batch

__all__ = ["trainer"]


def trainer(rank: int, world_size: int, setup: dict[str, Any]) -> Trainer:
    """Collective. Ready to train."""
    return _Torch(rank, world_size, setup)


class _Torch(Trainer):
    def __init__(self, rank: int, world_size: int, setup: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.rank = rank
        images, labels = synthetic_batch(setup["batch_size"], rank)
        self._x, self._y = torch.from_numpy(images), torch.from_numpy(labels).long()
        layers = [nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10)]
        self._net: nn.Module = nn.Sequential(*layers)
        self.about = f"torch {torch.__version__}"
        if world_size > 1:
            store = f"file://{setup['folder']}/store"
            distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
            self._net = nn.parallel.DistributedDataParallel(self._net)
            self.about += ", DistributedDataParallel over Gloo"
        self.gradient_count = sum(param.numel() for param in self._net.parameters())
        self._sgd = torch.optim.SGD(self._net.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-5)
        self._criterion = nn.CrossEntropyLoss()

    def step(self) -> None:
        start = perf_counter()
        self._sgd.zero_grad()
        loss = self._criterion(self._net(self._x), self._y)
        forward_ended = perf_counter()
        loss.backward()
        backward_ended = perf_counter()
        self._sgd.step()
        self._times = start, forward_ended, backward_ended, perf_counter()

    def phases(self, seconds: float) -> dict[str, float]:
        # DistributedDataParallel communicates within backward, and does not say for how long backward waited.
        forward, backward, update = (later - earlier for earlier, later in pairwise(self._times))
        return {"forward": forward, "backward": backward, "communication": math.nan, "update": update}

    def parameters(self) -> bytes:
        return b"".join(param.detach().numpy().tobytes() for param in self._net.parameters())
