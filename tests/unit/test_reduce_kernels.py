"""The reduction kernels of every instruction set against the NumPy oracle, bit by bit."""

import itertools

import numpy as np
import pytest

from distopt import _core
from distopt.comm.base import DTYPES, OPS
from tests.conformance import nonfinite
from tests.conformance.checks import COMBINATIONS, assert_same_bits, values
from tests.conformance.oracle import bfloat16_to, reduce_in_rank_order
from tests.unit.refusals import refused

EVERY_PATTERN = np.arange(1 << 16, dtype=np.uint16)


def reduce(outputs: list, inputs: list, dtype: str, op: str) -> None:
    _core.reduce(outputs, inputs, DTYPES[dtype], OPS[op])


# Around vector widths and the kernel's block of 512.
@pytest.mark.sweep(rest=400)
@pytest.mark.parametrize("count", [0, 1, 3, 8, 15, 31, 33, 511, 512, 513, 2077])
@pytest.mark.parametrize(("dtype", "op"), COMBINATIONS)
def test_reduction(isa: str, dtype: str, op: str, count: int) -> None:
    for n in (1, 2, 3, 4, 5, 9):
        inputs = [values(q, count, dtype) for q in range(n)]
        expected = reduce_in_rank_order(inputs, dtype, op)
        for _ in range(2):
            copies = [a.copy() for a in inputs]
            outputs = [copies[-1], np.empty_like(inputs[0]), copies[0]]  # two of them in place
            reduce(outputs, copies, dtype, op)
            for output in outputs:
                assert_same_bits(output, expected, (n, count))
            for copy, original in zip(copies[1:-1], inputs[1:-1], strict=True):
                assert_same_bits(copy, original, "inputs that are no outputs are left alone")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_look_for_what_is_not_finite(isa: str, dtype: str) -> None:
    """Of sums around groups of vectors; the results are those without the look, and inputs may be outputs."""
    for n, count in itertools.product((1, 2, 3, 4, 5), (1, 3, 31, 64, 65, 127, 513)):
        for i, inputs in enumerate(nonfinite.planted(n, count, dtype)):
            copies, plain = [a.copy() for a in inputs], np.empty_like(inputs[0])
            op = ("sum", "mean")[i % 2]
            found = _core.reduce([copies[-1], copies[0]], copies, DTYPES[dtype], OPS[op], look=True)
            assert found == nonfinite.at_fault(inputs, dtype), (n, count, i)
            assert _core.reduce([plain], inputs, DTYPES[dtype], OPS[op]) is None
            np.testing.assert_array_equal(copies[0], plain)
            np.testing.assert_array_equal(copies[-1], plain)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_round_to_nearest_even_once(isa: str, dtype: str) -> None:
    """All exponents against neighbours of every size: ties, carries into the next exponent, denormals, overflow."""
    a = EVERY_PATTERN
    stored, wide = (np.float16, np.asarray) if dtype == "float16" else (np.uint16, bfloat16_to)
    for other in (0x0001, 0x03FF, 0x1400, 0x2E66, 0x3C01, 0x7BFF, 0x8001, 0xB555):
        b = np.full_like(a, other)
        inputs = [a.view(stored), b.view(stored), np.roll(a, 77).view(stored)]
        out = np.empty(a.size, stored)
        reduce([out], inputs, dtype, "sum")
        expected = reduce_in_rank_order(inputs, dtype, "sum")
        np.testing.assert_array_equal(wide(out), wide(expected))
        number = ~np.isnan(wide(expected))
        assert_same_bits(out[number], expected[number], other)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_nan_wins_wherever_it_is(isa: str, dtype: str, op: str, n: int) -> None:
    stored, nan = ("uint16", 0x7FC1) if dtype == "bfloat16" else (dtype, np.nan)
    for where in range(n):
        inputs = [np.arange(40).astype(stored) for _ in range(n)]
        inputs[where][::3] = nan
        out = np.empty(40, stored)
        reduce([out], inputs, dtype, op)
        wide = bfloat16_to(out) if dtype == "bfloat16" else out
        assert np.isnan(wide[::3]).all()
        assert not np.isnan(np.delete(wide, np.s_[::3])).any()


def test_arrays_that_do_not_match_are_refused() -> None:
    refused(ValueError, "same size", reduce, [np.zeros(3)], [np.zeros(3), np.zeros(4)], "float64", "sum")
    refused(ValueError, "item size", reduce, [np.zeros(3)], [np.zeros(3), np.zeros(3)], "float32", "sum")


# Around four vectors of each instruction set.
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 4099])
@pytest.mark.parametrize("shift", [0, 1, 16])
def test_copy(isa: str, count: int, shift: int) -> None:
    source = values(1, count + shift, "int32").view(np.uint8)[shift : count + shift]
    border = np.full(64, 0xA5, np.uint8)
    for _ in range(2):
        whole = np.concatenate([border, np.full(count, 0xA5, np.uint8), border])
        _core.copy(whole[64 : 64 + count], source)
        np.testing.assert_array_equal(whole, np.concatenate([border, source, border]))
