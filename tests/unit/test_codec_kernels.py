import numpy as np
import pytest

from distopt import _core
from distopt.kernels import host
from tests.conformance.oracle import bfloat16_from, bfloat16_to

F32 = np.float32
SIZES = [0, 1, 3, 15, 16, 17, 511, 4095, 4096, 5000, 70001]
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}

pytestmark = pytest.mark.usefixtures("isa")


def unaligned(array):
    """The same values at an address that is a multiple of 4 only."""
    room = np.empty(array.size + 1, array.dtype)
    room[1:] = array
    return room[1:]


def special(n, rng):
    x = rng.standard_normal(n).astype(F32)
    x[rng.integers(0, n, n // 3)] = rng.choice(
        np.array([0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38, 1.0, -1.0, 65504, 65519, 65520, 6e-8, 3e-8, 2.9e-8], F32),
        n // 3,
    )
    return x


def inputs(n):
    rng = np.random.default_rng(n)
    yield "random", rng.standard_normal(n).astype(F32)
    yield "zero", np.zeros(n, F32)
    yield "minus zero", np.full(n, -0.0, F32)
    yield "equal", np.where(rng.random(n) < 0.5, F32(0.25), F32(-0.25))
    yield "mostly zero", np.where(rng.random(n) < 0.01, rng.standard_normal(n), 0).astype(F32)
    yield "ascending", np.arange(n, dtype=F32)
    yield "one block", np.where(np.arange(n) < n // 9, 1000 + rng.random(n), rng.random(n)).astype(F32)
    if n >= 3:
        yield "special", special(n, rng)
        infinite = special(n, rng)
        infinite[[0, n // 2, n - 1]] = np.inf, -np.inf, np.inf
        yield "infinite", infinite
        broken = infinite.copy()
        broken[[1, n // 2]] = np.nan
        yield "nan", broken


def keys(x):
    return (x.view(np.uint32) & 0x7FFFFFFF).astype(np.int64)


def top_k_reference(x, k):
    return np.sort(np.argsort(-keys(x), kind="stable")[:k])


def top_k(x, k, **accumulation):
    room = _core.top_k_capacity(x.size, k)
    indices, values = np.full(room, -1, np.int32), np.full(room, 77, F32)
    count, nonfinite = _core.top_k(x, k, indices, values, **accumulation)
    assert count == k
    assert nonfinite == np.count_nonzero(~np.isfinite(values[:k]))
    return indices[:k], values[:k]


def threshold(x, bound, room=None, **accumulation):
    room = x.size + _core.list_slack if room is None else room
    indices, values = np.full(room, -1, np.int32), np.full(room, 77, F32)
    count, nonfinite = _core.threshold(x, bound, indices, values, **accumulation)
    if count + _core.list_slack > room:
        return count, None
    assert nonfinite == np.count_nonzero(~np.isfinite(values[:count]))
    return indices[:count], values[:count]


def same_bits(a, b):
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("n", SIZES)
def test_top_k_is_exact_and_breaks_ties_by_lowest_index(n):
    for name, x in inputs(n):
        x = unaligned(x)
        before = x.copy()
        for k in sorted({0, min(1, n), n // 1000, n // 100, n // 20, n // 3, n - n // 4, max(n - 1, 0), n}):
            expected = top_k_reference(x, k)
            for _ in range(2):
                indices, values = top_k(x, k)
                assert np.array_equal(indices, expected), (name, k)
                assert same_bits(values, x[expected]), (name, k)
        assert same_bits(x, before)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bound", [0.0, 1e-42, 0.25, 1.0, 2.5, 3e38])
def test_threshold_lists_what_reaches_it(n, bound):
    for name, x in inputs(n):
        x = unaligned(x)
        expected = np.flatnonzero(~(np.abs(x) < F32(bound)))
        indices, values = threshold(x, bound)
        assert np.array_equal(indices, expected), name
        assert same_bits(values, x[expected]), name


def test_the_estimate_of_a_selection_samples_more_than_it_looks_for():
    assert _core.selection_estimate(4095, 10) == (0, 0, 10), "it does not pay"
    assert _core.selection_estimate(5000, 2501) == (0, 0, 2501)
    for n, k in ((4096, 1), (100_003, 1000), (1 << 24, 1 << 18)):
        strata, rank, capacity = _core.selection_estimate(n, k)
        assert strata == min(n // 128, 2048)
        assert k / n < rank / (8 * strata) <= 1
        assert k < capacity <= 4 * k + n // 256


def test_threshold_says_how_much_room_it_needs():
    x = np.arange(1, 5001, dtype=F32)
    assert threshold(x, 0.5, room=1000) == (5000, None)
    assert threshold(x, 0.5, room=0) == (5000, None)
    assert threshold(x, 4991, room=_core.list_slack + 10)[0].tolist() == list(range(4990, 5000))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("with_momentum", [False, True])
def test_accumulation_happens_in_the_selecting_pass(n, with_momentum):
    rng = np.random.default_rng(n)
    scale, decay = F32(0.7), F32(0.9)
    for name, grad in inputs(n):
        for k in sorted({0, n // 100, n // 2, n}):
            residual, momentum = (rng.standard_normal(n).astype(F32) for _ in range(2))
            with np.errstate(invalid="ignore", over="ignore"):
                step = scale * grad + decay * momentum if with_momentum else scale * grad
                total = residual + step
            arrays = {"residual": unaligned(residual)}
            if with_momentum:
                arrays["momentum"] = unaligned(momentum)
            indices, values = top_k(grad, k, **arrays, scale=scale, decay=decay)
            expected = top_k_reference(total, k)
            np.testing.assert_array_equal(arrays["residual"], total, err_msg=name)
            if with_momentum:
                np.testing.assert_array_equal(arrays["momentum"], step, err_msg=name)
            if not np.isnan(total).any():  # how NaN orders among NaN depends on its payload
                assert np.array_equal(indices, expected), (name, k)
            np.testing.assert_array_equal(values, total[indices], err_msg=name)

            small = unaligned(residual)
            threshold(grad, 0.5, room=0, residual=small, scale=scale)
            with np.errstate(invalid="ignore", over="ignore"):
                np.testing.assert_array_equal(small, residual + scale * grad, err_msg=name)


def decoded(wire, kind):
    with np.errstate(invalid="ignore"):  # ARM's conversion of a signalling NaN
        return wire.view(np.float16).astype(F32) if kind == "float16" else bfloat16_to(wire)


@pytest.mark.sweep(rest=100)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("with_residual", [False, True])
def test_cast_rounds_to_nearest_even_saturates_and_counts(n, kind, ranks, with_residual):
    limit = F32(_core.cast_limit(kind, ranks))
    scale = F32(F32(1) / F32(ranks))
    rng = np.random.default_rng(n)
    for name, x in inputs(n):
        before = rng.standard_normal(n).astype(F32)
        residual = unaligned(before) if with_residual else None
        out = unaligned(np.full(n, 77, np.uint16))
        counts = _core.encode16(unaligned(x), out, kind, scale, limit, residual)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            total = before + x if with_residual else x
            scaled = total * scale
            clamped = np.where(np.abs(scaled) > limit, np.copysign(limit, scaled), scaled)
            expected = clamped.astype(np.float16).view(np.uint16) if kind == "float16" else bfloat16_from(clamped)
            nan = np.isnan(total)
            assert np.array_equal(out[~nan], expected[~nan]), name
            assert np.isnan(decoded(out, kind)[nan]).all(), name
            assert counts == (
                np.count_nonzero(np.abs(scaled) > limit),
                np.count_nonzero((decoded(out, kind) == 0) & (total != 0)),
                np.count_nonzero(nan),
            ), name
            if with_residual:
                lost = total - decoded(expected, kind) * (F32(1) / scale)
                np.testing.assert_array_equal(residual, np.where(nan, np.nan, lost), err_msg=name)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_all_16_bit_values_survive_the_way_there_and_back(kind):
    wire = unaligned(np.arange(65536).astype(np.uint16))
    values = np.empty(wire.size, F32)
    _core.decode16(wire, values, kind, 1.0)
    np.testing.assert_array_equal(values, decoded(wire, kind))
    back = np.empty_like(wire)
    finite = np.isfinite(values)
    overflowed, underflowed, nan = _core.encode16(values, back, kind, 1.0, LARGEST[kind])
    assert np.array_equal(back[finite], wire[finite])
    assert (overflowed, underflowed, nan) == (2, 0, np.count_nonzero(np.isnan(values)))
    assert np.array_equal(decoded(back, kind)[np.isinf(values)], [LARGEST[kind], -LARGEST[kind]])
    scaled = np.empty(wire.size, F32)
    _core.decode16(wire, scaled, kind, 0.5)
    np.testing.assert_array_equal(scaled, values * F32(0.5))


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_cast_limit_is_the_largest_that_all_ranks_can_add_up(kind):
    for ranks in [1, 2, 3, 4, 7, 64, 1000]:
        limit = _core.cast_limit(kind, ranks)
        wire = np.empty(1, np.uint16)
        assert _core.encode16(np.array([limit], F32), wire, kind, 1.0, LARGEST[kind]) == (0, 0, 0)
        assert decoded(wire, kind)[0] == F32(limit)
        following = decoded(wire + np.uint16(1), kind)[0].astype(float)
        assert limit * ranks <= LARGEST[kind] < following * ranks


@pytest.mark.parametrize("n", SIZES)
def test_squared_norm(n):
    x = unaligned(np.random.default_rng(n).standard_normal(n).astype(F32) * F32(1e30))
    expected = np.dot(x.astype(float), x.astype(float))
    assert _core.squared_norm(x) == pytest.approx(expected, rel=1e-12)
    for bad in [np.nan, np.inf, -np.inf] if n else []:
        x[n // 2] = bad
        assert not np.isfinite(_core.squared_norm(x))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_first_nonfinite(dtype):
    n = 5001
    x = unaligned(np.full(n, np.finfo(dtype).max, dtype))
    x[1::3] = np.finfo(dtype).smallest_subnormal
    assert host.first_nonfinite(x) is None
    assert host.first_nonfinite(x[:0]) is None
    for index in range(n - 1, -1, -1):
        good, x[index] = x[index], [np.nan, np.inf, -np.inf][index % 3]
        assert host.first_nonfinite(x) == index
        if index % 7:  # what lies behind stays now and then
            x[index] = good


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_mark_beyond(dtype):
    n, limit = 5001, 3.0
    x, from_bad = unaligned(np.resize(np.array([limit, -limit, 0], dtype), n)), np.array([7])
    host.mark_beyond(x, limit, from_bad)
    host.mark_beyond(x[:0], limit, from_bad)
    assert (from_bad[0], x[0]) == (0, limit)
    for index, value in enumerate([np.nan, np.inf, -np.inf, 3.1, -3.1], start=2046):
        marked = x.copy()
        marked[[index, -1]] = value, np.nan
        host.mark_beyond(marked, limit, from_bad)
        assert from_bad[0] == n - index
        assert np.isnan(marked[0])
        assert np.array_equal(marked[1:index], x[1:index])


@pytest.mark.parametrize("n", [1, 17, 5000])
def test_scatter_add_runs_list_after_list_inside_the_range(n):
    rng = np.random.default_rng(n)
    lists = [np.sort(rng.choice(n, size, replace=False)).astype(np.int32) for size in (0, n, n // 2, min(n, 1))]
    values = [(rng.standard_normal(part.size) * 10.0**rank).astype(F32) for rank, part in enumerate(lists)]
    for lo, hi in [(0, n), (0, 0), (n // 3, n - n // 4), (n, n)]:
        dense = unaligned(rng.standard_normal(n).astype(F32))
        expected = dense.copy()
        for part, value in zip(lists, values, strict=True):
            inside = (part >= lo) & (part < hi)
            expected[part[inside]] += value[inside] * F32(0.3)
        _core.scatter_add(dense, lists, values, lo, hi, 0.3)
        assert same_bits(dense, expected)


def test_clear_at():
    dense = np.arange(1, 11, dtype=F32)
    _core.clear_at(dense, np.array([0, 4, 9], np.int32))
    assert np.flatnonzero(dense == 0).tolist() == [0, 4, 9]


@pytest.mark.parametrize("indices", [[-1, 2], [2, 10], [3, 3], [5, 4]])
def test_indices_outside_or_out_of_order_are_refused(indices):
    bad, values = np.array(indices, np.int32), np.ones(2, F32)
    dense = np.zeros(10, F32)
    with pytest.raises(ValueError, match="ascend"):
        _core.scatter_add(dense, [bad], [values], 0, 10)
    with pytest.raises(ValueError, match="ascend"):
        _core.clear_at(dense, bad)
    assert not dense.any()


def test_arrays_that_do_not_fit_are_refused():
    x = np.zeros(10, F32)
    room = _core.top_k_capacity(10, 3)
    lists = np.zeros(room, np.int32), np.zeros(room, F32)
    with pytest.raises(ValueError, match="larger"):
        _core.top_k(x, 11, *lists)
    with pytest.raises(ValueError, match="capacity"):
        _core.top_k(x, 3, lists[0][1:], lists[1][1:])
    with pytest.raises(ValueError, match="negative"):
        _core.threshold(x, -1.0, *lists)
    with pytest.raises(ValueError, match="length"):
        _core.top_k(x, 3, *lists, residual=x[1:])
    with pytest.raises(ValueError, match="length"):
        _core.encode16(x, np.zeros(9, np.uint16), "float16", 1.0, 1.0)
    with pytest.raises(ValueError, match="range"):
        _core.scatter_add(x, [], [], 0, 11)
    with pytest.raises(TypeError):
        _core.top_k(x.astype(float), 3, *lists)
    with pytest.raises(TypeError):
        _core.top_k(np.zeros(20, F32)[::2], 3, *lists)
    with pytest.raises(TypeError):
        _core.scatter_add(x, [np.zeros(1, np.int64)], [np.zeros(1, F32)], 0, 10)
