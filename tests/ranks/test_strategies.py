"""Every strategy with real ranks: it trains, ranks agree to the bit, and it can be changed, counted and saved."""

import os
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from distopt import opt
from distopt.codecs import BFloat16, ErrorFeedback, Fp16, Fp32, PowerSGD, Threshold, TopK
from tests.processes import Program
from tests.ranks.small_net import SMALL, assert_equal_bits, batch, build, on_ranks, parameters, train

STRATEGIES = {
    "fp32": Fp32(),
    "fp16": Fp16(),
    "bf16": BFloat16(),
    "fp16 scaled": ErrorFeedback(Fp16(scale="dynamic")),
    "top-K": ErrorFeedback(TopK(0.05)),
    "top-K 100 %": TopK(1.0),
    "top-K alone": TopK(0.3),
    "warm-up": ErrorFeedback(TopK(0.02, warm_up_steps=4, clip_norm=5.0)),
    "threshold": ErrorFeedback(Threshold(0.02)),
    "threshold 0": Threshold(0.0),
    "PowerSGD": ErrorFeedback(PowerSGD(rank=2)),
    "partial": "partialUpdate",
}
STEPS = 30


def every_strategy(optimizer) -> dict[str, np.ndarray]:
    results = {}
    for name, strategy in STRATEGIES.items():
        optimizer = opt.DistOpt(
            opt.SGD(lr=0.05, momentum=0.5),
            communicator=optimizer.communicator,
            bucket_elements=SMALL,
            partition_elements=100,
        )
        net = build(optimizer)
        losses = train(optimizer, net, range(STEPS), strategy)
        results[f"{name} drifted"] = parameters(net)
        optimizer.synchronize()
        results[name] = parameters(net)
        results[f"{name} losses"] = np.array(losses)
        total = optimizer.stats().total
        results[f"{name} bytes"] = np.array([total.wire_bytes, total.dense_bytes])
    return results


def check_every_strategy(ranks: list[dict[str, np.ndarray]]) -> None:
    for name in STRATEGIES:
        assert_equal_bits(ranks, name)
        mean = np.mean([rank[f"{name} losses"] for rank in ranks], axis=0)
        assert mean[-5:].mean() < 0.5 * mean[:3].mean(), name
        if name == "partial":
            assert np.ptp([rank[f"{name} drifted"] for rank in ranks], axis=0).max() > 1e-4
        else:
            assert_equal_bits(ranks, f"{name} drifted")
    for name in ("top-K 100 %", "threshold 0"):
        np.testing.assert_array_equal(ranks[0][name], ranks[0]["fp32"])
    for name, bound in {"fp16": 2e-3, "bf16": 2e-2}.items():
        np.testing.assert_allclose(ranks[0][name], ranks[0]["fp32"], atol=bound)
    for rank in ranks:
        dense = rank["fp32 bytes"][1]
        assert all(rank[f"{name} bytes"][1] == dense for name in STRATEGIES if name != "partial")
        assert rank["fp32 bytes"][0] == dense
        assert rank["partial bytes"][0] < rank["partial bytes"][1]
        assert rank["fp16 bytes"][0] < 0.75 * dense


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_strategy_trains_with_equal_parameters(tmp_path, world_size):
    check_every_strategy(on_ranks(tmp_path, world_size, every_strategy))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mpi4py") is None, reason="needs mpi4py")
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_strategy_over_mpi(tmp_path, world_size):
    mpiexec = Path(sys.executable).with_name("mpiexec")
    command = [str(mpiexec), "-n", str(world_size), sys.executable, "-m", "tests.ranks.test_strategies", str(tmp_path)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    ended = Program(command, {"DISTOPT_TRANSPORT": "mpi", **threads}).end()
    assert ended.code == 0, ended.stderr
    check_every_strategy([dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(world_size)])


# -- changes between steps --------------------------------------------------------------------------------------------
def changing(optimizer) -> dict[str, np.ndarray]:
    """Warm-up in fp32, then top-K of another share in every step, fp16 in between."""
    net = build(optimizer)
    shapes = []
    for number in range(STEPS):
        spars = 0.02 + 0.01 * (number % 7)
        if number < 5:
            train(optimizer, net, range(number, number + 1), Fp32())
        elif number == 20:
            train(optimizer, net, range(number, number + 1), Fp16())
        else:
            sparse = partial(optimizer.backward_and_sparse_update, threshold=SMALL, spars=spars, topK=True)
            net(*batch(number, optimizer.global_rank), sparse)
        states = optimizer.get_states()
        shapes.append(len(states))
    residual = np.concatenate([array.reshape(-1) for key, array in states.items() if "/residual/" in key])
    kinds = {kind for _, kind in optimizer.stats().buckets}
    assert kinds == {"Fp32", "Fp16", "ErrorFeedback(TopK)"}, kinds
    assert len(set(shapes[5:])) == 1, "a varying share of top-K makes new state"
    return {"parameters": parameters(net), "residual": residual}


def test_strategies_change_between_steps(tmp_path):
    ranks = on_ranks(tmp_path, 2, changing)
    assert_equal_bits(ranks, "parameters")
    assert all(np.abs(rank["residual"]).max() > 0 for rank in ranks)


def main(folder: str) -> None:
    """A rank of mpiexec."""
    optimizer = opt.DistOpt(opt.SGD())
    assert optimizer.communicator.name == os.environ["DISTOPT_TRANSPORT"]
    results = every_strategy(optimizer)
    np.savez(Path(folder) / f"{optimizer.global_rank}.npz", **results)


if __name__ == "__main__":
    main(sys.argv[1])
