"""Training in shards leaves the same bits for any number of ranks, whatever a script does besides."""

import contextlib
import logging
import math

import numpy as np
import pytest

from distopt import autograd, opt, tensor
from distopt.comm import create
from distopt.comm.single import SingleCommunicator
from distopt.data import ShardedSampler
from distopt.errors import GradientError, MismatchError, StateError, UsageError
from distopt.launch.job.topology import Topology
from distopt.nn.layers.normalization import SyncBatchNorm2d
from distopt.shards import block_of
from instruments.one_hash import nets
from instruments.one_hash.job import BATCH, SEED, train
from tests.conformance.ranks import run_ranks_ok
from tests.unit.refusals import refused
from tests.unit.test_one_hash_tree import slow_tree

SHARDS = 8


def alone() -> SingleCommunicator:
    return SingleCommunicator(Topology.of_one_host(0, 1, "here"))


def hashed(job, body, *args) -> str:
    with create(job) as comm:
        return nets.hash_of(body(comm, *args))


def assert_one_hash(body, *args, ranks=(2, 3)) -> None:
    expected = nets.hash_of(body(alone(), *args))
    for world_size in ranks:
        assert run_ranks_ok(hashed, world_size, body, *args) == [expected] * world_size, f"{world_size} ranks"


class Run:
    """A net that trains step by step."""

    def __init__(self, comm, shards=SHARDS, rule=None, net="norm", **options) -> None:
        self.x, self.y = nets.data(net)
        rule = rule or opt.SGD(lr=0.05, momentum=0.9)
        self.opt = opt.DistOpt(rule, communicator=comm, shards=shards, **{"seed": SEED, **options})
        self.opt.device.SetRandSeed(3)
        self.net = nets.net(net)
        self.net.set_optimizer(self.opt)
        self.net.compile([tensor.from_numpy(self.x[:2])], is_train=True)
        place = self.opt.world_size, self.opt.global_rank
        self.sampler = ShardedSampler(len(self.x), *place, BATCH, seed=1, shards=shards)

    def call(self, part) -> None:
        self.net(tensor.from_numpy(self.x[part]), tensor.from_numpy(self.y[part]))

    def step(self, indices) -> None:
        for part in self.opt.shards(indices):
            self.call(part)

    def states(self) -> dict[str, np.ndarray]:
        return {**{key: value.to_numpy() for key, value in self.net.get_states().items()}, **self.opt.get_states()}


@pytest.mark.slow(kept=1, rest=3)
@pytest.mark.parametrize("name", ["norm", "cnn"])
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_number_of_ranks(name, world_size):
    assert_one_hash(_trained, name, ranks=[world_size])


def _trained(comm, name):
    return train(name, comm, bucket_elements=300)


def _in_six(comm):
    """A number of shards that is no power of two, and other buckets."""
    size = comm.topology.world_size
    return train("norm", comm, 6, **({"bucket_elements": 100 * size} if size > 1 else {}))


def test_seed_and_shards_matter():
    runs = [(SHARDS, SEED), (SHARDS, SEED + 1), (4, SEED)]
    found = set()
    for shards, seed in runs:
        run = Run(alone(), shards, seed=seed)
        run.step(np.arange(16))
        found.add(nets.hash_of({"parameters": run.net.get_params()["body.layers.8.W"].to_numpy()}))
    assert len(found) == len(runs)


