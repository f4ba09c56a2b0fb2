"""The contract of every codec, on every number of ranks."""

import logging
import time
import tracemalloc
from dataclasses import replace
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
from tests.conformance.thread_ranks import OracleCommunicator, SplittingCommunicator, on_ranks

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

    def __init__(self, codec, comm, size=SIZE):
        self.comm = comm
        self.codec = codec
        self.bucket = comm.empty(size)
        self.reducer = codec.attach(self.bucket, comm, parts=parts_of(size), label="b0")
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


def run(codec, grads, cls=OracleCommunicator):
    world_size, size = grads.shape[1:]

    def body(comm):
        result = Run(codec, comm, size)
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


@pytest.mark.sweep(rest=60)
@worlds
@pytest.mark.parametrize("codec", ALL, ids=repr)
def test_all_ranks_hold_the_same_bits_on_every_run(codec, world_size, cls):
    grads = gradients(world_size)
    before = grads.copy()
    runs = run(codec, grads, cls) + run(codec, grads, cls)
    for other in runs[1:]:
        for mean, first in zip(other.means, runs[0].means, strict=True):
            assert np.array_equal(mean.view(np.uint32), first.view(np.uint32))
    assert np.array_equal(grads, before)


@worlds
@pytest.mark.parametrize("codec", LOSSLESS + [ErrorFeedback(codec) for codec in LOSSLESS[1:]], ids=repr)
def test_sending_everything_equals_dense_float32_bit_for_bit(codec, world_size, cls):
    grads = gradients(world_size)
    for rank in run(codec, grads, cls):
        for step, mean in enumerate(rank.means):
            assert np.array_equal(mean.view(np.uint32), mean_of(grads[step]).view(np.uint32))


@pytest.mark.sweep(rest=40)
@worlds
@pytest.mark.parametrize("codec", CORRECTED, ids=repr)
def test_nothing_is_lost_between_wire_and_residual(codec, world_size, cls):
    grads = gradients(world_size)
    runs = run(codec, grads, cls)
    sent = sum(mean.astype(float) for mean in runs[0].means) * world_size
    left = sum(rank.residual.astype(float) for rank in runs)
    total = grads.astype(float).sum(axis=(0, 1))
    if codec.codec in HALF:
        # The sum is rounded once more after the ranks' casts, which no residual of a rank covers.
        digits = 8 if isinstance(codec.codec, BFloat16) else 11
        bound = sum(np.abs(mean) for mean in runs[0].means) * world_size * 2.0**-digits + 1e-6
    else:
        bound = 1e-6 * np.maximum(1, np.abs(grads).sum(axis=(0, 1)))
    assert (np.abs(sent + left - total) <= bound).all()


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


@worlds
@pytest.mark.parametrize("codec", [TopK(0.01), TopK(k=1), Threshold(4.0)], ids=repr)
@pytest.mark.parametrize("corr", [False, True])
def test_sparse_codecs_send_what_they_say(codec, corr, world_size, cls):
    grads = gradients(world_size)
    runs = run(ErrorFeedback(codec) if corr else codec, grads, cls)
    residuals = np.zeros_like(grads[0])
    for step, grad in enumerate(grads):
        residuals = residuals + grad if corr else grad.copy()
        lists = []
        for residual in residuals:
            indices = selected(codec, residual)
            lists.append((indices, residual[indices]))
            residual[indices] = 0
        expected = sparse_mean(lists, SIZE)
        for rank in runs:
            assert np.array_equal(rank.means[step].view(np.uint32), expected.view(np.uint32))
    if corr:
        for rank, residual in zip(runs, residuals, strict=True):
            assert np.array_equal(rank.residual, residual)


@worlds
@pytest.mark.parametrize(("codec", "digits", "tiny"), [(Fp16(), 11, 2.0**-25), (BFloat16(), 8, 0.0)])
def test_half_casts_keep_their_error_bound(codec, digits, tiny, world_size, cls):
    grads = gradients(world_size)
    for rank in run(codec, grads, cls):
        for step, mean in enumerate(rank.means):
            exact = grads[step].astype(float).mean(axis=0)
            size = np.abs(grads[step]).astype(float).mean(axis=0)
            # One rounding per rank, one of the sum; float32 adds the rest.
            bound = (size + np.abs(exact) * 1.01) * 2.0**-digits + (world_size + 1) * tiny + 1e-6 * size
            assert (np.abs(mean - exact) <= bound).all()


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


@worlds
def test_a_rank_may_send_nothing(world_size, cls):
    grads = np.zeros((2, world_size, 300), F32)
    grads[:, -1, 7::50] = 5
    for rank in run(ErrorFeedback(Threshold(1.0)), grads, cls):
        np.testing.assert_allclose(rank.means[1], mean_of(grads[1]), rtol=1e-6)
    for rank in run(Threshold(1.0), np.zeros_like(grads), cls):
        assert not rank.means[1].any()
        assert rank.last.fell_back == 0


