"""Training in shards through PyTorch leaves the same bits for any number of ranks, whatever a script does besides."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import distopt.torch  # noqa: E402
from distopt.errors import GradientError, MismatchError, UsageError  # noqa: E402
from instruments.one_hash import nets  # noqa: E402
from instruments.one_hash.job import BATCH, SEED, SHARDS  # noqa: E402
from tests.torch.forked import in_group  # noqa: E402
from tests.unit.refusals import refused  # noqa: E402

STEPS = 6


class Choosing(nn.Module):
    """Its middle layer works for samples whose first value is positive: for no sample of some shards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(192, 9), nn.Linear(9, 9), nn.Linear(9, nets.CLASSES)

    def forward(self, x):
        y = self.first(x.flatten(1)).relu()
        return self.last(self.middle(y).relu() if bool(x[0, 0, 0, 0] > 0) else y)


class Run:
    """A net that trains step by step, by `distopt.torch.DistOpt` or by DDP's hook."""

    def __init__(self, front: str, net: nn.Module | None = None, unused: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = net or nets.torch_net("norm")
        self.x, self.y = map(torch.from_numpy, nets.data("norm"))
        self.y = self.y.long()
        torch.manual_seed(dist.get_rank())
        self.sgd = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        options = {"shards": SHARDS, "seed": SEED, **options}
        if front == "opt":
            found = {"named_parameters": self.net.named_parameters(), "model": self.net}
            self.called = self.net
            self.cut = self.step_of = distopt.torch.DistOpt(self.sgd, **found, find_unused_parameters=unused, **options)
        else:
            view = front == "ddp view"
            self.called = DistributedDataParallel(self.net, find_unused_parameters=unused, gradient_as_bucket_view=view)
            self.cut, function = distopt.torch.hook(self.called, **options)
            self.called.register_comm_hook(self.cut, function)
            self.step_of = self.sgd
        self.sampler = distopt.torch.ResumableSampler(len(self.x), BATCH, seed=1, shards=options["shards"])

    def loss(self, x, y):
        return nn.functional.cross_entropy(self.called(x), y)

    def step(self, indices) -> None:
        self.step_of.zero_grad()
        for x, y in self.cut.shards(self.x[indices], self.y[indices]):
            self.loss(x, y).backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        self.step_of.step()

    def states(self) -> dict[str, np.ndarray]:
        momenta = [each.get("momentum_buffer") for each in self.sgd.state.values()]
        found = {f"momentum {i}": each.numpy() for i, each in enumerate(momenta) if each is not None}
        return found | {key: value.numpy() for key, value in self.net.state_dict().items()}

    def batches(self, count: int = STEPS):
        return itertools.islice(self.sampler, count)

    def trained(self) -> dict[str, np.ndarray]:
        for indices in self.batches():
            self.step(indices)
        return self.states()


def plain(front: str) -> dict[str, np.ndarray]:
    run = Run(front)
    states = run.trained()
    assert run.net[1].num_batches_tracked == STEPS * SHARDS
    return states


def unused(front: str) -> dict[str, np.ndarray]:
    return Run(front, Choosing(), unused=True).trained()


def with_habits(front: str) -> dict[str, np.ndarray]:
    """Evaluation and random numbers between steps and shards, frozen parameters and statistics, two losses, a closure
    of `zero_grad(set_to_none=False)`, a GradScaler's factor."""
    run, drawn = Run(front), []
    torch.manual_seed(9)
    run.net[5].eval()  # its statistics are used, and stay
    for step, indices in enumerate(run.batches()):
        drawn.append(torch.rand(2))
        run.step_of.zero_grad(set_to_none=False)
        for place, (x, y) in enumerate(run.cut.shards(run.x[indices], run.y[indices])):
            loss = run.loss(x, y) * 1024
            loss.backward()
            if not place:
                run.net.eval()
                with torch.no_grad():
                    drawn.append(run.net(run.x[:3]).flatten())
                run.net.train()
                run.net[5].eval()
        for param in run.net.parameters():
            if param.grad is not None:
                param.grad /= 1024
        run.step_of.step()
        if front == "opt":  # DDP takes no frozen parameter
            run.net[0].weight.requires_grad_(step not in (1, 2))
    return {**run.states(), "drawn": torch.cat(drawn).numpy()}


def with_teacher(front: str) -> dict[str, np.ndarray]:
    """A copy of the model, made after it was wrapped, sees the batches, too; its layers are others."""
    expected, run = plain(front), Run(front)
    teacher = copy.deepcopy(run.net)
    for indices in run.batches():
        run.step_of.zero_grad()
        for x, y in run.cut.shards(run.x[indices], run.y[indices]):
            loss = run.loss(x, y)
            teacher(x)  # after all random numbers of the loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(run.net.parameters(), 0.5)
        run.step_of.step()
    for key, array in run.states().items():
        np.testing.assert_array_equal(array, expected[key], key)
    return {}


def mistakes(front: str) -> dict[str, np.ndarray]:
    run = Run(front)
    share = range(BATCH * len(run.cut._shards.mine))
    refused(UsageError, "each loss is that of one shard", lambda: run.loss(run.x[:2], run.y[:2]).backward())
    for cut in (run.cut, Run(front, Choosing(), unused=True).cut):
        refused(UsageError, "has given no gradients", list, cut.shards(share))
    refused(UsageError, "is not cut into", lambda: next(run.cut.shards([*share, 0])))
    refused(UsageError, r"SyncBatchNorm \(0\)", Run, front, nn.Sequential(distopt.torch.SyncBatchNorm(3)))
    refused(UsageError, "cumulative averages", Run, front, nn.Sequential(nn.BatchNorm2d(3, momentum=None)))
    if front == "opt":
        # DDP itself refuses it on CPUs.
        refused(UsageError, r"SyncBatchNorm \(0\)", Run, front, nn.Sequential(nn.SyncBatchNorm(3)))
        refused(UsageError, "shards need the model", distopt.torch.DistOpt, run.sgd, shards=SHARDS)
        refused(UsageError, "no_sync around shards", run.cut.no_sync().__enter__)
        refused(UsageError, "codec Fp16 would make results depend", Run(front, codec="fp16").step, share)
        before = torch.get_num_threads()
        torch.set_num_threads(1 + dist.get_rank())
        refused(MismatchError, "threads", Run(front).step, share)
        torch.set_num_threads(before)
    else:
        refused(UsageError, "pass DDP itself", distopt.torch.hook, run.net, shards=SHARDS)
    return {}


def with_exception(front: str) -> dict[str, np.ndarray]:
    """Rank 0 fails in the middle of its shards, and continues with the next step, as all others do."""
    run = Run(front)
    for step, indices in enumerate(run.batches(3)):
        if step != 1:
            run.step(indices)
        elif dist.get_rank():
            refused(GradientError, "not all shards of the step were computed", run.step, indices)
        else:
            with contextlib.suppress(ValueError):
                for turn, (x, y) in enumerate(run.cut.shards(run.x[indices], run.y[indices])):
                    if turn == 1:
                        raise ValueError("of the script")
                    run.loss(x, y).backward()
    return run.states()


def hashes(place: str, body, front: str, backend: str = "distopt") -> set[str]:
    return {*in_group(place, lambda: nets.hash_of(body(front)), backend)}


def assert_one_hash(body, front: str, places=("1", "3")) -> None:
    found = set().union(*(hashes(place, body, front) for place in places))
    assert [len(text) for text in found] == [16], "\n".join(found)


FRONTS = ["opt", "ddp", "ddp view"]


@pytest.mark.slow(kept=1, rest=3)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("body", [plain, unused, with_habits])
def test_number_of_ranks(body, front):
    assert_one_hash(body, front)


def test_a_copy_of_the_model_trains_nothing():
    assert_one_hash(with_teacher, "opt", ("2",))


@pytest.mark.slow
@pytest.mark.parametrize("front", ["opt", "ddp"])
@pytest.mark.usefixtures("net")  # needs root
def test_between_hosts(front):
    assert_one_hash(plain, front, ("1", "2+1", "2+2"))


@pytest.mark.slow(rest=1)
@pytest.mark.parametrize("front", FRONTS)
def test_over_gloo(front):
    assert hashes("3", plain, front, "gloo") == hashes("1", plain, front)


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("front", ["opt", "ddp"])
def test_mistakes_are_refused(front):
    assert_one_hash(mistakes, front, ("2",))


@pytest.mark.slow
def test_exception_in_a_turn_ends_the_step_on_all_ranks():
    assert_one_hash(with_exception, "opt", ("3",))
