"""The engine driven from plain NumPy arrays: no autograd, no optimizer, ranks as threads."""

import gc
import weakref
from dataclasses import dataclass
from functools import reduce
from itertools import product

import numpy as np
import pytest

from distopt.codecs import BFloat16, ChunkedTopK, ErrorFeedback, Fp16, Fp32, PowerSGD, Quantized, Threshold, TopK
from distopt.engine.bucket import ALIGNMENT_BYTES
from distopt.engine.engine import Engine
from distopt.engine.layout import FIRST_BUCKET_BYTES, plan
from distopt.errors import MismatchError, StateError, UsageError
from tests.conformance.codec_steps import CODECS as ON_TRANSPORTS
from tests.conformance.codec_steps import algorithm
from tests.conformance.thread_ranks import OracleCommunicator, SplittingCommunicator, on_ranks, same_bits, with_ranks

F32 = np.float32
SHAPES = {"conv.W": (7, 3, 3, 3), "conv.b": (7,), "fc.W": (61, 13), "fc.b": (13,), "scale": (1,)}
SMALL = 100  # elements; makes several buckets

DENSE = [Fp32(), TopK(1.0), ErrorFeedback(TopK(1.0)), Threshold(0.0)]
CODECS = [*DENSE, Fp16(), Fp16("dynamic"), ErrorFeedback(Fp16()), ErrorFeedback(Fp16("dynamic"))]
CODECS += [BFloat16(), ErrorFeedback(BFloat16("dynamic")), PowerSGD(2), ErrorFeedback(PowerSGD(1))]
CODECS += [TopK(0.1), TopK(0.1, warm_up_steps=2), ErrorFeedback(TopK(0.05)), ErrorFeedback(TopK(1.0, momentum=0.5))]
CODECS += [ErrorFeedback(TopK(0.05, momentum=0.5, warm_up_steps=1))]
CODECS += [ErrorFeedback(TopK(0.05, momentum=0.5, clip_norm=3.0, warm_up_steps=2))]
CODECS += [ErrorFeedback(TopK(0.05, momentum=0.5, factor_masking=False))]
CODECS += [Threshold(0.5), ErrorFeedback(Threshold(1.0)), ErrorFeedback(Threshold(0.0))]
CODECS += [ErrorFeedback(ChunkedTopK(300)), ErrorFeedback(ChunkedTopK(100), decay=0.9)]
CODECS += [ErrorFeedback(ChunkedTopK(500, bits=4), decay=0.9), ErrorFeedback(Quantized(4, stochastic=True))]
CODECS += [codec for codec in ON_TRANSPORTS if algorithm(codec) not in map(algorithm, CODECS)]
WORLDS = list(product([1, 2, 3], [OracleCommunicator, SplittingCommunicator]))

worlds = pytest.mark.parametrize(("world_size", "cls"), WORLDS, ids=lambda v: getattr(v, "name", v) if v else v)
codecs = pytest.mark.parametrize("codec", CODECS, ids=repr)


@dataclass(eq=False)
class Parameter:
    name: str | None
    array: np.ndarray


class Slots:
    """What an update rule keeps, which may differ between ranks."""

    def __init__(self, **states):
        self.states = states

    def get_states(self):
        return {name: array.copy() for name, array in self.states.items()}

    def set_states(self, states):
        assert states.keys() == self.states.keys()
        self.states = dict(states)

    def constants(self):
        return {}