@pytest.mark.sweep(rest=20)
@worlds
@pytest.mark.parametrize("codec", ALL, ids=repr)
def test_an_empty_bucket_is_reduced(codec, world_size, cls):
    assert [rank.means[1].size for rank in run(codec, np.zeros((2, world_size, 0), F32), cls)] == [0] * world_size


def test_state_that_does_not_fit_is_refused():
    def body(comm):
        mine = ErrorFeedback(TopK(0.1)).attach(comm.empty(10), comm, label="b0")
        with pytest.raises(StateError, match="codec"):
            mine.load_state_dict({})
        with pytest.raises(StateError, match="shape"):
            mine.load_state_dict({"residual/b0": np.ones(11, F32)})
        with pytest.raises(StateError, match="float64"):
            mine.load_state_dict({"residual/b0": np.ones(10)})
        with pytest.raises(StateError, match="residual/b1"):
            mine.load_state_dict({"residual/b1": np.ones(10, F32)})
        assert not mine.residual.any()

    on_ranks(1, body)


@pytest.mark.sweep(rest=80)
@worlds
@pytest.mark.parametrize(("bad", "codec"), UNUSABLE, ids=str)
def test_an_unusable_gradient_is_an_error_on_every_rank_and_not_the_end(codec, bad, world_size, cls):
    grads = gradients(world_size)
    grads[1, world_size - 1, 1234] = bad

    def body(comm):
        rank = Run(codec, comm)
        rank.step(grads[0])
        rank.bucket[:] = grads[1, comm.topology.rank]
        reduction = PendingReduction(codec, rank.reducer)
        (verdict,) = finish_all([reduction])
        assert (verdict.rank, verdict.element) == (world_size - 1, 1234)
        assert finish_all([reduction])[0] is reduction.verdict is verdict
        with pytest.raises(GradientError, match=f"element 1234 of bucket 'b0' on rank {world_size - 1}") as error:
            raise verdict.error()
        assert (error.value.rank, error.value.index) == (world_size - 1, 1234)
        rank.step(grads[2])
        return rank.means[1]

    for mean in on_ranks(world_size, body, cls=cls):
        assert np.isfinite(mean).all()


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
    assert {rank.reducer.statistics.fell_back for rank in run(Threshold(9.0), grads)} == {0}


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


@worlds
def test_momentum_correction_masking_and_clipping_follow_the_paper(world_size, cls):
    momentum, clip_norm, k = F32(0.9), 20.0, 50
    grads = gradients(world_size, steps=4)
    codec = ErrorFeedback(TopK(k=k, momentum=0.9, clip_norm=clip_norm))
    runs = run(codec, grads, cls)
    velocity, residual = np.zeros_like(grads[0]), np.zeros_like(grads[0])
    for step, grad in enumerate(grads):
        norms = np.sqrt((grad.astype(float) ** 2).sum(axis=1, keepdims=True))
        clipped = grad * np.minimum(1, clip_norm / np.sqrt(world_size) / norms).astype(F32)
        velocity = momentum * velocity + clipped
        residual = residual + velocity
        lists = []
        for r in range(world_size):
            indices = selected(TopK(k=k), residual[r])
            lists.append((indices, residual[r, indices]))
            residual[r, indices] = velocity[r, indices] = 0
        for rank in runs:
            np.testing.assert_allclose(rank.means[step], sparse_mean(lists, SIZE), rtol=1e-5, atol=1e-7)
    for rank, state in zip(runs, velocity, strict=True):
        np.testing.assert_allclose(rank.reducer.keep("velocity"), state, rtol=1e-5, atol=1e-7)


def test_momentum_goes_on_where_everything_is_sent():
    grads = gradients(2, steps=3)
    velocity = 0
    for mean, grad in zip(run(ErrorFeedback(TopK(1.0, momentum=0.5)), grads)[0].means, grads, strict=True):
        velocity = 0.5 * velocity + mean_of(grad)
        np.testing.assert_allclose(mean, velocity, rtol=1e-4, atol=1e-6)


