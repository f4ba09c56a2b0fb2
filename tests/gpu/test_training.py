"""Training on real GPUs, by the checks of `tests/ranks/test_gpu_emulated.py`."""

import pytest

from tests.gpu import require_gpu

require_gpu()

import cupy  # noqa: E402

from tests.ranks.graph_steps import BODIES  # noqa: E402
from tests.ranks.small_net import assert_equal_bits, on_ranks  # noqa: E402
from tests.ranks.test_gpu_emulated import by_hand, check, every_strategy, mnist_example, on_gpus, wrong_label  # noqa: E402


@pytest.mark.parametrize("body", [every_strategy, by_hand, wrong_label, mnist_example])
@pytest.mark.parametrize(("transport", "world_size"), [("auto", 1), ("auto", 2), ("shm", 2)])
def test_training_ends_as_on_the_cpu(tmp_path, transport, world_size, body):
    if transport == "auto" and cupy.cuda.runtime.getDeviceCount() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    if world_size == 1 and body is wrong_label:
        pytest.skip("the label is wrong on rank 1")
    gpus = on_gpus(tmp_path, world_size, body, emulated=False, transport=transport)
    check(gpus, on_ranks(world_size, body))


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_replays_give_the_bits_of_steps_without_a_graph(tmp_path, world_size, body):
    if cupy.cuda.runtime.getDeviceCount() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    ranks = on_gpus(tmp_path, world_size, body, emulated=False)
    for key in ranks[0]:
        if "losses" not in key:
            assert_equal_bits(ranks, key)
