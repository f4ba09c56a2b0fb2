"""Programs of training steps: codecs that change, gradients of every kind, bad steps, saves; ranks are threads."""

import logging
import math
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import NamedTuple, TypeAlias

import numpy as np
import pytest
from hypothesis import strategies as st

from distopt.compress import CODECS, BFloat16, Codec, ErrorFeedback, Fp16, Fp32, PowerSGD, Threshold, TopK, create
from distopt.errors import GradientError, UsageError
from tests.conformance.test_engine import Parameter, Rank
from tests.conformance.thread_ranks import OracleCommunicator, SplittingCommunicator, on_ranks

Arrays: TypeAlias = dict[str, np.ndarray]
F32 = np.float32
SHAPES = {"wide": (6, 40), "table": (24, 8), "cube": (5, 3, 4), "vector": (33,), "one": (1,)}
BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Step(NamedTuple):
    codec: Codec | None  # what is sent; None: a partial update
    bucket: int  # size in elements, or of partitions
    gradients: tuple[str, ...]  # the kind of every parameter's, see `gradient`; none: the step is left out
    bad: tuple[int, str, str] | None = None  # rank, parameter, and key of `BAD`
    saves: bool = False  # whether the states are saved before it and loaded into a new engine
    seed: int = 0  # of the gradients


@dataclass(frozen=True)
class Program:
    ranks: int
    parts: bool  # whether ranks send each other parts of lists
    skips: bool  # bad steps are skipped; else their error is caught
    steps: tuple[Step, ...]


# -- programs ----------------------------------------------------------------------------------------------------------
# Values of every option of the codecs in the registry, by name.
_OPTIONS = {
    "scale": (1.0, 64.0, "dynamic"),
    "ratio": (None, 0.01, 0.1, 0.3, 1.0),
    "k": (None, 1, 3, 50),
    "bound": (0.0, 0.5, 1.5, 100.0),
    "rank": (1, 2, 3, 4),
    "warm_up_steps": (0, 0, 1, 2),
    "momentum": (0.0, 0.5, 0.9),
    "factor_masking": (True, False),
    "clip_norm": (None, 0.5, 20.0),
}
_OF_RESIDUALS = {"momentum", "factor_masking", "clip_norm"}
KINDS = ("normal", "zero", "constant", "rows", "low rank", "denormal", "tiny", "large")


def _all(name, fed):
    """The codecs of that name with the options that go together."""
    names = [field.name for field in fields(CODECS[name]) if fed or field.name not in _OF_RESIDUALS]
    for values in product(*(_OPTIONS[name] for name in names)):
        with suppress(UsageError):
            yield create(name, error_feedback=fed, **dict(zip(names, values, strict=True)))


_CODECS = [list(_all(name, fed)) for name, cls in CODECS.items() for fed in {False, cls.lossy}]
_kinds = st.tuples(*[st.sampled_from(KINDS)] * len(SHAPES))
_bad = st.none() | st.tuples(st.integers(0, 3), st.sampled_from(list(SHAPES)), st.sampled_from(list(BAD)))
_steps = st.builds(Step, st.integers(0, 9), st.sampled_from([2000, 0, 50, 300]), _kinds, _bad, st.booleans(),
                   st.integers(0, 99))  # fmt: skip
_programs = st.builds(Program, st.integers(1, 4), st.booleans(), st.booleans(),
                      st.lists(_steps, min_size=1, max_size=6))  # fmt: skip
_few = st.lists(st.sampled_from(_CODECS), min_size=1, max_size=2)


@st.composite
def _with_codecs(draw):
    """A program in which few codecs take turns; some differ only in their options."""
    codecs = [*(draw(st.sampled_from(alike)) for alike in draw(_few) * 2), None]
    program = draw(_programs)
    return replace(program, steps=tuple(s._replace(codec=codecs[s.codec % len(codecs)]) for s in program.steps))


PROGRAMS = _with_codecs()


def gradient(kind, name, number, rank):
    """float32, other numbers for every parameter, seed and rank."""
    shape, seed = SHAPES[name], [number, *name.encode()]
    rng, common = np.random.default_rng([rank, *seed]), np.random.default_rng(seed)
    normal = rng.standard_normal(shape)
    if kind == "zero":
        normal[...] = 0
    elif kind == "constant":
        normal[...] = 1 + rank
    elif kind == "rows":  # the same on all ranks, as of an embedding of the same words
        normal[common.permutation(shape[0])[1 + number % 2 :]] = 0
    elif kind == "low rank":
        normal = np.multiply.outer(common.standard_normal(shape[0]), normal[0])
    return (normal * {"denormal": 1e-41, "tiny": 1e-20, "large": 1e4}.get(kind, 1.0)).astype(F32)


# -- a run -------------------------------------------------------------------------------------------------------------
class OwnRank(Rank):
    def __init__(self, comm, program):
        super().__init__(comm, non_finite="skip" if program.skips else "raise")
        self.params = [Parameter(name, np.ones(shape, F32)) for name, shape in SHAPES.items()]
        self.engine.agreement.attach(self.params)


