"""The kernels of the codecs on the GPU against those of the CPU, on the same arrays."""

from functools import partial

import numpy as np
import pytest

from tests.gpu import require_gpu

require_gpu()

import cupy  # noqa: E402

from distopt import _core  # noqa: E402
from distopt.kernels import FINDINGS, Accumulation, cuda, gpu, host, kernels_of  # noqa: E402
from distopt.kernels.base import Lists  # noqa: E402
from tests.unit.test_codec_kernels import inputs, same_bits  # noqa: E402

F32 = np.float32
TILE = 4096  # of a selecting block, and of a sum of lists; where estimates begin
SIZES = [0, 1, 3, 17, 1023, TILE - 1, TILE, 2 * TILE, 2 * TILE + 1, 6 * TILE + 5, 40_003]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=[0, 1], ids=["aligned", "unaligned"])
def offset(request):
    """Elements between a 16-byte boundary and the arrays."""
    return request.param


@pytest.fixture(autouse=True)
def stream():
    with cupy.cuda.Stream(non_blocking=True) as stream:
        yield stream


def on_device(value, offset=0):
    """Copies of arrays, and of tuples and lists of them; an array in two places stays one."""
    made = {}

    def moved(value):
        if isinstance(value, np.ndarray):
            if id(value) not in made:
                made[id(value)] = cupy.empty(value.size + offset, value.dtype)[offset:]
                made[id(value)][...] = cupy.asarray(value)
            return made[id(value)]
        if isinstance(value, Lists):
            return gpu.new_lists(value.values.size)
        if isinstance(value, Accumulation):
            return Accumulation(*map(moved, value))
        return type(value)(map(moved, value)) if isinstance(value, (tuple, list)) else value

    return moved(value)


def same(a, b):
    """Bits, apart from those of NaN; lists of a selection have room that means nothing."""
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if not isinstance(a, np.ndarray):
        return isinstance(a, Lists) or a == b
    a, b = a.copy(), b.get()
    nan = np.isnan(a)
    return np.array_equal(nan, np.isnan(b)) and a[~nan].tobytes() == b[~nan].tobytes()


def both(kernel, offset, *args):
    """Run a kernel, or a function of the kernels, on both, with the same results; the arguments on the device."""
    theirs = on_device(args, offset)
    run = kernel if callable(kernel) else lambda kernels, *args: getattr(kernels, kernel)(*args)
    results = run(host, *args), run(gpu, *theirs)
    assert same(args, theirs)
    assert same(*results)
    return theirs


def new_findings():
    return np.full(FINDINGS, -1, np.int64)


def accumulations(n, cases):
    """Each case with one of the kinds of accumulation, in turn."""
    rng = np.random.default_rng(n)
    for i, case in enumerate(cases):
        residual, momentum = (rng.standard_normal(n).astype(F32) for _ in range(2))
        elsewhere = np.zeros(n, F32), np.zeros(n, F32)
        kinds = (), (residual, None, 0.7), (residual, momentum, 0.7, 0.9), (residual, momentum, 0.7, 0.9, *elsewhere)
        yield case, Accumulation(*kinds[i % 4])


def test_kernels_are_chosen_by_the_array():
    assert kernels_of(np.zeros(1)) is host
    assert kernels_of(cupy.zeros(1)) is gpu