class Rank:
    """One rank's parameters, and its engine."""

    def __init__(self, comm, *, slots=None, non_finite="raise", bucket_elements=SMALL, spread=0, check_every=0):
        self.comm = comm
        self.rank = comm.topology.rank
        self.params = [Parameter(name, np.full(shape, 1 + spread * self.rank, F32)) for name, shape in SHAPES.items()]
        self.engine = Engine(comm, non_finite, check_every)
        self.slots = slots or Slots()
        self.version = 0
        self.bucket_elements = bucket_elements

    def begin(self, codec, clip=None):
        order = lambda: self.params  # noqa: E731
        return self.engine.begin(codec, self.bucket_elements, order, self.slots, version=self.version, clip=clip)

    def begin_partial(self, params=None):
        order = lambda: self.params if params is None else params  # noqa: E731
        return self.engine.begin_partial(self.bucket_elements, order, self.slots, version=self.version)

    def places(self, step):
        return {id(p): g for b in step.layout.buckets for p, g in zip(b.params, b.grads, strict=True)}

    def write(self, step, grads, order=None, without=()):
        """Every gradient to its place, and final, in any order."""
        places = self.places(step)
        for i in range(len(self.params)) if order is None else order:
            if self.params[i].name not in without:
                places[id(self.params[i])][...] = grads[i]
                step.final(self.params[i])

    def apply(self, gradients, rate=1):
        for param, grad in zip(self.params, gradients, strict=True):
            param.array -= F32(rate) * grad

    @property
    def arrays(self):
        return [param.array.copy() for param in self.params]

    def means(self, step):
        places = self.places(step)
        return [places[id(p)].copy() for p in self.params]

    def take(self, codec, grads, **options):
        """A step, and its verdict; without a codec one of partial updates, in which gradients stay as they are."""
        with self.begin_partial() if codec is None else self.begin(codec) as step:
            self.write(step, grads, **options)
            verdict = step.finish(unused="zero" if options.get("without") else "raise")
            if codec is None and verdict is None:
                self.engine.partial.average(step.layout)
        return step, verdict

    def run(self, codec, grads, **options):
        """The means of a good step."""
        step, verdict = self.take(codec, grads, **options)
        assert verdict is None
        return self.means(step)


def gradients(rank, step=0):
    """Other values for each rank, step, parameter and element."""
    rng = np.random.default_rng([rank, step])
    return [(rng.standard_normal(shape) * (1 + rank)).astype(F32) for shape in SHAPES.values()]


def mean_of(world_size, step=0):
    ranks = [gradients(rank, step) for rank in range(world_size)]
    return [reduce(np.add, parts) / F32(world_size) for parts in zip(*ranks, strict=True)]


@pytest.mark.sweep(rest=30)
@worlds
@codecs
def test_every_codec_gives_the_same_means_on_all_ranks_whatever_order_gradients_come_in(codec, world_size, cls):
    def body(comm, shuffled):
        own, results = Rank(comm), []
        for number in range(3):
            rng = np.random.default_rng([number, own.rank] if shuffled else 0)
            order = rng.permutation(len(SHAPES)) if shuffled else None
            results.append(own.run(codec, gradients(own.rank, number), order=order))
        return results

    in_order = on_ranks(world_size, lambda comm: body(comm, False), cls=cls)
    shuffled = on_ranks(world_size, lambda comm: body(comm, True), cls=cls)
    for results in in_order + shuffled:
        for step, expected in zip(results, in_order[0], strict=True):
            assert same_bits(step, expected)
    if codec in DENSE:
        assert all(same_bits(in_order[0][number], mean_of(world_size, number)) for number in range(3))


@with_ranks(2)
def test_buckets_start_in_the_order_of_their_indices(comm):
    own, started = Rank(comm), []

    class Tells(Fp32):
        def reduce(self, state):
            started.append(state.label)
            return super().reduce(state)

    step = own.begin(Tells())
    assert len(step.layout.buckets) > 2
    labels = [bucket.label for bucket in step.layout.buckets]
    own.write(step, gradients(own.rank), order=reversed(range(1, len(SHAPES))))
    assert not started, "the first bucket is not full"
    own.write(step, gradients(own.rank), order=[0])
    assert started == labels, "before the end of the pass"
    assert step.finish() is None


