"""Codecs over real communicators give the bits that they give over the oracle."""

import numpy as np
import pytest

from tests.conformance.codec_steps import on_backend, steps_of
from tests.conformance.ranks import run_ranks_ok
from tests.conformance.thread_ranks import on_ranks

SIZES = [3, 5003, 70001]


@pytest.mark.slow(kept=2)
@pytest.mark.parametrize(("backend", "world_size"), [("shm", 3), ("single", 1), ("shm", 1), ("shm", 2), ("shm", 4)])
def test_all_backends_agree_with_the_oracle(backend, world_size):
    ranks = run_ranks_ok(on_backend, world_size, backend, SIZES)
    for position, size in enumerate(SIZES):
        expected = on_ranks(world_size, lambda comm, size=size: steps_of(comm, size))
        for rank, reference in zip(ranks, expected, strict=True):
            for bucket, other in zip(rank[position], reference, strict=True):
                assert np.array_equal(bucket.view(np.uint32), other.view(np.uint32))
