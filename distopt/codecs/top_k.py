"""The K largest elements of every bucket."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from ..checks import check_integer, check_number
from ..errors import UsageError
from ..kernels import Accumulation
from .reduction import CodecState
from .sparse import SparseCodec

_WARM_UP_DENSITY = 0.25  # of the first stage, and the factor from stage to stage


@dataclass(frozen=True)
class TopK(SparseCodec):
    """The elements of largest magnitude, exactly K per rank; among equals those with the lowest index.

    Every rank sends the same number of elements, so nothing needs to be exchanged before the lists are sent.

    Args:
        ratio: share of the bucket to send, in (0, 1]; K = ceil(ratio * size).
        k: K itself, in place of the ratio; at most the size of the bucket is sent.
        warm_up_steps: length of one stage of sparsity warm-up (arXiv 1712.01887, section 3.3; one epoch there), or 0.
            The first stages send 25 %, 6.25 %, 1.56 % ... until `ratio` is reached. Needs `ratio`.
        momentum: see `SparseCodec`, as for the options below.
        factor_masking: momentum factor masking.
        clip_norm: local gradient clipping.
    """

    needs: ClassVar[Mapping[str, float]] = {"ratio": 0.01, "k": 1000}

    ratio: float | None = None
    _: KW_ONLY
    k: int | None = None
    warm_up_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.ratio is None) == (self.k is None):
            raise UsageError("top-K takes either a ratio, TopK(0.01), or a number of elements, TopK(k=1000)")
        if self.ratio is not None:  # 0.01 sends 1 % of the elements
            check_number("the ratio of top-K", self.ratio, "(0, 1]")
        if self.k is not None:
            object.__setattr__(self, "k", check_integer("k of top-K", self.k, 1))
        object.__setattr__(self, "warm_up_steps", check_integer("warm_up_steps of top-K", self.warm_up_steps, 0))
        if self.warm_up_steps and self.ratio is None:
            raise UsageError(f"warm_up_steps={self.warm_up_steps} of top-K needs a ratio, as in TopK(0.01)")

    def count(self, size: int, step: int) -> int:
        """Elements of a bucket of `size` that each rank sends in its reduction number `step`."""
        if self.ratio is None:
            return min(self.k or 0, size)
        ratio = self.ratio
        if self.warm_up_steps:
            ratio = max(ratio, _WARM_UP_DENSITY ** (1 + step // self.warm_up_steps))
        # Rounded first: 0.07 * 100 is a little above 7.
        return min(math.ceil(round(ratio * size, 6)), size)

    def prepare(self, state: CodecState) -> None:
        """Collective. As `SparseCodec`, with a count of reductions for the warm-up."""
        super().prepare(state)
        self._step(state)

    def _step(self, state: CodecState) -> int:
        return state.count_reduction() if self.warm_up_steps else 0

    def _known_count(self, state: CodecState) -> int:
        return self.count(state.size, self._step(state))

    def _select(self, state: CodecState, accumulation: Accumulation, count: int | None) -> None:
        kernels, lists = state.kernels, state.memory["lists"]
        if count:
            kernels.top_k(state.bucket, count, accumulation, lists, state.findings)
        else:  # the bucket is empty
            kernels.accumulate(state.bucket, accumulation, lists, state.findings)