@worlds
def test_a_parameter_without_gradient_takes_part_with_zeros(world_size, cls):
    def body(comm):
        own = Rank(comm)
        own.run(Fp32(), gradients(own.rank, 0))
        unused = {"conv.b", "scale"} | ({"fc.W"} if own.rank == 0 else set())
        return own.run(Fp32(), gradients(own.rank, 1), without=unused)

    everyone = [gradients(rank, 1) for rank in range(world_size)]
    for grads in everyone:
        grads[1][...] = grads[4][...] = 0
    everyone[0][2][...] = 0
    for means in on_ranks(world_size, body, cls=cls):
        for mean, parts in zip(means, zip(*everyone, strict=True), strict=True):
            np.testing.assert_allclose(mean, np.mean(parts, axis=0), rtol=1e-5, atol=1e-6)


@with_ranks(1)
def test_missing_foreign_and_repeated_gradients_are_errors(comm):
    own = Rank(comm)
    step = own.begin(Fp32())
    own.write(step, gradients(own.rank), without={"fc.b"})
    with pytest.raises(UsageError, match="did not reach 1 of"):
        step.finish()
    with pytest.raises(UsageError, match=r"conv\.b was declared final twice"):
        step.final(own.params[1])
    with pytest.raises(UsageError, match="parameter other was not part"):
        step.final(Parameter("other", np.zeros(3, F32)))
    with pytest.raises(UsageError, match=r"\(clip\) is 0; it must be a number in"):
        own.begin(Fp32(), clip=0)


@with_ranks(2)
def test_clipping_limits_every_element_before_it_is_sent(comm):
    own = Rank(comm)
    step = own.begin(Fp32(), clip=0.25)
    own.write(step, gradients(own.rank))
    step.finish()
    clipped = [[np.clip(g, -0.25, 0.25) for g in gradients(rank)] for rank in range(2)]
    assert same_bits(own.means(step), [(a + b) / F32(2) for a, b in zip(*clipped, strict=True)])


# -- partial updates --------------------------------------------------------------------------------------------------
def test_partial_updates_average_one_partition_after_the_other():
    def body(comm):
        slots = Slots(momentum=np.full(5, comm.topology.rank, F32), step=np.array([7]))
        own, averaged = Rank(comm, slots=slots), []
        for number in range(4):
            step = own.begin_partial()
            own.write(step, gradients(own.rank, number))
            assert step.finish() is None
            assert same_bits(own.means(step), gradients(own.rank, number)), "they stay as they are"
            own.apply(own.means(step))
            own.engine.partial.average(step.layout)
            partition = step.layout.buckets[number % len(step.layout.buckets)]
            averaged.append((own.arrays, {p.name for p in partition.params}))
        own.engine.partial.synchronize()
        synchronized = own.arrays
        own.run(Fp32(), gradients(own.rank))
        np.testing.assert_array_equal(slots.states["momentum"], np.full(5, 1, F32))
        assert slots.states["step"] == 7
        return averaged, synchronized

    ranks = on_ranks(3, body)
    for steps in zip(*(averaged for averaged, _ in ranks), strict=True):
        for name, *arrays in zip(SHAPES, *(arrays for arrays, _ in steps), strict=True):
            assert same_bits(arrays, arrays[:1] * 3) == (name in steps[0][1])
    for averaged, synchronized in ranks:
        assert same_bits(synchronized, ranks[0][1])
        assert not same_bits(averaged[-1][0], synchronized)
    for *drifted, after in zip(*(averaged[-1][0] for averaged, _ in ranks), ranks[0][1], strict=True):
        np.testing.assert_allclose(np.mean(drifted, axis=0), after, rtol=1e-5, atol=1e-6)


@with_ranks(2)
def test_ranks_that_drifted_are_made_equal_whatever_losses_came_before(comm):
    own = Rank(comm)
    step = own.engine.begin(Fp32(), 10, lambda: own.params[:2], own.slots)
    for param in own.params[:2]:
        step.final(param)
    step.finish()
    own.begin_partial()
    for param in own.params:  # and an exception comes before they are averaged
        param.array += own.rank
    own.engine.partial.synchronize()
    assert all(np.all(array == 1.5) for array in own.arrays)


