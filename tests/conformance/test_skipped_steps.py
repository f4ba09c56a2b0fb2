"""A step without update, because of a gradient that is NaN or infinite, leaves everything as it was before it."""

import re

import numpy as np
import pytest

from distopt.codecs import CODECS as REGISTRY
from distopt.codecs import BFloat16, ErrorFeedback, Fp16, Fp32, PowerSGD, Threshold, TopK
from distopt.engine.by_hand import Fusion
from distopt.errors import GradientError
from tests.conformance import nccl_ranks
from tests.conformance.codec_steps import algorithm
from tests.conformance.ranks import with_ranks
from tests.conformance.test_engine import CODECS, SHAPES, Parameter, Rank, TroubleError, gradients, leave
from tests.conformance.thread_ranks import OracleCommunicator, SplittingCommunicator, on_ranks, same_bits

F32 = np.float32
LEAVES = "an exception ends the step"
worlds = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
with_partial = pytest.mark.parametrize("codec", [*CODECS, None], ids=repr)


def test_every_codec_of_the_registry_is_among_those_that_are_tested():
    assert set(map(algorithm, CODECS)) == set(REGISTRY.values())


@pytest.mark.sweep(rest=20)
@worlds
@pytest.mark.parametrize(
    "codec",
    [c for c in CODECS if isinstance(c, ErrorFeedback) and c.decay == 1 and not getattr(c.codec, "momentum", 0)],
    ids=repr,
)
@pytest.mark.parametrize("large", [100.0, 3e20])
def test_a_skipped_gradient_is_never_applied(codec, world_size, large):
    def body(comm):
        own = Rank(comm, non_finite="skip")
        own.params = [Parameter("matrix", np.zeros((8, 5), F32))]
        applied = 0.0
        for number in range(60):
            grad = np.full((8, 5), {0: 1, 1: large}.get(number, 0), F32)
            if number == 1 and own.rank == world_size - 1:
                grad[3, 2] = np.nan
            step, verdict = own.take(codec, [grad])
            if verdict is None:
                applied += own.means(step)[0].sum(dtype=float)
            else:
                own.engine.refuse(verdict)
        return applied

    # Error feedback does not cover the rounding of a 16-bit sum.
    rel = 5e-3 if isinstance(codec.codec, Fp16 | BFloat16) else 1e-5
    assert on_ranks(world_size, body) == [pytest.approx(40, rel=rel)] * world_size


def plan_of(seed, world_size, steps=12):
    """For each step None, or how it goes wrong: on which rank, in which parameter, and by which value."""
    rng = np.random.default_rng([seed, world_size])
    values = np.nan, np.inf, -np.inf
    bad = [(rng.integers(world_size), rng.integers(len(SHAPES)), rng.choice(values)) for _ in range(steps)]
    return [each if rng.random() < 0.5 else None for each in bad]


def by(value, plan):
    """The same steps go wrong, by another value."""
    return [bad and (*bad[:2], value) for bad in plan]


def trained(comm, codec_of, plan, *, skip=False, non_finite="skip"):
    """The means of the good steps, and the states in the end; `skip`: take the good steps only."""
    own, results, good = Rank(comm, non_finite=non_finite), [], 0
    for number, bad in enumerate(plan):
        codec = codec_of(number)
        if bad is None:
            results += own.run(codec, gradients(own.rank, good))
            good += 1
        elif not skip:
            (leaves if bad[2] is LEAVES else refuse)(own, codec, number, *bad)
    statistics = own.engine.statistics
    expected = (good, 0) if skip else (len(plan), len(plan) - good)
    assert (statistics.steps, statistics.skipped) == expected
    assert own.engine.partial.pending == (codec is None)
    states = own.engine.get_states()
    states["steps"] = states["steps"][2:]  # behind the numbers of steps
    return results + [states[key].astype(F32) for key in sorted(states)]


def leaves(own, codec, number, rank, place, _):
    """A step that a rank leaves after so many gradients."""
    grads = gradients(own.rank, 1000 + number)
    if own.rank == rank:
        with pytest.raises(TroubleError):
            leave(own, codec, number, place)
        return
    text = rf"step {number}: rank {rank} \(host\) .*TroubleError: rank {rank} gives up"
    with pytest.raises(GradientError, match=text) as caught:
        own.run(codec, grads)
    assert caught.value.rank == rank


