"""Kernels of codecs, against NumPy, and encodings in a few bits against readers that go element by element."""

import numpy as np
import pytest

from distopt import _core
from distopt.kernels import host
from tests.conformance.oracle import bfloat16_from, bfloat16_to
from tests.unit.refusals import refused

F32 = np.float32
SIZES = [0, 1, 3, 15, 16, 17, 511, 4095, 4096, 5000, 70001]
BLOCK, CHUNK = _core.quantized_block, _core.top_chunk
FEW_BITS_SIZES = [*SIZES, BLOCK - 1, BLOCK, BLOCK + 1]
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}

pytestmark = [pytest.mark.usefixtures("isa"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


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


def test_the_room_of_a_selection():
    assert _core.selection_estimate(4095, 10) == (0, 0, 10), "it does not pay"
    assert _core.selection_estimate(5000, 2501) == (0, 0, 2501)
    for n, k in ((4096, 1), (100_003, 1000), (1 << 24, 1 << 18)):
        strata, rank, capacity = _core.selection_estimate(n, k)
        assert strata == min(n // 128, 2048)
        assert k / n < rank / (8 * strata) <= 1
        assert k < capacity <= 4 * k + n // 256
    x = np.arange(1, 5001, dtype=F32)
    assert threshold(x, 0.5, room=1000) == threshold(x, 0.5, room=0) == (5000, None)
    assert threshold(x, 4991, room=_core.list_slack + 10)[0].tolist() == list(range(4990, 5000))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("with_momentum", [False, True])
def test_accumulation_happens_in_the_selecting_pass(n, with_momentum):
    rng = np.random.default_rng(n)
    scale, decay = F32(0.7), F32(0.9)
    for name, grad in inputs(n):
        for k in sorted({0, n // 100, n // 2, n}):
            residual, momentum = (rng.standard_normal(n).astype(F32) for _ in range(2))
            step = scale * grad + decay * momentum if with_momentum else scale * grad
            total = residual + step
            arrays = {"residual": unaligned(residual)}
            if with_momentum:
                arrays["momentum"] = unaligned(momentum)
            indices, values = top_k(grad, k, **arrays, scale=scale, decay=decay)
            np.testing.assert_array_equal(arrays["residual"], total, err_msg=name)
            if with_momentum:
                np.testing.assert_array_equal(arrays["momentum"], step, err_msg=name)
            if not np.isnan(total).any():  # how NaN orders among NaN depends on its payload
                assert np.array_equal(indices, top_k_reference(total, k)), (name, k)
            np.testing.assert_array_equal(values, total[indices], err_msg=name)

            small = unaligned(residual)
            threshold(grad, 0.5, room=0, residual=small, scale=scale)
            np.testing.assert_array_equal(small, residual + scale * grad, err_msg=name)


def decoded(wire, kind):
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
def test_16_bit_values_survive_the_way_and_all_ranks_can_add_up_the_limit(kind):
    wire = unaligned(np.arange(65536).astype(np.uint16))
    values = np.empty(wire.size, F32)
    _core.decode16(wire, values, kind, 1.0)
    np.testing.assert_array_equal(values, decoded(wire, kind))
    back = np.empty_like(wire)
    finite = np.isfinite(values)
    assert _core.encode16(values, back, kind, 1.0, LARGEST[kind]) == (2, 0, np.count_nonzero(np.isnan(values)))
    assert np.array_equal(back[finite], wire[finite])
    assert np.array_equal(decoded(back, kind)[np.isinf(values)], [LARGEST[kind], -LARGEST[kind]])
    scaled = np.empty(wire.size, F32)
    _core.decode16(wire, scaled, kind, 0.5)
    np.testing.assert_array_equal(scaled, values * F32(0.5))
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
    assert _core.squared_norm(x) == pytest.approx(np.dot(x.astype(float), x.astype(float)), rel=1e-12)
    for bad in [np.nan, np.inf, -np.inf] if n else []:
        x[n // 2] = bad
        assert not np.isfinite(_core.squared_norm(x))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_first_element_that_is_not_finite_or_beyond_a_limit_is_found(dtype):
    n = 5001
    x = unaligned(np.full(n, np.finfo(dtype).max, dtype))
    x[1::3] = np.finfo(dtype).smallest_subnormal
    assert host.first_nonfinite(x) is host.first_nonfinite(x[:0]) is None
    for index in range(n - 1, -1, -1):
        good, x[index] = x[index], [np.nan, np.inf, -np.inf][index % 3]
        assert host.first_nonfinite(x) == index
        if index % 7:  # what lies behind stays now and then
            x[index] = good
    limit = 3.0
    x, from_bad = unaligned(np.resize(np.array([limit, -limit, 0], dtype), n)), np.array([7])
    for given in (x, x[:0]):
        host.find_beyond(given, limit, from_bad)
        assert from_bad[0] == 0
    for index, value in enumerate([np.nan, np.inf, -np.inf, 3.1, -3.1], start=2046):
        bad = x.copy()
        bad[[index, -1]] = value, np.nan
        host.find_beyond(bad, limit, from_bad)
        assert from_bad[0] == n - index


@pytest.mark.parametrize("buckets", [1, 3, 70])
def test_any_bad(buckets):
    for ranks in (1, 2, 300):
        headers = [np.resize(np.array([5, 7, 0]), 3 * ranks) for _ in range(buckets)]
        assert not host.any_bad(headers)
        for bucket, rank in ((0, 0), (buckets - 1, ranks - 1)):
            bad = [each.copy() for each in headers]
            bad[bucket][3 * rank + 2] = 1
            assert host.any_bad(bad)


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


def test_places_are_cleared_and_none_outside_or_out_of_order():
    dense = np.arange(1, 11, dtype=F32)
    _core.clear_at(dense, np.array([0, 4, 9], np.int32))
    assert np.flatnonzero(dense == 0).tolist() == [0, 4, 9]
    before = dense.copy()
    for indices in ([-1, 2], [2, 10], [3, 3], [5, 4]):
        bad = np.array(indices, np.int32)
        refused(ValueError, "ascend", _core.scatter_add, dense, [bad], [np.ones(2, F32)], 0, 10)
        refused(ValueError, "ascend", _core.clear_at, dense, bad)
        assert same_bits(dense, before)


X, BYTES = np.zeros(10, F32), np.empty(3, np.uint8)
LISTS = np.zeros(_core.top_k_capacity(10, 3), np.int32), np.zeros(_core.top_k_capacity(10, 3), F32)


@pytest.mark.parametrize(
    ("text", "call", "arguments"),
    [
        ("larger", _core.top_k, (X, 11, *LISTS)),
        ("capacity", _core.top_k, (X, 3, LISTS[0][1:], LISTS[1][1:])),
        ("negative", _core.threshold, (X, -1.0, *LISTS)),
        ("length", _core.top_k, (X, 3, *LISTS, X[1:])),
        ("length", _core.encode16, (X, np.zeros(9, np.uint16), "float16", 1.0, 1.0)),
        ("range", _core.scatter_add, (X, [], [], 0, 11)),
        ("", _core.top_k, (X.astype(float), 3, *LISTS)),
        ("", _core.top_k, (np.zeros(20, F32)[::2], 3, *LISTS)),
        ("", _core.scatter_add, (X, [np.zeros(1, np.int64)], [np.zeros(1, F32)], 0, 10)),
        ("bits are not 8, 4 or 2", _core.blocks_bytes, (3, 3)),
        *(("k is not in 1 ... 4096", _core.chunks_bytes, (3, k, 2)) for k in (0, 4097)),
        ("bits are not 2, 4, 8 or 16", _core.chunks_bytes, (3, 1, 3)),
        ("blocks_bytes", _core.encode_blocks, (X, BYTES, 4)),
        ("differ in length", _core.encode_blocks, (X, np.empty(132, np.uint8), 4, X[1:])),
        ("blocks_bytes", _core.decode_blocks, (BYTES, X, 4)),
        ("chunks_bytes", _core.encode_chunks, (X, BYTES, 64, 2)),
        ("chunks_bytes", _core.decode_chunks, (np.empty((2, 3), np.uint8), X, 64, 2)),
    ],
)
def test_arrays_that_do_not_fit_are_refused(text, call, arguments):
    if text:
        refused(ValueError, text, call, *arguments)
    else:  # nanobind lists the types, line after line
        with pytest.raises(TypeError):
            call(*arguments)


# -- a few bits an element ---------------------------------------------------------------------------------------------
def finite_inputs(n):
    """Inputs with a residual and their sum, which is finite."""
    residual = np.random.default_rng(n + 1).standard_normal(n).astype(F32)
    return [(name, x, residual, x + residual) for name, x in inputs(n) if np.isfinite(x + residual).all()]


def numbers_of(data, bits, count):
    """The first `count` numbers of so many bits in bytes, the first in the lowest bits."""
    flat = np.unpackbits(data, bitorder="little")[: count * bits].reshape(count, bits).astype(np.int64)
    return (flat << np.arange(bits)).sum(axis=1)


# -- blocks ------------------------------------------------------------------------------------------------------------
def encode_blocks(x, bits, residual=None, seed=None):
    wire = unaligned(np.full(_core.blocks_bytes(x.size, bits), 0xEE, np.uint8))
    left = None if residual is None else np.full(x.size, 77, F32)
    assert _core.encode_blocks(x, wire, bits, residual, left, seed) == x.size
    return wire, left


def read_blocks(wire, n, bits):
    """The integers and the scales of the elements."""
    rows = wire.reshape(-1, 4 + BLOCK * bits // 8)
    codes = [(rows[:, 4:] >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    q = np.concatenate(codes, axis=1).astype(np.int64) - (2 ** (bits - 1) - 1)
    return q.reshape(-1)[:n], np.repeat(rows[:, :4].copy().view(F32)[:, 0], BLOCK)[:n]


@pytest.mark.parametrize("n", FEW_BITS_SIZES)
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_blocks_are_rounded_to_the_nearest_multiple_of_their_scale(n, bits):
    bound = 2 ** (bits - 1) - 1
    for name, x, residual, total in finite_inputs(n):
        wire, left = encode_blocks(unaligned(x), bits, residual)
        q, scales = read_blocks(wire, n, bits)
        for begin in range(0, n, BLOCK):
            largest = np.abs(total[begin : begin + BLOCK]).max()
            assert scales[begin] == largest / F32(bound), name
        want = np.clip(
            np.rint(total * np.where(scales > 0, F32(1) / np.where(scales > 0, scales, 1), 0)), -bound, bound
        )
        assert np.array_equal(q, want), name
        sent = q.astype(F32) * scales
        assert same_bits(left, total - sent), name
        out = np.full(n, 55, F32)
        _core.decode_blocks(wire, out, bits, 0.5)
        assert np.array_equal(out, sent * F32(0.5)), name
        before = out.copy()
        _core.decode_blocks(wire, out, bits, 1.0, True)
        assert np.array_equal(out, before + sent), name


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_stochastic_rounding_keeps_the_mean_and_follows_its_seed(bits):
    x = np.tile(np.linspace(-1, 1, BLOCK, dtype=F32), 2000)
    wire, _ = encode_blocks(x, bits, seed=5)
    again, _ = encode_blocks(x, bits, seed=5)
    other, _ = encode_blocks(x, bits, seed=6)
    assert np.array_equal(wire, again)
    assert not np.array_equal(wire, other)
    q, scales = read_blocks(wire, x.size, bits)
    assert (np.abs(q - (x / scales)) < 1.001).all()
    means = (q * scales).reshape(-1, BLOCK).mean(axis=0)
    assert np.abs(means - x[:BLOCK]).max() < 5 * scales[0] / 2 / 2000**0.5  # five standard deviations, at most


# -- chunks ------------------------------------------------------------------------------------------------------------
def encode_chunks(x, k, bits, residual=None):
    wire = unaligned(np.full(_core.chunks_bytes(x.size, k, bits), 0xEE, np.uint8))
    left = None if residual is None else np.full(x.size, 77, F32)
    assert _core.encode_chunks(x, wire, k, bits, residual, left) == x.size
    return wire, left


def read_chunks(wire, n, k, bits):
    """For each chunk the positions of its elements in the array, the two levels, the codes, and the values."""
    at = 0
    for begin in range(0, n, CHUNK):
        count = -(-min(CHUNK, n - begin) * k // CHUNK)
        half = wire[at : at + 4].copy().view(np.uint16).astype(np.uint32) << 16
        low, high = half.view(F32)
        at += 4
        positions = numbers_of(wire[at : at + -(-count * 12 // 8)], 12, count)
        at += -(-count * 12 // 8)
        codes = numbers_of(wire[at : at + -(-count * bits // 8)], bits, count)
        at += -(-count * bits // 8)
        magnitudes = low + (codes >> 1).astype(F32) * ((high - low) / F32(2 ** (bits - 1) - 1))
        yield begin + positions, (low, high), codes, np.where(codes & 1, -magnitudes, magnitudes).astype(F32)
    assert at == wire.size


@pytest.mark.sweep(rest=150)
@pytest.mark.parametrize("n", FEW_BITS_SIZES)
@pytest.mark.parametrize("k", [1, 63, 64, 4096])
@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_chunks_have_their_largest_elements(n, k, bits):
    for name, x, residual, total in finite_inputs(n):
        wire, left = encode_chunks(unaligned(x), k, bits, residual)
        sent = np.zeros(n, F32)
        for positions, (low, high), codes, values in read_chunks(wire, n, k, bits):
            chunk = slice(positions[0] // CHUNK * CHUNK, positions[0] // CHUNK * CHUNK + CHUNK)
            order = np.argsort(-keys(total[chunk]), kind="stable")[: len(positions)]
            assert np.array_equal(positions, chunk.start + np.sort(order)), name
            own = total[positions]
            assert np.array_equal(codes & 1, own < 0), name
            largest, smallest = np.abs(own).max(), np.abs(own).min()
            assert smallest * F32(0.99) <= low <= high <= max(largest * F32(1.01), F32(1e-40)), name
            half_step = (high - low) / F32(2 ** (bits - 1) - 1) / 2
            nearest = np.abs(np.abs(values) - np.clip(np.abs(own), low, high))
            assert (nearest <= half_step * F32(1.001) + np.abs(own) * F32(1e-6)).all(), name
            sent[positions] = values
        want = total.copy()
        chosen = sent != 0
        want[chosen] -= sent[chosen]
        assert np.array_equal(left, want), name
        out = np.full(n, 55, F32)
        _core.decode_chunks(np.stack([wire, wire]), out, k, bits, 0.25)
        assert np.array_equal(out, sent * F32(0.25) + sent * F32(0.25)), name


def test_chunks_unlike_each_other_have_levels_and_positions_of_their_own():
    x = np.zeros(CHUNK, F32)
    x[[5, 70, 900, 4000]] = 1, -1.5, 4, -8  # nearer to 1: 1, 1.5, 4; to 8: 8
    wire, _ = encode_chunks(x, 4, 2)
    ((positions, levels, _, values),) = read_chunks(wire, CHUNK, 4, 2)
    assert positions.tolist() == [5, 70, 900, 4000]
    assert levels == (F32(2.171875), 8)  # (1 + 1.5 + 4) / 3 as bfloat16
    assert values.tolist() == [2.171875, -2.171875, 2.171875, -8]
    x = np.ones(100, F32)
    wire, _ = encode_chunks(x, 4096, 2)
    wire[4:] = 0xFF
    out = np.empty(100, F32)
    _core.decode_chunks(wire[None], out, 4096, 2)
    assert not out.any()
    # The key that the chunk before lets expect may let too few through, or all.
    rng = np.random.default_rng(3)
    scales = np.repeat([1, 1e-30, 1e30, 0, 1, 1e-3, 1e-2], CHUNK).astype(F32)
    x = rng.standard_normal(scales.size).astype(F32) * scales
    wire, _ = encode_chunks(x, 64, 16)
    for number, (positions, *_) in enumerate(read_chunks(wire, x.size, 64, 16)):
        chunk = x[number * CHUNK : (number + 1) * CHUNK]
        assert np.array_equal(positions - number * CHUNK, np.sort(np.argsort(-keys(chunk), kind="stable")[:64]))


# -- both --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("places", [[0], [5000], [9999], [300, 9000]])
def test_the_first_unusable_element_is_named(bad, places):
    x = np.random.default_rng(1).standard_normal(10_000).astype(F32)
    x[places] = bad
    residual, left = np.ones(x.size, F32), np.empty(x.size, F32)
    blocks = np.empty(_core.blocks_bytes(x.size, 4), np.uint8)
    chunks = np.empty(_core.chunks_bytes(x.size, 64, 2), np.uint8)
    for given in ((), (residual, left)):
        assert _core.encode_blocks(x, blocks, 4, *given) == places[0]
        assert _core.encode_chunks(x, chunks, 64, 2, *given) == places[0]