# -- other parameters -------------------------------------------------------------------------------------------------
@codecs
def test_other_parameters_have_new_buckets(codec):
    """And the costs of the old ones still count."""

    def body(comm):
        own, results, layouts = Rank(comm), [], []
        everyone = own.params
        for number, some in enumerate([everyone, everyone, everyone[1:], everyone[1:], everyone]):
            own.params, own.version = some, number  # a version may change without effect
            step, verdict = own.take(codec, gradients(own.rank, number)[-len(some) :])
            assert verdict is None
            results.append(own.means(step))
            layouts.append(step.layout)
        assert [layouts.index(layout) for layout in layouts] == [0, 0, 2, 2, 4]
        total = own.engine.stats().total
        assert total.reductions == sum(len(layout.buckets) for layout in layouts)
        assert own.engine.stats().total == total, "asking adds nothing"
        return results

    ranks = on_ranks(3, body)
    for number, results in enumerate(ranks[0]):
        assert all(same_bits(rank[number], results) for rank in ranks)
        if codec in DENSE:
            assert same_bits(results, mean_of(3, number)[-len(results) :])


def test_a_parameter_that_drifted_is_averaged_before_it_is_left_out():
    def body(comm):
        own = Rank(comm)
        for params in (own.params, own.params[1:]):
            step = own.begin_partial(params)
            for param in params:
                param.array += own.rank
                step.final(param)
            assert step.finish() is None
            own.engine.partial.average(step.layout)
            own.version += 1
        own.engine.partial.synchronize()
        assert np.all(own.params[0].array == 1.5)
        return own.arrays

    assert same_bits(*on_ranks(2, body))


# -- uneven data ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("codec", [Fp32(), Fp16(), TopK(0.3), PowerSGD(rank=1)], ids=repr)
@pytest.mark.parametrize("batches", [(3, 5), (4, 1, 2)], ids=str)
def test_ranks_with_other_numbers_of_batches_end_with_the_same_parameters(codec, batches):
    def body(comm):
        own = Rank(comm)

        def update(layout):
            for bucket in layout.buckets:
                for param, grad in zip(bucket.params, bucket.grads, strict=True):
                    param.array -= F32(0.1) * grad

        with own.engine.join(own.slots, update):
            for number in range(batches[own.rank]):
                own.apply(own.run(codec, gradients(own.rank, number)), 0.1)
        assert own.engine.statistics.steps == max(batches)
        return own.arrays

    ranks = on_ranks(len(batches), body)
    assert all(same_bits(rank, ranks[0]) for rank in ranks)
    if codec == Fp32():
        expected = [np.ones(shape, F32) for shape in SHAPES.values()]
        for number in range(max(batches)):
            with_data = [gradients(rank, number) for rank, count in enumerate(batches) if number < count]
            for param, parts in zip(expected, zip(*with_data, strict=True), strict=True):
                param -= F32(0.1) * np.mean(parts, axis=0)
        for param, other in zip(expected, ranks[0], strict=True):
            np.testing.assert_allclose(param, other, rtol=1e-5, atol=1e-5)


# -- states -----------------------------------------------------------------------------------------------------------
CORRECTED = [codec for codec in CODECS if isinstance(codec, ErrorFeedback)]


@pytest.mark.parametrize("codec", CORRECTED, ids=repr)
@with_ranks(2)
def test_states_are_saved_per_parameter_and_go_on_to_the_bit(comm, codec):
    whole = Rank(comm)
    for number in range(2):
        whole.run(codec, gradients(whole.rank, number))
    states = whole.engine.get_states()
    residuals = {key: array for key, array in states.items() if "/residual/" in key}
    assert {key.split("/", 2)[2]: array.shape for key, array in residuals.items()} == SHAPES
    expected = whole.run(codec, gradients(whole.rank, 2))
    fresh = Rank(comm)
    for target in (fresh, whole):  # one without buckets, and one with
        target.engine.set_states(states)
        assert target.engine.get_states().keys() == states.keys()
        assert same_bits(target.run(codec, gradients(target.rank, 2)), expected)
        assert target.engine.statistics.steps == 3
    key = next(iter(residuals))
    before = whole.engine.get_states()
    for bad in (
        {**states, "x/y": np.zeros(1)},
        {**states, "steps": np.full(5, np.nan)},
        {**states, f"{codec.kind}/residual/other": np.zeros(3, F32)},
        {k: a for k, a in states.items() if k != key},
        {**states, key: states[key].reshape(-1)[1:]},
        {},
    ):
        with pytest.raises(StateError):
            whole.engine.set_states(bad)
        after = whole.engine.get_states()
        assert all(np.array_equal(after[k], before[k]) for k in before), "nothing was changed"


