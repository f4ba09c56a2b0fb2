"""The bucket as it is: float32, or float64, on the wire."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from .base import Codec, Place, Reducer, Statistics, Stopwatch

if TYPE_CHECKING:
    from ..comm.base import Work
    from ..errors import GradientError

__all__ = ["Fp32"]


@dataclass(frozen=True)
class Fp32(Codec):
    """Dense, in the type of the bucket, reduced in place without a copy.

    Where the communicator does not look for NaN and infinity while it adds, a rank that finds an element which is NaN,
    infinite or so large that a sum over the ranks could overflow puts NaN into the first one. That survives every sum.
    So the first element of the mean tells each rank whether all gradients were good, and they come to the same verdict
    without a message and without another pass over the bucket; only a bad one is followed by the exchange of who it
    was.
    """

    lossy: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float64")

    def _attach(self, place: Place) -> Reducer[Fp32]:
        marks = place.check_finite and not place.comm.finds_nonfinite
        return (_MarkingReducer if marks else _DenseReducer)(self, place)


class _DenseReducer(Reducer[Fp32]):
    _work: Work

    def __init__(self, codec: Fp32, place: Place) -> None:
        super().__init__(codec, place)
        self._look = place.check_finite and place.comm.finds_nonfinite
        ranks = place.comm.topology.world_size
        largest = float(np.finfo(place.bucket.dtype).max)
        # Half of a share, as rounding goes up as well.
        self._limit = largest / (2 * ranks) if ranks > 1 else largest

    def _start(self, cost: Statistics) -> None:
        watch = Stopwatch(cost)
        self._work = self._comm.all_reduce(self.bucket, "mean", label=self._label, find_nonfinite=self._look)
        cost.wire_bytes += cost.dense_bytes
        watch.book("comm_seconds")

    def _done(self) -> bool:
        return self._work.done()

    def _finish(self, cost: Statistics, timeout: float | None) -> None:
        watch = Stopwatch(cost)
        self._work.wait(timeout)
        watch.book("comm_seconds")
        if self._look and (found := self._work.nonfinite):
            rank, index = found
            from_bad = [0] * rank + [self.bucket.size - index]
            raise self._error(from_bad)

    def _error(self, from_bad: list[int]) -> GradientError:
        ranks = self._comm.topology.world_size
        fault = f"NaN, infinite or, beyond {self._limit:.2g}, too large for a sum over {ranks} ranks"
        return next(self._errors(from_bad, fault))


class _MarkingReducer(_DenseReducer):
    def __init__(self, codec: Fp32, place: Place) -> None:
        super().__init__(codec, place)
        self._own = self._kernels.empty(1, "int64")  # as `FROM_BAD`

    def _start(self, cost: Statistics) -> None:
        watch = Stopwatch(cost)
        self._kernels.mark_beyond(self.bucket, self._limit, self._own)
        watch.book("select_seconds")
        super()._start(cost)

    def _finish(self, cost: Statistics, timeout: float | None) -> None:
        super()._finish(cost, timeout)
        watch = Stopwatch(cost)
        first = self._read(self.bucket[:1], self._work)  # of an empty bucket there is none
        watch.book("decode_seconds")
        if any(map(math.isnan, first)):
            gathered = self._comm.all_gather_ragged(self._own, label=self._label)
            raise self._error([int(own[0]) for own in gathered])
