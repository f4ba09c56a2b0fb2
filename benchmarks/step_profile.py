"""Where one training step of the reference CNN spends its time, by part of the package.

Every part's own time is taken, without that of the parts it calls. The two columns are the median over steps and the
lower decile, which the load of other processes hardly touches. Rank 0; the recorder's own 0.2 us a call are inside.

    python -m benchmarks step-profile --np 2 --batch-size 64
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict

import numpy as np

from distopt import _core, device, launch, opt
from distopt.cli.values import at_least
from distopt.nn.core import autograd

from .models import compiled, sgd

WARM_UP_STEPS = 20
KERNELS = ("conv2d", "linear", "cross_entropy")
KERNELS += tuple(f"{name}_backward" for name in KERNELS)


class Recorder:
    """Own time of the parts of a step."""

    def __init__(self) -> None:
        self._steps: list[dict[str, int]] = []
        self._stack = ["step loop"]
        self._last = time.perf_counter_ns()
        self.next_step()

    def _book(self) -> None:
        now = time.perf_counter_ns()
        self._steps[-1][self._stack[-1]] += now - self._last
        self._last = now

    def next_step(self) -> None:
        """Begin a step."""
        if self._steps:
            self._book()
        self._steps.append(defaultdict(int))

    def enter(self, part: str) -> None:
        """Begin a part; the part around it stops until `leave`."""
        self._book()
        self._stack.append(part)

    def leave(self) -> None:
        """End the part that began last."""
        self._book()
        self._stack.pop()

    def wrap(self, part: str, function):
        """`function` as a part."""

        def recorded(*args, **options):
            self.enter(part)
            try:
                return function(*args, **options)
            finally:
                self.leave()

        return recorded

    def wrap_generator(self, part: str, function):
        """A generator function whose every turn is a part."""

        def recorded(*args, **options):
            generator = function(*args, **options)
            done = object()
            while (item := self.wrap(part, next)(generator, done)) is not done:
                yield item

        return recorded

    def quantiles(self) -> dict[str, np.ndarray]:
        """Median and lower decile over the steps, in microseconds, by part."""
        steps = self._steps[WARM_UP_STEPS:-1]
        parts = dict.fromkeys(part for step in steps for part in step)
        return {part: np.quantile([step[part] for step in steps], [0.5, 0.1]) / 1000 for part in parts}


class RecordedCalls:
    """An object whose methods, and those of what they return, are recorded."""

    def __init__(self, recorder: Recorder, part: str, target) -> None:
        self._recorder, self._part, self._target = recorder, part, target

    def __getattr__(self, name: str):
        value = getattr(self._target, name)
        if not callable(value):
            return value
        call = self._recorder.wrap(self._part, value)

        def recorded(*args):
            result = call(*args)
            if result is None or not name.startswith("all_reduce"):
                return result
            return RecordedCalls(self._recorder, f"{self._part}: wait", result)

        return recorded


def profile_rank(_rank: int, world_size: int, args: argparse.Namespace) -> None:
    device.get_default_device().SetRandSeed(0)
    optimizer = opt.DistOpt(sgd())
    net, x, y = compiled(optimizer, args.batch_size)
    net.train()
    net(x, y)  # sets up the buckets

    recorder = Recorder()
    for name in KERNELS:
        setattr(_core, name, recorder.wrap(f"kernel {name}", getattr(_core, name)))
    _core.sgd = recorder.wrap("kernel sgd", _core.sgd)
    if world_size > 1:
        optimizer.communicator.core = RecordedCalls(recorder, "communication", optimizer.communicator.core)
    autograd.backward = recorder.wrap_generator("autograd", autograd.backward)
    optimizer.opt.update = recorder.wrap("optimizer", optimizer.opt.update)
    opt.DistOpt.step_by = recorder.wrap("DistOpt", opt.DistOpt.step_by)
    net.forward = recorder.wrap("layers", net.forward)
    for _ in range(WARM_UP_STEPS + args.steps):
        recorder.next_step()
        net(x, y)
    recorder.next_step()
    if optimizer.global_rank == 0:
        report(recorder.quantiles())
    optimizer.communicator.barrier()


def report(quantiles: dict[str, np.ndarray]) -> None:
    total = sum(quantiles.values())
    print(f"{'part':28} {'median us':>10} {'%':>6} {'decile us':>10} {'%':>6}")
    for part, row in [*sorted(quantiles.items(), key=lambda item: -item[1][1]), ("sum", total)]:
        share = 100 * row / total
        print(f"{part:28} {row[0]:10.1f} {share[0]:6.2f} {row[1]:10.1f} {share[1]:6.2f}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--np", type=at_least(1), default=2, metavar="N", help="ranks (2)")
    parser.add_argument("--batch-size", type=at_least(1), default=64, metavar="N", help="samples per rank (64)")
    parser.add_argument("--steps", type=at_least(1), default=300, metavar="N", help="(300)")


def run(args: argparse.Namespace) -> None:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    launch.main(profile_rank, args.np, (args,))
