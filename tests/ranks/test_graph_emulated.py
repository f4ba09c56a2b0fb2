"""Training steps as CUDA graphs, on emulated GPUs: the bits are those of steps that run as they are called."""

import pytest

from tests.ranks.graph_steps import BODIES
from tests.ranks.small_net import assert_equal_bits
from tests.ranks.test_gpu_emulated import on_gpus


@pytest.mark.slow(kept=1, rest=3)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_replays_give_the_bits_of_steps_without_a_graph(tmp_path, world_size, body):
    ranks = on_gpus(tmp_path, world_size, body)
    for key in ranks[0]:
        if "losses" not in key:
            assert_equal_bits(ranks, key)
