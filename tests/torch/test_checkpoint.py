"""Checkpoints of PyTorch's objects: disturbed jobs resume bit for bit, and mismatched states are refused."""

from __future__ import annotations

import copy
import gc
import os
import random
import re
import signal
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from distopt import checkpoint, cli
from distopt.data import ShardedSampler
from distopt.errors import StateError, UsageError
from distopt.torch import Checkpoint, ResumableSampler, load
from distopt.torch.checkpoint.generators import global_generators
from distopt.torch.checkpoint.gradients import Gradients
from distopt.torch.checkpoint.states import ModelState, parts_of
from distopt.torch.checkpoint.trees import decode, encode
from distopt.torch.ddp.bucket_order import bucket_order, lay_out
from instruments.faults.healing import RUN, Job, without_heal
from instruments.faults.healing import disturb as kill
from instruments.torch.disturbed import disturb
from tests.conformance.thread_ranks import on_ranks
from tests.processes import Ended, Program
from tests.unit.refusals import refused

SEED = int(os.environ.get("DISTOPT_TEST_SEED", "7"))
JOB = [sys.executable, "-W", "ignore", "-m", "distopt", "run", "--nproc-per-node"]


# -- jobs that are disturbed -------------------------------------------------------------------------------------------
def run(ranks: int, folder: Path, *options: str) -> Ended:
    command = [*JOB, str(ranks), "-m", "instruments.torch.resumed", "--folder", str(folder), *options]
    return Program(command, {"OMP_NUM_THREADS": "1"}).end()


def ends_of(*ended: Ended) -> list[str]:
    return sorted(re.findall(r"^(?:\[rank \d\] )?(.* ends with .*)$", "".join(one.stdout for one in ended), re.M))


def undisturbed(folder: Path, ranks: int, *options: str) -> list[str]:
    ended = run(ranks, folder, *options)
    assert ended.code == 0, ended
    return ends_of(ended)


WITH_CODECS = ["hook", "dist-opt", "diloco", "sparse-diloco"]
# Over Gloo, sums of three ranks depend on the layout of DDP's buckets.
JOBS = [
    ("distopt", 2, ""),
    ("gloo", 2, "--accumulate 4"),
    pytest.param("distopt", 2, "--accumulate 4", marks=pytest.mark.sweep),
    pytest.param("gloo", 3, "--precision bfloat16", marks=pytest.mark.sweep),
    pytest.param("gloo", 3, "--static-graph", marks=pytest.mark.sweep),
    pytest.param("gloo", 2, "--by fsdp --precision bfloat16", marks=pytest.mark.sweep),
    pytest.param("distopt", 2, "--by zero", marks=pytest.mark.sweep),
    *(
        pytest.param(backend, 2, f"--by {by}", marks=pytest.mark.sweep)
        for by, backend in product(WITH_CODECS, ("distopt", "gloo"))
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "ranks", "options"), JOBS)
def test_a_job_that_is_killed_and_preempted_ends_with_the_undisturbed_bits(tmp_path, backend, ranks, options):
    options = ["--backend", backend, *options.split()]
    want = undisturbed(tmp_path / "undisturbed", ranks, *options)
    folder, numbers = tmp_path / "disturbed", random.Random(SEED)
    killed = run(ranks, folder, *options, "--end", "SIGKILL", str(numbers.randrange(8, 25)))
    assert killed.code == 137, killed
    left = run(ranks, folder, *options, "--end", "SIGTERM", str(numbers.randrange(26, 40)))
    gloo_has_aborted = "gloo" in options and "terminate called without an active exception" in left.stderr
    assert left.code == (134 if gloo_has_aborted else 143), left  # a thread of PyTorch's Gloo at the end of a process
    assert "the job leaves after step" in left.stderr
    ended = run(ranks, folder, *options)
    assert ended.code == 0, ended
    assert "resuming from step" in ended.stdout
    assert ends_of(ended) == want


