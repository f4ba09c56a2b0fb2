"""The contract of every codec, on every number of ranks."""

import logging
import time
import tracemalloc
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest

from distopt.codecs import (
    BFloat16,
    ChunkedTopK,
    ErrorFeedback,
    Fp16,
    Fp32,
    Part,
    PendingReduction,
    PowerSGD,
    Quantized,
    Threshold,
    TopK,
    finish_all,
)
from distopt.comm import Work
from distopt.errors import GradientError, MismatchError, PeerLostError, StateError, UsageError
from distopt.recorder.statistics import CommunicationStatistics, Statistics
from tests.conformance.checks import assert_same_bits
from tests.conformance.thread_ranks import OracleCommunicator, SplittingCommunicator, on_ranks, same_bits, with_ranks

F32 = np.float32
SIZE = 5003

LOSSLESS = [Fp32(), TopK(1.0), TopK(k=10**6), Threshold(0.0)]
SPARSE = [TopK(0.01), TopK(k=1), TopK(0.2), Threshold(2.0), Threshold(0.5), Threshold(100.0)]
HALF = [Fp16(), BFloat16(), Fp16(scale=64.0), Fp16(scale="dynamic")]
LOW_RANK = [PowerSGD(), PowerSGD(rank=1)]
FEW_BITS = [ChunkedTopK(), ChunkedTopK(1), ChunkedTopK(200, bits=4), ChunkedTopK(4096, bits=16)]
FEW_BITS += [Quantized(), Quantized(4), Quantized(2), Quantized(4, stochastic=True, seed=7)]
CORRECTED = [ErrorFeedback(codec) for codec in SPARSE + HALF + LOSSLESS[1:] + LOW_RANK + FEW_BITS]
ALL = LOSSLESS + SPARSE + HALF + LOW_RANK + FEW_BITS + CORRECTED
# A 16-bit codec without a residual saturates and counts infinity.
UNUSABLE = [
    *product([np.nan, np.inf], [*SPARSE, *LOW_RANK, *FEW_BITS, *CORRECTED, TopK(1.0)]),
    *product([np.nan], HALF),
]
WORLDS = list(product([1, 2, 3, 4], [OracleCommunicator, SplittingCommunicator]))

worlds = pytest.mark.parametrize(("world_size", "cls"), WORLDS, ids=lambda v: getattr(v, "name", v) if v else v)


def gradients(world_size, steps=3, size=SIZE):
    """Gradients by step and rank; no rank's are like another's, nor is the share that a threshold selects."""
    rng = np.random.default_rng(world_size)
    ranks = (1 + np.arange(world_size, dtype=F32))[:, None]
    return rng.standard_normal((steps, world_size, size)).astype(F32) * ranks / 2


def parts_of(size):
    """Parameters that fill a bucket of `SIZE` without padding; a bucket of another size holds one."""
    shapes = {"a": (40, 50), "b": (3,), "c": (25, 4, 10), "d": (2000,)} if size == SIZE else {}
    offset, parts = 0, []
    for name, shape in shapes.items():
        parts.append(Part(name, offset, shape))
        offset += parts[-1].size
    return parts


class Run:
    """The state of a rank after some steps."""

    def __init__(self, codec, comm, size=SIZE, parts=None):
        self.comm = comm
        self.codec = codec
        self.bucket = comm.empty(size)
        self.reducer = codec.attach(self.bucket, comm, parts=parts or parts_of(size), label="b0")
        self.means = []

    def step(self, grads):
        self.bucket[:] = grads[self.comm.topology.rank]
        before = replace(self.reducer.statistics)
        reduction = PendingReduction(self.codec, self.reducer)
        assert finish_all([reduction]) == [None]
        assert finish_all([reduction]) == [None]
        self.means.append(self.bucket.copy())
        self.last = self.reducer.statistics - before
        return self

    @property
    def residual(self):
        return self.reducer.residual


