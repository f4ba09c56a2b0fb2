"""One process of a job whose hosts come and go, for `python -m benchmarks churn`: `tiny` of the language example.

    distopt run --heal ... churn.py ddp -                             states in memory
    distopt run --heal --workers node ... churn.py diloco -           or diloco-top-k, sparse-loco
    torchrun --max-restarts ... churn.py gloo FOLDER                  saves every 50 steps, as torchrun's guide has it
    TORCHFT_LIGHTHOUSE=... python churn.py torchft-ddp -              as torchft's own example has it
    TORCHFT_LIGHTHOUSE=... python churn.py torchft-diloco -

Prints, with a mark: "began NAME"; "step NAME NUMBER SAMPLES" after a step, with the samples of all that took part in it;
"average NAME" when the steps since the last one have been averaged, "lost NAME" if they are given up; "loss NUMBER" of
validation samples. A step that all make together has the name "all", others that of their host. distopt's workers say
more: at the end of "began" and "average" the number of the average that they hold and a digest of their parameters, at
the end of "step" the seconds that they have waited for others.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "pytorch" / "language"))
from model import TINY, LanguageModel, loss_of
from text import Text, bytes_of, verses

MARK = "churn:"
NAME = os.environ["CHURN_HOST"]
BATCH, SAVE_EVERY, TEST_EVERY = 8, 50, 50
SYNC_EVERY = int(os.environ["CHURN_SYNC_EVERY"])
TEST_SAMPLES = 32
SILENT = timedelta(seconds=5)  # then Gloo gives up a peer, and torchft a replica


class Job:
    """What all ways have in common: model, optimizers and samples."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        seed = int(os.environ["CHURN_SEED"])
        torch.manual_seed(seed)
        self.model, self.text = LanguageModel(TINY), Text(bytes_of(verses()), seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, betas=(0.9, 0.95))
        self._validation = self.text.validation(TEST_SAMPLES)

    def outer(self) -> torch.optim.Optimizer:
        """DiLoCo's."""
        return torch.optim.SGD(self.model.parameters(), 0.7, momentum=0.9, nesterov=True)

    def train(self, net: nn.Module, worker: int, step: int, optimizer: Any = None) -> None:
        """A step of this worker."""
        optimizer = optimizer or self.optimizer
        optimizer.zero_grad()
        loss_of(net, self.text.batch(worker, step, BATCH)).backward()
        optimizer.step()

    def report(self, name: object, step: int, ranks: int, *more: object, tests: bool = True) -> None:
        """Print a step that has been done."""
        print(MARK, "step", name, step, ranks * BATCH, *more, flush=True)
        if tests and step % TEST_EVERY == 0:
            self.test()

    def test(self) -> None:
        """Print the loss of validation samples."""
        with torch.no_grad():
            print(MARK, "loss", loss_of(self.model, self._validation).item(), flush=True)


def ddp(job: Job, _: str) -> None:
    from distopt.torch import Checkpoint

    dist.init_process_group("distopt")
    net = nn.parallel.DistributedDataParallel(job.model)
    checkpoint = Checkpoint(None, model=net, optimizer=job.optimizer)
    checkpoint.resume()
    while True:
        job.train(net, dist.get_rank(), checkpoint.steps)
        checkpoint.step()
        if dist.get_rank() == 0:
            job.report("all", checkpoint.steps, dist.get_world_size())


def diloco(job: Job, _: str, way: str) -> None:
    from train import LOCAL

    def say(what: str) -> int:
        found = local.stats().workers
        values = b"".join(value.numpy().tobytes() for value in job.model.state_dict().values())
        digest = hashlib.sha256(values).hexdigest()[:16]
        print(MARK, what, NAME, found.average, digest, flush=True)
        return found.average

    dist.init_process_group("distopt")
    local = LOCAL[way].start(job.model, job.optimizer, SYNC_EVERY, min_workers=1)
    local.finished  # noqa: B018 - joins
    average = say("began")
    while True:
        job.train(job.model, local.worker, local.steps)
        found = local.stats().workers
        job.report(NAME, local.steps, 1, found.waited_seconds, tests=False)
        if found.average > average and local.worker in found.members:
            average = say("average")
            job.test()