class Record(NamedTuple):
    """A rank's data after a step; arrays by parameter, states by the engine's names."""

    refused: bool
    buckets: list[list[str]]  # names of parameters
    gradients: Arrays
    means: Arrays
    params: Arrays
    states: Arrays


def _train(comm, program):
    """A record of every step, and of the end."""
    own, records = OwnRank(comm, program), []
    for step in program.steps:
        if step.saves:  # as a job that begins anew: it knows its parameters before it loads
            states, values = own.engine.get_states(), [param.array for param in own.params]
            own = OwnRank(comm, program)
            for param, value in zip(own.params, values, strict=True):
                param.array[...] = value
            own.engine.set_states(states)
        if not step.gradients:  # in `begin` partial updates come to their end, which stays if a step is refused
            if step.codec is not None and own.engine.partial.slots_pending:
                own.engine.partial.end(own.slots)
            records.append(_record(own, False, [], {}, {}))
            continue
        own.bucket_elements = step.bucket
        opened = own.begin_partial(step.bucket) if step.codec is None else own.begin(step.codec)
        kinds = zip(SHAPES, step.gradients, strict=True)
        grads = {name: gradient(kind, name, step.seed, own.rank) for name, kind in kinds}
        if step.bad and step.bad[0] % program.ranks == own.rank:
            grad = grads[step.bad[1]].reshape(-1)
            grad[step.seed % grad.size] = BAD[step.bad[2]]
        with opened:
            own.write(opened, list(grads.values()))
            verdict = opened.finish()
        means = dict(zip(SHAPES, own.means(opened), strict=True))
        if verdict is None:
            for param in own.params:
                with np.errstate(all="ignore"):  # 16-bit floats saturate far out
                    param.array -= means[param.name]
            if step.codec is None:
                own.engine.partial.average(opened.layout)
        else:
            with nullcontext() if program.skips else pytest.raises(GradientError):
                own.engine.refuse(verdict)
        buckets = [[param.name for param in bucket.params] for bucket in opened.layout.buckets]
        records.append(_record(own, verdict is not None, buckets, grads, means))
    own.engine.partial.synchronize()
    return [*records, _record(own, False, [], {}, {})]


def _record(own, refused, buckets, grads, means):
    params = {param.name: param.array.copy() for param in own.params}
    states = {name: array for name, array in own.engine.get_states().items() if name != "steps"}
    return Record(refused, buckets, grads, means, params, states)


def _runs_of(program):
    cls = SplittingCommunicator if program.parts else OracleCommunicator
    return on_ranks(program.ranks, lambda comm: _train(comm, program), cls=cls)


# -- what must hold ----------------------------------------------------------------------------------------------------
def run(program):
    """Check bits across ranks, across saves and bad steps, and every step against a slow oracle."""
    logging.getLogger("distopt").setLevel(logging.ERROR)  # every step that is skipped warns
    ranks = _runs_of(program)
    steps = [[records[number] for records in ranks] for number in range(len(program.steps) + 1)]
    before, kinds, equal = [{} for _ in ranks], set(), True
    for number, (step, records) in enumerate(zip(program.steps, steps, strict=False)):
        what, codec, refused = f"step {number}", step.codec, records[0].refused
        halves = isinstance(codec, BFloat16 | Fp16)  # which saturate
        assert {record.refused for record in records} == {refused}, f"{what} is refused on some ranks"
        assert not refused or step.bad or "large" in step.gradients, f"{what} is refused"
        assert refused or not step.bad or (halves and step.bad[2] != "nan"), f"{what} is not refused"
        if not refused:
            equal &= codec is not None
        if equal:
            _check_equal(records, what)
        if codec is not None and not refused:
            for record in records:
                _same(record.means, records[0].means, f"on rank 0, means of {what}")
            for bucket in records[0].buckets:
                _check_means(codec, bucket, records, before, codec.kind not in kinds, what)
            kinds.add(codec.kind)
        before = [record.states for record in records]
    _check_equal(steps[-1], "the end")
    if any(step.saves for step in program.steps) or any(record.refused for record in ranks[0]):
        plain = tuple(
            step._replace(saves=False, gradients=() if records[0].refused else step.gradients)
            for step, records in zip(program.steps, steps, strict=False)
        )
        for rank, others in enumerate(_runs_of(replace(program, steps=plain))):
            for number, (record, other) in enumerate(zip(ranks[rank], others, strict=True)):
                if _saturates(program.steps[number:][:1]) and any(before.refused for before in ranks[rank][:number]):
                    break  # at what a scale says that other buckets in a bad step may have changed
                what = f"of rank {rank} after step {number}, without saves and bad steps"
                _same(record.params, other.params, what)
                if not record.refused:  # else there may be other partitions
                    # A dynamic scale is a bucket's: other buckets in a bad step share it among other parameters.
                    common = {name for name in record.states.keys() & other.states.keys() if "/scale/" not in name}
                    _same(*({name: of.states[name] for name in common} for of in (record, other)), what)


