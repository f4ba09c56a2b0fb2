"""A step without update, because of a gradient that is NaN or infinite, leaves everything as it was before it."""

import numpy as np
import pytest

from distopt.codecs import (
    CODECS,
    BFloat16,
    ChunkedTopK,
    Codec,
    ErrorFeedback,
    Fp16,
    Fp32,
    PowerSGD,
    Quantized,
    Threshold,
    TopK,
)
from distopt.engine.by_hand import Fusion
from distopt.errors import GradientError
from tests.conformance import nccl_ranks
from tests.conformance.ranks import LocalJob, run_ranks_ok
from tests.conformance.test_engine import SHAPES, Parameter, Rank, gradients, same_bits
from tests.conformance.thread_ranks import OracleCommunicator, SplittingCommunicator, on_ranks
from tests.emulation import build

F32 = np.float32
LEAVES = "an exception ends the step"
EVERY = [
    Fp32(),
    Fp16("dynamic"),
    ErrorFeedback(Fp16()),
    ErrorFeedback(Fp16("dynamic")),
    BFloat16(),
    ErrorFeedback(BFloat16("dynamic")),
    TopK(0.1, warm_up_steps=2),
    ErrorFeedback(TopK(0.05)),
    ErrorFeedback(TopK(0.05, momentum=0.5, clip_norm=3.0, warm_up_steps=2)),
    ErrorFeedback(TopK(0.05, momentum=0.5, factor_masking=False)),
    ErrorFeedback(TopK(1.0, momentum=0.5)),
    Threshold(0.5),
    ErrorFeedback(Threshold(1.0)),
    ErrorFeedback(Threshold(0.0)),
    PowerSGD(2),
    ErrorFeedback(ChunkedTopK(300)),
    ErrorFeedback(ChunkedTopK(100), decay=0.9),
    ErrorFeedback(Quantized(4, stochastic=True)),
    ErrorFeedback(PowerSGD(1)),
]
codecs = pytest.mark.parametrize("codec", EVERY, ids=repr)
worlds = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def test_every_codec_of_the_registry_is_among_those_that_are_tested():
    assert {type(getattr(codec, "codec", codec)) for codec in EVERY} == set(CODECS.values())


