"""Sums by hand, as SINGA's scripts make them, and such a script."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from distopt import opt, tensor
from distopt.errors import GradientError, StateError
from tests.processes import Program
from tests.ranks.small_net import (
    on_ranks,
)


def by_hand(optimizer) -> dict[str, np.ndarray]:
    rank, world_size = optimizer.global_rank, optimizer.world_size
    rng = np.random.default_rng(rank)
    own = [rng.standard_normal(shape).astype(np.float32) for shape in ((3, 4), (5,), (70,), (2, 2))]
    everyone = [np.random.default_rng(r) for r in range(world_size)]
    all_own = [[g.standard_normal(a.shape).astype(np.float32) for a in own] for g in everyone]
    sums = [np.sum([arrays[i] for arrays in all_own], axis=0) for i in range(len(own))]
    small = opt.DistOpt(opt.SGD(), communicator=optimizer.communicator, buffSize=20)
    for face in (optimizer, small):
        for turn in range(3):  # buffers are used again
            tensors = [tensor.from_numpy(array) for array in own]
            face.all_reduce(tensors[0])
            face.all_reduce_half(tensors[1])
            face.fused_all_reduce_half(tensors[2:3], send=False)
            face.fused_all_reduce_half(tensors[2:], send=True)
            face.wait()
            for i, (t, expected) in enumerate(zip(tensors, sums, strict=True)):
                np.testing.assert_allclose(t.array, expected, atol=1e-6 if i == 0 else 2e-2, err_msg=f"{turn} {i}")
            tensors = [tensor.from_numpy(array) for array in own]
            face.fused_all_reduce(tensors, send=True)
            face.wait()
            for t, expected in zip(tensors, sums, strict=True):
                np.testing.assert_allclose(t.array, expected, rtol=1e-5, atol=1e-6)

    sent = np.zeros(70)
    residual = tensor.Tensor((70,))
    for step in range(4):
        t = tensor.from_numpy(own[2])
        optimizer.sparsification(t, residual, 0.03 * (step + 1), topK=True)
        optimizer.wait()
        assert 0 < np.count_nonzero(t.array) <= 9 * world_size
        sent += t.array
    optimizer.all_reduce(residual)
    optimizer.wait()
    np.testing.assert_allclose(sent + residual.array, 4 * sums[2], rtol=1e-4, atol=1e-5)

    with pytest.raises(StateError, match=r"shape \(1,\), not float32 of shape \(70,\)"):
        optimizer.sparsification(tensor.from_numpy(own[2]), tensor.Tensor((1,)), topK=True)

    pair = [tensor.from_numpy(array) for array in own[1:3]]
    residual = tensor.Tensor((75,))
    optimizer.fused_sparsification(pair, residual, 1.4, topK=False)
    optimizer.wait()
    kept = [np.sum([np.where(np.abs(a[i]) >= 1.4, a[i], 0) for a in all_own], axis=0) for i in (1, 2)]
    for t, expected in zip(pair, kept, strict=True):
        np.testing.assert_allclose(t.array, expected, rtol=1e-5, atol=1e-6)
    flat = np.concatenate([own[1], own[2]])
    np.testing.assert_array_equal(residual.array, np.where(np.abs(flat) < 1.4, flat, 0))

    one = tensor.from_numpy(own[2])
    optimizer.sparsification(one, None, 1.4)
    optimizer.wait()
    np.testing.assert_allclose(one.array, kept[1], rtol=1e-5, atol=1e-6)
    bad = tensor.from_numpy(np.full(5, np.nan if rank else 1.0, np.float32))
    optimizer.fused_all_reduce([bad])
    with pytest.raises(GradientError, match="on rank 1"):
        optimizer.wait()
    return {}


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_by_hand(tmp_path, world_size):
    on_ranks(tmp_path, world_size, by_hand)


def test_singa_s_script_runs_with_its_imports_changed():
    script = Path(__file__).with_name("singa_script.py")
    ended = Program([sys.executable, str(script)], {"OPENBLAS_NUM_THREADS": "1"}).end()
    assert sorted(ended.stdout.splitlines()) == [f"rank {r} of 2 sum 3.0 True" for r in range(2)], ended.stderr
