"""Kernels that are asked for no gradient of the weight: the other gradients stay what they are."""

from __future__ import annotations

import numpy as np
import pytest

from distopt.nn.kernels import cpu
from tests.unit import test_ops
from tests.unit.test_ops import CONVOLUTIONS, FUSED, WINOGRAD, array, near

pytestmark = pytest.mark.parametrize("need_dx", [False, True])
isa, dtype = test_ops.isa, test_ops.dtype


def check(backward, saved, weight, y, need_dx):
    """`backward` with and without memory for the gradient of the weight."""
    found = []
    for dw in (np.empty_like(weight), None):
        db = np.full(y.shape[1], np.nan, y.dtype)
        found.append((backward(array(y.shape, y.dtype, 3), saved, dw, db, need_dx), db))
    (dx, db), (dx_alone, db_alone) = found
    assert need_dx or dx_alone is None
    np.testing.assert_array_equal(dx_alone, dx)
    near(db_alone, db)


@pytest.mark.parametrize("case", [*CONVOLUTIONS, *WINOGRAD[1:]])
def test_conv2d(isa, dtype, case, need_dx):
    n, c, h, w, m, kernel, stride, padding = case
    x, weight, bias = array((n, c, h, w), dtype), array((m, c, *kernel), dtype, 1), array(m, dtype, 2)
    y, saved = cpu.conv2d(x, weight, bias, stride, padding, True)
    check(cpu.conv2d_backward, saved, weight, y, need_dx)


@pytest.mark.parametrize("case", FUSED)
def test_conv2d_max_pool(isa, dtype, case, need_dx):
    (n, c, h, w, m, kernel, *geometry), pooling = case
    x, weight, bias = array((n, c, h, w), dtype), array((m, c, *kernel), dtype, 1), array(m, dtype, 2)
    y, saved = cpu.conv2d(x, weight, bias, *geometry, True, pooling)
    check(cpu.conv2d_backward, saved, weight, y, need_dx)


@pytest.mark.parametrize("sizes", [(64, 800, 50), (5, 37, 10), (0, 4, 3)])
def test_linear(isa, dtype, sizes, need_dx):
    n, n_in, n_out = sizes
    x, w, b = array((n, n_in), dtype), array((n_in, n_out), dtype, 1), array(n_out, dtype, 2)
    y, saved = cpu.linear(x, w, b, True)
    check(cpu.linear_backward, saved, w, y, need_dx)