@pytest.mark.parametrize("codec", [*CORRECTED, PowerSGD(1), Fp16("dynamic"), TopK(0.1, warm_up_steps=2)], ids=repr)
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(("first", "second"), [(10**6, SMALL), (SMALL, 10**6)])
@with_ranks(2)
def test_states_do_not_depend_on_which_parameters_share_a_bucket(comm, codec, loaded, first, second):
    """They differ between transports: where bytes move during the backward pass, the first bucket is small."""
    own = Rank(comm, bucket_elements=first)
    own.run(codec, gradients(own.rank))
    before, layout = own.engine.get_states(), own.engine.layout
    if loaded:
        own = Rank(comm)
        own.engine.set_states(before)
    own.bucket_elements = second
    with own.begin(codec) as step:
        now = own.engine.get_states()
        assert all(np.array_equal(now[key], array) for key, array in before.items() if key != "steps")
        own.write(step, gradients(own.rank, 1))
        assert step.finish() is None
    assert now.keys() == own.engine.get_states().keys() == before.keys()
    assert len(before) > 1
    assert len(step.layout.buckets) != len(layout.buckets)


@with_ranks(3)
def test_partial_updates_are_averaged_in_the_order_that_loaded_states_name(comm):
    """Before any step has told the order of gradients."""
    own = Rank(comm)
    order = own.params[::-1]
    step = own.begin_partial(order)
    own.write(step, gradients(own.rank))
    assert step.finish() is None
    for param in own.params:
        param.array *= own.rank + 0.1
    states = own.engine.get_states()
    fresh = Rank(comm)
    fresh.engine.set_states(states)
    with pytest.raises(UsageError, match=r"scale of the loaded .* not known yet; call DistOpt.attach"):
        fresh.engine.partial.synchronize()
    fresh.engine.agreement.attach(fresh.params)
    for param, saved in zip(fresh.params, own.params, strict=True):
        param.array[...] = saved.array
    for rank in (fresh, own):
        rank.engine.partial.synchronize()
    assert same_bits(fresh.arrays, own.arrays)
    assert fresh.engine.partial.layout.names == [p.name for p in order]
    for bad in ({k: a for k, a in states.items() if k != "partitions"}, {**states, "partitions": np.zeros(2)}):
        with pytest.raises(StateError, match="partitions is missing"):
            fresh.engine.check_states(bad)


@pytest.mark.parametrize("first", [slice(0, None), slice(2, None)], ids=["then some", "then all"])
def test_a_run_that_resumes_where_other_parameters_begin_to_train_goes_on_as_if_undisturbed(first):
    """A residual per kind of codec: of the next step, of a step before, and of none in the run that resumes."""
    codecs = [ErrorFeedback(TopK(0.1)), ErrorFeedback(Threshold(1.0)), Fp32()]
    then = slice(2 - first.start, None)

    def run(own, some, codec, number):
        own.params, own.version = own.everyone[some], own.version + 1
        return own.run(codec, gradients(own.rank, number)[some])

    def body(comm):
        whole, late, later = Rank(comm), Rank(comm), Rank(comm)
        for own in (whole, late, later):
            own.everyone = own.params
            own.engine.agreement.attach(own.params)
        for number, codec in enumerate(codecs):
            run(whole, first, codec, number)
        late.engine.set_states(whole.engine.get_states())
        later.engine.set_states(whole.engine.get_states())
        for own in (whole, later):
            run(own, first, Fp32(), 3)
        for number, codec in enumerate(codecs, 4):
            expected = run(whole, then, codec, number)
            for own in (late, later):
                assert same_bits(run(own, then, codec, number), expected)
                assert own.engine.get_states().keys() == whole.engine.get_states().keys()

    on_ranks(2, body)


