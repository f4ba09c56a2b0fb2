"""Programs of training steps: codecs that change, gradients of every kind, bad steps, saves; ranks are threads."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

from distopt.compress import CODECS, BFloat16, Codec, ErrorFeedback, Fp16, Fp32, PowerSGD, Threshold, TopK, create
from distopt.errors import GradientError, UsageError
from distopt.sync.engine import Engine
from tests.conformance.test_engine import Parameter, Rank
from tests.conformance.thread_ranks import OracleCommunicator, SplittingCommunicator, on_ranks

__all__ = ["BFloat16", "ErrorFeedback", "Fp16", "Fp32", "PowerSGD", "Program", "Step", "Threshold", "TopK", "run"]

F32 = np.float32
SHAPES = {"wide": (6, 40), "table": (24, 8), "cube": (5, 3, 4), "vector": (33,), "one": (1,)}
BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Step(NamedTuple):
    """One step.

    Attributes:
        codec: what is sent; None: a partial update.
        bucket: bucket size in elements, or of partitions.
        gradients: the kind of every parameter's gradient, see `gradient`.
        bad: None, or rank, place of the parameter and a key of `BAD`.
        saves: whether the states are saved before it and loaded into a new engine.
        seed: of the gradients.
    """

    codec: Codec | None
    bucket: int
    gradients: tuple[str, ...]
    bad: tuple[int, int, str] | None = None
    saves: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Program:
    ranks: int
    parts: bool  # whether ranks send each other parts of lists
    skips: bool  # bad steps are skipped; else their error is caught
    steps: tuple[Step, ...]


# -- programs ----------------------------------------------------------------------------------------------------------
# Values of every option of the codecs in the registry, by name.
_OPTIONS: dict[str, tuple[Any, ...]] = {
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


@st.composite
def _any_options(draw: Any, name: str, fed: bool) -> Codec | None:
    """A codec, or None where the options that were drawn do not go together."""
    names = [field.name for field in fields(CODECS[name]) if fed or field.name not in _OF_RESIDUALS]
    try:
        return create(name, error_feedback=fed, **{name: draw(st.sampled_from(_OPTIONS[name])) for name in names})
    except UsageError:
        return None


# By class, and whether with error feedback.
_CODECS = {
    (cls, fed): _any_options(name, fed).filter(bool) for name, cls in CODECS.items() for fed in {False, cls.lossy}
}
_kinds = st.tuples(*[st.sampled_from(KINDS)] * len(SHAPES))
_bad = st.none() | st.tuples(st.integers(0, 3), st.integers(0, len(SHAPES) - 1), st.sampled_from(list(BAD)))
_steps = st.builds(Step, st.none() | st.one_of(_CODECS.values()), st.sampled_from([2000, 0, 50, 300]), _kinds, _bad,
                   st.booleans(), st.integers(0, 99))  # fmt: skip
_changes = st.sampled_from(["other", "same", "options"])


def _parts(codec: Codec) -> tuple[Codec, bool]:
    """The codec itself, and whether it has error feedback."""
    return (codec.codec, True) if isinstance(codec, ErrorFeedback) else (codec, False)


@st.composite
def _runs(draw: Any) -> tuple[Step, ...]:
    """Steps, of which many go on with the codec of the one before, under options of their own or the same."""
    steps: list[Step] = []
    for change, step in draw(st.lists(st.tuples(_changes, _steps), min_size=1, max_size=6)):
        before = steps[-1].codec if steps and change != "other" else None
        if before is not None:
            inner, fed = _parts(before)
            step = step._replace(codec=before if change == "same" else draw(_CODECS[type(inner), fed]))
        steps.append(step)
    return tuple(steps)


PROGRAMS = st.builds(Program, st.integers(1, 4), st.booleans(), st.booleans(), _runs())


def gradient(kind: str, shape: tuple[int, ...], *seed: int) -> np.ndarray:
    """float32, other numbers for every seed, of which the last is the rank."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(shape)
    if kind == "zero":
        normal[...] = 0
    elif kind == "constant":
        normal[...] = 1 + seed[-1]
    elif kind == "rows":  # the same on all ranks, as of an embedding of the same words
        rows = np.random.default_rng(seed[:-1]).permutation(shape[0])[: 1 + seed[0] % 2]
        normal[np.setdiff1d(np.arange(shape[0]), rows)] = 0
    elif kind == "low rank":
        normal = np.multiply.outer(np.random.default_rng(seed[:-1]).standard_normal(shape[0]), normal[0])
    return (normal * {"denormal": 1e-41, "tiny": 1e-20, "large": 1e4}.get(kind, 1.0)).astype(F32)