# -- against a slow oracle ---------------------------------------------------------------------------------------------
def _oracle(comm):
    """One step, and what it should be, computed here for all shards, one by one."""
    run, rank, size = Run(comm, rule=opt.SGD(lr=1.0)), comm.topology.rank, comm.topology.world_size
    before = {name: value.to_numpy().copy() for name, value in run.net.get_states().items()}
    run.step(np.concatenate([batch_of(shard) for shard in block_of(SHARDS, rank, size)]))
    after = {name: value.to_numpy().copy() for name, value in run.net.get_states().items()}
    other = nets.net("norm")
    other.compile([tensor.from_numpy(run.x[:2])], is_train=True)
    leaves: dict[str, list[np.ndarray]] = {}
    running = {name: value.copy() for name, value in before.items() if "running" in name}
    for shard in range(SHARDS):
        other.set_states({name: np.zeros_like(v) if name in running else v for name, v in before.items()})
        with run.opt.device.seeded((SEED, 0, shard)):
            part = batch_of(shard)
            autograd.training = True
            loss = other.loss(other.forward(tensor.from_numpy(run.x[part])), tensor.from_numpy(run.y[part]))
        for param, grad in autograd.backward(loss):
            leaves.setdefault(param.name, []).append(grad.to_numpy().copy())
        for name, value in other.get_states().items():
            if name in running:
                momentum = 0.7 if ".5." in name else 0.9
                running[name] = running[name] * np.float32(1 - (1 - momentum)) + value.to_numpy()
    for name, grads in leaves.items():
        expected = before[name] - slow_tree(grads) * np.float32(1 / SHARDS)
        assert after[name].tobytes() == expected.tobytes(), name
    for name, expected in running.items():
        assert after[name].tobytes() == expected.tobytes(), name
    return after


def batch_of(shard: int) -> np.ndarray:
    return np.arange(BATCH) + shard * BATCH


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_step_is_that_of_an_oracle(world_size):
    assert len(set(run_ranks_ok(hashed, world_size, _oracle))) == 1


# -- what scripts do besides -------------------------------------------------------------------------------------------
def _with_habits(comm):
    """Schedules, evaluation, random numbers between steps, a layer that is frozen, a partial last batch."""
    run = Run(comm, rule=opt.SGD(lr=opt.ExponentialDecay(0.1, 3, 0.7), momentum=0.9), clip_grad_norm=0.5, check_every=2)
    rng, drawn = run.opt.device.rng, []
    place = run.opt.world_size, run.opt.global_rank
    sampler = ShardedSampler(len(run.x), *place, 6, seed=2, shards=SHARDS, partial_batch=True, tail="wrap")
    for step, indices in enumerate(sampler):
        drawn.append(run.opt.device.rng.random())
        run.step(indices)
        run.net.eval()
        drawn.append(float(run.net.forward(tensor.from_numpy(run.x[:5])).to_numpy().sum()))
        run.net.train()
        if step == 3:
            run.net.body.layers[0].requires_grad = False
        if step == 6:
            run.net.body.layers[0].requires_grad = True
    assert len(sampler) == math.ceil(math.ceil(len(run.x) / SHARDS) / 6)
    assert run.opt.device.rng is rng
    return {**run.states(), "drawn": np.array(drawn)}


def _with_nan(comm):
    run = Run(comm, non_finite="skip")
    sampler = ShardedSampler(len(run.x), 1, 0, BATCH * SHARDS, seed=1)
    bad = next(iter(sampler))[5]
    run.x[bad] = np.nan
    for _, indices in zip(range(4), run.sampler, strict=False):
        run.step(indices)
    assert run.opt.stats().skipped == 1
    return run.states()


@pytest.mark.slow
@pytest.mark.parametrize(("body", "ranks"), [(_in_six, (4, 5)), (_with_habits, (2, 3)), (_with_nan, (2, 3))])
def test_other_ways_to_train(body, ranks, caplog):
    caplog.set_level(logging.ERROR)
    assert_one_hash(body, ranks=ranks)


def _saved(job) -> tuple[dict[str, np.ndarray], ...]:
    with create(job) as comm:
        run = Run(comm)
        for _, indices in zip(range(11), run.sampler, strict=False):
            run.step(indices)
        of_net, of_opt = run.net.get_states(), run.opt.get_states()
        assert run.opt.shared_states(of_opt) == of_opt.keys()
        assert run.net.shared_states(of_net) == of_net.keys()
        return {key: value.to_numpy().copy() for key, value in of_net.items()}, of_opt, run.sampler.get_states()


def _to_the_end(comm, *saved):
    run = Run(comm)
    for part, states in zip((run.net, run.opt, run.sampler), saved, strict=False):
        part.set_states(states)
    for indices in run.sampler:
        run.step(indices)
    return run.states()