@pytest.mark.parametrize("n", SIZES)
def test_top_k_lists_what_the_cpu_lists(n, offset):
    # Up to four values of k and four kinds of accumulation, each input with another of these first.
    cases = [
        (x, k)
        for i, (_, x) in enumerate(inputs(n))
        for k in np.roll(sorted({min(1, n), n // 100, n // 3, n} - {0}), i).tolist()
    ]
    for (x, k), accumulation in accumulations(n, cases):
        lists = host.new_lists(0)
        # How NaN orders among NaN depends on its payload, which an addition may change.
        with_nan = accumulation.residual is not None and np.isnan(x).any()
        *_, theirs, _ = both("top_k", offset, x, k, accumulation, lists, new_findings())
        if not with_nan:
            assert same([lists.indices[:k], lists.values[:k]], [theirs.indices[:k], theirs.values[:k]])


def without_subnormals(x):
    """The GPU counts them as zero."""
    return np.where(np.abs(x) < np.finfo(F32).tiny, F32(0), x)


def encoded(n):
    """Inputs, with and without a residual in turns."""
    rng = np.random.default_rng(n)
    for i, (_, x) in enumerate(inputs(n)):
        x, residual = without_subnormals(x), rng.standard_normal(n).astype(F32)
        yield x, [(None, None), (residual, residual), (residual, np.zeros(n, F32))][i % 3]


def encode(kernel, offset, x, residuals, wire, *options):
    """The same bytes and findings; where x is not finite, the same findings. Whether it is finite."""
    findings = new_findings()
    if np.isfinite(x).all():
        both(kernel, offset, x, residuals, wire, *options, findings)
        return True
    on_gpu = on_device((x, residuals, wire, *options, findings), offset)
    getattr(gpu, kernel)(*on_gpu)
    getattr(host, kernel)(x, residuals, wire, *options, findings)
    assert same(findings, on_gpu[-1])
    return False


@pytest.mark.parametrize("n", [0, 1, 1023, 2 * TILE + 1])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_blocks_have_the_bytes_of_the_cpu(n, bits, offset):
    for seed, (x, residuals) in enumerate(encoded(n)):
        wire = np.zeros(_core.blocks_bytes(n, bits), np.uint8)
        stochastic = seed if seed % 2 and np.isfinite(x).all() else None
        if encode("encode_blocks", offset, x, residuals, wire, bits, stochastic):
            both("decode_blocks", offset, wire, x, bits, 0.3, seed % 2 > 0)


@pytest.mark.parametrize("n", [0, 1, TILE - 1, 2 * TILE + 1])
@pytest.mark.parametrize(("k", "bits"), [(64, 2), (1, 4), (777, 8), (4096, 16)])
def test_chunks_have_the_bytes_of_the_cpu(n, k, bits, offset):
    for x, residuals in encoded(n):
        wires = np.zeros((3, _core.chunks_bytes(n, k, bits)), np.uint8)
        if encode("encode_chunks", offset, x, residuals, wires[0], k, bits):
            wires[1:] = wires[0]
            out, on_gpu = np.empty(n, F32), cupy.empty(n, F32)
            host.decode_chunks(wires, out, k, bits, 0.25)
            gpu.decode_chunks(cupy.asarray(wires), on_gpu, k, bits, 0.25)
            assert same(out, on_gpu)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bound", [0.0, 1e-42, 1.0, 3e38])
def test_threshold_lists_what_the_cpu_lists(n, bound, offset):
    for (_, x), accumulation in accumulations(n, inputs(n)):
        lists, found = host.new_lists(n), new_findings()
        *_, theirs, _ = both("threshold", offset, x, bound, accumulation, lists, found)
        count = found[0]
        assert same([lists.indices[:count], lists.values[:count]], [theirs.indices[:count], theirs.values[:count]])


@pytest.mark.parametrize("room", [0, 1, 4999, 5000])
def test_threshold_says_how_much_room_it_needs(room):
    x, residual = (np.arange(1, 5001, dtype=F32) for _ in range(2))
    lists, found, kept = gpu.new_lists(room), on_device(new_findings()), on_device(residual)
    lists.values.fill(77)
    gpu.threshold(on_device(x), 0.5, Accumulation(kept), lists, found)
    assert found.tolist() == [5000, 0, 0, 0]
    assert same(residual + x, kept)
    assert lists.values.get().tolist() == ((residual + x).tolist() if room == 5000 else [77] * room)


def test_a_scan_of_more_tiles_than_its_threads_take_at_a_time(offset):
    """As of more than 16 million elements."""
    tiles, found, state = 3 * 4096 + 5, on_device(new_findings()), cupy.zeros(1 << 14, np.uint8)
    above, equal = np.random.default_rng(0).integers(0, 99, (2, tiles))
    counts = (above << 32 | equal).astype(np.uint64)
    kept = on_device(counts, offset)
    cuda.launch("scan", (1,), (1024,), (state.data.ptr, 0, kept.data.ptr, 0, 0, 0), tiles, found)
    np.testing.assert_array_equal(kept.get(), counts.cumsum() - counts)
    assert found[0] == above.sum()


@pytest.mark.parametrize("n", SIZES)
def test_accumulation_without_a_selection(n, offset):
    for (_, x), accumulation in accumulations(n, inputs(n)):
        both("accumulate", offset, x, accumulation, host.new_lists(0), new_findings())


def test_the_first_nan_is_found_in_every_row_of_a_tile(offset):
    x = np.zeros(TILE, F32)
    for at in reversed(range(0, TILE, 129)):  # a warp reads rows of 128
        x[at] = np.nan
        both("accumulate", offset, x, Accumulation(), host.new_lists(0), new_findings())


def cast(kernels, x, residuals, kind, scale, findings, back, offset=0):
    """There and back: what is decoded tells all bits of the wire apart from those of NaN."""
    wire = kernels.empty(x.size + 4 * offset, np.uint16)[4 * offset :]
    kernels.encode16(x, residuals, wire, kind, scale, _core.cast_limit(kind, round(1 / scale)), findings)
    kernels.decode16(wire, back, kind, 1.0)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_casts_give_the_bits_and_counts_of_the_cpu(n, kind, with_residual, offset):
    for _, x in inputs(n):
        residual = np.random.default_rng(n).standard_normal(n).astype(F32) if with_residual else None
        given = x, (residual, residual), kind, 1 / 3, new_findings(), np.empty(n, F32)
        both(partial(cast, offset=offset), offset, *given)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("scale", [0.5, 1.0])  # with 1 what is cast lies exactly between two, too
def test_all_16_bit_values_survive_the_way_there_and_back(kind, scale):
    wire = np.arange(65536).astype(np.uint16)
    if kind == "bfloat16":  # without those that become subnormal float32, which count as zero on a GPU
        wire = wire[(wire & 0x7FFF == 0) | (wire & 0x7F80 >= 3 << 7)]
    halves = np.empty(wire.size, F32)
    both("decode16", 0, wire, halves, kind, 0.5)
    both(cast, 0, halves * F32(0.5 / scale), (None, None), kind, scale, new_findings(), np.empty(wire.size, F32))


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


def test_a_scale_on_the_device_counts_like_one_on_the_host():
    rng = np.random.default_rng(0)
    x, residual = (rng.standard_normal(5000).astype(F32) for _ in range(2))
    scale = gpu.clip_scale(on_device(x), 3.0)
    results = []
    for factor in [scale, float(scale.get()[0])]:
        kept, lists = on_device(residual), gpu.new_lists(0)
        gpu.top_k(on_device(x), 50, Accumulation(kept, None, factor), lists, on_device(new_findings()))
        results.append((kept.get(), lists.values[:50].get()))
    assert same_bits(results[0][0], results[1][0])
    assert same_bits(results[0][1], results[1][1])
    assert not same_bits(results[0][0], residual + x)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_first_element_that_is_not_finite_or_too_large(dtype, offset):
    n, limit = 50_001, 3.0
    x = np.resize(np.array([np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal], dtype), n)
    small = np.resize(np.array([limit, -limit, 0], dtype), n)
    for index in (None, n - 1, 40_000, 2049, 16, 3, 0):  # what lies behind stays
        if index is not None:
            x[index] = [np.nan, np.inf, -np.inf][index % 3]
        both("first_nonfinite", offset, x)
    both("first_nonfinite", offset, x[:0])
    both("find_beyond", offset, small[:0], limit, np.array([7]))
    for value in (0, np.nan, np.inf, -np.inf, 3.1, -3.1):
        bad = small.copy()
        bad[40_000] = value
        bad[-1] = np.nan if value else 0
        both("find_beyond", offset, bad, limit, np.array([7]))


@pytest.mark.parametrize("buckets", [1, 32, 33, 70])
def test_whether_a_header_of_any_bucket_is_bad(buckets):
    for ranks in (1, 2, 300):
        headers = [np.resize(np.array([5, 7, 0]), 3 * ranks) for _ in range(buckets)]
        both("any_bad", 0, headers)
        for bucket, rank in ((0, 0), (buckets - 1, ranks - 1)):
            headers[bucket][3 * rank + 2] = 1
            both("any_bad", 0, headers)
            headers[bucket][3 * rank + 2] = 0


@pytest.mark.parametrize("n", [1, 17, TILE, TILE + 1, 20_001])
@pytest.mark.parametrize("ranks", [0, 1, 5, 70])
def test_sums_of_lists_have_the_bits_of_the_cpu(n, ranks, offset):
    rng = np.random.default_rng(n)
    sizes = [(0, n, n // 2, n // 100, min(n, 1))[rank % 5] for rank in range(ranks)]
    indices = [np.sort(rng.choice(n, size, replace=False)).astype(np.int32) for size in sizes]
    values = [(rng.standard_normal(part.size) * 10.0 ** (rank % 5)).astype(F32) for rank, part in enumerate(indices)]
    for lo, hi in [(0, n), (0, 0), (n // 3, n - n // 4), (n, n)]:
        both("scatter_sum", offset, rng.standard_normal(n).astype(F32), indices, values, lo, hi, 0.3)
    for part in indices[:3]:
        both("cuts", offset, part, [0, n // 3, n // 2, n])


def test_clear_and_nonzero():
    x = np.where(np.random.default_rng(1).random(9000) < 0.2, F32(1e-45), F32(-0.0))
    x[7] = np.nan
    both("nonzero", 1, x)
    both("clear_at", 0, x, np.flatnonzero(x).astype(np.int32))
    assert not x.any()


def test_wrong_arguments_are_refused():
    x, found = cupy.zeros(10, F32), on_device(new_findings())
    for text, kernel, *arguments in (
        ("outside", gpu.top_k, 0, Accumulation(), gpu.new_lists(0), found),
        ("outside", gpu.top_k, 11, Accumulation(), gpu.new_lists(0), found),
        ("bound", gpu.threshold, -1.0, Accumulation(), gpu.new_lists(0), found),
        ("16-bit", gpu.decode16, x, "float32", 1.0),
        ("range", gpu.scatter_sum, [], [], 3, 11),
    ):
        with pytest.raises(ValueError, match=text):
            kernel(x, *arguments)


def test_a_copy_whose_result_is_never_read_writes_into_no_other_memory():
    """As in a step that an exception ends."""
    x = cupy.arange(1000, dtype=np.int64)
    gpu.fetch(x)
    other = np.frombuffer(cupy.cuda.alloc_pinned_memory(x.nbytes), x.dtype, x.size)
    other[...] = -1
    cupy.cuda.get_current_stream().synchronize()
    assert (other == -1).all()
    assert gpu.fetch(x)().tolist() == list(range(1000))


def test_state_goes_to_the_host_and_back():
    x, target = cupy.asarray(np.arange(5, dtype=F32)), cupy.zeros(5, F32)
    copy = gpu.to_host(x)
    x.fill(1)
    gpu.copy_into(x, copy)
    gpu.copy_into(target, x)
    assert target.tolist() == copy.tolist() == [0, 1, 2, 3, 4]