@pytest.mark.slow(rest=1)
@pytest.mark.parametrize("backend", ["distopt", "gloo"])
@pytest.mark.parametrize("by", WITH_CODECS)
def test_a_job_with_codecs_heals_with_the_undisturbed_bits(start, tmp_path, backend, by):
    """From memory: nothing is saved in files."""
    command = [*RUN, "--heal", "-m", "instruments.torch.resumed", "--backend", backend, "--by", by]
    want = Job(*without_heal([command])).end()
    job = start([*command, "--pause", "0.2", "--until", str(tmp_path / "end")])
    for _ in range(2):
        job.more_steps()
        kill(job, (), "SIGKILL", random.Random(SEED))
    (tmp_path / "end").touch()
    assert job.end() == want
    assert sum("resuming from step" in line for line in job.lines) >= 2 * 2


@pytest.mark.slow
@pytest.mark.sweep
def test_a_job_of_two_hosts_that_is_killed_at_any_moment_ends_with_the_undisturbed_bits(net, tmp_path):
    """Over distopt; `python -m instruments.torch.disturbed` does more, and over Gloo."""
    signals = [signal.SIGKILL, signal.SIGTERM]
    assert disturb(net, 2, tmp_path, signals, random.Random(SEED), "--steps", "150") >= 1


@pytest.mark.slow
def test_a_job_goes_on_with_other_numbers_of_ranks(tmp_path):
    assert run(2, tmp_path, "--end", "SIGTERM", "20").code == 143
    more = run(3, tmp_path)
    assert more.code == 0, more
    assert "was saved by 2 ranks and resumes with 3" in more.stderr
    assert len(ends_of(more)) == 3


# -- one rank ----------------------------------------------------------------------------------------------------------
class Small(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.inner = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.norm(self.inner(x))


def job(folder: Path, optimizer=torch.optim.AdamW, width: int = 5, **more):
    torch.manual_seed(1)
    model = Small(width)
    optimizer = optimizer(model.parameters(), 0.01)
    return model, optimizer, Checkpoint(folder, model=model, optimizer=optimizer, **more)


def train(model, optimizer, checkpoint, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mul(torch.rand(5)).mean().backward()
        optimizer.step()
        checkpoint.step()


def saved_job(folder: Path) -> None:
    """A job saves its states after two steps."""
    *_, saver = objects = job(folder)
    with saver:
        saver.resume()
        train(*objects, 2)
        saver.save()


def save(folder: Path, **objects) -> None:
    with Checkpoint(folder, **objects) as saver:
        saver.resume()
        saver.save()


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize(("before", "rate", "words"), [
    (2, 0.1, "optimizer resumes with the learning rates [0.2] of its states, not with [0.1] of the script"),
    (2, 0.2, ""),
    (1, 0.1, ""),
])  # fmt: skip
def test_rates_that_another_number_of_ranks_has_saved_are_named(tmp_path, caplog, before, rate, words, scheduled):
    def objects(rate: float):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], rate)
        schedules = {"schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1)} if scheduled else {}
        return {"optimizer": optimizer, **schedules}

    def body(comm):
        parts = parts_of(made := objects(0.2), replicated=True) | global_generators()
        parts |= {"gradients.waiting": Gradients({})}
        with checkpoint.Checkpoint(tmp_path, communicator=comm, **parts) as saver:
            saver.resume()
            made["optimizer"].step()
            for schedule in list(made.values())[1:]:
                schedule.step()
            saver.save()

    on_ranks(before, body)
    made = objects(rate)
    with Checkpoint(tmp_path, **made) as saver:
        saver.resume()
    assert made["optimizer"].param_groups[0]["lr"] == pytest.approx(0.02 if scheduled else 0.2)
    assert [words in caplog.text, "learning rate" in caplog.text] == [True, bool(words)]


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_model_goes_by_its_own_names_inside_ddp_and_compile_and_is_loaded_alone(tmp_path):
    model, fresh = Small(), Small()
    inner = torch.compile(model, backend="eager")
    save(tmp_path, model=torch.compile(nn.parallel.DistributedDataParallel(inner), backend="eager"))
    assert load(tmp_path, model=fresh).step == 0
    assert_same_states(model, fresh)


def assert_same_states(model, other) -> None:
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_tensors_can_be_resized_after_a_save(tmp_path):
    model, fresh = Small().bfloat16(), Small().bfloat16()
    model.register_buffer("places", torch.ones(3, 4).t())  # lies in columns
    fresh.register_buffer("places", torch.zeros(4, 3))
    for name, dtype in (("waves", torch.complex64), ("counts", torch.uint16)):
        model.register_buffer(name, torch.ones(4, dtype=dtype))
        fresh.register_buffer(name, torch.zeros(4, dtype=dtype))
    save(tmp_path, model=model)
    load(tmp_path, model=fresh)
    assert_same_states(model, fresh)
    for tensor in model.state_dict().values():
        tensor.untyped_storage().resize_(0)


@pytest.mark.usefixtures("alone")
def test_buckets_are_laid_out_anew_where_ddp_sends_buffers():
    """Which it does before every forward pass, as is its default."""
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    order = sorted(dict(ddp.module.named_parameters()))
    assert bucket_order(ddp) != order
    lay_out(ddp, order)
    assert bucket_order(ddp) == order
    assert ddp.forward_sync_buffers
    ddp(torch.randn(5, 3)).sum().backward()


TENSORS = {
    **{str(t): torch.arange(6).reshape(2, 3).to(t) for t in (torch.int8, torch.uint8, torch.int64, torch.bool)},
    **{str(t): torch.randn(3, 2).to(t) for t in (torch.float16, torch.bfloat16, torch.float64, torch.complex64)},
    **{str(t): torch.randn(5).to(t) for t in (torch.float8_e4m3fn, torch.float8_e5m2)},
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 3),
    "strided": torch.arange(12.0).reshape(3, 4).t()[::2],
    "conjugate": torch.randn(2, dtype=torch.complex64).conj(),
}


