"""Training on emulated GPUs, over the stand-in for NCCL and via the host, ends as on the CPU."""

import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from distopt import opt, tensor
from distopt.codecs import BFloat16, ErrorFeedback, Fp16, Fp32, Threshold, TopK
from distopt.errors import GradientError, UsageError
from instruments.emulation import activate, build
from tests.ranks import small_net
from tests.ranks.graph_steps import BODIES
from tests.ranks.small_net import SMALL, STRATEGIES, assert_equal_bits, beside, on_ranks, parameters, spawned, train
from tests.ranks.test_by_hand import sums, updates
from tests.users_rules import ByApply

STEPS = 6
# NCCL adds 16-bit numbers in 16 bits; our own transports widen them.
TOLERANCE = {"fp16": 3e-4, "fp16 scaled": 3e-4, "dynamic": 3e-4, "bf16": 3e-3}


def every_strategy(optimizer) -> dict[str, np.ndarray]:
    results = {"kind": np.array(optimizer.device.kind)}
    for name, strategy in STRATEGIES.items():
        optimizer = beside(optimizer, partition_elements=100)
        net = small_net.build(optimizer)
        results[f"{name} losses"] = np.array(train(optimizer, net, range(STEPS), strategy))
        optimizer.synchronize()
        results[name] = parameters(net)
        states = optimizer.get_states()
        assert all(type(array) is np.ndarray for array in states.values())
        optimizer.set_states(states)
        train(optimizer, net, range(STEPS, STEPS + 1), strategy)
        optimizer.synchronize()
        results[f"{name} resumed"] = parameters(net)
    return results


def by_hand(optimizer) -> dict[str, np.ndarray]:
    """Clipping, the other rules, and SINGA's methods on single tensors."""
    results = {}
    for rule in (opt.Adam(lr=0.01), opt.RMSProp(lr=0.01), opt.AdaGrad(lr=0.05), ByApply()):
        dist = beside(optimizer, rule)
        net = small_net.build(dist)
        train(dist, net, range(2), STRATEGIES["fp32"])
        step = partial(dist.backward_and_update_half, threshold=SMALL, clipping=True, clip_Value=0.01)
        net(*small_net.batch(2, dist.global_rank, dist.device), step)
        results[type(rule).__name__] = parameters(net)
    sums(optimizer)
    updates(optimizer)
    return results


def wrong_label(optimizer) -> dict[str, np.ndarray]:
    """Rank 1, which has it, names it, the other names that rank's bad gradients; nothing is learnt."""
    net = small_net.build(optimizer)
    x, y = small_net.batch(0, optimizer.global_rank, optimizer.device)
    y.array[3] = 77 if optimizer.global_rank == 1 else 0
    before = parameters(net)
    if optimizer.device.kind == "cuda":
        net(x, y, optimizer)
        wrong = (UsageError, "label 77 of sample 3 is outside"), (GradientError, "rank 1")
        kind, match = wrong[0 if optimizer.global_rank else 1]
        with pytest.raises(kind, match=match):
            optimizer.get_states()
    np.testing.assert_array_equal(parameters(net), before)
    return {"parameters": before}


CODECS = {
    "fp32": Fp32(),
    "fp16": Fp16(),
    "bf16": BFloat16(),
    "dynamic": Fp16(scale="dynamic"),
    "top-K": ErrorFeedback(TopK(0.05)),
    "warm-up": ErrorFeedback(TopK(0.05, warm_up_steps=2, momentum=0.5)),
    "threshold": ErrorFeedback(Threshold(0.02)),
}
# Of the host, in a step with one bucket: dynamic scales and warm-up counts are its own; lists have lengths.
MOST_WAITS = {"fp32": 0, "fp16": 0, "bf16": 0, "dynamic": 1, "top-K": 0, "warm-up": 1, "threshold": 1}
BAD = (1, 4)  # steps with a gradient that is not finite, each of another rank; the last one, too


def step_of_rank(optimizer, net, n: int, codec) -> tensor.Tensor:
    x, y = small_net.batch(n, optimizer.global_rank, optimizer.device)
    if n in BAD and optimizer.global_rank == BAD.index(n):
        x.array[0, 0] = np.inf
    return net(x, y, lambda loss: optimizer.reduce_and_update(loss, codec, SMALL))


def skipped_steps(optimizer) -> dict[str, np.ndarray]:
    """Nothing of a bad gradient is seen: not in parameters, slots or residuals, nor in what counts steps."""
    results = {}
    for rule in (small_net.sgd, lambda: opt.Adam(lr=0.01), ByApply):
        for name, codec in CODECS.items():
            optimizer = beside(optimizer, rule(), non_finite="skip")
            net = small_net.build(optimizer)
            for n in range(5):
                step_of_rank(optimizer, net, n, codec)
            states = optimizer.get_states()
            key = f"{name} of {type(optimizer.opt).__name__}"
            results[key] = parameters(net)
            assert states["steps"][:2].tolist() == [5, 2]
            assert states["optimizer/step_counter"] == 3
            # Residuals are each rank's own.
            results[f"{key} losses"] = np.concatenate([states[name].ravel() for name in sorted(states)])
    return results