def run(codec, grads, cls=OracleCommunicator, parts=None):
    world_size, size = grads.shape[1:]

    def body(comm):
        result = Run(codec, comm, size, parts)
        for step in grads:
            result.step(step)
        return result

    return on_ranks(world_size, body, cls=cls)


def mean_of(grads):
    """The dense float32 mean, added in rank order."""
    total = grads[0].copy()
    for grad in grads[1:]:
        total += grad
    return total / F32(len(grads))


def lost(codec, grads, ranks):
    """What neither the means nor the residuals hold of each element, and how much rounding may take."""
    n, means = len(ranks), [mean.astype(float) for mean in ranks[0].means]
    missing = grads.sum(axis=(0, 1), dtype=float) - sum(means) * n - sum(rank.residual.astype(float) for rank in ranks)
    if codec in HALF:
        # The sum is rounded once more after the ranks' casts, which no residual of a rank covers.
        digits = 8 if isinstance(codec, BFloat16) else 11
        return missing, sum(map(np.abs, means)) * n * 2.0**-digits + 1e-6
    return missing, 1e-6 * np.maximum(1, np.abs(grads).sum(axis=(0, 1)))


@pytest.mark.sweep(rest=160)
@worlds
@pytest.mark.parametrize("codec", ALL, ids=repr)
def test_all_ranks_and_runs_have_the_same_bits_and_lose_nothing(codec, world_size, cls):
    grads = gradients(world_size)
    before = grads.copy()
    ranks = run(codec, grads, cls)
    assert all(same_bits(other.means, ranks[0].means) for other in ranks + run(codec, grads, cls))
    assert np.array_equal(grads, before)
    inner = getattr(codec, "codec", codec)
    if inner in LOSSLESS:
        assert same_bits(ranks[0].means, map(mean_of, grads))
    if inner is not codec:
        missing, bound = lost(inner, grads, ranks)
        assert (np.abs(missing) <= bound).all()
    empty = np.zeros((2, world_size, 0), F32)
    assert [rank.means[1].size for rank in run(codec, empty, cls)] == [0] * world_size


def selected(codec, x):
    if isinstance(codec, Threshold):
        return np.flatnonzero(np.abs(x) >= F32(codec.bound))
    k = codec.k or int(np.ceil(codec.ratio * x.size))
    return np.sort(np.argsort(-np.abs(x), kind="stable")[:k])


def sparse_mean(lists, size):
    dense = np.zeros(size, F32)
    for indices, values in lists:
        dense[indices] += values * F32(1 / len(lists))
    return dense


SELECTING = [TopK(0.01), TopK(k=1), Threshold(4.0)]
SELECTING += [ErrorFeedback(codec) for codec in SELECTING]
SELECTING += [ErrorFeedback(TopK(k=50, momentum=0.9, clip_norm=20.0)), ErrorFeedback(TopK(1.0, momentum=0.5))]


@worlds
@pytest.mark.parametrize("codec", SELECTING, ids=repr)
def test_sparse_codecs_send_what_they_say(codec, world_size, cls):
    """Momentum correction, masking and clipping follow the paper; where everything is sent, momentum goes on."""
    grads, inner = gradients(world_size, steps=4), getattr(codec, "codec", codec)
    runs = run(codec, grads, cls)
    velocity, residual = np.zeros_like(grads[0]), np.zeros_like(grads[0])
    agree = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    if not inner.momentum:  # whose products, and norms, may be rounded otherwise
        agree = partial(assert_same_bits, what=codec)
    for step, grad in enumerate(grads):
        if inner.clip_norm:
            norms = np.sqrt((grad.astype(float) ** 2).sum(axis=1, keepdims=True))
            grad = grad * np.minimum(1, inner.clip_norm / np.sqrt(world_size) / norms).astype(F32)
        velocity = F32(inner.momentum) * velocity + grad
        residual = residual + velocity if inner is not codec else velocity.copy()
        lists = []
        for r in range(world_size):
            indices = selected(inner, residual[r])
            lists.append((indices, residual[r, indices]))
            residual[r, indices] = 0
            velocity[r, indices if indices.size < SIZE else []] = 0
        for rank in runs:
            agree(rank.means[step], sparse_mean(lists, SIZE))
    for rank, *expected in zip(runs, residual, velocity, strict=True):
        if inner is not codec:
            agree(rank.residual, expected[0])
        if inner.momentum:
            agree(rank.reducer.keep("velocity"), expected[1])


