"""Digests of arrays: they tell any other bits, and are the same wherever they are computed."""

import numpy as np
import pytest

from distopt.kernels.digest import digests
from distopt.launch import Job
from instruments.emulation import build
from tests.conformance.ranks import run_ranks_ok

SIZES = [0, 1, 2, 4095, 4096, 4097, 3 * 4096, 2_100_001]  # about rows, and more rows than a row has words
WEIGHTS = [int(weight) for weight in np.random.PCG64(20).random_raw(4096)]


def data(size: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(size).standard_normal(size).astype(dtype)


def by_definition(array: np.ndarray) -> int:
    """In Python's integers, which know no width."""
    words = np.frombuffer(array.tobytes(), f"u{min(array.itemsize, 4)}").tolist()
    while True:
        rows = [words[start : start + 4096] for start in range(0, len(words), 4096)] or [[]]
        sums = [sum(word * weight for word, weight in zip(row, WEIGHTS, strict=False)) % 2**64 for row in rows]
        if len(sums) == 1:
            return sums[0]
        words = [half for total in sums for half in (total % 2**32, total >> 32)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int8])
@pytest.mark.parametrize("size", SIZES)
def test_they_are_what_the_definition_says(size, dtype):
    array = data(size, dtype)
    assert digests([array]).tolist() == [by_definition(array)]


def test_each_array_has_its_own_on_a_gpu_too():
    arrays = [data(size).reshape(shape) for size, shape in ((6, (2, 3)), (5000, (50, 100)), (1, ()), (0, (0, 4)))]
    found = digests(arrays)
    assert (found.dtype, found.shape) == (np.uint64, (4,))
    assert found.tolist() == [by_definition(array) for array in arrays]
    assert digests([]).shape == (0,)
    build.build()
    ((where, found),) = run_ranks_ok(on_emulated_gpu, 1)
    assert "emulation" in where
    assert found == digests([data(size) for size in SIZES]).tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [7, 4097, 9000])
def test_any_flipped_bit_changes_them(size, dtype):
    array = data(size, dtype)
    seen = {digests([array]).item()}
    bits = array.view(f"u{array.itemsize}")
    for index in (0, 1, size // 2, size - 1):
        for bit in range(8 * array.itemsize):
            bits[index] ^= bits.dtype.type(1 << bit)
            seen.add(digests([array]).item())
            bits[index] ^= bits.dtype.type(1 << bit)
    assert len(seen) == 1 + 4 * 8 * array.itemsize


def on_emulated_gpu(job: Job) -> tuple[str, list[int]]:
    from instruments.emulation import activate

    activate()
    import cupy

    return cupy.__file__, digests([cupy.asarray(data(size)) for size in SIZES]).tolist()
