"""The elements of every bucket that reach a threshold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..checks import check_number
from ..comm.base import Array
from ..kernels import FINDINGS, Accumulation
from .reduction import CodecState
from .sparse import SparseCodec


@dataclass(frozen=True)
class Threshold(SparseCodec):
    """All elements with a magnitude of at least `bound`, of residual + gradient with error feedback.

    How many these are differs from rank to rank, so their number is exchanged first; the lists follow when the
    reduction is waited for.

    Args:
        bound: smallest magnitude that is sent, not negative; 0 sends everything.
        momentum: see `SparseCodec`, as for the options below.
        factor_masking: momentum factor masking.
        clip_norm: local gradient clipping.
    """

    needs: ClassVar[Mapping[str, float]] = {"bound": 0.01}

    bound: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("the threshold", self.bound, "[0, inf)")

    def _known_count(self, state: CodecState) -> int | None:
        return state.size if self.bound == 0 else None

    def prepare(self, state: CodecState) -> None:
        """Collective. As `SparseCodec`, with room in the lists for a usual selection."""
        super().prepare(state)
        state.memory["lists"].reserve(state.bucket.size // 32)  # more than a useful threshold selects

    def _select(self, state: CodecState, accumulation: Accumulation, count: int | None) -> None:
        lists = state.memory["lists"]
        state.kernels.threshold(state.bucket, self.bound, accumulation, lists, state.findings)

    def _complete(self, state: CodecState, count: int, source: Array) -> None:
        lists = state.memory["lists"]
        if count <= lists.values.size:
            return
        # A GPU does not wait for the host to make room. The accumulated values are in the source by now.
        lists.reserve(count + count // 4)
        scratch = state.kernels.empty(FINDINGS, "int64")
        state.kernels.threshold(source, self.bound, Accumulation(), lists, scratch)