def refuse(own, codec, number, rank, place, value):
    """A step whose verdict names parameter, step and rank."""
    grads, before = gradients(own.rank, 1000 + number), own.engine.get_states()
    if own.rank == rank:
        grads[place].flat[grads[place].size // 2] = value
    _, verdict = own.take(codec, grads)
    name = list(SHAPES)[place]
    text = f"step {number}: the gradient of {name} is NaN, infinite or too large for a sum on rank {rank} "
    assert text in verdict.text
    assert verdict.rank == rank
    after = own.engine.get_states()
    assert after["steps"][2:].tolist() == before["steps"][2:].tolist(), "of partial updates"
    assert codec is not None or after.keys() == before.keys()
    if own.engine.non_finite == "skip":
        own.engine.refuse(verdict)
    else:
        with pytest.raises(GradientError, match=re.escape(name)):
            own.engine.refuse(verdict)


def check(world_size, codec_of, plan, cls=OracleCommunicator, **options):
    expected = on_ranks(world_size, lambda comm: trained(comm, codec_of, plan, skip=True, **options), cls=cls)
    found = on_ranks(world_size, lambda comm: trained(comm, codec_of, plan, **options), cls=cls)
    for a, b in zip(found, expected, strict=True):
        assert same_bits(a, b)


@pytest.mark.sweep(rest=50)
@worlds
@with_partial
@pytest.mark.parametrize("seed", range(3))
def test_training_goes_on_as_if_there_had_been_no_bad_step(codec, world_size, seed):
    plan = plan_of(seed, world_size)
    if isinstance(codec, Fp16 | BFloat16):  # infinity becomes the largest value: not a bad gradient
        plan = by(np.nan, plan)
    cls = SplittingCommunicator if seed == 2 else OracleCommunicator
    check(world_size, lambda _: codec, plan, cls, non_finite="raise" if seed == 1 else "skip")


@pytest.mark.sweep(rest=24)
@worlds
@with_partial
def test_a_step_that_an_exception_ends_leaves_no_trace(codec, world_size):
    check(world_size, lambda _: codec, by(LEAVES, plan_of(7, world_size)))


@worlds
@pytest.mark.parametrize(
    "kinds",
    [
        [ErrorFeedback(TopK(0.05)), ErrorFeedback(TopK(0.1, momentum=0.5)), ErrorFeedback(TopK(0.1, warm_up_steps=1))],
        [Fp16(), Fp16("dynamic"), Fp32()],
        [ErrorFeedback(Threshold(1.0)), ErrorFeedback(PowerSGD(1)), ErrorFeedback(Threshold(0.5, momentum=0.9))],
    ],
    ids=repr,
)
def test_bad_steps_leave_no_trace_where_options_and_codecs_change(kinds, world_size):
    plan = by(np.nan, plan_of(8, world_size, steps=20))
    check(world_size, lambda number: kinds[number % len(kinds)], plan)


@worlds
@pytest.mark.parametrize(
    "codec",
    [Fp16("dynamic"), TopK(0.1, warm_up_steps=2), ErrorFeedback(TopK(0.2)), ErrorFeedback(BFloat16())],
    ids=repr,
)
def test_sums_by_hand_leave_no_trace_of_a_bad_step(codec, world_size):
    plan = by(np.nan, plan_of(9, world_size))
    sizes = [300, 40, 40, 7, 300]

    def body(comm, skip):
        rank, fusion, good, results = comm.topology.rank, Fusion(comm, 50), 0, []
        feedback = isinstance(codec, ErrorFeedback)
        residuals = [np.zeros(size, F32) if feedback else None for size in sizes]
        for number, bad in enumerate(plan):
            if skip and bad is not None:
                continue
            rng = np.random.default_rng([rank, good if bad is None else 1000 + number])
            arrays = [(rng.standard_normal(size) * 3e4).astype(F32) for size in sizes]
            if bad is not None and bad[0] == rank:
                arrays[bad[1]][2] = np.nan
            for array, residual in zip(arrays, residuals, strict=True):
                fusion.send([array], codec, residual)
            if bad is not None:
                with pytest.raises(GradientError):
                    fusion.wait()
                continue
            fusion.wait()
            results += [array.copy() for array in (*arrays, *(residuals if feedback else ()))]
            good += 1
        return results

    expected = on_ranks(world_size, lambda comm: body(comm, True))
    for a, b in zip(on_ranks(world_size, lambda comm: body(comm, False)), expected, strict=True):
        assert same_bits(a, b)


@pytest.mark.usefixtures("built")
@with_ranks(2, nccl_ranks.connect)
def test_a_verdict_is_left_on_the_device_only_if_the_step_asks_for_it(comm):
    for codec in (Fp32(), Fp16()):
        own = Rank(comm)
        for param in own.params:
            param.array = comm.xp.asarray(param.array)
        own.run(codec, [comm.xp.asarray(grad) for grad in gradients(own.rank)])
