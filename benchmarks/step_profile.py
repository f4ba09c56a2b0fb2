"""Where one training step of the reference CNN spends its time, by part of the package.

Steps are replayed, as in the examples, unless --no-graph is given. Every part's own time is taken, without that of the
parts it calls. The two columns are the median over steps and the lower decile, which the load of other processes hardly
touches. Rank 0; the recorder's own 0.2 us a call are inside.

    python benchmarks/step_profile.py --np 2 --batch-size 64
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

WARM_UP_STEPS = 20
KERNELS = ("conv2d_max_pool", "linear", "cross_entropy")
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
        if self._steps:
            self._book()
        self._steps.append(defaultdict(int))

    def enter(self, part: str) -> None:
        self._book()
        self._stack.append(part)

    def leave(self) -> None:
        self._book()
        self._stack.pop()

    def wrap(self, part: str, function):
        def recorded(*args, **options):
            self.enter(part)
            try:
                return function(*args, **options)
            finally:
                self.leave()

        return recorded

    def wrap_generator(self, part: str, function):
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
            return (
                RecordedCalls(self._recorder, f"{self._part}: wait", result)
                if name.startswith("all_reduce")
                else result
            )

        return recorded


def profile_rank(rank: int, world_size: int, ticket, size: int, steps: int, use_graph: bool) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from train_cnn import CNN

    from distopt import _core, device, opt, tensor
    from distopt.nn import autograd
    from distopt.nn.replay import replayed as replay

    device.get_default_device().SetRandSeed(0)
    sgd = opt.DistOpt(opt.SGD(lr=0.005, momentum=0.9, weight_decay=1e-5), ticket, rank, world_size)
    rng = np.random.default_rng(rank)
    x = tensor.from_numpy(rng.standard_normal((size, 1, 28, 28), dtype=np.float32))
    y = tensor.from_numpy(rng.integers(0, 10, size).astype(np.int32))
    net = CNN()
    net.set_optimizer(sgd)
    net.compile([x], is_train=True, use_graph=use_graph)
    net.train()
    net(x, y)  # sets up the buckets

    recorder = Recorder()
    for name in KERNELS:
        setattr(_core, name, recorder.wrap(f"kernel {name}", getattr(_core, name)))
    _core.sgd = recorder.wrap("kernel sgd", _core.sgd)
    if world_size > 1:
        sgd.communicator._core = RecordedCalls(recorder, "communication", sgd.communicator._core)
    autograd.backward = recorder.wrap_generator("autograd", autograd.backward)
    sgd.opt.update = recorder.wrap("optimizer", sgd.opt.update)
    opt.DistOpt.step_by = recorder.wrap("DistOpt", opt.DistOpt.step_by)
    net.forward = recorder.wrap("layers", net.forward)
    replay.ReplayedStep.replay = recorder.wrap("replay", replay.ReplayedStep.replay)
    for _ in range(WARM_UP_STEPS + steps):
        recorder.next_step()
        net(x, y)
    recorder.next_step()
    if rank == 0:
        report(recorder.quantiles())
    sgd.communicator.barrier()


def report(quantiles: dict[str, np.ndarray]) -> None:
    total = sum(quantiles.values())
    print(f"{'part':28} {'median us':>10} {'%':>6} {'decile us':>10} {'%':>6}")
    for part, row in [*sorted(quantiles.items(), key=lambda item: -item[1][1]), ("sum", total)]:
        share = 100 * row / total
        print(f"{part:28} {row[0]:10.1f} {share[0]:6.2f} {row[1]:10.1f} {share[1]:6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2, help="ranks")
    parser.add_argument("--batch-size", type=int, default=64, help="samples a rank")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--no-graph", action="store_true", help="run the Python code of every step")
    args = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"

    from distopt import launch, singa_wrap

    launch.spawn(profile_rank, args.np, (singa_wrap.NcclIdHolder(), args.batch_size, args.steps, not args.no_graph))


if __name__ == "__main__":
    main()