@with_ranks(1)
def test_states_of_another_model_are_refused_at_every_step_though_those_of_other_kinds_fit(comm):
    own, fresh = Rank(comm), Rank(comm)
    for codec in (ErrorFeedback(TopK(0.1)), ErrorFeedback(Threshold(1.0))):
        own.run(codec, gradients(own.rank))
    states = own.engine.get_states()
    del states["ErrorFeedback(TopK)/residual/fc.W"]
    fresh.engine.agreement.attach(fresh.params)
    fresh.params = fresh.params[1:]
    foreign = {"ErrorFeedback(TopK)/residual/other": np.zeros(3, F32)}
    new = Rank(comm)
    for rank, given, text in ((fresh, states, r"lack that of fc\.W"), (new, foreign, "no parameter other")):
        rank.engine.set_states(rank.engine.get_states() | given)
        for _ in range(2):
            with pytest.raises(StateError, match=text):
                rank.begin(ErrorFeedback(TopK(0.1)))
        assert given.keys() <= rank.engine.get_states().keys()


@with_ranks(2)
def test_parameters_without_names_have_states_too(comm):
    own = Rank(comm)
    for param in own.params[1:]:
        param.name = None
    own.run(ErrorFeedback(TopK(0.1)), gradients(own.rank))
    names = {key.split("/", 2)[2] for key in own.engine.get_states() if "/residual/" in key}
    assert names == {"conv.W", "parameter 1", "parameter 2", "parameter 3", "parameter 4"}


def test_ranks_that_start_from_other_parameters_are_made_equal(caplog):
    def body(comm):
        for attach in (True, False):
            own = Rank(comm, spread=1)
            if attach:
                own.engine.agreement.attach(own.params)
            own.begin(Fp32())
            assert all((array == 1).all() for array in own.arrays)

    on_ranks(3, body)
    (record,) = caplog.records
    assert "parameters of ranks [1, 2] differed from those of rank 0" in record.getMessage()


@pytest.mark.parametrize("limit", [1, 1 << 20])
def test_only_parameters_that_differ_are_sent_before_the_first_step(monkeypatch, limit):
    monkeypatch.setattr("distopt.engine.agreement._UNDER_WAY_BYTES", limit)

    class Records(OracleCommunicator):
        def broadcast(self, array, root=0, *, label=""):
            self.sent.append(label)
            return super().broadcast(array, root, label=label)

    def body(comm):
        comm.sent, own = [], Rank(comm)
        for param in (own.params[1], own.params[3]):
            param.array += 5 * (own.rank == 2)
        own.engine.agreement.attach(own.params)
        assert all((array == 1).all() for array in own.arrays)
        assert comm.sent == ["conv.b", "fc.b"]

    on_ranks(3, body, cls=Records)


# -- layouts ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("odd", "where"),
    [
        ({0}, r"rank 0 \(host\d?\) than on rank 1 \("),
        ({1}, r"rank 1 \(host\d?\) than on rank 0 \("),
        ({1, 3}, r"rank 1 \(host\d?\), 3 \(host\d?\) than on rank 0 \("),
        ({2, 3, 4}, r"rank 0 \(host\d?\), 1 \(host\d?\) than on rank 2 \("),
    ],
)
@with_ranks(5)
def test_the_ranks_with_other_parameters_are_those_in_the_minority(comm, odd, where):
    own = Rank(comm, check_every=3)
    for number in range(3):
        own.run(Fp32(), gradients(own.rank, number))
        if own.rank in odd and number == 1:
            own.params[2].array[-1] *= -1
            own.params[4].array += 1
    text = r"before step 3, parameter fc.W \(and 1 more\) has other values on "
    with pytest.raises(MismatchError, match=text + where):
        own.begin(Fp32())


