"""The elements of every bucket that reach a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..kernels import FINDINGS, Accumulation
from .sparse import SparseCodec, SparseReducer

if TYPE_CHECKING:
    from .base import Place, Reducer

__all__ = ["Threshold"]


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

    bound: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.bound < math.inf:
            raise UsageError(f"the threshold {self.bound!r} is not a number from 0 up")

    def _attach(self, place: Place) -> Reducer[Threshold]:
        return _ThresholdReducer(self, place)


class _ThresholdReducer(SparseReducer[Threshold]):
    def _known_count(self) -> int | None:
        return self.bucket.size if self._codec.bound == 0 else None

    def _room(self, size: int) -> int:
        return size // 32  # more than any threshold that is worth it selects

    def _select(self, accumulation: Accumulation) -> None:
        self._kernels.threshold(self.bucket, self._codec.bound, accumulation, self._lists, self._findings)

    def _complete(self, count: int) -> None:
        if count <= self._lists.values.size:
            return
        # A GPU does not wait for the host to make room. What was accumulated is in the residual by now.
        self._lists.reserve(count + count // 4)
        source = self.bucket if self._residual is None else self._residual
        scratch = self._kernels.empty(FINDINGS, "int64")
        self._kernels.threshold(source, self._codec.bound, Accumulation(), self._lists, scratch)