@pytest.mark.sweep(rest=20)
@worlds
@pytest.mark.parametrize(
    "codec",
    [c for c in EVERY if isinstance(c, ErrorFeedback) and c.decay == 1 and not getattr(c.codec, "momentum", 0)],
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
            step = own.begin(codec)
            own.write(step, [grad])
            if (verdict := step.finish()) is None:
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
    names = list(SHAPES)
    return [
        None
        if rng.random() < 0.5
        else (rng.integers(world_size), rng.integers(len(names)), rng.choice([np.nan, np.inf, -np.inf]))
        for _ in range(steps)
    ]


def trained(comm, codec_of, plan, *, skip=False, non_finite="skip"):
    """The means of the good steps, and the states in the end; `skip`: take the good steps only."""
    own, results, good = Rank(comm, non_finite=non_finite), [], 0
    for number, bad in enumerate(plan):
        if skip and bad is not None:
            continue
        step = own.begin(codec_of(number))
        if bad is None:
            own.write(step, gradients(own.rank, good))
            assert step.finish() is None
            results += own.means(step)
            good += 1
            continue
        rank, place, value = bad
        grads = gradients(own.rank, 1000 + number)
        if value is LEAVES:
            with pytest.raises(ZeroDivisionError if rank == own.rank else GradientError), step:  # noqa: PT012
                if rank == own.rank:
                    own.write(step, grads, without=[list(SHAPES)[place]])
                    1 / 0  # noqa: B018
                own.write(step, grads)
                step.finish()
            continue
        if rank == own.rank:
            grads[place].flat[grads[place].size // 2] = value
        own.write(step, grads)
        verdict = step.finish()
        assert verdict.rank == rank
        if non_finite == "raise":
            with pytest.raises(GradientError):
                own.engine.refuse(verdict)
        else:
            own.engine.refuse(verdict)
    states = own.engine.get_states()
    return results + [states[key].astype(F32) for key in sorted(states) if key != "steps"]


def check(world_size, codec_of, plan, cls=OracleCommunicator, **options):
    expected = on_ranks(world_size, lambda comm: trained(comm, codec_of, plan, skip=True, **options), cls=cls)
    found = on_ranks(world_size, lambda comm: trained(comm, codec_of, plan, **options), cls=cls)
    for a, b in zip(found, expected, strict=True):
        assert same_bits(a, b)


@pytest.mark.sweep(rest=50)
@worlds
@codecs
@pytest.mark.parametrize("seed", range(3))
def test_training_goes_on_as_if_there_had_been_no_bad_step(codec, world_size, seed):
    if isinstance(codec, Fp16 | BFloat16):  # infinity becomes the largest value: not a bad gradient
        plan = [bad and (*bad[:2], np.nan) for bad in plan_of(seed, world_size)]
    else:
        plan = plan_of(seed, world_size)
    cls = SplittingCommunicator if seed == 2 else OracleCommunicator
    check(world_size, lambda _: codec, plan, cls, non_finite="raise" if seed == 1 else "skip")


@pytest.mark.sweep(rest=20)
@worlds
@codecs
def test_a_step_that_an_exception_ends_leaves_no_trace(codec, world_size):
    check(world_size, lambda _: codec, [bad and (*bad[:2], LEAVES) for bad in plan_of(7, world_size)])


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
    plan = [bad and (*bad[:2], np.nan) for bad in plan_of(8, world_size, steps=20)]
    check(world_size, lambda number: kinds[number % len(kinds)], plan)


@worlds
@pytest.mark.parametrize(
    "codec",
    [Fp16("dynamic"), TopK(0.1, warm_up_steps=2), ErrorFeedback(TopK(0.2)), ErrorFeedback(BFloat16())],
    ids=repr,
)
def test_sums_by_hand_leave_no_trace_of_a_bad_step(codec, world_size):
    plan = [bad and (*bad[:2], np.nan) for bad in plan_of(9, world_size)]
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


@worlds
def test_a_bad_partial_update_is_named_and_leaves_the_ranks_equal(world_size):
    def body(comm):
        own, before = Rank(comm, non_finite="skip"), []
        for bad in (True, False, True):
            before.append(own.engine.get_states())
            step = own.begin_partial(100)
            grads = gradients(own.rank)
            if bad and own.rank == world_size - 1:
                grads[1][0] = np.nan
            own.write(step, grads)
            verdict = step.finish()
            assert (verdict is not None) == bad
            if verdict is None:
                own.engine.partial.average(step.layout)
            else:
                assert (verdict.rank, "the gradient of conv.b" in verdict.text) == (world_size - 1, True)
                own.engine.refuse(verdict)
                after = own.engine.get_states()
                assert after.keys() == before[-1].keys()
                assert after["steps"][2:].tolist() == before[-1]["steps"][2:].tolist()
        return own.engine.partial.pending

    assert on_ranks(world_size, body) == [True] * world_size


def finish_on_a_gpu(job: LocalJob, codec: Codec) -> None:
    comm = nccl_ranks.connect(job)
    own = Rank(comm)
    for param in own.params:
        param.array = comm.xp.asarray(param.array)
    step = own.begin(codec)
    own.write(step, [comm.xp.asarray(grad) for grad in gradients(own.rank)])
    assert step.finish() is None
    comm.close()


@pytest.mark.parametrize("codec", [Fp32(), Fp16()], ids=repr)
def test_a_verdict_is_left_on_the_device_only_if_the_step_asks_for_it(codec):
    build.build()
    run_ranks_ok(finish_on_a_gpu, 2, codec)
