"""16-bit floats on the wire."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from .. import _core
from ..errors import UsageError
from .base import Codec, LossyReducer, Place, Reducer, Statistics, Stopwatch

if TYPE_CHECKING:
    from ..comm.base import Work

__all__ = ["BFloat16", "Fp16"]

# Loss scaling is that of Micikevicius et al., arXiv 1710.03740, section 3.2; half the factor at an overflow, and twice
# after a long time without one, is the usual way to find it.
_GROWTH_STEPS = 1000
_LARGEST_SCALE = 2.0**24


class _Half(Codec):
    """What both 16-bit codecs do.

    Every rank divides by the world size *before* the cast, and values beyond the largest one that all ranks can add up
    without leaving the range become that one: the sum is never infinite. The sum itself is accumulated in float32 by
    the communicator and rounded once. Values that were too large, and those that became zero, are counted in the
    statistics; NaN raises `GradientError`.
    """

    wire: ClassVar[str]
    scale: float | Literal["dynamic"]

    def __post_init__(self) -> None:
        if self.scale != "dynamic" and not (isinstance(self.scale, int | float) and 0 < self.scale < math.inf):
            raise UsageError(f"scale {self.scale!r} is neither a positive number nor 'dynamic'")

    def _attach(self, place: Place) -> Reducer[_Half]:
        return _HalfReducer(self, place)


@dataclass(frozen=True)
class Fp16(_Half):
    """IEEE half precision: 11 significant bits, from 6e-8 to 65,504.

    Args:
        scale: factor on the wire, taken off again after it. "dynamic" begins with 1, halves when a value of any rank
            was too large, and doubles after 1,000 reductions without one.
    """

    wire: ClassVar[str] = "float16"
    scale: float | Literal["dynamic"] = 1.0


@dataclass(frozen=True)
class BFloat16(_Half):
    """bfloat16: 8 significant bits, the range of float32.

    Args:
        scale: as for `Fp16`, and hardly ever needed.
    """

    wire: ClassVar[str] = "bfloat16"
    scale: float | Literal["dynamic"] = 1.0


class _HalfReducer(LossyReducer[_Half]):
    _work: Work

    def __init__(self, codec: _Half, place: Place) -> None:
        super().__init__(codec, place)
        self._wire = place.comm.empty(place.bucket.size, codec.wire)
        self._limit = _core.cast_limit(codec.wire, place.comm.topology.world_size)

    def _tune(self, codec: _Half) -> None:
        super()._tune(codec)
        if codec.scale == "dynamic":
            # The scale, and the reductions since it last changed.
            self._keep("scale", np.zeros(2), (1.0, 0.0))

    @property
    def scale(self) -> float:
        """Factor that the next reduction puts on the wire."""
        return float(self._state["scale"][0]) if self._codec.scale == "dynamic" else float(self._codec.scale)

    def _start(self, cost: Statistics) -> None:
        watch = Stopwatch(cost)
        self._used_scale = self.scale
        factor = self._used_scale / self._comm.topology.world_size
        wire = self._wire.view(np.uint16)
        # Without a residual infinity is saturated and counted; a residual would keep it for ever.
        self._kernels.encode16(self.bucket, self._residual, wire, self._codec.wire, factor, self._limit, self._findings)
        watch.book("select_seconds")
        self._start_header(cost)
        self._work = self._comm.all_reduce(self._wire, "sum", wire=self._codec.wire, label=self._label)
        cost.wire_bytes += self._dense_bytes(self._wire.nbytes)
        watch.book("comm_seconds")

    def _done(self) -> bool:
        return self._header_work.done() and self._work.done()

    def _finish(self, cost: Statistics, timeout: float | None) -> None:
        watch = Stopwatch(cost)
        _, overflowed, error = self._wait_header(cost, timeout)
        self._work.wait(timeout)
        watch.book("comm_seconds")
        if self._codec.scale == "dynamic":
            self._adapt(overflowed)
        if error:
            raise error
        self._kernels.decode16(self._wire.view(np.uint16), self.bucket, self._codec.wire, 1 / self._used_scale)
        watch.book("decode_seconds")

    def _adapt(self, overflowed: bool) -> None:
        scale, calm = self._state["scale"]
        if overflowed:
            scale, calm = scale / 2, 0
        elif calm + 1 == _GROWTH_STEPS:
            scale, calm = min(scale * 2, _LARGEST_SCALE), 0
        else:
            calm += 1
        self._state["scale"][:] = scale, calm
