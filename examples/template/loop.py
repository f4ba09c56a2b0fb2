"""Training on one of the ranks: the loop around what a file of trainers/ measures."""

import contextlib
import hashlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import board
import torch
import torch.distributed as dist
from parts import build
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from distopt.torch import Checkpoint, ResumableSampler, SyncBatchNorm  # registers the backend "distopt", too

SILENT_SECONDS = 10.0  # then a rank says that it waits for others


def run(rank: int, world_size: int, device: torch.device, url: str, args) -> None:
    """Be one of the ranks, which meet at `url`."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if args.timeline:
        os.environ["DISTOPT_TIMELINE"] = args.timeline
    where = "the launcher's endpoint" if url == "env://" else url
    late = threading.Timer(SILENT_SECONDS, print, [f"Rank {rank} waits for all {world_size} ranks at {where}"])
    late.daemon = True
    late.start()
    timeout = timedelta(seconds=args.timeout)
    dist.init_process_group(args.backend, init_method=url, rank=rank, world_size=world_size, timeout=timeout)
    late.cancel()
    with output(args.out / "logs" / f"rank-{rank}.log", rank):
        print(f"Rank {rank} of {world_size} on {socket.gethostname()}, {device}, {args.backend}", flush=True)
        build("trainer", args, device).fit()
    dist.destroy_process_group()


class Trainer:
    """The base of all trainers: a file of trainers/ derives from it and defines `measure`."""

    def __init__(self, args, device: torch.device) -> None:
        self.args, self.device, cuda = args, device, device.type == "cuda"
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)  # the same parameters on all ranks
        data = build("dataset", args)
        network = build("arch", args, data).to(device)
        norm = nn.SyncBatchNorm if cuda else SyncBatchNorm
        self.model = DistributedDataParallel(norm.convert_sync_batchnorm(network))
        self.loss = build("loss", args).to(device)
        self.optimizer = build("optimizer", args, self.model.parameters())
        self.scheduler = build("scheduler", args, self.optimizer)
        self.scaler = torch.amp.GradScaler(device.type, enabled=args.fp16 and cuda)
        self.autocast = torch.autocast(device.type, torch.float16 if cuda else torch.bfloat16, enabled=args.fp16)

        self.sampler = ResumableSampler(data.train, args.batch_size, seed=args.seed)
        loading = {"pin_memory": cuda, "multiprocessing_context": "fork" if args.workers else None}
        self.batches = DataLoader(data.train, batch_sampler=self.sampler, num_workers=args.workers, **loading)
        share = Subset(data.test, range(self.rank, len(data.test), self.world_size))
        self.tests = DataLoader(share, batch_size=500)
        self.means, self.pace = Means(), board.Pace(self.model, args.batch_size)
        torch.manual_seed(args.seed + 1000 + self.rank)  # other noise on every rank
        saved = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        saved |= {"scaler": self.scaler, "sampler": self.sampler, "means": self.means}
        # On a signal: save, have Slurm queue the job again, and leave.
        self.checkpoint = Checkpoint(args.out / "checkpoints", every=args.save_every, preemptible=True, **saved)

    def measure(self, network: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        """Means over the samples of a batch: "loss", which training makes smaller, and any others."""
        raise NotImplementedError

    def update(self, batch: list[Tensor]) -> dict[str, Tensor]:
        """One training step; the measures before it."""
        self.optimizer.zero_grad()
        with self.autocast:
            measures = self.measure(self.model, batch)
        self.scaler.scale(measures["loss"]).backward()
        self.pace.end_backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return measures

    def fit(self) -> None:
        """Train all epochs, or those that are left."""
        if (resumed := self.checkpoint.resume()) and self.rank == 0:
            print(f"Resuming from {resumed}", flush=True)
        folder = self.args.out / "board" if self.args.tb and self.rank == 0 else None
        self.board = board.Board(folder, self.checkpoint.steps)
        for epoch in range(self.checkpoint.epoch, self.args.epochs):
            self.train(epoch)
            self.scheduler.step()
            self.test(epoch)
            self.checkpoint.save(epoch + 1)
        self.checkpoint.close()
        bits = b"".join(each.detach().cpu().numpy().tobytes() for each in self.model.parameters())
        print(f"Digest of the parameters: {hashlib.sha256(bits).hexdigest()[:16]}", flush=True)

    def train(self, epoch: int) -> None:
        """One epoch."""
        self.model.train()
        self.sampler.set_epoch(epoch)
        self.pace.start()
        sampler, images, shown = self.sampler, self.pace.images, ""  # images of all ranks in a step
        for batch in self.batches:
            measures = self.update([tensor.to(self.device, non_blocking=True) for tensor in batch])
            self.means.add(measures, len(batch[0]))
            done = f"{epoch + 1} [{sampler.consumed + images}/{sampler.size}]"
            board.show(f"Epoch {done}, {self.pace.speed():.0f} images/s{shown}" if self.rank == 0 else "")
            if (step := self.checkpoint.steps + 1) % self.args.log_every == 0:
                loss = measures["loss"].item()
                shown = f", loss={loss:.4f}"
                board.show("")
                print(f"Train Epoch: {done}\tLoss: {loss:.6f}", flush=True)
                numbers = {"train/loss": loss, "train/learning rate": self.optimizer.param_groups[0]["lr"]}
                self.board.add(step, {**numbers, **self.pace.figures()})
            self.checkpoint.step(epoch)  # saves every few steps; this is where a preempted job leaves
        board.show("")
        self.report("Train", epoch)

    @torch.no_grad()
    def test(self, epoch: int) -> None:
        """Measure on all test samples, a share on each rank."""
        self.model.eval()
        for batch in self.tests:
            with self.autocast:
                measures = self.measure(self.model.module, [tensor.to(self.device) for tensor in batch])
            self.means.add(measures, len(batch[0]))
        self.report("Test", epoch)

    def report(self, part: str, epoch: int) -> None:
        """Collective. Show the means over all samples of all ranks since the last report."""
        names, sums = zip(*self.means.sums.items(), strict=True)
        totals = torch.tensor(sums, dtype=torch.float64, device=self.device)
        dist.all_reduce(totals)
        self.means.sums.clear()
        means = dict(zip(names, (totals / totals[0]).tolist(), strict=True))
        del means["samples"]
        said = ", ".join(f"{name} {mean:.6f}" for name, mean in means.items())
        print(f"{part} set: epoch {epoch + 1}, {said}", flush=True)
        self.board.add(self.checkpoint.steps, {f"{part.lower()} set/{name}": mean for name, mean in means.items()})


class Means:
    """Sums of measures over samples. The checkpoint holds them, so that an epoch resumes with its own."""

    def __init__(self) -> None:
        self.sums = {}

    def add(self, measures: dict[str, Tensor], samples: int) -> None:
        self.sums["samples"] = self.sums.get("samples", 0.0) + samples
        for name, mean in measures.items():
            self.sums[name] = self.sums.get(name, 0.0) + mean.detach().double() * samples

    def state_dict(self) -> dict:
        return {"sums": {name: float(total) for name, total in self.sums.items()}}

    def load_state_dict(self, state: dict) -> None:
        self.sums = state["sums"]


class Tee:
    """Writes to several files at once."""

    def __init__(self, *files) -> None:
        self.files = files

    def write(self, text: str) -> None:
        for file in self.files:
            file.write(text)

    def flush(self) -> None:
        for file in self.files:
            file.flush()


@contextlib.contextmanager
def output(path: Path, rank: int) -> Iterator[None]:
    """Write standard output to the rank's log; rank 0 writes to the screen as well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", buffering=1) as log, contextlib.redirect_stdout(Tee(log, *[sys.stdout] * (rank == 0))):
        yield