@worlds
def test_large_and_tiny_gradients_in_half_precision_are_counted_not_lost(world_size, cls):
    grads = np.zeros((1, world_size, 8), F32)
    grads[0, :, :6] = 60_000, -60_000, 1e-8, 0.5, 1e6, -np.inf
    for rank in run(Fp16(), grads, cls):
        np.testing.assert_allclose(rank.means[0][:2], [60_000, -60_000], rtol=1e-3)
        np.testing.assert_allclose(rank.means[0][4:6], [65_504, -65_504], rtol=2e-3)
        assert rank.means[0][3] == 0.5
        assert rank.last.overflowed == 2
        assert rank.last.underflowed == 1
    for rank in run(BFloat16(), grads[:, :, :5], cls):
        np.testing.assert_allclose(rank.means[0], grads[0, 0, :5], rtol=1e-2)
        assert (rank.last.overflowed, rank.last.underflowed) == (0, 0)
    for rank in run(ErrorFeedback(Fp16()), np.repeat(grads[:, :, :5], 20, axis=0), cls):
        assert sum(mean[2] for mean in rank.means) + rank.residual[2] == pytest.approx(20e-8, rel=0.3)
        assert rank.residual[4] > 1e7


@pytest.mark.slow(kept=1)
@worlds
def test_dynamic_scale_follows_overflow_of_any_rank(world_size, cls):
    grads = np.full((1002, world_size, 3), 0.25, F32)
    grads[1, -1, 0] = 1e6
    for rank in run(Fp16(scale="dynamic"), grads, cls):
        assert rank.reducer.state_dict()["scale/b0"].tolist() == [1.0, 0.0]
        assert rank.means[-1][0] == 0.25
        assert rank.reducer.statistics.reductions == 1002
    for rank in run(Fp16(scale="dynamic"), grads[:2], cls):
        assert rank.reducer.state_dict()["scale/b0"].tolist() == [0.5, 0.0]
    scaled = np.full((1, world_size, 3), 1e-8, F32)
    for rank in run(Fp16(scale=2.0**14), scaled, cls):
        np.testing.assert_allclose(rank.means[0], 1e-8, rtol=1e-2)


@with_ranks(1)
def test_state_that_does_not_fit_is_refused(comm):
    mine = ErrorFeedback(TopK(0.1)).attach(comm.empty(10), comm, label="b0")
    for text, states in (
        ("codec", {}),
        ("shape", {"residual/b0": np.ones(11, F32)}),
        ("float64", {"residual/b0": np.ones(10)}),
        ("residual/b1", {"residual/b1": np.ones(10, F32)}),
    ):
        with pytest.raises(StateError, match=text):
            mine.load_state_dict(states)
    assert not mine.residual.any()


def check_bad_step(codec, grads, cls, fault, text):
    """The second step is an error on every rank, which names its fault, a rank and an element; and not the end."""

    def body(comm):
        rank = Run(codec, comm)
        rank.step(grads[0])
        rank.bucket[:] = grads[1, comm.topology.rank]
        reduction = PendingReduction(codec, rank.reducer)
        (verdict,) = finish_all([reduction])
        assert (verdict.rank, verdict.element) == fault
        assert finish_all([reduction])[0] is reduction.verdict is verdict
        assert text in verdict.text
        with pytest.raises(GradientError, match=f"element {fault[1]} of bucket 'b0' on rank {fault[0]}") as error:
            raise verdict.error()
        assert (error.value.rank, error.value.index) == fault
        assert np.isfinite(rank.step(grads[2]).means[1]).all()

    on_ranks(grads.shape[1], body, cls=cls)