def test_trees_keep_their_types_and_bits():
    tree = {
        **TENSORS,
        3: (1, 2.5, None, [float("inf"), "x", True]),
        "counter": Counter([3, 3, 7]),
        "ordered": OrderedDict(b=torch.ones(2), a={}),
        (1, "pair"): np.float32(0.1),
        "scalars": [np.float64(0.1), np.int8(-3), np.bool_(True), np.str_("text"), np.uint64(2**64 - 1), np.array(3)],
        "size": torch.Size([2, 3]),
        "counts": [defaultdict(int, a=1), defaultdict(list), defaultdict(None, b=2)],
        "a/b": torch.tensor(1),
        "a": {"b": torch.tensor(2)},
    }
    arrays: dict = {}
    found = decode(encode(tree, "", arrays), {name: np.array(array) for name, array in arrays.items()}, str)
    assert list(found) == list(tree)
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        one, other = (
            bytes(each.contiguous().view(-1).view(torch.uint8)) for each in (found[name], tensor.resolve_conj())
        )
        assert one == other, name
    assert found[3] == tree[3]
    assert (type(found["counter"]), found["counter"]) == (Counter, tree["counter"])
    assert (type(found["ordered"]), list(found["ordered"])) == (OrderedDict, ["b", "a"])
    assert (type(found[1, "pair"]), found[1, "pair"]) == (np.float32, np.float32(0.1))
    for name in ("scalars", "size", "counts"):
        assert type(found[name]) is type(tree[name])
        for each, wanted in zip(found[name], tree[name], strict=True):
            assert (type(each), each) == (type(wanted), wanted)
            assert getattr(each, "default_factory", None) is getattr(wanted, "default_factory", None)
    assert (found["a/b"], found["a"]["b"]) == (torch.tensor(1), torch.tensor(2))


# -- what does not fit -------------------------------------------------------------------------------------------------
Pair = namedtuple("Pair", "a b")


