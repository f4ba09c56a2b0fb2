"""The base of top-K and threshold: lists of selected elements on the wire.

The options of Deep Gradient Compression (Lin et al., arXiv 1712.01887) live here; its section numbers are quoted.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from ..checks import check_number
from ..comm.base import Array, Work
from ..comm.sparse import choose_route
from ..errors import UsageError
from ..kernels import Accumulation
from .base import Codec
from .reduction import CodecState, Steps

log = logging.getLogger("distopt")


@dataclass(frozen=True, kw_only=True)
class SparseCodec(Codec):
    """A codec that sends a list of selected elements.

    Where a dense float32 reduction moves fewer bytes than the lists of all ranks (4-byte index and 4-byte value each),
    the whole bucket is reduced densely instead, residual included; the log reports it once per bucket, and statistics
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
        check_number("momentum", self.momentum, "[0, 1)")
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, "(0, inf)")

    # -- for the codec -----------------------------------------------------------------------------------------------
    @abstractmethod
    def _known_count(self, state: CodecState) -> int | None:
        """Local. Entries that every rank sends in this step, if that is known beforehand."""

    @abstractmethod
    def _select(self, state: CodecState, accumulation: Accumulation, count: int | None) -> None:
        """Local. Accumulate; fill the lists and the findings. `count` is what `_known_count` gave."""

    def _complete(self, state: CodecState, count: int, source: Array) -> None:
        """Local. Make sure that the lists hold all `count` entries of `source` that the findings promised."""

    # -- the reduction -----------------------------------------------------------------------------------------------
    def prepare(self, state: CodecState) -> None:
        """Collective. Make the lists; raises a UsageError for options that need error feedback."""
        size = state.bucket.size
        if size >= 2**31:
            raise UsageError(f"int32 indices do not reach into a bucket of {size}; use smaller buckets")
        self._accumulation(state)
        state.memory["lists"] = state.kernels.new_lists(0)

    def reduce(self, state: CodecState) -> Steps:
        """Collective. Select, and exchange the lists; or the dense bucket where the lists would be longer."""
        kernels, lists = state.kernels, state.memory["lists"]
        accumulation = self._accumulation(state)
        count = self._known_count(state)
        counts = None if count is None else [count] * state.topology.world_size
        if counts is not None and _goes_dense(state, counts):
            kernels.accumulate(state.bucket, accumulation, lists, state.findings)
        else:
            self._select(state, accumulation, count)
        # Lists of known lengths are sent with the header, others after it.
        with state.comm.together():
            sent = state.send_header()
            payload = None if counts is None else self._send(state, counts, accumulation)
            under_way = [] if payload is None else [next(payload)]
        yield sent
        header = state.read_header(sent, may_stay=payload is not None)
        yield from under_way
        if payload is None and not header.is_bad:
            payload = self._send(state, header.counts, accumulation)
        if payload is not None:
            yield from payload
        return header.verdict

    def _send(
        self, state: CodecState, counts: Sequence[int], accumulation: Accumulation
    ) -> Generator[Work, None, None]:
        if _goes_dense(state, counts):
            yield from self._send_dense(state, counts, accumulation.new_residual)
            return
        count = counts[state.topology.rank]
        self._complete(state, count, accumulation.source(state.bucket))
        lists = state.memory["lists"]
        indices, values = lists.indices[:count], lists.values[:count]
        if accumulation.new_residual is not None:
            state.kernels.clear_at(accumulation.new_residual, indices)
        if accumulation.new_momentum is not None and self.factor_masking:
            state.kernels.clear_at(accumulation.new_momentum, indices)
        yield from state.sparse_all_reduce(indices, values, counts)

    def _send_dense(
        self, state: CodecState, counts: Sequence[int], residual: Array | None
    ) -> Generator[Work, None, None]:
        if not state.statistics.fell_back:
            log.info(
                "bucket %r: %d of %d elements per rank on %d ranks are more bytes than the dense bucket; reducing it "
                "densely", state.label, max(counts), state.size, len(counts),
            )  # fmt: skip
        state.statistics.fell_back += 1
        # Everything is sent, so nothing is left over. Velocity continues: masked everywhere, it would give no momentum.
        if residual is not None:
            state.kernels.copy_into(state.bucket, residual)
            residual.fill(0)
        yield state.all_reduce(state.bucket, "mean")

    # -- the residual ------------------------------------------------------------------------------------------------
    def _accumulation(self, state: CodecState) -> Accumulation:
        if state.residual is None and (self.momentum or self.clip_norm is not None):
            raise UsageError(
                "momentum correction and local clipping act on the residual; wrap the codec: "
                f"ErrorFeedback({type(self).__name__}(...))"
            )
        scale, (residual, new_residual) = 1.0, state.renew_residual()
        velocity, new_velocity = state.renew("velocity") if self.momentum else (None, None)
        if self.clip_norm is not None:
            limit = self.clip_norm / math.sqrt(state.topology.world_size)
            scale = state.kernels.clip_scale(state.bucket, limit)
        return Accumulation(residual, velocity, scale, self.momentum, new_residual, new_velocity)


def _goes_dense(state: CodecState, counts: Sequence[int]) -> bool:
    return choose_route(counts, state.size, splits=state.comm.sends_parts) == "dense"
