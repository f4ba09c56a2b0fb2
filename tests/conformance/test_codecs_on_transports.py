"""Codecs over real communicators give the bits that they give over the oracle."""

import numpy as np
import pytest

from distopt.codecs import BFloat16, ErrorFeedback, Fp16, Fp32, TopK
from tests.conformance.codec_steps import CODECS, on_emulated_gpu, on_transport, steps_of
from tests.conformance.ranks import run_ranks_ok
from tests.conformance.thread_ranks import SplittingCommunicator, on_ranks
from tests.emulation import build

SIZES = [3, 5003, 70001]


@pytest.mark.slow(kept=2)
@pytest.mark.parametrize(("transport", "world_size"), [("shm", 3), ("single", 1), ("shm", 1), ("shm", 2), ("shm", 4)])
def test_all_transports_agree_with_the_oracle(transport, world_size):
    ranks = run_ranks_ok(on_transport, world_size, transport, SIZES)
    for position, size in enumerate(SIZES):
        expected = on_ranks(world_size, lambda comm, size=size: steps_of(comm, size))
        for rank, reference in zip(ranks, expected, strict=True):
            for bucket, other in zip(rank[position], reference, strict=True):
                assert np.array_equal(bucket.view(np.uint32), other.view(np.uint32))


# -- the emulated GPU --------------------------------------------------------------------------------------------------
GPU_SIZES = [3, 5003, 40_001]
# Where the sum is NCCL's own, or its scale comes from a norm that is added up in another order.
TOLERANCE = {Fp32(): 1e-6, TopK(1.0): 1e-6, Fp16(): 2e-3, BFloat16(): 2e-2, ErrorFeedback(Fp16("dynamic")): 2e-3}
TOLERANCE |= {codec: 1e-5 for codec in CODECS if getattr(getattr(codec, "codec", codec), "clip_norm", None)}


@pytest.mark.slow
@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_emulated_gpus_agree_with_the_oracle(world_size):
    build.build()
    runs = [run_ranks_ok(on_emulated_gpu, world_size, GPU_SIZES) for _ in range(2)]
    for position, size in enumerate(GPU_SIZES):
        expected = on_ranks(world_size, lambda comm, size=size: steps_of(comm, size), cls=SplittingCommunicator)[0]
        for ranks in runs:
            for rank in ranks:
                for i, (bucket, other) in enumerate(zip(rank[position], expected, strict=True)):
                    # All ranks and runs: the same bits.
                    assert np.array_equal(bucket.view(np.uint32), runs[0][0][position][i].view(np.uint32))
                    codec = CODECS[i % len(CODECS)]
                    if codec in TOLERANCE and world_size > 1:
                        np.testing.assert_allclose(bucket, other, rtol=0, atol=TOLERANCE[codec] * np.abs(other).max())
                    elif codec in TOLERANCE:
                        np.testing.assert_allclose(bucket, other, rtol=TOLERANCE[codec], err_msg=str(codec))
                    else:
                        assert np.array_equal(bucket.view(np.uint32), other.view(np.uint32)), codec
