"""A model of the time of data-parallel training steps: a curve per measured communicator, and a network between hosts.

A message of m bytes takes latency + m / bandwidth (Hockney, "The communication challenge for MPP", Parallel Computing
20, 1994). Within a host there are two bandwidths, one of the caches and one of memory. First the ranks of each host
reduce, in the time given by the curve fitted to their measured all-reduce; then the hosts reduce over the network, with
each local rank sending its share of the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from distopt.comm.sparse import ENTRY_BYTES, choose_route

ALGORITHMS = ("ring", "halving-doubling")
STRATEGIES = ("fp32", "fp16", "sparseTopK")


@dataclass(frozen=True)
class Line:
    """Time over message size.

    Attributes:
        latency: seconds.
        seconds_per_byte: inverse of the bandwidth.
    """

    latency: float
    seconds_per_byte: float

    def time(self, size_bytes: float) -> float:
        """Seconds for `size_bytes`."""
        return self.latency + size_bytes * self.seconds_per_byte


@dataclass(frozen=True)
class Curve:
    """Time over message size, with a bend.

    Attributes:
        line: for sizes up to the knee.
        knee_bytes: size above which the arrays do not fit the caches; None if no bend was found.
        slope: seconds per byte for sizes above the knee.
    """

    line: Line
    knee_bytes: float | None = None
    slope: float = 0.0

    def time(self, size_bytes: float) -> float:
        """Seconds for `size_bytes`."""
        if self.knee_bytes is None or size_bytes <= self.knee_bytes:
            return self.line.time(size_bytes)
        return self.line.time(self.knee_bytes) + (size_bytes - self.knee_bytes) * self.slope


def fit(points: Sequence[tuple[float, float]]) -> Curve:
    """The curve through (bytes, seconds) with the least sum of squared relative errors and no negative term.

    A bend needs at least three sizes below its knee and two above, and must reduce the sum to a quarter.
    """
    straight = Curve(_fit_line(points))
    sizes = sorted({size for size, _ in points})
    bent = [curve for knee in sizes[2:-2] if (curve := _fit_bent(points, knee))]
    best = min(bent, key=lambda curve: _squares(curve, points), default=straight)
    return best if 4 * _squares(best, points) < _squares(straight, points) else straight


def _squares(curve: Line | Curve, points: Sequence[tuple[float, float]]) -> float:
    return sum((curve.time(size) / seconds - 1) ** 2 for size, seconds in points)


def _fit_bent(points: Sequence[tuple[float, float]], knee: float) -> Curve | None:
    terms = _least_squares(points, lambda size: (1.0, min(size, knee), max(size - knee, 0.0)))
    return Curve(Line(terms[0], terms[1]), knee, terms[2]) if min(terms) >= 0 else None


def _fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """The line through (bytes, seconds) with the least sum of squared relative errors and no negative term."""
    if len({size for size, _ in points}) > 1:
        latency, slope = _least_squares(points, lambda size: (1.0, size))
        if latency >= 0 and slope >= 0:
            return Line(latency, slope)
    # The best line with a single term; if both are possible, the better one.
    (latency,), (slope,) = (_least_squares(points, term) for term in (lambda _: (1.0,), lambda size: (size,)))
    return min(Line(0.0, slope), Line(latency, 0.0), key=lambda line: _squares(line, points))


def _least_squares(points: Sequence[tuple[float, float]], terms: Callable[[float], tuple[float, ...]]) -> list[float]:
    """The factors of `terms` of a size with the least sum of squared relative errors.

    Errors are relative because the points span five orders of magnitude: absolute ones would not constrain the latency.
    """
    rows = np.array([terms(size) for size, _ in points]) / np.array([[seconds] for _, seconds in points])
    scale = np.max(rows, axis=0)  # the columns differ by ten orders of magnitude
    found: list[float] = (np.linalg.lstsq(rows / scale, np.ones(len(rows)), rcond=None)[0] / scale).tolist()
    return found


@dataclass(frozen=True)
class Network:
    """Links between hosts, one per host, full duplex, through a switch that never blocks.

    Attributes:
        line: time of one message between two hosts.
        algorithm: of the dense all-reduce. Both move 2 (h - 1) / h times the bytes: a ring in 2 (h - 1) successive
            messages, recursive halving and doubling in 2 ceil(log2 h) (Thakur, Rabenseifner and Gropp,
            "Optimization of Collective Communication Operations in MPICH", 2005, section 4.3).
    """

    line: Line
    algorithm: str

    def all_reduce(self, size_bytes: float, hosts: int) -> float:
        """Seconds of a dense all-reduce of `size_bytes` per host."""
        if hosts == 1:
            return 0.0
        messages = 2 * (hosts - 1) if self.algorithm == "ring" else 2 * math.ceil(math.log2(hosts))
        return messages * self.line.latency + 2 * (hosts - 1) / hosts * size_bytes * self.line.seconds_per_byte

    def sparse_all_reduce(self, entries: int, count: int, hosts: int) -> float:
        """Seconds to sum `entries` indices and values per host into `count` float32, as `comm.sparse` does."""
        if hosts == 1:
            return 0.0
        dense_bytes, per_host = 4 * count, ENTRY_BYTES * entries
        latency = (hosts - 1) * self.line.latency
        match choose_route([entries] * hosts, count, splits=True):
            case "gather":
                return latency + (hosts - 1) * per_host * self.line.seconds_per_byte
            case "split":
                received = per_host + min(hosts * per_host, dense_bytes)
                return 2 * latency + (hosts - 1) / hosts * received * self.line.seconds_per_byte
            case _:
                return self.all_reduce(dense_bytes, hosts)


@dataclass(frozen=True)
class Training:
    """The cost of a training step.

    Attributes:
        alone: seconds per step with one process.
        compute: seconds per step without communication, with the final number of ranks per host.
        backward: the part of it that can hide communication, in seconds.
        count: number of float32 gradient elements.
        batch_size: samples per rank.
    """

    alone: float
    compute: float
    backward: float
    count: int
    batch_size: int


@dataclass(frozen=True)
class Prediction:
    """A step on some number of ranks.

    Attributes:
        ranks: number of ranks.
        hosts: number of hosts.
        strategy: what is sent.
        communication: seconds for all gradients.
        step: seconds if no communication is hidden, and if as much as possible is hidden behind backward.
        efficiency: step time of one process divided by `step`.
    """

    ranks: int
    hosts: int
    strategy: str
    communication: float
    step: tuple[float, float]
    efficiency: tuple[float, float]


def predict(
    training: Training, local: Curve | None, network: Network, per_host: int, ranks: int, strategy: str, ratio: float
) -> Prediction:
    """Predict the step on `ranks` ranks, with `per_host` of them on each host.

    Args:
        training: the step without communication.
        local: all-reduce among the ranks of one host; None for one rank per host.
        network: between hosts.
        per_host: ranks per host.
        ranks: number of ranks.
        strategy: what is sent. The model ignores the time to encode and decode.
        ratio: share of the gradients that sparseTopK sends.
    """
    on_host = min(ranks, per_host)
    hosts = -(-ranks // on_host)
    size, selected = 4 * training.count, max(1, round(ratio * training.count))
    if strategy == "sparseTopK":
        local_bytes = ENTRY_BYTES * selected * on_host
        between = network.sparse_all_reduce(min(training.count, selected * on_host), training.count, hosts)
    else:
        local_bytes = size // 2 if strategy == "fp16" else size
        between = network.all_reduce(local_bytes, hosts)
    within = local.time(local_bytes) if local is not None and on_host > 1 else 0.0
    communication = within + between
    compute = training.compute if on_host > 1 else training.alone
    step = compute + communication, compute + max(0.0, communication - training.backward)
    return Prediction(ranks, hosts, strategy, communication, step, (training.alone / step[0], training.alone / step[1]))