@pytest.mark.sweep(rest=80)
@worlds
@pytest.mark.parametrize(("bad", "codec"), UNUSABLE, ids=str)
def test_an_unusable_gradient_is_an_error_on_every_rank_and_not_the_end(codec, bad, world_size, cls):
    grads = gradients(world_size)
    grads[1, world_size - 1, 1234] = bad
    check_bad_step(codec, grads, cls, (world_size - 1, 1234), "")


@worlds
@pytest.mark.parametrize("codec", [Fp32(), PowerSGD(), ErrorFeedback(PowerSGD())], ids=repr)
def test_values_whose_sum_or_products_overflow_are_named(codec, world_size, cls):
    grads = gradients(world_size)
    share, first = float(np.finfo(F32).max) / world_size, world_size // 2
    fits, large = (0.49 * share, 2.02 * share) if codec == Fp32() else (1.0, 1e38)
    grads[0, :, 1234] = fits
    with np.errstate(over="ignore"):
        grads[1, first:, 1234:1300] = -large
    check_bad_step(codec, grads, cls, (first, 1234), "too large")


def test_dense_fallback_is_logged_once_and_counted(caplog):
    caplog.set_level(logging.INFO, logger="distopt")
    grads = gradients(4)
    for rank in run(ErrorFeedback(TopK(0.3)), grads):
        assert rank.reducer.statistics.fell_back == 3
        assert rank.last.wire_bytes == rank.last.dense_bytes + 3 * 24
        assert not rank.residual.any()
    assert len(caplog.records) == 4
    assert "'b0': 1501 of 5003 elements per rank on 4 ranks" in caplog.text
    # Where each rank can be sent its part alone, sparse pays for longer.
    assert {rank.reducer.statistics.fell_back for rank in run(TopK(0.3), grads, SplittingCommunicator)} == {0}
    # Thresholds find out from the exchanged counts.
    assert {rank.reducer.statistics.fell_back for rank in run(Threshold(0.5), grads)} == {3}
    assert {rank.reducer.statistics.fell_back for rank in run(Threshold(100.0), grads)} == {0}, "no rank sends"


