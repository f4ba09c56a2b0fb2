"""Codecs over real communicators give the bits that they give over the oracle."""

import numpy as np
import pytest

from distopt.codecs import BFloat16, ErrorFeedback, Fp16, Fp32, TopK
from tests.conformance.codec_steps import CODECS, on_transport, steps_of
from tests.conformance.nccl_ranks import VIA_HOST
from tests.conformance.ranks import run_ranks_ok
from tests.conformance.thread_ranks import OracleCommunicator, SplittingCommunicator, on_ranks, same_bits

SIZES = [3, 5003, 70001]


@pytest.mark.slow(kept=2)
@pytest.mark.parametrize(("transport", "world_size"), [("shm", 3), ("single", 1), ("shm", 1), ("shm", 2), ("shm", 4)])
def test_all_transports_agree_with_the_oracle(transport, world_size):
    ranks = run_ranks_ok(on_transport, world_size, transport, SIZES)
    for position, size in enumerate(SIZES):
        expected = on_ranks(world_size, lambda comm, size=size: steps_of(comm, size))
        for rank, reference in zip(ranks, expected, strict=True):
            assert same_bits(rank[position], reference)


# -- the emulated GPU --------------------------------------------------------------------------------------------------
GPU_SIZES = [3, 5003, 40_001]
# Where the sum is NCCL's own, or its scale comes from a norm that is added up in another order.
OF_NCCL = {Fp32(): 1e-6, TopK(1.0): 1e-6, Fp16(): 2e-3, BFloat16(): 2e-2, ErrorFeedback(Fp16("dynamic")): 2e-3}
OF_NORMS = {codec: 1e-5 for codec in CODECS if getattr(getattr(codec, "codec", codec), "clip_norm", None)}


@pytest.mark.usefixtures("built")
@pytest.mark.slow(rest=1)
@pytest.mark.parametrize(
    ("transport", "world_size"), [("nccl", 1), ("nccl", 2), ("nccl", 3), (VIA_HOST, 2), (VIA_HOST, 3)]
)
def test_emulated_gpus_agree_with_the_oracle(transport, world_size):
    tolerance, oracle = OF_NORMS, OracleCommunicator
    if transport == "nccl":
        tolerance, oracle = OF_NCCL | OF_NORMS, SplittingCommunicator
    runs = [run_ranks_ok(on_transport, world_size, transport, GPU_SIZES) for _ in range(2)]
    for position, size in enumerate(GPU_SIZES):
        expected = on_ranks(world_size, lambda comm, size=size: steps_of(comm, size), cls=oracle)[0]
        for ranks in runs:
            for rank in ranks:
                assert same_bits(rank[position], runs[0][0][position]), "the same bits on all ranks and in all runs"
                for i, (bucket, other) in enumerate(zip(rank[position], expected, strict=True)):
                    codec = CODECS[i % len(CODECS)]
                    if codec in tolerance and world_size > 1:
                        np.testing.assert_allclose(bucket, other, rtol=0, atol=tolerance[codec] * np.abs(other).max())
                    elif codec in tolerance:
                        np.testing.assert_allclose(bucket, other, rtol=tolerance[codec], err_msg=str(codec))
                    else:
                        assert same_bits([bucket], [other]), codec
