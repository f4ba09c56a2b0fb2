"""The bucket as it is: float32, or float64, on the wire."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from .base import Codec

if TYPE_CHECKING:
    from .base import Steps
    from .reducer import Reducer

__all__ = ["Fp32"]


@dataclass(frozen=True)
class Fp32(Codec):
    """Dense, in the type of the bucket, reduced in place without a copy.

    Where the communicator does not look for NaN and infinity while it adds, a rank that finds an element which is NaN,
    infinite or so large that a sum over the ranks could overflow puts NaN into the first one. That survives every sum.
    So the first element of the mean tells each rank whether all gradients were good, without a message and without
    another pass over the bucket; only a bad one is followed by the exchange of who it was.
    """

    lossy: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float64")

    def prepare(self, reducer: Reducer) -> None:
        """Collective. See `Codec.prepare`."""
        if reducer.check_finite and not reducer.wire.finds_nonfinite:
            reducer.memory["from_bad"] = reducer.kernels.empty(1, "int64"), _limit(reducer)

    def reduce(self, reducer: Reducer) -> Steps:
        """Collective. See `Codec.reduce`."""
        bucket, wire = reducer.bucket, reducer.wire
        from_bad, limit = reducer.memory.get("from_bad", (None, 0.0))
        if from_bad is not None:
            reducer.kernels.mark_beyond(bucket, limit, from_bad)
        looks = reducer.check_finite and from_bad is None
        work = wire.all_reduce(bucket, "mean", find_nonfinite=looks)
        yield work
        if looks and (found := work.nonfinite):
            rank, index = found
            return reducer.verdict([0] * rank + [bucket.size - index], _fault(reducer))
        # Of an empty bucket there is no first element.
        if from_bad is not None and any(map(math.isnan, reducer.read(bucket[:1], work))):
            gathered = wire.all_gather_ragged(from_bad)
            yield gathered
            return reducer.verdict([int(own[0]) for own in gathered.parts], _fault(reducer))
        return None


def _limit(reducer: Reducer) -> float:
    """The largest magnitude of which a sum over the ranks is surely finite."""
    largest, ranks = float(np.finfo(reducer.bucket.dtype).max), reducer.wire.world_size
    return largest / (2 * ranks) if ranks > 1 else largest  # half of a share, as rounding goes up as well


def _fault(reducer: Reducer) -> str:
    ranks = reducer.wire.world_size
    return f"NaN, infinite or, beyond {_limit(reducer):.2g}, too large for a sum over {ranks} ranks"