# -- a run -------------------------------------------------------------------------------------------------------------
class OwnRank(Rank):
    def __init__(self, comm: Any, program: Program) -> None:
        super().__init__(comm, non_finite="skip" if program.skips else "raise")
        self.params = [Parameter(name, np.ones(shape, F32)) for name, shape in SHAPES.items()]
        self.engine.agreement.attach(self.params)


class Bucket(NamedTuple):
    """A bucket in a step of a rank, by parameter: gradients, means, and residuals before and after it, if any."""

    gradients: dict[str, np.ndarray]
    means: dict[str, np.ndarray]
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    fresh: bool  # whether no step of this kind of codec came before


class Record(NamedTuple):
    refused: bool
    params: list[np.ndarray]
    buckets: list[Bucket]
    states: dict[str, np.ndarray]


def _train(comm: Any, program: Program) -> list[Record]:
    own, records, kinds = OwnRank(comm, program), [], set()
    for step in program.steps:
        if step.saves:  # as a job that begins anew: it knows its parameters before it loads
            states, values = own.engine.get_states(), [param.array for param in own.params]
            own = OwnRank(comm, program)
            for param, value in zip(own.params, values, strict=True):
                param.array[...] = value
            own.engine.set_states(states)
        own.bucket_elements, kind = step.bucket, step.codec and step.codec.kind
        opened = own.begin_partial(step.bucket) if step.codec is None else own.begin(step.codec)
        before = _residuals(own.engine, kind)
        grads = [gradient(kind, shape, step.seed, place, own.rank)
                 for place, (kind, shape) in enumerate(zip(step.gradients, SHAPES.values(), strict=True))]  # fmt: skip
        if step.bad and step.bad[0] % program.ranks == own.rank:
            grad = grads[step.bad[1]].reshape(-1)
            grad[step.seed % grad.size] = BAD[step.bad[2]]
        with opened:
            own.write(opened, grads)
            verdict = opened.finish()
        buckets = []
        if verdict is None:
            means, after = own.means(opened), _residuals(own.engine, kind)
            arrays = dict(zip(SHAPES, grads, strict=True)), dict(zip(SHAPES, means, strict=True)), before, after
            for bucket in opened.layout.buckets:
                names = [param.name for param in bucket.params]
                buckets.append(Bucket(*[{name: of[name] for name in names if of} for of in arrays], kind not in kinds))
            kinds.add(kind)
            for param, mean in zip(own.params, means, strict=True):
                with np.errstate(all="ignore"):  # 16-bit floats saturate far out
                    param.array -= mean
            if step.codec is None:
                own.engine.partial.average(opened.layout)
        else:
            with nullcontext() if program.skips else pytest.raises(GradientError):
                own.engine.refuse(verdict)
        states = {key: value for key, value in own.engine.get_states().items() if key != "steps"}
        records.append(Record(verdict is not None, [p.array.copy() for p in own.params], buckets, states))
    own.engine.partial.synchronize()
    records.append(Record(False, [p.array.copy() for p in own.params], [], {}))
    return records


def _residuals(engine: Engine, kind: str | None) -> dict[str, np.ndarray]:
    prefix = f"{kind}/residual/"
    return {key.removeprefix(prefix): a for key, a in engine.get_states().items() if key.startswith(prefix)}


def _runs_of(program: Program) -> list[list[Record]]:
    cls = SplittingCommunicator if program.parts else OracleCommunicator
    return on_ranks(program.ranks, lambda comm: _train(comm, program), cls=cls)


# -- what must hold ----------------------------------------------------------------------------------------------------
def run(program: Program) -> None:
    """Check bits across ranks, across saves and bad steps, and every step against a slow oracle."""
    logging.getLogger("distopt").setLevel(logging.ERROR)  # every step that is skipped warns
    ranks = _runs_of(program)
    refused = [record.refused for record in ranks[0]]
    for rank, records in enumerate(ranks):
        assert [record.refused for record in records] == refused, f"rank {rank} skips other steps"
    differ = False
    for number, step in enumerate(program.steps):
        halves = isinstance(step.codec, BFloat16 | Fp16)  # which saturate
        assert not refused[number] or step.bad or "large" in step.gradients, f"step {number} is refused"
        assert refused[number] or not step.bad or (halves and step.bad[2] != "nan"), f"step {number} is not refused"
        if not refused[number]:
            differ |= step.codec is None
            if step.codec is not None:
                if not differ:
                    _check_equal(ranks, number)
                for buckets in zip(*(records[number].buckets for records in ranks), strict=True):
                    _check_means(step.codec, buckets, f"step {number}")
    _check_equal(ranks, -1)
    if any(refused) or any(step.saves for step in program.steps):
        good = [number for number, bad in enumerate(refused[:-1]) if not bad]
        steps = tuple(program.steps[number]._replace(saves=False) for number in good)
        for rank, (records, others) in enumerate(zip(ranks, _runs_of(replace(program, steps=steps)), strict=True)):
            for number, other in zip([*good, -1], others, strict=True):
                what = f"rank {rank} after step {number}, against a run without saves and bad steps"
                record = records[number]
                _same(record.params, other.params, f"parameters of {what}")
                # A dynamic scale is a bucket's: other buckets in a bad step share it among other parameters.
                common = sorted(key for key in record.states.keys() & other.states.keys() if "/scale/" not in key)
                _same([record.states[key] for key in common], [other.states[key] for key in common], f"state of {what}")


