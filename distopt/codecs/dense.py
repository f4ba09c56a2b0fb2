"""The bucket unchanged: float32, or float64, on the wire."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..kernels import FROM_BAD
from .base import Codec
from .reduction import CodecState, Steps


@dataclass(frozen=True)
class Fp32(Codec):
    """Dense, in the type of the bucket, reduced in place without a copy.

    Where the communicator does not look for NaN and infinity while it adds, a rank that finds an element which is NaN,
    infinite or so large that a sum over the ranks could overflow puts NaN into the first one. That survives every sum.
    So the first element of the mean shows each rank whether all gradients were good, without a message or
    another pass over the bucket; only after a bad one do the ranks exchange whose it was. GPUs, for which another
    kernel costs as much as a message, exchange headers always.
    """

    lossy: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float64")

    def prepare(self, state: CodecState) -> None:
        """Collective. Where the communicator does not look for NaN and infinity, make the memory of findings."""
        if state.check_finite and not state.comm.finds_nonfinite:
            state.prepare_header()
            state.memory["limit"] = _limit(state)

    def reduce(self, state: CodecState) -> Steps:
        """Collective. One all-reduce of the bucket; with headers beside it, or after a bad gradient."""
        bucket = state.bucket
        finds = "limit" in state.memory
        marks = finds and isinstance(bucket, np.ndarray)
        if finds:
            found = state.findings[FROM_BAD : FROM_BAD + 1]
            state.kernels.find_beyond(bucket, state.memory["limit"], found)
            if marks and found[0]:
                bucket[0] = np.nan
        looks = state.check_finite and not finds
        with state.comm.together():
            work = state.all_reduce(bucket, "mean", find_nonfinite=looks)
            header = state.send_header() if finds and not marks else None
        yield work
        if header is not None:
            yield header
            return state.read_header(header, _fault(state), may_stay=True).verdict
        if looks and (found := work.nonfinite):
            rank, index = found
            return state.verdict([0] * rank + [bucket.size - index], _fault(state))
        # An empty bucket has no first element.
        if marks and any(map(math.isnan, state.read(bucket[:1], work))):
            header = state.send_header()
            yield header
            return state.read_header(header, _fault(state)).verdict
        return None


def _limit(state: CodecState) -> float:
    """The largest magnitude whose sum over the ranks is certain to be finite."""
    largest, ranks = float(np.finfo(state.bucket.dtype).max), state.topology.world_size
    return largest / (2 * ranks) if ranks > 1 else largest  # half of a share, because sums may be rounded up


def _fault(state: CodecState) -> str:
    ranks = state.topology.world_size
    return f"NaN, infinite or, beyond {_limit(state):.2g}, too large for a sum over {ranks} ranks"
