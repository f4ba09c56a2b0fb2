"""The elements of every bucket that reach a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import _core
from ..errors import UsageError
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
    def __init__(self, codec: Threshold, place: Place) -> None:
        super().__init__(codec, place)
        self._reserve(_core.list_slack)

    def _known_count(self) -> int | None:
        return self.bucket.size if self._codec.bound == 0 else None

    def _select(self, **accumulation: Any) -> tuple[int, int]:
        bound = self._codec.bound
        count, unusable = _core.threshold(self.bucket, bound, self._indices, self._values, **accumulation)
        if count + _core.list_slack > self._values.size:
            # Once more with room to grow into; what was accumulated is in the residual by now.
            self._reserve(count + count // 4 + _core.list_slack)
            source = self.bucket if self._residual is None else self._residual
            count, unusable = _core.threshold(source, bound, self._indices, self._values)
        return count, unusable