class Holder:
    def __init__(self, states) -> None:
        self.states = states

    def state_dict(self):
        return self.states

    def load_state_dict(self, states) -> None:
        self.states = states


def thing(states):
    return partial(save, thing=Holder(states))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (partial(save, thing=object()), "thing is a object, which cannot be saved; pass objects with state_dict"),
        (thing({"a": [{"deep": len}]}), "a/0/deep is a builtin_function_or_method, which can be saved neither"),
        (thing({"s": torch.ones(2, 2).to_sparse()}), "s is a Tensor, which can be saved neither"),
        (thing({"p": Pair(1, 2)}), "p is a Pair, which can be saved neither .*; make it a tensor"),
        (thing({"d": defaultdict(lambda: 3)}), "d is a defaultdict, which"),
        (thing({"m": torch.ones(2, device="meta")}), "m is a tensor on the device meta, which has no values"),
        (partial(save, thing=nn.Linear(2, 2, device="meta")), "weight is a tensor on the device meta, which has no"),
        (thing({"a": np.ma.masked_array([1.0], [True])}), "a is a MaskedArray, which"),
        (thing({"c": np.complex64(1j)}), "c is a complex64, which"),
        (partial(Checkpoint, sampler=ShardedSampler(8, 1, 0, 2)), "a ShardedSampler.*a distopt.torch.ResumableSampler"),
        (lambda _: ResumableSampler(DataLoader([1, 2]), 1), "a DataLoader would be ignored; pass the data set"),
        (
            lambda _: ResumableSampler(WeightedRandomSampler([1.0], 2), 1),
            "the order of a WeightedRandomSampler would be",
        ),
        *(
            (front, "a checkpoint of no objects saves nothing; name them")
            for front in (Checkpoint, load, checkpoint.Checkpoint, checkpoint.load)
        ),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path, call, words):
    refused(UsageError, words, call, tmp_path)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_does_not_make_batches_of_batches(workers):
    data = torch.arange(12.0)
    sampler = ResumableSampler(data, 4, shuffle=False)
    loaders = DataLoader(data, batch_sampler=sampler), DataLoader(data, sampler=sampler, batch_size=None)
    for batches in loaders:
        assert [batch.tolist() for batch in batches] == data.view(3, 4).tolist()
    with pytest.raises(UsageError, match=r"gives whole batches; pass it as DataLoader\(data, batch_sampler=sampler\)"):
        next(iter(DataLoader(data, sampler=sampler, num_workers=workers)))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"width": 6}, r"model: inner.bias is float32 of shape \(5,\), here float32 of shape \(6,\)"),
        ({"optimizer": torch.optim.SGD}, "optimizer: the object is of SGD, the states are of AdamW"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "it has no scaler"),
    ],
)
def test_checkpoints_of_another_job_are_refused_and_change_nothing(tmp_path, other, words):
    saved_job(tmp_path)
    model, _, saved = job(tmp_path, **other)
    before = copy.deepcopy(model)
    refused(StateError, words, saved.resume)
    assert_same_states(before, model)


def test_the_files_are_those_of_nn_and_hold_no_pickle(tmp_path):
    saved_job(tmp_path / "pytorch")
    weight = {"weight": np.zeros((5, 3), np.float32)}
    with checkpoint.Checkpoint(tmp_path / "nn", model=weight) as saver:
        saver.resume()
        saver.save()
    refused(StateError, "no state dictionary of PyTorch", load, tmp_path / "nn", model=nn.Linear(3, 5, bias=False))
    # States of PyTorch's for arrays of nn's.
    refused(StateError, "of another script", checkpoint.load, tmp_path / "pytorch", model=weight)
    files = sorted(path.name for path in (tmp_path / "pytorch").rglob("*") if path.is_file())
    assert files == [".lock", "checkpoint.json", "rank-00000.safetensors"]