@pytest.mark.slow
def test_other_number_of_ranks_in_the_middle():
    expected = nets.hash_of(_to_the_end(alone()))
    saved = run_ranks_ok(_saved, 4)[0]
    assert nets.hash_of(_to_the_end(alone(), *saved)) == expected
    assert run_ranks_ok(hashed, 3, _to_the_end, *saved) == [expected] * 3


def _with_exception(comm):
    """Rank 0 fails in the middle of its shards, and continues with the next step, as all others do."""
    run, steps = Run(comm), {0: Run.step, 1: _broken, 2: Run.step, 3: Run.step}
    for step, indices in zip(steps, run.sampler, strict=False):
        if step == 1 and comm.topology.rank > 0:
            with pytest.raises(GradientError, match="not all shards of the step were computed") as caught:
                run.step(indices)
            assert caught.value.rank == 0
        else:
            steps[step](run, indices)
    return run.states()


def _broken(run: Run, indices: np.ndarray) -> None:
    with contextlib.suppress(ValueError):
        for turn, part in enumerate(run.opt.shards(indices)):
            if turn == 1:
                raise ValueError("of the script")
            run.call(part)


@pytest.mark.slow
def test_exception_in_a_turn_ends_the_step_on_all_ranks():
    for world_size in (2, 3):
        assert len(set(run_ranks_ok(hashed, world_size, _with_exception))) == 1


# -- mistakes ----------------------------------------------------------------------------------------------------------
def _refused(comm):
    run, indices = Run(comm), np.arange(8 * BATCH // comm.topology.world_size)
    part = indices[:BATCH]
    refused(UsageError, "each loss is that of one shard", run.call, part)
    assert run.net.body.layers[1].running_mean.to_numpy().any(), "outside of shards, statistics move at once"
    for part in run.opt.shards(indices):
        run.call(part)
        refused(UsageError, "each loss is that of one shard", run.call, part)
    run = Run(comm)
    refused(UsageError, r"shard . has given no gradients", list, run.opt.shards(indices))
    refused(UsageError, r"7 samples is not cut into . equal shards", run.step, indices[:7])
    refused(UsageError, r"8 and 9 samples is not cut", next, iter(run.opt.shards(range(8), range(9))))
    refused(UsageError, "no_sync, which adds up losses", run.opt.no_sync)
    refused(UsageError, "join, with ranks out of data", run.opt.join().__enter__)
    refused(UsageError, "a sum over ranks would make results depend", run.opt.all_reduce, np.zeros(3, np.float32))
    for call, what in (
        (lambda loss: run.opt.backward_and_update_half(loss), "codec Fp16"),
        (lambda loss: run.opt.backward_and_partial_update(loss), "a partial update"),
        (lambda loss: run.opt.reduce_and_update(loss, run.opt.codec, clip=1.0), "a limit of single elements"),
    ):
        run.net.set_optimizer(opt.SGD())
        run.net._optimizer = call
        refused(UsageError, f"{what}.* would make results depend on the number of ranks", run.step, indices)
        run.net._optimizer = run.opt
    run.net.body.layers = (SyncBatchNorm2d(), *run.net.body.layers[2:])
    run.net.set_optimizer(run.opt)
    run.net.body.layers[0].use_optimizer(run.opt)
    refused(UsageError, "SyncBatchNorm2d, or another sum over ranks", run.step, indices)
    states = run.opt.get_states()
    refused(StateError, "of shards=8, seed=7, not shards=4, seed=7", Run(comm, 4).opt.set_states, states)
    plain = opt.DistOpt(opt.SGD(lr=0.05, momentum=0.9), communicator=comm)
    refused(UsageError, r"shards\(\) cuts steps for DistOpt", plain.shards, indices)
    refused(UsageError, "leave nothing to some of", opt.DistOpt, opt.SGD(), communicator=comm, shards=1)
    assert "shards" not in plain.get_states()
    refused(StateError, "the states are of a job with shards=, this one is without", plain.set_states, states)
    refused(StateError, "of a job without shards=, this one is with", run.opt.set_states, plain.get_states())
    refused(MismatchError, "shards", Run(comm, 8 + 2 * comm.topology.rank).step, np.arange(20 * BATCH))
    return {}


def test_refused():
    run_ranks_ok(hashed, 2, _refused)