def gloo(job: Job, folder: str) -> None:
    dist.init_process_group("gloo", timeout=SILENT)
    net, path, step = nn.parallel.DistributedDataParallel(job.model), Path(folder) / "last.pt", 0
    if path.exists():
        saved = torch.load(path)
        job.model.load_state_dict(saved["model"])
        job.optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while True:
        job.train(net, dist.get_rank(), step)
        step += 1
        if dist.get_rank() == 0:
            if step % SAVE_EVERY == 0:
                saved = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict(), "step": step}
                torch.save(saved, path.with_name("part"))
                path.with_name("part").replace(path)
            job.report("all", step, dist.get_world_size())


def _manager(states: dict[str, Any], *, is_async: bool) -> Any:
    """Torchft's manager of this process, which is a replica of one rank."""
    socket.gethostname = lambda: os.environ["HOST_ADDRESS"]  # nobody resolves the names of these hosts
    from torchft import Manager, ProcessGroupGloo

    def load(saved: dict[str, Any]) -> None:
        for name, part in states.items():
            part.load_state_dict(saved[name])

    def save() -> dict[str, Any]:
        return {name: part.state_dict() for name, part in states.items()}

    return Manager(
        pg=ProcessGroupGloo(timeout=SILENT),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        use_async_quorum=is_async,
        timeout=SILENT,
        quorum_timeout=timedelta(seconds=60),
        rank=0,
        world_size=1,
        store_addr=os.environ["HOST_ADDRESS"],
        store_port=int(os.environ["MASTER_PORT"]),
        replica_id=f"worker_{NAME}",
        hostname=os.environ["HOST_ADDRESS"],
    )


def _store() -> Any:
    place = os.environ["HOST_ADDRESS"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*place, is_master=True, wait_for_workers=False)


def torchft_ddp(job: Job, _: str) -> None:
    from torchft import Optimizer
    from torchft.ddp import PureDistributedDataParallel  # the other fails at a fault if there are several buckets

    store = _store()
    manager = _manager({"model": job.model, "optimizer": job.optimizer}, is_async=True)
    net, optimizer = PureDistributedDataParallel(manager, job.model), Optimizer(manager, job.optimizer)
    while store is not None:
        step = manager.current_step()
        job.train(net, int(NAME), step, optimizer)
        if manager.current_step() > step and manager.participating_rank() == 0:
            job.report("all", manager.current_step(), manager.num_participants())


def torchft_diloco(job: Job, _: str) -> None:
    from torchft.local_sgd import DiLoCo

    store, outer = _store(), job.outer()
    manager = _manager({"model": job.model, "optimizer": job.optimizer, "outer": outer}, is_async=False)
    step = 0
    print(MARK, "began", NAME, flush=True)
    with DiLoCo(manager, [job.model], job.optimizer, outer, sync_every=SYNC_EVERY):
        while store is not None:
            before = manager.current_step()
            job.train(job.model, int(NAME), step)
            step += 1
            averaged = manager.current_step() > before
            job.report(NAME, step, 1, tests=averaged)
            if step % SYNC_EVERY == 0:
                print(MARK, "average" if averaged else "lost", NAME, flush=True)


WAYS: dict[str, Callable[[Job, str], None]] = {
    "ddp": ddp,
    "diloco": partial(diloco, way="diloco"),
    "diloco-top-k": partial(diloco, way="diloco-top-k"),
    "sparse-loco": partial(diloco, way="sparse-loco"),
    "gloo": gloo,
    "torchft-ddp": torchft_ddp,
    "torchft-diloco": torchft_diloco,
}

if __name__ == "__main__":
    WAYS[sys.argv[1]](Job(), sys.argv[2])