def test_the_first_array_of_two_runs_that_differs_is_named(tmp_path, monkeypatch, capsys):
    for name in "ab":
        monkeypatch.setenv("DISTOPT_HASH", str(tmp_path / name))
        torch.manual_seed(4)
        model, *more = objects = job(tmp_path / f"of {name}")
        objects[-1].resume()
        train(*objects, 2)
        if name == "b":
            with torch.no_grad():
                model.norm.weight[1] *= 1.5
        train(model, *more, 2)
        objects[-1].save()
        objects[-1].close()
    assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert capsys.readouterr().out.startswith("step 3: model/inner.weight differs; ")
    assert cli.main(["diff", str(tmp_path / "of a"), str(tmp_path / "of b")]) == 1
    assert capsys.readouterr().out.startswith("checkpoint of step 4: model/inner.bias differs in ")


# -- samples -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_workers_have_fetched_are_not_counted(workers):
    data = TensorDataset(torch.arange(103))
    sampler = ResumableSampler(data, 4, seed=3)
    whole = [batch.tolist() for (batch,) in DataLoader(data, batch_sampler=sampler, num_workers=workers)]
    sampler.set_epoch(1)
    sampler.set_epoch(0)
    seen = []
    for (batch,) in DataLoader(data, batch_sampler=sampler, num_workers=workers):
        seen.append(batch.tolist())
        sampler.step()
        if len(seen) == 5:
            break
    assert sampler.consumed == 20
    again = ResumableSampler(data, 4, seed=3)
    again.set_states(sampler.get_states())
    rest = [batch.tolist() for (batch,) in DataLoader(data, batch_sampler=again, num_workers=workers)]
    assert seen + rest == whole


def test_accumulated_batches_count_together():
    sampler = ResumableSampler(np.int64(10), np.uint8(1), batches_per_step=np.int64(4))
    next(iter(sampler))
    counts = []
    for _ in range(3):
        sampler.step()
        counts.append(sampler.consumed)
    assert counts == [4, 8, 10]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("n_batches", "accumulated", "given"), [(9, 2, 1), (9, 3, 1), (9, 4, 2), (9, 2, 2), (9, 1, 1)])
def test_steps_of_several_batches_that_are_counted_as_less_are_noticed(workers, n_batches, accumulated, given, caplog):
    sampler = ResumableSampler(2 * n_batches, 2, batches_per_step=given)
    loader = DataLoader(torch.arange(2 * n_batches), batch_sampler=sampler, num_workers=workers)
    for number, _ in enumerate(loader, 1):
        if number % accumulated == 0:
            sampler.step()
    del loader
    gc.collect()
    wanted = [] if accumulated == given else [f"batches_per_step={round(n_batches / (n_batches // accumulated))}"]
    assert re.findall(r"batches_per_step=\d+", caplog.text) == wanted


def test_buffers_of_a_module_that_is_replaced_are_recorded():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    state = ModelState(model, {id(parameter) for parameter in model.parameters()})
    for mean in (1.0, 3.0):
        model[1].running_mean += mean
        own = state.own().arrays
        assert own.keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
        np.testing.assert_array_equal(own["1.running_mean"], np.full(3, mean))
        model[1].running_mean += 1  # in place
        np.testing.assert_array_equal(state.own().arrays["1.running_mean"], np.full(3, mean + 1))
        model[1] = nn.BatchNorm1d(3)


@pytest.mark.parametrize("keeps", [False, True])
def test_an_epoch_of_a_loader_that_keeps_its_workers_is_no_place_to_resume_at(keeps: bool) -> None:
    """The loader of a job that resumed there would draw a seed for new workers."""
    sampler, begun = ResumableSampler(8, 2), []
    sampler.watch_epochs(lambda: None, lambda: begun.append(sampler.epoch))
    loader = DataLoader(range(8), batch_sampler=sampler, num_workers=1, persistent_workers=keeps)  # type: ignore[arg-type]
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert len([*loader]) == 4
    assert begun == ([0] if keeps else [0, 1, 2])
