"""A small job that saves checkpoints, with all that a job can have: for tests, in their process or in one to be killed.

    python -m tests.ranks.checkpoint_job WORLD_SIZE FOLDER STRATEGY EPOCHS RESULTS

prints a line per epoch, pauses for EPOCH_PAUSE seconds, if the environment has that variable, and writes all states of
each rank to RESULTS/RANK.npz at the end.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from distopt import launch, layer, opt, singa_wrap, tensor
from distopt.checkpoint import Checkpoint
from distopt.checkpoint.adapters import adapters_of, copy_of
from distopt.codecs import ErrorFeedback, Fp16, PowerSGD, TopK
from distopt.data import ShardedSampler
from tests.ranks import small_net

SAMPLES, BATCH = 203, 8
BUCKET, PARTITION = 300, 100  # elements; both cut the net into several pieces

CODECS = {
    "power-sgd": "power-sgd",
    "power-sgd fed": ErrorFeedback(PowerSGD(2)),
    "fp16 scaled": ErrorFeedback(Fp16(scale="dynamic")),
    "warm-up": ErrorFeedback(TopK(0.02, warm_up_steps=5)),
    "velocity": ErrorFeedback(TopK(0.05, momentum=0.5)),
}
STRATEGIES = ["plain", "half", "bf16", "partialUpdate", "sparseTopK", "sparseThreshold", *CODECS]
SPARS = {"sparseTopK": 0.05, "sparseThreshold": 0.01}


class Net(small_net.Net):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.flatten = layer.BatchNorm2d(1), layer.Flatten()
        self.dropout = layer.Dropout(dropout) if dropout else None

    def forward(self, x):
        y = self.linear1(self.flatten(self.norm(x)))
        return self.linear2(self.dropout(y) if self.dropout else y)

    def train_one_batch(self, x, y, strategy):
        loss = self.loss(self.forward(x), y)
        if strategy in opt.DIST_OPTIONS:
            self.optimizer.step_by(strategy, loss, spars=SPARS.get(strategy, 0.0))
        else:
            self.optimizer(loss)
        return loss


class Job:
    """One rank of it. `results` are all states, bit for bit."""

    def __init__(self, communicator, strategy="plain", folder=None, *, adam=False, dropout=0.0, graph=False, **options):
        topology = communicator.topology
        momentum = 0.0 if strategy == "velocity" else 0.5
        inner = opt.Adam(lr=0.01) if adam else opt.SGD(lr=0.05, momentum=momentum)
        codec = CODECS.get(strategy, "fp32")
        options = {"every": 4, **options}
        self.strategy = strategy
        self.optimizer = opt.DistOpt(
            inner, communicator=communicator, codec=codec, bucket_elements=BUCKET, partition_elements=PARTITION
        )
        x, y = small_net.whole([(step, 0) for step in range(13)])
        self.x, self.y = x.array[:SAMPLES].reshape(SAMPLES, 1, 3, 7), y.array[:SAMPLES]
        self.device = self.optimizer.device
        self.device.SetRandSeed(3)
        self.net = Net(dropout)
        self.net.set_optimizer(self.optimizer)
        self.net.compile([tensor.from_numpy(self.x[:BATCH], self.device)], is_train=True, use_graph=graph)
        self.sampler = ShardedSampler(SAMPLES, topology.world_size, topology.rank, BATCH, seed=1)
        self.noise = np.random.default_rng((7, topology.rank))
        self.sums = self.device.xp.zeros(1)
        self.used: list[np.ndarray] = []
        self.objects = {"model": self.net, "optimizer": self.optimizer, "sampler": self.sampler}
        self.objects |= {"noise": self.noise, "sums": self.sums}
        self.checkpoint = Checkpoint(folder, **options, **self.objects)

    def train(self, epochs: int, stop: int = 10**9) -> list[float]:
        """Go on to the end of the epochs, or leave after so many steps in all; the summed losses of ended epochs."""
        losses = []
        for epoch in range(self.checkpoint.epoch, epochs):
            self.net.train()
            self.sampler.set_epoch(epoch)
            for chosen in self.sampler:
                self.used.append(chosen)
                x = self.x[chosen] + self.noise.standard_normal((BATCH, 1, 3, 7), np.float32) / 10
                batch = tensor.from_numpy(x, self.device), tensor.from_numpy(self.y[chosen], self.device)
                self.sums[0] += self.net(*batch, self.strategy).item()
                self.checkpoint.step(epoch)
                if self.checkpoint.steps == stop:
                    return losses
            losses.append(float(self.sums[0]))
            self.sums[0] = 0
            self.optimizer.synchronize()
        self.checkpoint.save(epochs)
        return losses

    def results(self) -> dict[str, np.ndarray]:
        states = {name: adapter.snapshot() for name, adapter in adapters_of(self.objects).items()}
        arrays = ((f"{name}/{key}", each) for name, state in states.items() for key, each in state.arrays.items())
        notes = json.dumps({name: state.notes for name, state in states.items()}, sort_keys=True)
        return {**{key: copy_of(array) for key, array in arrays}, "notes": np.frombuffer(notes.encode(), np.uint8)}


def main(rank: int, world_size: int, ticket, folder: str, strategy: str, epochs: int, results: str) -> None:
    communicator = opt.DistOpt(opt.SGD(), ticket, rank, world_size).communicator
    job = Job(communicator, strategy, folder, preemptible=True)
    if resumed := job.checkpoint.resume():
        print(f"resuming from step {resumed.step}", flush=True)
    for epoch in range(job.checkpoint.epoch, epochs):
        losses = job.train(epoch + 1)
        job.checkpoint.epoch = epoch + 1
        print(f"epoch {epoch}: {losses}", flush=True)
        time.sleep(float(os.environ.get("EPOCH_PAUSE", "0")))
    job.checkpoint.close()
    np.savez(Path(results) / f"{rank}.npz", **job.results())


if __name__ == "__main__":
    world_size, folder, strategy, epochs, results = sys.argv[1:]
    launch.main(main, int(world_size), (singa_wrap.NcclIdHolder(), folder, strategy, int(epochs), results))
