"""The kernels of the codecs on the GPU against those of the CPU, on the same arrays."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu import require_gpu

require_gpu()

import cupy  # noqa: E402

from distopt import _core  # noqa: E402
from distopt.kernels import FINDINGS, FROM_BAD, Accumulation, gpu, host, kernels_of  # noqa: E402
from tests.unit.test_codec_kernels import inputs, same_bits  # noqa: E402

F32 = np.float32
TILE = 8192  # of a selecting block; half of it is a tile of a sum of lists, and where estimates begin
SIZES = [0, 1, 3, 17, 1023, TILE // 2 - 1, TILE // 2, TILE, TILE + 1, 3 * TILE + 5, 40_003]


@pytest.fixture(params=[0, 1], ids=["aligned", "unaligned"])
def offset(request):
    """Elements between a 16-byte boundary and the arrays."""
    return request.param


@pytest.fixture(autouse=True)
def stream():
    with cupy.cuda.Stream(non_blocking=True) as stream:
        yield stream


def on_device(array, offset=0):
    room = cupy.empty(array.size + offset, array.dtype)
    room[offset:] = cupy.asarray(array)
    return room[offset:]


def same(a, b):
    """Bits, apart from those of NaN."""
    a, b = (x.get() if isinstance(x, cupy.ndarray) else x for x in (a, b))
    nan = np.isnan(a)
    return np.array_equal(nan, np.isnan(b)) and same_bits(a[~nan], b[~nan])


def new_findings():
    return np.full(FINDINGS, -1, np.int64), cupy.full(FINDINGS, -1, np.int64)


def both(accumulation, offset):
    return accumulation, Accumulation(
        *(on_device(x, offset) if isinstance(x, np.ndarray) else x for x in accumulation[:2]), *accumulation[2:]
    )


def accumulations(n, rng, cases):
    """Each case with one of the three kinds of accumulation, in turn."""
    for i, case in enumerate(cases):
        residual, momentum = (rng.standard_normal(n).astype(F32) for _ in range(2))
        kinds = Accumulation(), Accumulation(residual, None, 0.7), Accumulation(residual, momentum, 0.7, 0.9)
        yield case, kinds[i % 3]


def check_state(ours, theirs):
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        assert a is None or same(a, b)


def test_kernels_are_chosen_by_the_array():
    assert kernels_of(np.zeros(1)) is host
    assert kernels_of(cupy.zeros(1)) is gpu


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_top_k_lists_what_the_cpu_lists(n, offset):
    rng = np.random.default_rng(n)
    # Four values of k and three kinds of accumulation: every pair comes up.
    cases = [(name, x, k) for name, x in inputs(n) for k in sorted({min(1, n), n // 100, n // 3, n} - {0})]
    for (name, x, k), accumulation in accumulations(n, rng, cases):
        x_device = on_device(x, offset)
        ours, theirs = both(accumulation, offset)
        lists, found = (host.new_lists(0), gpu.new_lists(0)), new_findings()
        # How NaN orders among NaN depends on its payload, which an addition may change.
        with_nan = ours.residual is not None and np.isnan(x).any()
        host.top_k(x, k, ours, lists[0], found[0])
        gpu.top_k(x_device, k, theirs, lists[1], found[1])
        case = name, k, accumulation[2:]
        assert found[0].tolist() == found[1].tolist(), case
        check_state(ours, theirs)
        if not with_nan:
            assert np.array_equal(lists[0].indices[:k], lists[1].indices[:k].get()), case
            assert same(lists[0].values[:k], lists[1].values[:k]), case
        assert same(x, x_device)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bound", [0.0, 1e-42, 1.0, 3e38])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_threshold_lists_what_the_cpu_lists(n, bound, offset):
    rng = np.random.default_rng(n)
    for (name, x), accumulation in accumulations(n, rng, inputs(n)):
        ours, theirs = both(accumulation, offset)
        lists, found = (host.new_lists(0), gpu.new_lists(n)), new_findings()
        host.threshold(x, bound, ours, lists[0], found[0])
        gpu.threshold(on_device(x, offset), bound, theirs, lists[1], found[1])
        count = found[0][0]
        assert found[0].tolist() == found[1].tolist(), name
        assert np.array_equal(lists[0].indices[:count], lists[1].indices[:count].get()), name
        assert same(lists[0].values[:count], lists[1].values[:count]), name
        check_state(ours, theirs)


@pytest.mark.parametrize("room", [0, 1, 4999, 5000])
def test_threshold_says_how_much_room_it_needs(room):
    x, residual = (np.arange(1, 5001, dtype=F32) for _ in range(2))
    lists, (_, found) = gpu.new_lists(room), new_findings()
    lists.values.fill(77)
    on_gpu = on_device(residual)
    gpu.threshold(on_device(x), 0.5, Accumulation(on_gpu), lists, found)
    assert found.tolist() == [5000, 0, 0, 0]
    assert same(on_gpu, residual + x)
    assert lists.values.get().tolist() == ((residual + x).tolist() if room == 5000 else [77] * room)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_accumulation_without_a_selection(n, offset):
    rng = np.random.default_rng(n)
    for (name, x), accumulation in accumulations(n, rng, inputs(n)):
        ours, theirs = both(accumulation, offset)
        found = new_findings()
        host.accumulate(x, ours, host.new_lists(0), found[0])
        gpu.accumulate(on_device(x, offset), theirs, gpu.new_lists(0), found[1])
        assert found[0].tolist() == found[1].tolist(), name
        check_state(ours, theirs)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("ranks", [3])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_casts_give_the_bits_and_counts_of_the_cpu(n, kind, ranks, with_residual, offset):
    rng = np.random.default_rng(n)
    limit, scale = _core.cast_limit(kind, ranks), 1 / ranks
    for name, x in inputs(n):
        residual = rng.standard_normal(n).astype(F32) if with_residual else None
        residual_device = on_device(residual, offset) if with_residual else None
        wire, found = np.full(n, 77, np.uint16), new_findings()
        wire_device, x_device = on_device(wire, 8 * offset // 2), on_device(x, offset)
        host.encode16(x, (residual, residual), wire, kind, scale, limit, found[0])
        gpu.encode16(x_device, (residual_device, residual_device), wire_device, kind, scale, limit, found[1])
        assert found[0].tolist() == found[1].tolist(), name
        nan = np.isnan(x)
        back = np.empty(n, F32)
        host.decode16(wire, back, kind, ranks)
        assert np.array_equal(wire[~nan], wire_device.get()[~nan]), name
        gpu.decode16(wire_device, x_device, kind, ranks)
        assert same(back, x_device), name
        if with_residual:
            assert same(residual, residual_device), name


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_all_16_bit_values_survive_the_way_there_and_back(kind):
    wire = np.arange(65536).astype(np.uint16)
    values, expected = cupy.empty(wire.size, F32), np.empty(wire.size, F32)
    gpu.decode16(cupy.asarray(wire), values, kind, 0.5)
    host.decode16(wire, expected, kind, 0.5)
    assert same(values, expected)
    back, (_, found) = cupy.empty(wire.size, np.uint16), new_findings()
    gpu.encode16(values, (None, None), back, kind, 2.0, _core.cast_limit(kind, 1), found)
    finite = np.isfinite(expected)
    assert np.array_equal(back.get()[finite], wire[finite])
    assert found.tolist()[:2] == [0, 2]
    assert wire.size - found.tolist()[FROM_BAD] == np.flatnonzero(np.isnan(expected))[0]
    # Halves of all values, among them what lies exactly between two.
    wire, ours = np.empty(wire.size, np.uint16), np.empty(FINDINGS, np.int64)
    host.encode16(expected, (None, None), wire, kind, 1.0, _core.cast_limit(kind, 1), ours)
    gpu.encode16(values, (None, None), back, kind, 1.0, _core.cast_limit(kind, 1), found)
    assert found.tolist() == ours.tolist()
    assert np.array_equal(back.get()[finite], wire[finite])


@pytest.mark.parametrize("n", [*SIZES, 300_007])
def test_clipping_scales_by_the_norm(n, offset):
    x = np.random.default_rng(n).standard_normal(n).astype(F32) * F32(1e30)
    norm = float(np.sqrt(np.dot(x.astype(float), x.astype(float))))
    for limit in [norm / 3, norm * 2]:
        expected = host.clip_scale(x, limit)
        found = [gpu.clip_scale(on_device(x, offset), limit).get()[0] for _ in range(2)]
        assert found == [pytest.approx(expected, rel=1e-6)] * 2
    for bad in [np.nan, np.inf] if n else []:
        x[n // 2] = bad
        assert gpu.clip_scale(on_device(x, offset), norm / 3).get()[0] == 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_scale_on_the_device_counts_like_one_on_the_host():
    rng = np.random.default_rng(0)
    x, residual = (rng.standard_normal(5000).astype(F32) for _ in range(2))
    scale = gpu.clip_scale(on_device(x), 3.0)
    results = []
    for factor in [scale, float(scale.get()[0])]:
        kept, lists, (_, found) = on_device(residual), gpu.new_lists(0), new_findings()
        gpu.top_k(on_device(x), 50, Accumulation(kept, None, factor), lists, found)
        results.append((kept.get(), lists.values[:50].get()))
    assert same_bits(results[0][0], results[1][0])
    assert same_bits(results[0][1], results[1][1])
    assert not same_bits(results[0][0], residual + x)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_first_nonfinite(dtype, offset):
    n = 50_001
    x = np.full(n, np.finfo(dtype).max, dtype)
    x[1::3] = np.finfo(dtype).smallest_subnormal
    assert gpu.first_nonfinite(on_device(x, offset)) is None
    assert gpu.first_nonfinite(on_device(x[:0], offset)) is None
    for index in (n - 1, 40_000, 2049, 16, 3, 0):  # what lies behind stays
        x[index] = [np.nan, np.inf, -np.inf][index % 3]
        assert gpu.first_nonfinite(on_device(x, offset)) == index


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_mark_beyond(dtype, offset):
    n, limit = 50_001, 3.0
    x, found = np.resize(np.array([limit, -limit, 0], dtype), n), on_device(np.array([7]))
    clean = on_device(x, offset)
    for array in (clean, clean[:0]):
        gpu.mark_beyond(array, limit, found)
        assert (int(found.get()[0]), same_bits(clean.get(), x)) == (0, True)
    for index, value in enumerate([np.nan, np.inf, -np.inf, 3.1, -3.1], start=40_000):
        marked = x.copy()
        marked[[index, -1]] = value, np.nan
        device = on_device(marked, offset)
        gpu.mark_beyond(device, limit, found)
        assert int(found.get()[0]) == n - index
        assert np.isnan(device.get()[0])
        assert same_bits(device.get()[1:], marked[1:])


@pytest.mark.parametrize("n", [1, 17, TILE // 2, TILE // 2 + 1, 20_001])
@pytest.mark.parametrize("ranks", [0, 1, 5, 70])
def test_sums_of_lists_have_the_bits_of_the_cpu(n, ranks, offset):
    rng = np.random.default_rng(n)
    sizes = [(0, n, n // 2, n // 100, min(n, 1))[rank % 5] for rank in range(ranks)]
    indices = [np.sort(rng.choice(n, size, replace=False)).astype(np.int32) for size in sizes]
    values = [(rng.standard_normal(part.size) * 10.0 ** (rank % 5)).astype(F32) for rank, part in enumerate(indices)]
    device_lists = [[on_device(part, offset) for part in parts] for parts in (indices, values)]
    for lo, hi in [(0, n), (0, 0), (n // 3, n - n // 4), (n, n)]:
        dense = rng.standard_normal(n).astype(F32)
        dense_device = on_device(dense, offset)
        host.scatter_sum(dense, indices, values, lo, hi, 0.3)
        gpu.scatter_sum(dense_device, *device_lists, lo, hi, 0.3)
        assert same(dense, dense_device)
    if ranks > 1:
        bounds = [0, n // 3, n // 2, n]
        assert gpu.cuts(device_lists[0][2 if ranks > 2 else 0], bounds) == host.cuts(
            indices[2 if ranks > 2 else 0], bounds
        )


def test_clear_and_nonzero():
    x = np.where(np.random.default_rng(1).random(9000) < 0.2, F32(1e-45), F32(-0.0))
    x[7] = np.nan
    ours, theirs = host.nonzero(x), gpu.nonzero(on_device(x, 1))
    assert np.array_equal(ours[0], theirs[0].get())
    assert same(ours[1], theirs[1])
    cleared = on_device(x)
    gpu.clear_at(cleared, theirs[0])
    assert not cleared.get().any()


def test_wrong_arguments_are_refused():
    x = cupy.zeros(10, F32)
    _, found = new_findings()
    with pytest.raises(ValueError, match="outside"):
        gpu.top_k(x, 11, Accumulation(), gpu.new_lists(0), found)
    with pytest.raises(ValueError, match="outside"):
        gpu.top_k(x, 0, Accumulation(), gpu.new_lists(0), found)
    with pytest.raises(ValueError, match="bound"):
        gpu.threshold(x, -1.0, Accumulation(), gpu.new_lists(0), found)
    with pytest.raises(ValueError, match="16-bit"):
        gpu.decode16(x, x, "float32", 1.0)
    with pytest.raises(ValueError, match="range"):
        gpu.scatter_sum(x, [], [], 3, 11)


def test_state_goes_to_the_host_and_back():
    x = cupy.asarray(np.arange(5, dtype=F32))
    copy = gpu.to_host(x)
    x.fill(1)
    assert copy.tolist() == [0, 1, 2, 3, 4]
    gpu.copy_into(x, copy)
    target = cupy.zeros(5, F32)
    gpu.copy_into(target, x)
    assert target.tolist() == copy.tolist()
