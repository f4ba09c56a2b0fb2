"""Training on emulated GPUs, over the stand-in for NCCL: every strategy, and the example, end as on the CPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from distopt import launch, opt, singa_wrap
from tests.emulation import activate, build
from tests.ranks import small_net
from tests.ranks.small_net import SMALL, assert_equal_bits, on_ranks, parameters, train
from tests.ranks.test_strategies import STRATEGIES

STEPS = 6
# NCCL adds 16-bit numbers as such, where our own transports widen them.
TOLERANCE = {"fp16": 3e-4, "fp16 scaled": 3e-4, "bf16": 3e-3}


def every_strategy(optimizer) -> dict[str, np.ndarray]:
    results = {"kind": np.array(optimizer.device.kind)}
    for name, strategy in STRATEGIES.items():
        optimizer = opt.DistOpt(
            opt.SGD(lr=0.05, momentum=0.5), communicator=optimizer.communicator, threshold=SMALL, partition_size=100
        )
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
    """SINGA's methods on single tensors, clipping, and the other rules."""
    results = {}
    for rule in (opt.Adam(lr=0.01), opt.RMSProp(lr=0.01), opt.AdaGrad(lr=0.05)):
        optimizer = opt.DistOpt(rule, communicator=optimizer.communicator, threshold=SMALL)
        net = small_net.build(optimizer)
        train(optimizer, net, range(2), STRATEGIES["fp32"])
        step = lambda loss, o=optimizer: o.backward_and_update_half(loss, SMALL, True, 0.01)  # noqa: E731
        net(*small_net.batch(2, optimizer.global_rank, optimizer.device), step)
        results[type(rule).__name__] = parameters(net)
    rank = optimizer.global_rank
    tensors = [opt.tensor.Tensor((n,), optimizer.device) for n in (5, 331)] if hasattr(opt, "tensor") else []
    for t in tensors:
        t.set_value(rank + 1.0)
    return results


def mnist_example(optimizer) -> dict[str, np.ndarray]:
    """The example on a handful of images."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import train_cnn

    rng = np.random.default_rng(5)
    images, labels = rng.integers(0, 256, (24, 1, 28, 28), np.uint8), rng.integers(0, 10, 24, np.int32)
    data = SimpleNamespace(train_x=images, train_y=labels, test_x=images[:10], test_y=labels[:10])
    nets = []

    class Remembered(train_cnn.CNN):
        def __init__(self) -> None:
            super().__init__()
            nets.append(self)

    train_cnn.mnist = SimpleNamespace(load=lambda *_, **__: data)
    train_cnn.CNN = Remembered
    train_cnn.run(optimizer, train_cnn.parse_args("", ["-m", "2", "-b", "4", "--seed", "1"]))
    return {"parameters": parameters(nets[0])}


def enter_on_gpu(rank: int, world_size: int, ticket, folder: str, body) -> None:
    activate()
    os.environ["DISTOPT_BACKEND"] = "nccl" if world_size > 1 else "auto"
    small_net.enter(rank, world_size, ticket, folder, body)


def on_gpus(folder: Path, world_size: int, body) -> list[dict[str, np.ndarray]]:
    build.build()
    launch.spawn(enter_on_gpu, world_size, (singa_wrap.NcclIdHolder(), str(folder), body))
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(world_size)]


def check(gpus: list[dict[str, np.ndarray]], cpus: list[dict[str, np.ndarray]]) -> None:
    for rank, (gpu, cpu) in enumerate(zip(gpus, cpus, strict=True)):
        assert gpu.keys() == cpu.keys()
        for key in gpu.keys() - {"kind"}:
            name = key.removesuffix(" losses").removesuffix(" resumed")
            np.testing.assert_allclose(gpu[key], cpu[key], atol=TOLERANCE.get(name, 2e-5), err_msg=f"{key}, rank {rank}")
            if "losses" not in key:
                assert_equal_bits(gpus, key)


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_strategy_ends_as_on_the_cpu(tmp_path, monkeypatch, world_size):
    (tmp_path / "cpu").mkdir()
    gpus = on_gpus(tmp_path, world_size, every_strategy)
    monkeypatch.setenv("DISTOPT_DEVICE", "cpu")
    check(gpus, on_ranks(tmp_path / "cpu", world_size, every_strategy))
    assert {str(gpu["kind"]) for gpu in gpus} == {"cuda"}


@pytest.mark.parametrize("body", [by_hand, mnist_example])
def test_other_ways_end_as_on_the_cpu(tmp_path, monkeypatch, body):
    (tmp_path / "cpu").mkdir()
    gpus = on_gpus(tmp_path, 2, body)
    monkeypatch.setenv("DISTOPT_DEVICE", "cpu")
    check(gpus, on_ranks(tmp_path / "cpu", 2, body))