def _check_equal(ranks: list[list[Record]], number: int) -> None:
    for rank, records in enumerate(ranks):
        _same(records[number].params, ranks[0][number].params, f"parameters of ranks 0 and {rank} after step {number}")


def _same(arrays: list[np.ndarray], others: list[np.ndarray], what: str) -> None:
    for array, other in zip(arrays, others, strict=True):
        assert array.tobytes() == other.tobytes(), f"{what}: {array.flat[:3]}... is not {other.flat[:3]}..."


def _check_means(codec: Codec, buckets: tuple[Bucket, ...], what: str) -> None:
    """A bucket of all ranks."""
    for name in buckets[0].means:
        for bucket in buckets:
            assert bucket.means[name].tobytes() == buckets[0].means[name].tobytes(), f"{what}: other means of {name}"
    inner, fed = _parts(codec)
    if getattr(inner, "momentum", 0.0):
        return
    sums = [_flat(b.gradients) for b in buckets]
    clip = getattr(inner, "clip_norm", None)
    if clip is not None:
        sums = [g * min(1.0, clip / math.sqrt(len(buckets)) / (np.linalg.norm(g) or 1)) for g in sums]
    if fed:
        sums = [(_flat(b.before).astype(F32) + g.astype(F32)).astype(float) for b, g in zip(buckets, sums, strict=True)]
    mean, got, scale = np.mean(sums, axis=0), _flat(buckets[0].means), np.max(np.abs(sums))
    digits = {Fp16: 10, BFloat16: 7}.get(type(inner), 20)
    bound = 2.0**-digits * scale + {Fp16: 2e-7, BFloat16: 1e-40}.get(type(inner), 1e-43)
    if fed:  # nothing is lost between what is applied and what is left
        _close(got + np.mean([_flat(b.after) for b in buckets], axis=0), mean, bound, f"{what}: mean and residual")
    if isinstance(inner, Fp32) or (digits < 20 and scale < 100):
        _close(got, mean, bound, what)
    if isinstance(inner, TopK | Threshold) and clip is None and not getattr(inner, "warm_up_steps", 0):
        _check_selection(inner, sums, got, what)
    if isinstance(inner, PowerSGD):
        _check_projection(inner, fed, buckets, what)


def _flat(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """In float64; of no arrays, one number that stands for zeros."""
    return np.concatenate([array.reshape(-1).astype(float) for array in arrays.values()] or [np.zeros(1)])


def _close(array: np.ndarray, expected: np.ndarray, bound: float, what: str) -> None:
    error = np.max(np.abs(array - expected))
    assert error <= bound, f"{what}: an error of {error:.3g}, where {bound:.3g} is allowed"


def _check_selection(codec: TopK | Threshold, sums: list[np.ndarray], got: np.ndarray, what: str) -> None:
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


def _check_projection(codec: PowerSGD, fed: bool, buckets: tuple[Bucket, ...], what: str) -> None:
    """The mean is projected onto the span of at most `codec.rank` columns; all of it, if these can span it."""
    for name, shape in SHAPES.items():
        if name not in buckets[0].means or len(shape) < 2:
            continue
        sums = [b.gradients[name].astype(float) + (b.before[name] if fed else 0) for b in buckets]
        mean, got = (a.reshape(shape[0], -1).astype(float) for a in (np.mean(sums, axis=0), buckets[0].means[name]))
        if codec.rank * sum(mean.shape) >= mean.size:
            _close(got, mean, 1e-6 * np.max(np.abs(sums)) + 1e-44, f"{what}: {name} is sent densely")
            continue
        largest = max(map(np.linalg.norm, sums))  # in the mean they may cancel, and leave their rounding
        grain = 1e-3 + 1e-43 / (largest or 1)  # of what denormal numbers leave
        rest = abs(np.sum((mean - got) * got))
        assert rest <= grain * largest**2, f"{what}: {name} is no projection, by {rest / largest**2:.2g}"
        if buckets[0].fresh and np.linalg.matrix_rank(mean, 1e-6 * largest) <= codec.rank:
            _close(got, mean, 10 * grain * largest, f"{what}: {name}, which has no more than rank {codec.rank}")
