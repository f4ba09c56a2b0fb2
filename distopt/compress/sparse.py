"""What top-K and threshold have in common: lists of selected elements on the wire.

The options of Deep Gradient Compression (Lin et al., arXiv 1712.01887) live here; its section numbers are quoted.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ..comm.sparse import choose_strategy
from ..errors import UsageError
from ..kernels import Accumulation
from .base import Codec, LossyReducer, Place, Statistics, Stopwatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..comm.base import Array, SparseWork, Work

__all__ = ["SparseCodec", "SparseReducer"]

log = logging.getLogger("distopt")


@dataclass(frozen=True, kw_only=True)
class SparseCodec(Codec):
    """A codec that sends a list of selected elements.

    Where a dense float32 reduction moves fewer bytes than the lists of all ranks (4-byte index and 4-byte value each),
    the whole bucket is reduced densely instead, residual included; the log says so once per bucket and the statistics
    count it.

    Args:
        momentum: momentum correction (section 3.2): velocities rather than gradients are accumulated in the residual,
            so that delayed updates count as if they had not been delayed. It takes the place of the optimizer's
            momentum, which must be 0 then. Needs error feedback.
        factor_masking: momentum factor masking (section 3.3): velocity stops where an element has been sent.
        clip_norm: local gradient clipping (section 3.2): before it is accumulated, the bucket's gradient is scaled to
            an l2 norm of at most clip_norm / sqrt(world_size); the paper's norm is that of all gradients. Needs error
            feedback.
    """

    momentum: float = 0.0
    factor_masking: bool = True
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise UsageError(f"momentum {self.momentum!r} is outside [0, 1)")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise UsageError(f"clip_norm {self.clip_norm!r} is not a positive number")

    def _check_residual(self, residual: bool) -> None:
        if not residual and (self.momentum or self.clip_norm is not None):
            raise UsageError(
                "momentum correction and local clipping act on the residual; wrap the codec: "
                f"ErrorFeedback({type(self).__name__}(...))"
            )


SparseCodecT = TypeVar("SparseCodecT", bound=SparseCodec)


class SparseReducer(LossyReducer[SparseCodecT]):
    """A sparse codec at work on one bucket."""

    def __init__(self, codec: SparseCodecT, place: Place) -> None:
        if place.bucket.size >= 2**31:
            raise UsageError(f"int32 indices do not reach into a bucket of {place.bucket.size}; use smaller buckets")
        super().__init__(codec, place)
        self._lists = self._kernels.new_lists(self._room(place.bucket.size))
        self._payload: Work | None = None
        self._sparse: SparseWork | None = None
        self._told = False

    def _tune(self, codec: SparseCodecT) -> None:
        codec._check_residual(self._residual is not None)
        super()._tune(codec)
        self._velocity: Array | None = self._keep("velocity", self.bucket) if codec.momentum else None

    # -- for the codec -----------------------------------------------------------------------------------------------
    @abstractmethod
    def _known_count(self) -> int | None:
        """Entries that every rank will send in this step, if that is known beforehand."""

    @abstractmethod
    def _select(self, accumulation: Accumulation) -> None:
        """Accumulate; fill the lists and the findings."""

    def _room(self, size: int) -> int:
        """Entries that the lists begin with."""
        return 0

    def _complete(self, count: int) -> None:
        """Make sure that the lists hold all `count` entries that the findings promised."""

    # -- the reduction -----------------------------------------------------------------------------------------------
    def _start(self, cost: Statistics) -> None:
        watch = Stopwatch(cost)
        world_size = self._comm.topology.world_size
        count = self._known_count()
        counts = None if count is None else [count] * world_size
        if counts is not None and self._goes_dense(counts):
            self._kernels.accumulate(self.bucket, self._accumulation(), self._lists, self._findings)
        else:
            self._select(self._accumulation())
        watch.book("select_seconds")
        self._payload = self._sparse = None
        self._start_header(cost)
        if counts is not None:
            self._start_payload(counts, cost)
        watch.book("comm_seconds")

    def _done(self) -> bool:
        return self._header_work.done() and self._payload is not None and self._payload.done()

    def _finish(self, cost: Statistics, timeout: float | None) -> None:
        watch = Stopwatch(cost)
        counts, _, error = self._wait_header(cost, timeout)
        if self._payload is None and error is None:
            self._start_payload(counts, cost)
        if self._payload is not None:
            self._payload.wait(timeout)
        if self._sparse is not None:
            cost.wire_bytes += self._sparse.wire_bytes
        watch.book("comm_seconds")
        if error:
            raise error

    def _goes_dense(self, counts: Sequence[int]) -> bool:
        return choose_strategy(counts, self.bucket.size, splits=self._comm.sends_parts) == "dense"

    def _start_payload(self, counts: Sequence[int], cost: Statistics) -> None:
        if self._goes_dense(counts):
            self._start_dense(counts, cost)
            return
        count = counts[self._comm.topology.rank]
        self._complete(count)
        indices, values = self._lists.indices[:count], self._lists.values[:count]
        if self._residual is not None:
            self._kernels.clear_at(self._residual, indices)
        if self._velocity is not None and self._codec.factor_masking:
            self._kernels.clear_at(self._velocity, indices)
        self._payload = self._sparse = self._comm.sparse_all_reduce(
            indices, values, self.bucket, counts=counts, scale=1 / len(counts), label=self._label
        )

    def _start_dense(self, counts: Sequence[int], cost: Statistics) -> None:
        if not self._told:
            self._told = True
            log.info(
                "bucket %r: %d of %d elements per rank on %d ranks are more bytes than the dense bucket; reducing it "
                "densely", self._label, max(counts), self.bucket.size, len(counts),
            )  # fmt: skip
        # Everything is sent, so nothing is left over. Velocity goes on: masked everywhere, there would be no momentum.
        if self._residual is not None:
            self._kernels.copy_into(self.bucket, self._residual)
            self._residual.fill(0)
        self._payload = self._comm.all_reduce(self.bucket, "mean", label=self._label)
        cost.wire_bytes += self._dense_bytes(self.bucket.nbytes)
        cost.fell_back = 1

    # -- the residual ------------------------------------------------------------------------------------------------
    def _accumulation(self) -> Accumulation:
        scale = 1.0
        if self._codec.clip_norm is not None:
            limit = self._codec.clip_norm / math.sqrt(self._comm.topology.world_size)
            scale = self._kernels.clip_scale(self.bucket, limit)
        return Accumulation(self._residual, self._velocity, scale, self._codec.momentum)
