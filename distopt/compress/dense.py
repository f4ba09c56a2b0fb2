"""The bucket as it is: float32, or float64, on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..errors import GradientError
from .base import Codec, Place, Reducer, Statistics, Stopwatch

if TYPE_CHECKING:
    from ..comm.base import Work

__all__ = ["Fp32"]


@dataclass(frozen=True)
class Fp32(Codec):
    """Dense, in the type of the bucket, reduced in place without a copy.

    What is NaN or infinite on one rank is so in the mean, which all ranks hold alike. So each rank looks at the mean,
    and they come to the same verdict without a message; only a bad one is followed by the exchange of who it was.
    """

    lossy: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float64")

    def _attach(self, place: Place) -> Reducer[Fp32]:
        return _DenseReducer(self, place)


class _DenseReducer(Reducer[Fp32]):
    _work: Work

    def __init__(self, codec: Fp32, place: Place) -> None:
        super().__init__(codec, place)
        self._check_finite = place.check_finite
        # As `FROM_BAD`, of the own gradients and of the mean.
        self._found = self._kernels.empty(2, "int64")
        self._own, self._mean = self._found[:1], self._found[1:]

    def _start(self, cost: Statistics) -> None:
        watch = Stopwatch(cost)
        if self._check_finite:
            self._kernels.find_nonfinite(self.bucket, self._own)
            watch.book("select_seconds")
        self._work = self._comm.all_reduce(self.bucket, "mean", label=self._label)
        cost.wire_bytes += cost.dense_bytes
        watch.book("comm_seconds")

    def _done(self) -> bool:
        return self._work.done()

    def _finish(self, cost: Statistics, timeout: float | None) -> None:
        watch = Stopwatch(cost)
        self._work.wait(timeout)
        watch.book("comm_seconds")
        if self._check_finite:
            self._kernels.find_nonfinite(self.bucket, self._mean)
            _, from_bad = self._read(self._found, self._work)
            watch.book("decode_seconds")
            if from_bad:
                raise self._verdict(self.bucket.size - from_bad)

    def _verdict(self, bad: int) -> GradientError:
        gathered = self._comm.all_gather_ragged(self._own, label=self._label)
        overflow = GradientError(
            f"the sum over ranks of element {bad} of bucket {self._label!r} exceeds {self.bucket.dtype}; lower the "
            "learning rate or clip the gradients",
            index=bad,
        )
        return next(self._errors([int(own[0]) for own in gathered]), overflow)