def test_warm_up_thins_out_stage_by_stage():
    codec = TopK(0.01, warm_up_steps=2)
    assert [codec.count(1000, step) for step in range(8)] == [250, 250, 63, 63, 16, 16, 10, 10]
    grads = gradients(2, steps=8, size=1000)

    def body(comm):
        rank = Run(ErrorFeedback(codec), comm, 1000)
        return [(rank.step(step).last.wire_bytes - 24) // 8 for step in grads]

    assert on_ranks(2, body)[0] == [codec.count(1000, step) for step in range(8)]


def test_a_state_goes_on_under_other_options_but_not_as_another_codec():
    """The last step, whose share is everything, sends all that the varying shares have left."""
    grads = gradients(3, steps=4, size=101)

    def body(comm):
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
        return received

    for received in on_ranks(3, body):
        np.testing.assert_allclose(received, grads.mean(axis=1).sum(axis=0), atol=1e-5)


def test_a_bucket_cannot_be_started_twice():
    def body(comm):
        codec = Fp32()
        reducer = codec.attach(comm.empty(4), comm, label="b7")
        reduction = PendingReduction(codec, reducer)
        with pytest.raises(UsageError, match="b7"):
            PendingReduction(codec, reducer)
        finish_all([reduction])
        finish_all([PendingReduction(codec, reducer)])

    on_ranks(2, body)


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


def test_power_sgd_finds_a_matrix_of_its_rank():
    rng = np.random.default_rng(1)
    grad = np.zeros(SIZE, F32)
    grad[:2000] = (rng.standard_normal((40, 2)) @ rng.standard_normal((2, 50))).reshape(-1)
    for rank in run(PowerSGD(rank=2), np.broadcast_to(grad, (2, 3, SIZE))):
        np.testing.assert_allclose(rank.means[1], grad, atol=1e-5)
        sent = 4 * (2 * (40 + 25) + 2003) + 4 * 2 * (50 + 40)
        assert rank.last.wire_bytes == sent * 4 // 3 + 2 * 24
        assert rank.last.wire_bytes < 0.5 * rank.last.dense_bytes


def test_power_sgd_recovers_from_gradients_of_zero():
    grads = gradients(2, steps=6)
    grads[:3] = 0
    grads[3:, :, :2000] = np.outer(np.arange(40), np.arange(50)).reshape(-1)
    for rank in run(PowerSGD(rank=1), grads):
        np.testing.assert_allclose(rank.means[-1][:2000], grads[-1, 0, :2000], rtol=1e-4)


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
        shares = [matrix.astype(F32) * F32(scale) * F32(r + 1) for r in range(world_size)]  # denormal ones are coarse
        exact = [share.astype(np.float64) / world_size for share in shares]
        start = first_q(parts[0].name, m, rank).astype(F32)
        oracle = sum(exact) if rank * (n + m) >= n * m else projected(exact, start.astype(np.float64))

        def body(comm, shares=shares, parts=parts):
            bucket = comm.empty(shares[0].size)
            codec = PowerSGD(rank=rank)
            reducer = codec.attach(bucket, comm, parts=parts, label="b0")
            means = []
            for _ in range(3):
                bucket[:] = shares[comm.topology.rank].reshape(-1)
                assert finish_all([PendingReduction(codec, reducer)]) == [None]
                means.append(bucket.copy().reshape(parts[0].shape))
            return means

        norm = np.linalg.norm(sum(exact))
        # Numbers near zero are coarse, and so are P = M Q, which may be shorter than M.
        grain = 16 * np.sqrt(n * m) * np.finfo(F32).smallest_subnormal * (1 + norm / np.linalg.norm(sum(exact) @ start))
        for means in on_ranks(world_size, body):
            # Rounding may leave it one direction more than the oracle, and then it is closer to the gradient.
            missed = np.linalg.norm(sum(exact) - oracle)
            for step, mean in enumerate(means):
                error = np.linalg.norm(sum(exact) - mean)
                assert error <= missed * (1 + 1e-4) + 1e-5 * norm + grain, (name, step, error / norm)


def test_power_sgd_has_all_its_columns_after_gradients_of_lower_rank():
    rng = np.random.default_rng(2)
    left, right = (np.linalg.qr(rng.standard_normal((size, 2)))[0] for size in (40, 50))
    full = np.zeros(SIZE, F32)
    full[:2000] = (left @ np.diag([3, 2]) @ right.T).reshape(-1)
    for few in (np.outer(left[:, 1], right[:, 1]), np.outer(left[:, 0], np.ones(50)), np.ones((40, 50))):
        grads = np.zeros((8, 2, SIZE), F32)
        grads[:4, :, :2000] = few.reshape(-1)
        grads[0] = grads[4:] = full
        for rank in run(PowerSGD(rank=2), grads):
            np.testing.assert_allclose(rank.means[-1], full, atol=1e-5)


def test_an_error_inside_a_reduction_is_raised_again_and_never_taken_for_its_end():
    class Breaks(Fp32):
        def reduce(self, reducer):
            yield reducer.all_reduce(reducer.bucket, "mean")
            raise OSError("in the middle")

    def body(comm):
        codec = Breaks()
        reducer = codec.attach(comm.empty(4), comm, label="b0")
        reduction = PendingReduction(codec, reducer)
        for _ in range(3):
            with pytest.raises(OSError, match="in the middle"):
                reduction.resume()
            assert not reduction.finished
        with pytest.raises(UsageError, match="still being reduced"):
            PendingReduction(codec, reducer)
        assert reducer.statistics.reductions == 0

    on_ranks(2, body)


def test_a_lost_peer_is_named_again_by_the_next_start():
    class Lost(Work):
        def done(self):
            raise PeerLostError("rank 1 ended")

        def wait(self, timeout=None):
            self.done()

    class Loses(Fp32):
        def reduce(self, reducer):
            yield Lost()

    def body(comm):
        codec = Loses()
        reducer = codec.attach(comm.empty(4), comm)
        reduction = PendingReduction(codec, reducer)
        for again in (reduction.resume, reduction.resume, lambda: PendingReduction(codec, reducer)):
            with pytest.raises(PeerLostError, match="rank 1 ended"):
                again()

    on_ranks(1, body)


@worlds
def test_times_are_booked_where_they_are_spent(world_size, cls):
    class Slow(Fp32):
        def reduce(self, reducer):
            time.sleep(0.02)
            yield from super().reduce(reducer)
            time.sleep(0.04)

    def body(comm):
        codec = Slow()
        reducer = codec.attach(comm.empty(4), comm)
        finish_all([PendingReduction(codec, reducer)])
        return reducer.statistics

    for cost in on_ranks(world_size, body, cls=cls):
        assert cost.select_seconds >= 0.02
        assert cost.decode_seconds >= 0.04


def test_the_summary_is_the_mean_of_the_steps_since_another_one():
    earlier = CommunicationStatistics(2, 1, {("conv", "Fp16"): Statistics(2, 9_000, 6_000, 1.0, 2.0, 3.0, 7, 8, 0)})
    later = CommunicationStatistics(6, 3, {("conv", "Fp16"): Statistics(6, 21_000, 10_000, 1.1, 2.2, 3.3, 7, 10, 1)})
    later.buckets["fc", "Fp32"] = Statistics(4, 8_000, 8_000)
    assert (later - earlier).summary() == (
        "Communication: 0.003 MB/step of 0.005 MB dense (Fp16, Fp32), 25.00 ms select, 50.00 ms wait, "
        "75.00 ms decode, 1 of 8 reductions dense, 2 values too small for 16 bits, 2 steps skipped"
    )
    assert (later - later).summary().startswith("Communication: 0.000 MB/step of 0.000 MB dense (nothing), 0.00 ms")


@worlds
@pytest.mark.parametrize("codec", [Fp32(), PowerSGD(), ErrorFeedback(PowerSGD())], ids=repr)
def test_values_whose_sum_or_products_overflow_are_named(codec, world_size, cls):
    grads = gradients(world_size)
    share, first = float(np.finfo(F32).max) / world_size, world_size // 2
    fits, large = (0.49 * share, 2.02 * share) if codec == Fp32() else (1.0, 1e38)
    grads[0, :, 1234] = fits
    with np.errstate(over="ignore"):
        grads[1, first:, 1234:1300] = -large

    def body(comm):
        rank = Run(codec, comm)
        rank.step(grads[0])
        rank.bucket[:] = grads[1, comm.topology.rank]
        (verdict,) = finish_all([PendingReduction(codec, rank.reducer)])
        assert (verdict.rank, verdict.element) == (first, 1234)
        assert "too large" in verdict.text
        return rank.step(grads[2]).means[1]

    for mean in on_ranks(world_size, body, cls=cls):
        assert np.isfinite(mean).all()


@pytest.mark.parametrize("wrap", [lambda codec: codec, ErrorFeedback], ids=["bare", "with error feedback"])
@pytest.mark.parametrize("codec", [ChunkedTopK(), Quantized(4)], ids=["chunked top-K", "quantized"])
def test_ranks_that_send_another_format_are_refused(codec, wrap):
    newer = type("Newer", (type(codec),), {"wire_format": 2, "kind": codec.kind})

    def body(comm):
        own = newer(**{name: getattr(codec, name) for name in codec.__match_args__}) if comm.topology.rank else codec
        with pytest.raises(MismatchError) as info:
            wrap(own).attach(np.zeros(SIZE, F32), comm)
        return str(info.value)

    kind, cure = wrap(codec).kind, "install the same release of distopt on all hosts"
    first, second = (f"rank {rank} (host) {{}}{kind} in format {rank + 1}" for rank in (0, 1))
    assert on_ranks(2, body) == [
        f"{second.format('sends ')}, {first.format('')}; {cure}",
        f"{first.format('sends ')}, {second.format('')}; {cure}",
    ]


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