@with_ranks(2)
def test_gradients_are_aligned_and_padding_stays_zero(comm):
    own = Rank(comm, bucket_elements=10**6)
    for codec in CODECS:
        for number in range(2):
            step, _ = own.take(codec, gradients(own.rank, number))
            (bucket,) = step.layout.buckets
            inside = np.zeros(bucket.flat.size, bool)
            for grad in bucket.grads:
                offset = grad.ctypes.data - bucket.flat.ctypes.data
                assert offset % ALIGNMENT_BYTES == 0
                inside[offset // 4 :][: grad.size] = True
            assert not bucket.flat[~inside].any(), codec
            assert inside.sum() == sum(grad.size for grad in bucket.grads) < bucket.flat.size


@pytest.mark.parametrize("count", [1, 5, 99])
@with_ranks(1)
def test_k_is_a_share_of_the_parameters_not_of_the_padding(comm, count):
    own = Rank(comm, bucket_elements=10**6)
    means = own.run(TopK(count / sum(array.size for array in own.arrays)), gradients(own.rank))
    assert sum(map(np.count_nonzero, means)) == count


def test_plan():
    params = [Parameter(str(n), np.empty(n, F32)) for n in (5, 50, 3, 400, 3, 3)]

    def sizes(*limits):
        return [[param.array.size for param in group] for group in plan(params, *limits)]

    assert sizes(54) == [[5, 50], [400], [3, 3, 3]]
    assert sizes(1000) == [[5, 50, 3, 400, 3, 3]]
    assert sizes(1000, 54) == [[5, 50], [3, 400, 3, 3]], "a small first bucket"
    assert sizes(54, 10**6) == sizes(54), "never larger than the others"
    assert sizes(0) == [[5], [50], [3], [400], [3], [3]]
    with pytest.raises(UsageError, match="in elements is -1; it must be an integer of at least 0"):
        sizes(-1)


def test_the_first_bucket_is_small_where_bytes_move_during_backward(monkeypatch):
    def body(comm):
        quarter = FIRST_BUCKET_BYTES // 16
        own = Rank(comm, bucket_elements=10**7)
        own.params = [Parameter(f"p{i}", np.zeros(quarter, F32)) for i in range(12)]
        own.engine.agreement.attach(own.params)
        dense = own.begin(Fp32()).layout
        partial = own.begin_partial().layout
        return [len(bucket.params) for bucket in dense.buckets], len(partial.buckets)

    assert on_ranks(2, body) == [([12], 1)] * 2
    monkeypatch.setattr(OracleCommunicator, "overlaps", True)
    assert on_ranks(2, body) == [([5, 7], 1)] * 2


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("partial", [False, True])
def test_buckets_of_other_sizes_take_the_place_of_those_before(partial):
    """And their memory, so that a size which changes all the time costs no more of it than the two largest layouts."""

    class Counts(OracleCommunicator):
        def __init__(self, *args):
            super().__init__(*args)
            self.bytes = []

        def _empty(self, count, dtype, xp):
            self.bytes.append(count * np.dtype(dtype).itemsize)
            return super()._empty(count, dtype, xp)

    def body(comm):
        own, layouts, held = Rank(comm), [], []
        for number in range(160):
            own.bucket_elements = 10 + 97 * number % 1009
            own.run(None if partial else CODECS[number % len(CODECS)], gradients(own.rank, number))
            layouts.append(weakref.ref((own.engine.partial if partial else own.engine).layout))
            held.append(sum(comm.bytes))
        gc.collect()
        assert [layout() is None for layout in layouts] == [True] * 159 + [False]
        assert held[-1] <= 2 * 6 * 4 * sum(-(-int(np.prod(shape)) // 64) * 64 for shape in SHAPES.values())
        assert held[-1] == held[80], "no more from some size on"

    on_ranks(2, body, cls=Counts)


# -- exceptions -------------------------------------------------------------------------------------------------------
class TroubleError(Exception):
    pass


def leave(own, codec, number, after):
    """A step that an exception ends after so many gradients; all of them: after the end of the pass."""
    with own.begin_partial() if codec is None else own.begin(codec) as step:
        grads = gradients(own.rank, number)
        own.write(step, grads, order=range(after))
        raise TroubleError(f"rank {own.rank} gives up")


@pytest.mark.parametrize("codec", [*CODECS, None], ids=repr)
def test_a_step_that_exceptions_end_at_different_places_on_all_ranks_leaves_them_in_step(codec):
    def body(comm):
        own = Rank(comm)
        with pytest.raises(TroubleError):
            leave(own, codec, 0, 2 * own.rank)
        return own.run(Fp32(), gradients(own.rank, 1))

    for means in on_ranks(3, body):
        assert same_bits(means, mean_of(3, 1))


@pytest.mark.parametrize("how", ["in the middle of a call", "nobody looks for NaN", "partial, nobody looks"])
def test_where_the_ranks_cannot_go_on_together_the_others_get_an_error(how):
    class Interrupted(Fp32):
        def reduce(self, state):
            if state.topology.rank == 1:
                raise TroubleError
            return super().reduce(state)

    def body(comm):
        own = Rank(comm, non_finite="ignore" if "looks" in how else "raise")
        codec = Interrupted() if "middle" in how else None if "partial" in how else Fp32()
        if own.rank == 1:
            with pytest.raises(TroubleError):
                leave(own, codec, 0, 2)
            return
        with pytest.raises(MismatchError):
            own.run(codec, gradients(own.rank))

    on_ranks(2, body)


CHANGES = [
    (ErrorFeedback(TopK(0.01, warm_up_steps=2)), ErrorFeedback(TopK(0.01))),
    (TopK(0.01, warm_up_steps=2), TopK(0.01)),
    (ErrorFeedback(TopK(0.05, momentum=0.5)), ErrorFeedback(TopK(0.05))),
    (ErrorFeedback(Threshold(0.5, momentum=0.5)), ErrorFeedback(Threshold(1.0, clip_norm=3.0))),
    (Fp16("dynamic"), Fp16(8.0)),
    (ErrorFeedback(BFloat16("dynamic")), ErrorFeedback(BFloat16())),
    (ErrorFeedback(TopK(0.05)), ErrorFeedback(Threshold(0.5))),
    (ErrorFeedback(PowerSGD(1)), ErrorFeedback(PowerSGD(2))),
    (ErrorFeedback(Fp16("dynamic")), Fp32()),
]


@pytest.mark.slow(kept=6, rest=12)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("fresh", [True, False], ids=["new", "running"])
@pytest.mark.parametrize(
    ("first", "second"), [*CHANGES, *((b, a) for a, b in CHANGES)], ids=lambda v: repr(v).replace(" ", "")
)
def test_options_that_may_change_from_step_to_step_may_change_across_a_save(first, second, fresh, world_size):
    kinds = [first, first, first, second, second, first, second]

    def body(comm, saved):
        own, means = Rank(comm), []
        for number, codec in enumerate(kinds):
            if number == saved:
                states = own.engine.get_states()
                if fresh:
                    own = Rank(comm)
                else:
                    own.run(first, gradients(own.rank, 99))
                own.engine.set_states(states)
            means += own.run(codec, gradients(own.rank, number))
        states = own.engine.get_states()
        return means + [states[key].astype(F32) for key in sorted(states)]

    whole = on_ranks(world_size, lambda comm: body(comm, None))
    for saved in (1, 3, 4, 5):
        for rank, reference in zip(on_ranks(world_size, lambda comm: body(comm, saved)), whole, strict=True):  # noqa: B023
            assert same_bits(rank, reference)
