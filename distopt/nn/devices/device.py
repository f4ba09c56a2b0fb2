"""Devices: each has an array module, random generators and a profile of its operations. Method names follow SINGA."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from time import perf_counter
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from ...checks import check_integer
from ...errors import UsageError

T = TypeVar("T")

_log = logging.getLogger("distopt")


def bad_index(index: int, position: int, length: int, axis: int) -> str:
    """The message about an index out of the range of its axis; `position` counts the indices."""
    return f"index {index}, number {position}, is not in [{-length}, {length}), the range of axis {axis}"


class Device:
    """A CPU or a GPU.

    Args:
        kind: "cpu" or "cuda".
        index: number of the device within its kind.
        xp: the array module, numpy or cupy.

    Attributes:
        kind: as given.
        xp: as given.
        host_rng: NumPy generator for initial parameters, so that a seed gives the same parameters on every device. On
            the CPU it is the same object as `rng`.
        capturing: the pass that is being captured in a CUDA graph, "forward" or "backward"; else empty.
        graph_generation: incremented when captured steps become invalid.
        verbosity: if 1 or more, every operation is timed.
    """

    def __init__(self, kind: str, index: int, xp: ModuleType) -> None:
        self.kind = kind
        self.xp: Any = xp
        self._rng = self.xp.random.default_rng()
        self.host_rng = self._rng if kind == "cpu" else np.random.default_rng()
        self.capturing = ""
        self.graph_generation = 0
        self.verbosity = 0
        self._index = index
        self._skip = 0
        self._graph = False
        self._profile: dict[str, list[float]] = {}

    def __repr__(self) -> str:
        return f"{self.kind}:{self._index}"

    def __reduce__(self) -> tuple[Callable[..., Device], tuple[int, ...]]:
        """A copy of a tensor is on the same device."""
        return (get_default_device, ()) if self.kind == "cpu" else (_gpu_at, (self._index,))

    @property
    def rng(self) -> Any:
        """Random generator of this device's array module, for dropout masks.

        Raises:
            UsageError: a training step is being captured; every replay would draw the same numbers.
        """
        if self.capturing:
            raise UsageError("random numbers, such as those of dropout, would be the same in every replay of a graph")
        if self._rng is None:
            self._rng = self.xp.random.default_rng(self._seed)
        return self._rng

    def id(self) -> int:
        """Number of the device within its kind."""
        return self._index

    def lang(self) -> str:
        """SINGA's name for the kind: "kCpp" or "kCuda"."""
        return "kCpp" if self.kind == "cpu" else "kCuda"

    def SetRandSeed(self, seed: int) -> None:  # noqa: N802 - the methods in capitals are SINGA's
        """Seed `rng` and `host_rng`, which makes parameters and dropout masks reproducible.

        Raises:
            UsageError: the seed is not an integer of at least 0.
        """
        seed = check_integer("the seed of random numbers", seed, 0)
        self._rng = self.xp.random.default_rng(seed)
        self.host_rng = self._rng if self.kind == "cpu" else np.random.default_rng(seed)

    @contextmanager
    def seeded(self, seed: Any) -> Iterator[None]:
        """In the body of a `with`, `rng` is a new generator, made from `seed`; afterwards, the old one."""
        kept, self._rng = self._rng, None
        self._seed = seed  # a generator takes 20 us to make, and most steps need none
        try:
            yield
        finally:
            self._rng = kept

    def Sync(self) -> None:  # noqa: N802
        """Wait until the device has finished all its work. On the CPU, return at once."""
        if self.kind == "cuda":
            self.xp.cuda.Device(self._index).synchronize()
            self.check()

    def host(self, array: Any) -> Any:
        """The values of `array` on this device as a NumPy array; on the CPU, `array` itself.

        Raises:
            UsageError: see `check`.
        """
        if self.kind == "cpu":
            return array
        values = self.xp.asnumpy(array)
        self.check()
        return values

    def check(self) -> None:
        """Raise errors found by kernels that have finished. On a GPU, errors are detected only here, to avoid waiting.

        Raises:
            UsageError: a label of a cross entropy, or an index, was out of range; what comes of it is NaN.
        """
        if self.kind == "cuda" and self.out_of_range[0]:
            self.out_of_range[0] = 0
            _, kind, position, value, length = self.out_of_range.tolist()
            if kind:
                raise UsageError(bad_index(value, position, length, kind - 1))
            raise UsageError(f"label {value} of sample {position} is outside 0 ... {length - 1}")

    @cached_property
    def out_of_range(self) -> Any:
        """Five int64 where kernels of a GPU report a label or an index, in memory of the host, so that none waits.

        They are 1 if one is reported, else 0; 0 for a label, or 1 + the axis of an index; its position among the labels
        or indices; its value; and the number of classes, or the length of the axis.
        """
        values = np.frombuffer(self.xp.cuda.alloc_pinned_memory(40), np.int64, 5)
        values[:] = 0
        return values

    # -- profile -----------------------------------------------------------------------------------------------------
    def SetVerbosity(self, verbosity: int) -> None:  # noqa: N802
        """Time every operation if `verbosity` is 1 or more; on a GPU, this waits for each operation.

        Meanwhile, steps are not replayed.
        """
        self.verbosity = verbosity

    def SetSkipIteration(self, iterations: int) -> None:  # noqa: N802
        """Exclude the first `iterations` calls of each operation from the profile, as warm-up."""
        self._skip = check_integer("iterations", iterations, 0)

    def timed(self, name: str, call: Callable[..., T], *args: Any) -> T:
        """The result of `call(*args)`, with its time added to the profile as one call of operation `name`."""
        start = perf_counter()
        result = call(*args)
        self.Sync()
        self._profile.setdefault(name, []).append(perf_counter() - start)
        return result

    def PrintTimeProfiling(self) -> str:  # noqa: N802
        """Log and return the profile: calls, total time and mean time of each operation. The log level is INFO."""
        lines = [f"time of operations on {self!r}, without the first {self._skip} calls of each"]
        for name, times in sorted(self._profile.items()):
            if times := times[self._skip :]:
                total = math.fsum(times)
                mean_us = total / len(times) * 1e6
                lines.append(f"{name:32} {len(times):8} calls {total * 1e3:10.3f} ms {mean_us:10.1f} us each")
        text = "\n".join(lines)
        _log.info("%s", text)
        return text

    # -- graph -------------------------------------------------------------------------------------------------------
    def EnableGraph(self, enabled: bool) -> None:  # noqa: N802
        """Whether models on this device capture and replay training steps; without effect on a CPU.

        See `distopt.nn.replay.graphs`.

        Args:
            enabled: any value, taken as Python takes its truth: SINGA's scripts pass the text "True".
        """
        self._graph = bool(enabled)

    def graph_enabled(self) -> bool:
        """The last argument of `EnableGraph`."""
        return self._graph

    def ResetGraph(self) -> None:  # noqa: N802
        """Discard all captured training steps; models capture them again."""
        self.graph_generation += 1


_cpu = Device("cpu", 0, np)
_gpus: dict[int, Device] = {}


def get_default_device() -> Device:
    """The CPU. All calls return the same object."""
    return _cpu


def device_of(array: Any) -> Device:
    """The device that holds the memory of `array`; the CPU for anything but a CuPy array."""
    cupy = sys.modules.get("cupy")
    if cupy is None or isinstance(array, np.ndarray) or not isinstance(array, cupy.ndarray):
        return _cpu
    index = array.device.id
    return _gpus[index] if index in _gpus else gpu(cupy, index)


def _gpu_at(index: int) -> Device:
    import cupy

    return gpu(cupy, index)


def gpu(cupy: Any, index: int) -> Device:
    """GPU `index`, which becomes the current one of `cupy`. All calls return the same object."""
    cupy.cuda.Device(index).use()
    if index not in _gpus:
        _gpus[index] = Device("cuda", index, cupy)
    return _gpus[index]