def test_bytes_are_those_of_the_wire():
    grads = gradients(2, steps=2)
    dense, header = 4 * SIZE, 24
    for codec, expected in [
        (Fp32(), dense),
        (Fp16(), dense // 2 + header),
        (ErrorFeedback(BFloat16()), dense // 2 + header),
        (TopK(0.01), 51 * 8 + header),
    ]:
        for rank in run(codec, grads):
            assert (rank.last.wire_bytes, rank.last.dense_bytes) == (expected, dense)
            total = rank.reducer.statistics
            assert (total.reductions, total.wire_bytes) == (2, 2 * expected)
            assert total.comm_seconds > 0
    for rank in run(TopK(0.01), gradients(1)):
        assert rank.last.wire_bytes == rank.last.dense_bytes == 0


@with_ranks(2)
def test_warm_up_thins_out_stage_by_stage(comm):
    codec = TopK(0.01, warm_up_steps=2)
    assert [codec.count(1000, step) for step in range(8)] == [250, 250, 63, 63, 16, 16, 10, 10]
    rank, grads = Run(ErrorFeedback(codec), comm, 1000), gradients(2, steps=8, size=1000)
    assert [(rank.step(step).last.wire_bytes - 24) // 8 for step in grads] == [codec.count(1000, n) for n in range(8)]


@with_ranks(3)
def test_a_state_goes_on_under_other_options_but_not_as_another_codec(comm):
    """The last step, whose share is everything, sends all that the varying shares have left."""
    grads = gradients(3, steps=4, size=101)
    bucket = comm.empty(101)
    reducer, received = ErrorFeedback(TopK(0.01)).attach(bucket, comm), 0
    for grad, ratio in zip(grads, [0.01, 0.2, 0.05, 1.0], strict=True):
        bucket[:] = grad[comm.topology.rank]
        finish_all([PendingReduction(ErrorFeedback(TopK(ratio)), reducer)])
        received += bucket
    for other in (TopK(0.1), ErrorFeedback(Threshold(1.0)), Fp32()):
        with pytest.raises(UsageError, match="cannot continue as"):
            PendingReduction(other, reducer)
    assert not reducer.residual.any()
    np.testing.assert_allclose(received, grads.mean(axis=1).sum(axis=0), atol=1e-5)


# -- PowerSGD ---------------------------------------------------------------------------------------------------------
def orthogonal(p):
    for k in range(p.shape[1]):
        for j in range(k):
            p[:, k] -= (p[:, j] @ p[:, k]) * p[:, j]
        p[:, k] /= np.linalg.norm(p[:, k])
    return p


def first_q(name, m, rank):
    """Where PowerSGD begins, for a parameter whose gradient has m columns."""
    return np.random.default_rng([*name.encode()]).standard_normal((m, rank))


@worlds
def test_power_sgd_follows_the_paper(world_size, cls):
    grads = gradients(world_size, steps=4)
    runs = run(ErrorFeedback(PowerSGD(rank=2)), grads, cls)
    last = {name: first_q(name, m, 2) for name, m in (("a", 50), ("c", 40))}
    residual = np.zeros(grads.shape[1:])
    for step, grad in enumerate(grads):
        residual += grad
        mean = residual.mean(axis=0)  # what has one dimension is sent as it is
        for part in parts_of(SIZE):
            if part.name in last:
                place = slice(part.offset, part.offset + part.size)
                rows = residual[:, place].reshape(world_size, part.shape[0], -1)
                p = orthogonal((rows @ last[part.name]).mean(axis=0))
                last[part.name] = q = (rows.transpose(0, 2, 1) @ p).mean(axis=0)
                mean[place] = (p @ q.T).reshape(-1)
        residual -= mean
        for rank in runs:
            np.testing.assert_allclose(rank.means[step], mean, rtol=1e-3, atol=2e-4)
    for rank, expected in zip(runs, residual, strict=True):
        np.testing.assert_allclose(rank.residual, expected, rtol=1e-3, atol=1e-3)


def gradients_of_a_matrix():
    """Matrices [40, 50] by step, of a lower rank in between; the last is one of PowerSGD's rank."""
    rng = np.random.default_rng(2)
    left, right = (np.linalg.qr(rng.standard_normal((size, 2)))[0] for size in (40, 50))
    full, zero = left @ np.diag([3, 2]) @ right.T, np.zeros((40, 50))
    yield 2, [rng.standard_normal((40, 2)) @ rng.standard_normal((2, 50))] * 2
    yield 1, [zero] * 3 + [np.outer(np.arange(40), np.arange(50))] * 3
    for few in (np.outer(left[:, 1], right[:, 1]), np.outer(left[:, 0], np.ones(50)), np.ones((40, 50))):
        yield 2, [full, *[few] * 3, *[full] * 4]


@pytest.mark.parametrize(("rank", "matrices"), [*gradients_of_a_matrix()])
def test_power_sgd_finds_a_matrix_of_its_rank(rank, matrices):
    """Whatever came before it."""
    grads = np.zeros((len(matrices), 3, SIZE), F32)
    grads[:, :, :2000] = np.reshape(matrices, (-1, 1, 2000))
    for result in run(PowerSGD(rank=rank), grads):
        np.testing.assert_allclose(result.means[-1], grads[-1, 0], rtol=1e-4 * (rank == 1), atol=1e-5 * (rank == 2))
        sent = 4 * (rank * (40 + 25) + 2003) + 4 * rank * (50 + 40)
        assert result.last.wire_bytes == sent * 4 // 3 + 2 * 24 < 0.5 * result.last.dense_bytes


def low_rank_gradients():
    """Matrices [n, m] of every kind that has fewer directions than PowerSGD has columns."""
    rng = np.random.default_rng(5)
    for n, m, live in [(64, 32, 2), (33, 57, 1), (17, 130, 3), (129, 9, 4)]:
        whole = rng.standard_normal((n, m))
        rows, columns = rng.permutation(n)[:live], rng.permutation(m)[:live]
        some_rows, some_columns, both = np.zeros((3, n, m))
        some_rows[rows], some_columns[:, columns] = whole[rows], whole[:, columns]
        both[np.ix_(rows, columns)] = whole[np.ix_(rows, columns)]
        product = rng.standard_normal((n, live)) @ rng.standard_normal((live, m))
        integers = rng.integers(-3, 4, (n, live)) @ rng.integers(-3, 4, (live, m))
        for kind, matrix in [
            ("rows", some_rows), ("columns", some_columns), ("both", both), ("product", product),
            ("integers", integers), ("whole", whole), ("constant", np.full((n, m), 0.3)),
        ]:  # fmt: skip
            yield f"{kind} {n}x{m} {live}", matrix


def projected(rows, q):
    """The sum of the ranks' matrices, projected onto the columns of their products with q: the oracle, in float64."""
    u, values, _ = np.linalg.svd(sum(rows) @ q, full_matrices=False)
    u = u[:, values > 1e-6 * values.max(initial=0)]
    return u @ (u.T @ sum(rows))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-38, 1e-42])
@pytest.mark.parametrize("rank", [1, 2, 3, 5])
def test_power_sgd_projects_gradients_with_few_directions(rank, scale, world_size):
    for name, matrix in low_rank_gradients():
        n, m = matrix.shape
        parts = [Part("w", 0, (n, m))]
        flat = matrix.reshape(-1).astype(F32) * F32(scale)  # denormal numbers are coarse
        shares = [flat * F32(r + 1) for r in range(world_size)]
        exact = [share.reshape(n, m).astype(np.float64) / world_size for share in shares]
        start = first_q(parts[0].name, m, rank).astype(F32)
        oracle = sum(exact) if rank * (n + m) >= n * m else projected(exact, start.astype(np.float64))

        norm, missed = np.linalg.norm(sum(exact)), np.linalg.norm(sum(exact) - oracle)
        # Numbers near zero are coarse, and so are P = M Q, which may be shorter than M.
        grain = 16 * np.sqrt(n * m) * np.finfo(F32).smallest_subnormal * (1 + norm / np.linalg.norm(sum(exact) @ start))
        for result in run(PowerSGD(rank=rank), np.stack([shares] * 3), parts=parts):
            # Rounding may leave it one direction more than the oracle, and then it is closer to the gradient.
            for step, mean in enumerate(result.means):
                error = np.linalg.norm(sum(exact) - mean.reshape(n, m))
                assert error <= missed * (1 + 1e-4) + 1e-5 * norm + grain, (name, step, error / norm)


class Lost(Work):
    def done(self):
        raise PeerLostError("rank 1 ended")

    wait = done


class Breaks(Fp32):
    def reduce(self, reducer):
        yield reducer.all_reduce(reducer.bucket, "mean")
        raise OSError("in the middle")


class Loses(Fp32):
    def reduce(self, reducer):
        yield Lost()


@pytest.mark.parametrize(
    ("codec", "error", "text", "next_error", "next_text"),
    [
        (Breaks(), OSError, "in the middle", UsageError, "b7.* still being reduced"),
        (Loses(), PeerLostError, "rank 1 ended", PeerLostError, "rank 1 ended"),
    ],
)
@with_ranks(2)
def test_an_error_inside_a_reduction_is_raised_again_and_never_taken_for_its_end(
    comm, codec, error, text, next_error, next_text
):
    reducer = codec.attach(comm.empty(4), comm, label="b7")
    reduction = PendingReduction(codec, reducer)
    for _ in range(3):
        with pytest.raises(error, match=text):
            reduction.resume()
        assert not reduction.finished
        with pytest.raises(next_error, match=next_text):
            PendingReduction(codec, reducer)
    assert reducer.statistics.reductions == 0


class Slow(Fp32):
    def reduce(self, reducer):
        time.sleep(0.02)
        yield from super().reduce(reducer)
        time.sleep(0.04)


@with_ranks(2)
def test_times_are_booked_where_they_are_spent(comm):
    reducer = Slow().attach(comm.empty(4), comm)
    finish_all([PendingReduction(Slow(), reducer)])
    assert reducer.statistics.select_seconds >= 0.02
    assert reducer.statistics.decode_seconds >= 0.04


def test_the_summary_is_the_mean_of_the_steps_since_another_one():
    earlier = CommunicationStatistics(2, 1, {("conv", "Fp16"): Statistics(2, 9_000, 6_000, 1.0, 2.0, 3.0, 7, 8, 0)})
    later = CommunicationStatistics(6, 3, {("conv", "Fp16"): Statistics(6, 21_000, 10_000, 1.1, 2.2, 3.3, 7, 10, 1)})
    later.buckets["fc", "Fp32"] = Statistics(4, 8_000, 8_000)
    assert (later - earlier).summary() == (
        "Communication: 0.003 MB/step of 0.005 MB dense (Fp16, Fp32), 25.00 ms select, 50.00 ms wait, "
        "75.00 ms decode, 1 of 8 reductions dense, 2 values too small for 16 bits, 2 steps skipped"
    )
    assert (later - later).summary().startswith("Communication: 0.000 MB/step of 0.000 MB dense (nothing), 0.00 ms")


@pytest.mark.parametrize("wrap", [lambda codec: codec, ErrorFeedback], ids=["bare", "with error feedback"])
@pytest.mark.parametrize("codec", [ChunkedTopK(), Quantized(4)], ids=["chunked top-K", "quantized"])
@with_ranks(2)
def test_ranks_that_send_another_format_are_refused(comm, codec, wrap):
    newer = type("Newer", (type(codec),), {"wire_format": 2, "kind": codec.kind})
    own = newer(**{name: getattr(codec, name) for name in codec.__match_args__}) if comm.topology.rank else codec
    with pytest.raises(MismatchError) as info:
        wrap(own).attach(np.zeros(SIZE, F32), comm)
    sends = [f"rank {rank} (host) {{}}{wrap(codec).kind} in format {rank + 1}" for rank in (0, 1)]
    mine, other = sends[comm.topology.rank], sends[1 - comm.topology.rank]
    cure = "install the same release of distopt on all hosts"
    assert str(info.value) == f"{other.format('sends ')}, {mine.format('')}; {cure}"


@worlds
def test_chunked_top_k_needs_little_memory(world_size, cls):
    """The residual, one for each rank, and what is sent and received: 116 bytes of each 16 KiB."""
    n_bytes = 4 * (n := 1 << 20)
    codec, x = ErrorFeedback(ChunkedTopK(), decay=0.9), np.random.default_rng(1).standard_normal((world_size, n), F32)

    def body(comm):
        state = codec.attach(x[comm.topology.rank], comm)
        for _ in range(2):
            assert finish_all([PendingReduction(codec, state)]) == [None]

    tracemalloc.start()
    on_ranks(world_size, body, cls=cls)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    of_the_oracle = 0.01 * world_size  # which copies what it gathers
    assert peak_bytes < world_size * (1.05 + of_the_oracle) * n_bytes
