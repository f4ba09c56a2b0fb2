"""Training steps as CUDA graphs on real GPUs, by the checks of `tests/ranks/test_graph_emulated.py`."""

from __future__ import annotations

import pytest

from tests.gpu import require_gpu

require_gpu()

import cupy  # noqa: E402

from tests.ranks.graph_refused import refused  # noqa: E402
from tests.ranks.graph_steps import BODIES  # noqa: E402
from tests.ranks.small_net import assert_equal_bits  # noqa: E402
from tests.ranks.test_gpu_emulated import on_gpus  # noqa: E402


@pytest.mark.parametrize("body", [*BODIES, refused])
@pytest.mark.parametrize("world_size", [1, 2])
def test_replays_give_the_bits_of_steps_without_a_graph(tmp_path, world_size, body):
    if cupy.cuda.runtime.getDeviceCount() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    ranks = on_gpus(tmp_path, world_size, body, emulated=False)
    for key in ranks[0]:
        if "losses" not in key:
            assert_equal_bits(ranks, key)
