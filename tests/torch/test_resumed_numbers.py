"""Numbers after a resume: samples, gradients, random numbers and means, where a script is free to choose its loop."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distopt import checkpoint, codecs
from distopt.torch import Checkpoint, DistOpt, ResumableSampler
from distopt.torch.checkpoint.gradients import Gradients
from distopt.torch.checkpoint.states import parts_of
from distopt.torch.checkpoint.trees import narrowed
from tests.conformance.thread_ranks import on_ranks


class StoppedError(Exception):
    """The job is killed."""


class Job:
    """A loop over epochs with one parameter for each sample, in which a script may look, accumulate and draw.

    Args:
        folder: of the checkpoints.
        group: number of batches of an update.
        counts: whether each batch counts as a step, or each update.
        size: number of samples.
        workers: of the loader.
        options: of the Checkpoint.
    """

    def __init__(self, folder, *, group=1, counts=False, size=16, workers=0, rule=torch.optim.SGD, **options):
        torch.manual_seed(1)
        random.seed(2)
        np.random.seed(3)  # noqa: NPY002 - the global one
        self.model = nn.Sequential(nn.Embedding(size, 2, sparse=options.pop("sparse", False)), nn.Linear(2, 1))
        self.optimizer = rule(self.model.parameters(), 0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.generator = torch.Generator().manual_seed(3)
        self.sampler = ResumableSampler(size, 1, seed=2, batches_per_step=1 if counts else group)
        data = TensorDataset(torch.arange(size))
        self.loader = DataLoader(data, batch_sampler=self.sampler, num_workers=workers, generator=self.generator)
        self.group, self.counts = group, counts
        self.seen: list[list[int]] = []
        parts = {name: getattr(self, name) for name in ("model", "optimizer", "schedule", "sampler", "generator")}
        self.saver = Checkpoint(folder, every=1, **parts, **options)
        self.resumed = self.saver.resume()

    def run(self, epochs=3, stop=None, looks=False, validates=None):
        if looks:
            next(iter(self.loader))
        for epoch in range(self.saver.epoch, epochs):
            self.sampler.set_epoch(epoch)
            self.seen.append([])
            for i, (batch,) in enumerate(self.loader):
                self.seen[-1].append(batch.item())
                noise = torch.rand(1, generator=self.generator) + torch.rand(1) + random.random() + np.random.rand()  # noqa: NPY002
                loss = self.model(batch).sum() / noise.float()
                loss.backward()
                first = self.saver.steps if self.counts else i
                updates = (first + 1) % self.group == 0 or i + 1 == len(self.loader)
                if updates:
                    self.optimizer.step(loss.detach)
                    self.optimizer.zero_grad()
                if updates or self.counts:
                    self.saver.step(epoch)
                    if self.saver.steps == stop:
                        self.stop()
            if validates == epoch:
                self.stop()
            self.schedule.step()
            sum(self.seen[-1]) / len(self.seen[-1])
            self.saver.save(epoch + 1)
        self.saver.close()
        return self

    def stop(self):
        self.saver._wait()
        self.saver._abandon()
        raise StoppedError

    def ends(self):
        return [
            *self.model.state_dict().values(),
            self.generator.get_state(),
            *self.optimizer.state_dict()["param_groups"],
        ]


def same(one, other) -> bool:
    return all(torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in zip(one, other, strict=True))


def stopped(folder, **options):
    when = {name: options.pop(name) for name in ("stop", "validates", "looks") if name in options}
    with pytest.raises(StoppedError):
        Job(folder, **options).run(**when)


JOBS = {
    "plain": {},
    "an update of four batches": {"group": 4},
    "an update of three batches, and one of the last": {"group": 3},
    "four batches, each a step": {"group": 4, "counts": True},
    "sparse gradients": {"group": 4, "counts": True, "sparse": True},
    "workers": {"workers": 2, "group": 3},
    **{rule.__name__: {"rule": rule} for rule in (torch.optim.AdamW, torch.optim.Adagrad, torch.optim.LBFGS)},
}


@pytest.mark.sweep(rest=10)
@pytest.mark.parametrize("looks", [False, True], ids=["", "looks"])
@pytest.mark.parametrize("stop", [1, 2, 7])
@pytest.mark.parametrize("name", JOBS)
def test_a_job_that_stops_in_an_epoch_ends_as_another(tmp_path, name, stop, looks):
    options = JOBS[name]
    whole = Job(tmp_path / "whole", **options).run(looks=looks)
    stopped(tmp_path / "parts", stop=stop, looks=looks, **options)
    parts = Job(tmp_path / "parts", **options)
    assert parts.resumed.step == stop
    parts.run(looks=looks)
    assert same(parts.ends(), whole.ends())
    assert parts.seen[-1] == whole.seen[-1]
    tail = whole.seen[parts.resumed.epoch]
    assert parts.seen[0] == tail[len(tail) - len(parts.seen[0]) :]


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("name", ["plain", "an update of three batches, and one of the last"])
def test_a_job_killed_between_two_epochs_ends_the_epoch_again(tmp_path, name, epoch):
    """Its script divides by the number of batches, and has a schedule for each epoch."""
    options = JOBS[name]
    whole = Job(tmp_path / "whole", **options).run()
    stopped(tmp_path / "parts", validates=epoch, **options)
    parts = Job(tmp_path / "parts", **options)
    assert (parts.resumed.epoch, len(parts.loader)) == (epoch, options.get("group", 1) if not options else 1)
    parts.run()
    assert same(parts.ends(), whole.ends())


@pytest.mark.parametrize("empty", [False, True])
def test_zeros_and_used_gradients(tmp_path, empty):
    """An optimizer with momentum moves parameters with a gradient of zero, and leaves alone those without one."""
    rule = partial(torch.optim.SGD, momentum=0.9)
    job = Job(tmp_path, rule=rule)
    weight = job.model[1].weight
    weight.grad = torch.ones_like(weight)
    job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=empty)
    job.model[1].bias.grad = torch.full((1,), 3.0)
    job.saver.save()
    job.saver.close()
    again = Job(tmp_path, rule=rule)
    assert again.model[1].bias.grad.item() == 3
    assert again.model[0].weight.grad is None
    grad = again.model[1].weight.grad
    assert grad is None if empty else torch.equal(grad, torch.zeros_like(grad))
    again.optimizer.step()
    again.saver.step()
    assert not Gradients({"m": again.model}).state_dict()
    again.model[1].bias.grad *= 2
    assert list(Gradients({"m": again.model}).state_dict()) == ["m/1.bias"]
    again.saver.close()


def checkpoint_of(comm, folder, objects, **parts):
    """Of one rank, which is a thread."""
    return checkpoint.Checkpoint(folder, every=1, communicator=comm, **parts_of(objects, replicated=True), **parts)


# -- generators --------------------------------------------------------------------------------------------------------
def test_ranks_that_seeded_python_and_numpy_equally_stay_equal_when_one_comes(tmp_path):
    """Threads stand for ranks, so generators of their own stand for the global ones of Python and NumPy."""

    def body(comm):
        own = torch.Generator().manual_seed(100 + comm.topology.rank)
        things = {"python": random.Random(7), "numpy": np.random.RandomState(7), "own": own}
        with checkpoint_of(comm, tmp_path, things) as saver:
            saver.resume()
            drawn = [things["python"].random(), things["numpy"].rand(), torch.rand(1, generator=own).item()]
            saver.step()
        return drawn

    first = on_ranks(2, body)
    second = on_ranks(3, body)
    fresh = random.Random(7)
    assert {draw[0] for draw in first} == {fresh.random()}
    assert {draw[0] for draw in second} == {fresh.random()}
    assert len({draw[1] for draw in second}) == 1
    assert second[0][1] != first[0][1]
    assert len({draw[2] for draw in first + second}) == 5


# -- means of types that NumPy lacks -----------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_gradients_and_buffers_become_their_mean_where_the_number_of_ranks_changes(tmp_path, dtype):
    buffers = torch.tensor([[1, 3, -0.5, np.nan], [2, 1, 0.25, 1], [6, 2, 0.25, 1]]).to(dtype)
    kept = torch.full((2,), 0.75).to(dtype)

    def body(comm, saves):
        rank, model = comm.topology.rank, nn.Linear(3, 2, bias=False).to(torch.bfloat16)
        model.register_buffer("running", buffers[rank].clone() if saves else torch.zeros(4).to(dtype))
        model.register_buffer("same", kept.clone())
        parts = {"gradients.waiting": Gradients({"model": model})}
        with checkpoint_of(comm, tmp_path, {"model": model}, **parts) as saver:
            resumed = saver.resume()
            if saves:
                nn.init.constant_(model.weight, rank + 1)
                model.weight.grad = torch.full_like(model.weight, 0.5 * (rank + 1))
                saver.save()
        return resumed is not None, model

    on_ranks(3, lambda comm: body(comm, True))
    mean = (buffers.double().sum(0) / 3).to(dtype).float()
    for came, model in on_ranks(2, lambda comm: body(comm, False)):
        assert came
        assert model.weight.tolist() == [[2.0] * 3] * 2
        assert torch.equal(model.weight.grad, torch.ones(2, 3, dtype=torch.bfloat16))
        assert torch.equal(model.running.float()[:3], mean[:3])
        assert model.running[3].isnan()
        assert torch.equal(model.same.float(), kept.float())


def test_a_mean_is_rounded_once():
    below, tie = 1 + 2.0**-8 - 2.0**-40, 1 + 2.0**-8  # float32 rounds the first to the second
    above = 1 + 2.0**-8 + 2.0**-40
    bits = narrowed(np.array([below, tie, above, -above, np.inf, 0.0]), "bfloat16", np.dtype(np.int16))
    found = torch.from_numpy(bits).view(torch.bfloat16).double().tolist()
    assert found == [1, 1, 1 + 2.0**-7, -1 - 2.0**-7, np.inf, 0.0]


# -- codecs ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("alone", ["distopt", "gloo"], indirect=True)
@pytest.mark.parametrize(("after", "says"), [("fp32", True), ("top-k", True), ("error feedback", False)])
@pytest.mark.usefixtures("alone")
def test_states_that_the_codec_of_a_resumed_job_does_not_use_are_named(tmp_path, caplog, after, says):
    kinds = {
        "error feedback": codecs.create("top-k", ratio=0.5, error_feedback=True),
        "top-k": codecs.create("top-k", ratio=0.5),
        "fp32": "fp32",
    }
    for codec in ("error feedback", after):
        model = nn.Linear(3, 2)
        optimizer = DistOpt(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), codec=kinds[codec])
        with Checkpoint(tmp_path, model=model, optimizer=optimizer) as saver:
            saver.resume()
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(4, 3)).square().mean().backward()
                optimizer.step()
                saver.step()
            saver.save()
    assert caplog.text.count("the loaded states of codec ErrorFeedback(TopK), such as") == says