def _saturates(steps):
    inner = [getattr(step.codec, "codec", step.codec) for step in steps if step.bad and step.bad[2] != "nan"]
    return any(getattr(codec, "scale", "") == "dynamic" for codec in inner)


def _check_equal(records, what):
    for rank, record in enumerate(records):
        _same(record.params, records[0].params, f"of rank {rank} after {what}, on rank 0")


def _same(arrays, others, what):
    for name, array in arrays.items():
        other = others[name]
        assert array.tobytes() == other.tobytes(), f"{name}, {array.flat[:3]}..., is {other.flat[:3]}... {what}"


def _check_means(codec, bucket, records, before, fresh, what):
    """One bucket of a step that is not refused; `fresh`: no such step of this kind of codec came before."""

    def flat(arrays, prefix=""):
        """The bucket's parameters; zeros where nothing is kept."""
        parts = [arrays.get(prefix + name, np.zeros(SHAPES[name])).reshape(-1) for name in bucket]
        return np.concatenate(parts).astype(float)

    inner, fed = (codec.codec, True) if isinstance(codec, ErrorFeedback) else (codec, False)
    if getattr(inner, "momentum", 0.0):
        return
    clip, residual, sums = getattr(inner, "clip_norm", None), f"{codec.kind}/residual/", []
    for record, old in zip(records, before, strict=True):
        sent = flat(record.gradients)
        if clip is not None:
            sent *= min(1.0, clip / math.sqrt(len(records)) / (np.linalg.norm(sent) or 1))
        sums.append((flat(old, residual).astype(F32) + sent.astype(F32)).astype(float) if fed else sent)
    mean, got, scale = np.mean(sums, axis=0), flat(records[0].means), np.max(np.abs(sums))
    digits = {Fp16: 10, BFloat16: 7}.get(type(inner), 20)
    bound = 2.0**-digits * scale + {Fp16: 2e-7, BFloat16: 1e-40}.get(type(inner), 1e-43)
    if fed:  # nothing is lost between what is applied and what is left
        left = np.mean([flat(record.states, residual) for record in records], axis=0)
        _close(got + left, mean, bound, f"{what}: mean and residual")
    if isinstance(inner, Fp32) or (digits < 20 and scale < 100):
        _close(got, mean, bound, what)
    if isinstance(inner, TopK | Threshold) and clip is None and not getattr(inner, "warm_up_steps", 0):
        _check_selection(inner, sums, got, what)
    if isinstance(inner, PowerSGD):
        ends = np.cumsum([math.prod(SHAPES[name]) for name in bucket])[:-1]
        for name, part, *parts in zip(bucket, np.split(got, ends), *(np.split(x, ends) for x in sums), strict=True):
            if len(SHAPES[name]) > 1:
                matrices = [x.reshape(SHAPES[name][0], -1) for x in (part, *parts)]
                _check_projection(inner.rank, fresh, matrices[0], matrices[1:], f"{what}: {name}")


def _close(array, expected, bound, what):
    error = np.max(np.abs(array - expected))
    assert error <= bound, f"{what}: an error of {error:.3g}, where {bound:.3g} is allowed"


def _check_selection(codec, sums, got, what):
    """The mean of what the ranks selected or, where that is fewer bytes, of everything."""
    mean = np.zeros_like(got)
    for x in sums:
        chosen = np.abs(x) >= F32(codec.bound) if isinstance(codec, Threshold) else np.zeros(x.size, bool)
        if isinstance(codec, TopK):
            count = codec.k or math.ceil(round((codec.ratio or 0) * x.size, 6))
            chosen[np.argsort(-np.abs(x), kind="stable")[:count]] = True
        mean += np.where(chosen, x, 0) / len(sums)
    bound = 1e-6 * np.max(np.abs(sums)) + 1e-44
    if np.max(np.abs(got - mean)) > bound:
        _close(got, np.mean(sums, axis=0), bound, f"{what}: neither the selected elements nor all")


def _check_projection(rank, fresh, got, sums, what):
    """The mean is projected onto the span of at most `rank` columns; all of it, if these can span it."""
    mean, largest = np.mean(sums, axis=0), max(map(np.linalg.norm, sums))
    if rank * sum(mean.shape) >= mean.size:
        _close(got, mean, 1e-6 * largest + 1e-44, f"{what} is sent densely")
        return
    # Where the ranks cancel in the mean, they leave their rounding; and denormal numbers have few digits.
    grain = 1e-3 + 1e-43 / (largest or 1)
    rest = abs(np.sum((mean - got) * got))
    assert rest <= grain * largest**2, f"{what} is no projection, by {rest / largest**2:.2g}"
    if fresh and np.linalg.matrix_rank(mean, 1e-6 * largest) <= rank:
        _close(got, mean, 10 * grain * largest, f"{what}, which has no more than rank {rank}")
