"""The reference CNN in distopt."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from threadpoolctl import threadpool_info

from distopt import comm, dist_opt, launch
from distopt.nn import convert, device, layer, model, optim

from .train import Trainer, synthetic_batch

if TYPE_CHECKING:
    from distopt.nn.tensor import Tensor

__all__ = ["trainer"]


def trainer(rank: int, world_size: int, setup: dict[str, Any]) -> Trainer:
    """Collective. A trainer, ready for its first step."""
    return _Distopt(rank, world_size, setup)


class _Cnn(model.Model):
    """Two convolutions with pooling and two linear layers: 431,080 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = layer.Conv2d(20, 5, activation="RELU", pool=layer.MaxPool2d(2, 2))
        self.conv2 = layer.Conv2d(50, 5, activation="RELU", pool=layer.MaxPool2d(2, 2))
        self.flatten = layer.Flatten()
        self.linear1 = layer.Linear(500, activation="RELU")
        self.linear2 = layer.Linear(10)
        self.loss = layer.SoftMaxCrossEntropy()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.conv1(x))
        logits: Tensor = self.linear2(self.linear1(self.flatten(y)))
        return logits

    def train_one_batch(self, x: Tensor, y: Tensor) -> None:
        self.optimizer(self.loss(self.forward(x), y))


class _Clock:
    """Times of the last step."""

    started = 0.0
    forward_ended = 0.0
    update_seconds = 0.0


class _TimedSgd(optim.SGD):
    """SGD that records the time of its updates."""

    clock: _Clock

    def update(self, param: Tensor, grad: Tensor) -> None:
        start = perf_counter()
        super().update(param, grad)
        self.clock.update_seconds += perf_counter() - start


class _TimedDistOpt(dist_opt.DistOpt):
    """DistOpt that records when it was called."""

    clock: _Clock

    def __call__(self, loss: Tensor) -> None:
        self.clock.forward_ended = perf_counter()
        super().__call__(loss)


class _Distopt(Trainer):
    def __init__(self, rank: int, world_size: int, setup: dict[str, Any]) -> None:
        ticket = launch.Ticket(bytes.fromhex(setup["secret"]))
        if setup.get("apart"):
            job: launch.Job = launch.MultiprocessJob(ticket, 0, 1)
        else:
            job = launch.MpiJob() if rank < 0 else launch.MultiprocessJob(ticket, rank, world_size)
        self.rank = job.topology.rank
        communicator = comm.create(job, setup["backend"] if job.topology.world_size > 1 else "single")
        device.get_default_device().SetRandSeed(0)
        self._clock, self._communicated = _Clock(), 0.0
        sgd = _TimedSgd(lr=0.005, momentum=0.9, weight_decay=1e-5)
        sgd.clock = self._clock
        images, labels = synthetic_batch(setup["batch_size"], self.rank)
        self._x, self._y = convert.from_numpy(images), convert.from_numpy(labels)
        self._net = _Cnn()
        self._dist_opt = _TimedDistOpt(sgd, communicator=communicator)
        self._dist_opt.clock = self._clock
        self._net.set_optimizer(self._dist_opt)
        self._net.compile([self._x], is_train=True, use_graph=True)
        self.gradient_count = sum(param.array.size for param in self._net.get_params().values())
        self.about = f"distopt, {communicator.name} communicator{_blas()}"

    def step(self) -> None:
        self._clock.update_seconds = 0.0
        self._clock.started = perf_counter()
        self._net(self._x, self._y)

    def phases(self, seconds: float) -> dict[str, float]:
        cost = self._dist_opt.stats().total
        total = cost.select_seconds + cost.comm_seconds + cost.decode_seconds
        communication, self._communicated = total - self._communicated, total
        forward, update = self._clock.forward_ended - self._clock.started, self._clock.update_seconds
        backward = seconds - forward - communication - update
        return {"forward": forward, "backward": backward, "communication": communication, "update": update}

    def parameters(self) -> bytes:
        return b"".join(param.to_numpy().tobytes() for param in self._net.get_params().values())


def _blas() -> str:
    for library in threadpool_info():
        if library["user_api"] == "blas":
            return f"; {library['internal_api']} with {library.get('architecture', 'unknown')} kernels"
    return ""
