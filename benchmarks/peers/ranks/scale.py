"""One rank of `python -m benchmarks scale`: a ResNet in DistributedDataParallel or in distopt's `nn`.

In `setup`, "model", "image_size" and "batch_size" say what trains; "group" names the process group, or "nothing" for DDP
with an all-reduce that does nothing; "jobs" is the number of equal jobs that share the ranks, and do not know of each
other; with "own_cores", every rank has its share of the cores, and no other rank that of its own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from . import train
from .transports import communicator, join_torch

BLOCKS = {"resnet18": ((2, 2, 2, 2), 1), "resnet50": ((3, 4, 6, 3), 4)}


def prepare(setup: dict[str, Any], rank: int, world_size: int) -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:
    """A description of this rank, and a function that runs steps."""
    cores = sorted(os.sched_getaffinity(0))
    if setup["own_cores"]:
        share = max(len(cores) // world_size, 1)
        first = rank * share % len(cores)
        cores = cores[first : first + share]
        os.sched_setaffinity(0, cores)
    members = world_size // setup["jobs"]
    folder = Path(setup["folder"], str(rank // members))
    folder.mkdir(exist_ok=True)
    kind = _InTorch if setup["library"] == "torch" else _InDistopt
    trainer = kind(rank % members if rank >= 0 else rank, members, {**setup, "folder": str(folder)})
    number = trainer.rank + (rank // members) * members if rank >= 0 else trainer.rank
    return {"rank": number, "about": trainer.about, "cores": cores}, partial(train.measure, trainer)


class _Trainer(train.Trainer):
    def images(self, setup: dict[str, Any]) -> tuple[Any, Any]:
        """The images of this rank, and their labels."""
        rng, size = np.random.default_rng(self.rank), setup["image_size"]
        images = rng.standard_normal((setup["batch_size"], 3, size, size), dtype=np.float32)
        return images, rng.integers(0, 1000, setup["batch_size"])

    def phases(self, seconds: float) -> dict[str, float]:
        return dict.fromkeys(train.PHASES, math.nan)


class _InTorch(_Trainer):
    def __init__(self, rank: int, world_size: int, setup: dict[str, Any]) -> None:
        import torch

        import distopt.torch  # noqa: F401 - registers the backend
        from benchmarks.models.resnet import in_torch

        from .pytorch import without_communication

        talks = setup["group"] != "nothing"
        self.rank = join_torch(setup, rank, world_size, setup["group"] if talks else "distopt")
        torch.manual_seed(0)
        net = in_torch(*BLOCKS[setup["model"]])
        if talks:
            self._net = torch.nn.parallel.DistributedDataParallel(net)
        else:
            self._net = without_communication(net)
        images, labels = self.images(setup)
        self._x, self._y = torch.from_numpy(images), torch.from_numpy(labels)
        self._sgd = torch.optim.SGD(self._net.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-5)
        self._loss = torch.nn.functional.cross_entropy
        self.about = f"torch {torch.__version__}"

    def step(self) -> None:
        self._sgd.zero_grad()
        self._loss(self._net(self._x), self._y).backward()
        self._sgd.step()

    def parameters(self) -> bytes:
        return b"".join(param.detach().numpy().tobytes() for param in self._net.parameters())


class _InDistopt(_Trainer):
    def __init__(self, rank: int, world_size: int, setup: dict[str, Any]) -> None:
        from benchmarks.models.cnn import compiled, sgd
        from benchmarks.models.resnet import in_distopt
        from distopt import compress, device, opt

        where = communicator(rank, world_size, setup)
        self.rank = where.topology.rank
        device.get_default_device().SetRandSeed(0)
        self._opt = opt.DistOpt(
            sgd(), communicator=where, codec=compress.create(**setup.get("codec", {"name": "fp32"}))
        )
        net = in_distopt(setup["model"], setup["image_size"])
        self._net, self._x, self._y = compiled(self._opt, self.images(setup), use_graph=True, net=net)
        self.about = f"distopt, {where.name} communicator"

    def step(self) -> None:
        self._net(self._x, self._y)

    def parameters(self) -> bytes:
        return b"".join(param.to_numpy().tobytes() for param in self._net.get_params().values())

    def sent_bytes(self) -> int:
        return int(self._opt.stats().total.wire_bytes)