def raised_steps(optimizer) -> dict[str, np.ndarray]:
    """The error comes at the next step, which is not taken; the one after it is."""
    results = {}
    for name, codec in CODECS.items():
        optimizer = beside(optimizer)
        net = small_net.build(optimizer)
        step_of_rank(optimizer, net, 0, codec)
        before = parameters(net)
        late = optimizer.device.kind == "cuda" and MOST_WAITS[name] == 0
        if late:
            step_of_rank(optimizer, net, 1, codec)
        with pytest.raises(GradientError, match=r"step 1: the gradient of linear\d\.[Wb] is NaN.* on rank 0 \("):
            step_of_rank(optimizer, net, 2 if late else 1, codec)
        np.testing.assert_array_equal(parameters(net), before)
        step_of_rank(optimizer, net, 3, codec)
        results[name] = parameters(net)
    return results


def waits_per_step(optimizer) -> dict[str, np.ndarray]:
    """How often the host waits for the device in a step whose loss is not read."""
    host_waits = optimizer.device.xp.cuda.host_waits
    results = {}
    for name, codec in CODECS.items():
        optimizer = beside(optimizer, bucket_elements=10**6)  # one
        net = small_net.build(optimizer)
        batches = [small_net.batch(n, optimizer.global_rank, optimizer.device) for n in range(2, 8)]
        for n, (x, y) in enumerate(batches):
            if n == 3:
                host_waits.clear()
            net(x, y, lambda loss: optimizer.reduce_and_update(loss, codec))  # noqa: B023 - called at once
        # It looks at the event behind the verdict of the step before, which has long been reached.
        results[name] = np.array(sum(wait != "event" for wait in host_waits) / 3)
    return results


def mnist_example(optimizer, *options: str) -> dict[str, np.ndarray]:
    """The example on a handful of images."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import train_cnn

    rng = np.random.default_rng(5)
    images, labels = rng.integers(0, 256, (24, 1, 28, 28), np.uint8), rng.integers(0, 10, 24, np.int32)
    data = SimpleNamespace(train_x=images, train_y=labels, test_x=images[:10], test_y=labels[:10], caveat="")
    nets = []

    class Remembered(train_cnn.CNN):
        def __init__(self) -> None:
            super().__init__()
            nets.append(self)

    train_cnn.mnist = SimpleNamespace(load=lambda *_, **__: data)
    train_cnn.CNN = Remembered
    train_cnn.run(optimizer, train_cnn.parse_args("", ["-m", "2", "-b", "4", "--seed", "1", *options]))
    assert bool(nets[0].graph_replays) == ("--graph" in options and optimizer.device.kind == "cuda")
    return {"parameters": parameters(nets[0])}


def mnist_example_as_graphs(optimizer) -> dict[str, np.ndarray]:
    return mnist_example(optimizer, "--graph")


def enter_on_gpu(rank: int, world_size: int, ticket, folder: str, body, emulated: bool, transport: str) -> None:
    if emulated:
        activate()
    os.environ.update(DISTOPT_DEVICE="cuda", DISTOPT_TRANSPORT=transport)
    small_net.enter(rank, world_size, ticket, folder, body)


def on_gpus(folder: Path, world_size: int, body, *, emulated=True, transport="auto") -> list[dict[str, np.ndarray]]:
    if emulated:
        build.build()
    return spawned(folder, world_size, enter_on_gpu, body, emulated, transport)


def check(gpus: list[dict[str, np.ndarray]], cpus: list[dict[str, np.ndarray]]) -> None:
    for rank, (gpu, cpu) in enumerate(zip(gpus, cpus, strict=True)):
        assert gpu.keys() == cpu.keys()
        for key in gpu.keys() - {"kind"}:
            name = key.removesuffix(" losses").removesuffix(" resumed")
            bound = TOLERANCE.get(name.split(" of ")[0], 2e-5)
            np.testing.assert_allclose(gpu[key], cpu[key], atol=bound, err_msg=f"{key}, rank {rank}")
            if "losses" not in key:
                assert_equal_bits(gpus, key)


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "world_size"), [("auto", 1), ("auto", 2), ("shm", 2)])
def test_every_strategy_ends_as_on_the_cpu(tmp_path, transport, world_size):
    gpus = on_gpus(tmp_path, world_size, every_strategy, transport=transport)
    check(gpus, on_ranks(world_size, every_strategy))
    assert {str(gpu["kind"]) for gpu in gpus} == {"cuda"}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_waits_of_the_host(tmp_path, world_size):
    for waits in on_gpus(tmp_path, world_size, waits_per_step):
        assert {name: float(count) for name, count in waits.items()} == MOST_WAITS


@pytest.mark.slow(rest=4)
@pytest.mark.parametrize(
    "body", [by_hand, wrong_label, skipped_steps, raised_steps, mnist_example, mnist_example_as_graphs]
)
def test_other_ways_end_as_on_the_cpu(tmp_path, body):
    check(on_gpus(tmp_path, 2, body), on_ranks(2, body))


@pytest.mark.slow(kept=1, rest=3)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_replays_give_the_bits_of_steps_without_a_graph(tmp_path, world_size, body):
    ranks = on_gpus(tmp_path, world_size, body)
    for key in ranks[0]:
        if "losses" not in key:
            assert_equal_bits(ranks, key)
