"""How long the kernels of the reference CNN take on one core: minimum and median of many calls, in microseconds.

Before each call 8 MiB are read, so that second-level caches are as cold as in a training step.

    python -m benchmarks layers --batch-size 64
"""

from __future__ import annotations

import argparse
from time import perf_counter

import numpy as np

from distopt.cli.values import at_least
from distopt.nn.kernels import cpu

from .models.cnn import PARAMETERS

POOLED = (1, 1), (0, 0), True, ((2, 2), (2, 2), (0, 0))  # as `cpu.conv2d` has it
CONVOLUTIONS = [("conv1", 1, 28, 20), ("conv2", 20, 12, 50)]  # channels, height and width, filters of 5 x 5
ROWS = [("linear1", 800, 500), ("linear2", 500, 10)]


def measure(name: str, call, rounds: int, others: np.ndarray) -> None:
    times = []
    for _ in range(rounds):
        others.sum()
        start = perf_counter()
        call()
        times.append(1e6 * (perf_counter() - start))
    print(f"{name:20} {min(times):8.1f} {np.median(times):8.1f}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=at_least(1), default=64, metavar="N", help="(64)")
    parser.add_argument("--rounds", type=at_least(1), default=300, metavar="N", help="(300)")


def run(args: argparse.Namespace) -> None:
    rng, others = np.random.default_rng(0), np.ones(2 << 20, np.float32)

    def array(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    print(f"{'kernel':20} {'min':>8} {'median':>8}")
    for i, (name, channels, size, filters) in enumerate(CONVOLUTIONS):
        given = array(args.batch_size, channels, size, size), array(filters, channels, 5, 5), array(filters), *POOLED
        y, saved = cpu.conv2d(*given)
        # The gradient of the images themselves is not needed.
        back = array(*y.shape), saved, np.empty_like(given[1]), np.empty_like(given[2]), i > 0
        measure(f"{name} forward", lambda given=given: cpu.conv2d(*given), args.rounds, others)
        measure(f"{name} backward", lambda back=back: cpu.conv2d_backward(*back), args.rounds, others)
    for name, inner, columns in ROWS:
        given = array(args.batch_size, inner), array(inner, columns), array(columns), name == "linear1"
        y, saved = cpu.linear(*given)
        back = array(*y.shape), saved, np.empty_like(given[1]), np.empty_like(given[2])
        measure(f"{name} forward", lambda given=given: cpu.linear(*given), args.rounds, others)
        measure(f"{name} backward", lambda back=back: cpu.linear_backward(*back), args.rounds, others)
    state = array(PARAMETERS), array(PARAMETERS), [array(PARAMETERS)], 0.005, 0.9, 0.0, 0.0, False
    measure("SGD, momentum", lambda: cpu.update("sgd", *state), args.rounds, others)
