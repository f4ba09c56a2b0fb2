"""Encodings in a few bits an element, against readers and writers of their formats that go element by element."""

import numpy as np
import pytest

from distopt import _core
from tests.unit.test_codec_kernels import SIZES, inputs, keys, same_bits, unaligned

F32 = np.float32
BLOCK, CHUNK = _core.quantized_block, _core.top_chunk
SIZES = [*SIZES, BLOCK - 1, BLOCK, BLOCK + 1]

pytestmark = [pytest.mark.usefixtures("isa"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def finite_inputs(n):
    return [(name, x) for name, x in inputs(n) if np.isfinite(x).all()]


def with_residual(x):
    residual = np.random.default_rng(x.size + 1).standard_normal(x.size).astype(F32)
    return residual, x + residual


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
    scales = rows[:, :4].copy().view(F32)[:, 0]
    codes = [(rows[:, 4:] >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    q = np.concatenate(codes, axis=1).astype(np.int64) - (2 ** (bits - 1) - 1)
    return q.reshape(-1)[:n], np.repeat(scales, BLOCK)[:n]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_blocks_are_rounded_to_the_nearest_multiple_of_their_scale(n, bits):
    bound = 2 ** (bits - 1) - 1
    for name, x in finite_inputs(n):
        residual, total = with_residual(x)
        if not np.isfinite(total).all():
            continue
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
    scaled = x / scales
    assert (np.abs(q - scaled) < 1.001).all()
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
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("k", [1, 63, 64, 4096])
@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_chunks_have_their_largest_elements(n, k, bits):
    for name, x in finite_inputs(n):
        residual, total = with_residual(x)
        if not np.isfinite(total).all():
            continue
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


def test_two_levels_are_the_means_of_the_values_nearer_to_each_end():
    x = np.zeros(CHUNK, F32)
    x[[5, 70, 900, 4000]] = 1, -1.5, 4, -8  # nearer to 1: 1, 1.5, 4; to 8: 8
    wire, _ = encode_chunks(x, 4, 2)
    ((positions, levels, _, values),) = read_chunks(wire, CHUNK, 4, 2)
    assert positions.tolist() == [5, 70, 900, 4000]
    assert levels == (F32(2.171875), 8)  # (1 + 1.5 + 4) / 3 as bfloat16
    assert values.tolist() == [2.171875, -2.171875, 2.171875, -8]


def test_a_chunk_unlike_the_one_before_it():
    """The key that the chunk before lets expect may let too few through, or all."""
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


def test_positions_beyond_the_array_change_nothing():
    x = np.ones(100, F32)
    wire, _ = encode_chunks(x, 4096, 2)
    wire[4:] = 0xFF
    out = np.empty(100, F32)
    _core.decode_chunks(wire[None], out, 4096, 2)
    assert not out.any()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: _core.blocks_bytes(3, 3), "bits are not 8, 4 or 2"),
        (lambda x: _core.chunks_bytes(3, 0, 2), "k is not in 1 ... 4096"),
        (lambda x: _core.chunks_bytes(3, 4097, 2), "k is not in 1 ... 4096"),
        (lambda x: _core.chunks_bytes(3, 1, 3), "bits are not 2, 4, 8 or 16"),
        (lambda x: _core.encode_blocks(x, np.empty(3, np.uint8), 4), "blocks_bytes"),
        (lambda x: _core.encode_blocks(x, np.empty(132, np.uint8), 4, x[1:]), "differ in length"),
        (lambda x: _core.decode_blocks(np.empty(3, np.uint8), x, 4), "blocks_bytes"),
        (lambda x: _core.encode_chunks(x, np.empty(3, np.uint8), 64, 2), "chunks_bytes"),
        (lambda x: _core.decode_chunks(np.empty((2, 3), np.uint8), x, 64, 2), "chunks_bytes"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call(np.zeros(10, F32))
