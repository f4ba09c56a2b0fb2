"""A network in distopt.

Of the setup, "transport" names the transport, "codec" has the arguments of `codecs.create`; with "partial", the updates
of the reference CNN are partial.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from threadpoolctl import threadpool_info

from benchmarks.models import CNN, compiled, resnet, sgd
from distopt import codecs, device, opt
from distopt.tensor import Tensor

from . import train
from .libraries import communicator


class _TimedDistOpt(opt.DistOpt):
    """DistOpt that records when it was called, and the time of the updates of the last step."""

    called = update_seconds = 0.0

    def __call__(self, loss: Tensor) -> None:
        self._begin()
        super().__call__(loss)

    def step_by(self, dist_option: str, loss: Tensor, **options: Any) -> None:
        """Collective. As that of `opt.DistOpt`."""
        self._begin()
        super().step_by(dist_option, loss, **options)

    def _begin(self) -> None:
        self.called, self.update_seconds = perf_counter(), 0.0

    def time(self, update: Callable[[Tensor, Tensor], None], param: Tensor, grad: Tensor) -> None:
        """Local. Update a parameter by `update`, and add the time that this takes."""
        start = perf_counter()
        update(param, grad)
        self.update_seconds += perf_counter() - start


class Trainer(train.Trainer):
    """Ready for its first step."""

    def __init__(self, rank: int, world_size: int, setup: dict[str, Any]) -> None:
        where = communicator(rank, world_size, setup)
        self.rank = where.topology.rank
        device.get_default_device().SetRandSeed(0)
        self._started = self._communicated = 0.0
        optimizer, codec = sgd(), codecs.create(**setup.get("codec", {"name": "fp32"}))
        self._dist_opt = _TimedDistOpt(optimizer, communicator=where, codec=codec, partition_elements=100_000)
        optimizer.update = partial(self._dist_opt.time, optimizer.update)
        if (name := setup.get("model", "cnn")) == "cnn":
            net = CNN()
            net.partial = setup.get("partial", False)
        else:
            net = resnet(name, setup["image_size"])
        batch = train.synthetic_batch(setup, self.rank)
        self._net, self._x, self._y = compiled(self._dist_opt, batch, net=net)
        self.about = f"distopt, {where.name} communicator{_blas()}"

    def step(self) -> None:
        self._started = perf_counter()
        self._net(self._x, self._y)

    def phases(self, seconds: float) -> dict[str, float]:
        cost = self._dist_opt.stats().total
        total = cost.select_seconds + cost.comm_seconds + cost.decode_seconds
        communication, self._communicated = total - self._communicated, total
        forward, update = self._dist_opt.called - self._started, self._dist_opt.update_seconds
        backward = seconds - forward - communication - update
        return {"forward": forward, "backward": backward, "communication": communication, "update": update}

    def parameters(self) -> bytes:
        return b"".join(param.to_numpy().tobytes() for param in self._net.get_params().values())

    def sent_bytes(self) -> int:
        return int(self._dist_opt.stats().total.wire_bytes)


def _blas() -> str:
    for library in threadpool_info():
        if library["user_api"] == "blas":
            return f"; {library['internal_api']} with {library.get('architecture', 'unknown')} kernels"
    return ""
