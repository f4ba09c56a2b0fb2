"""16-bit floats on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from .. import _core
from ..checks import check_number
from ..comm.base import Array
from ..kernels import array_module
from .base import Codec
from .reduction import CodecState, Steps

# Loss scaling follows Micikevicius et al., arXiv 1710.03740, section 3.2. As is usual, the scale halves at an overflow
# and doubles after a long time without one.
_GROWTH_STEPS = 1000
_LARGEST_SCALE = 2.0**24


class _Half(Codec):
    """The base of both 16-bit codecs.

    Every rank divides by the world size *before* the cast, and clamps values so that the sum over all ranks stays
    in range: it is never infinite. The sum itself is accumulated in float32 by
    the communicator and rounded once. Values that were too large, and those that became zero, are counted in the
    statistics; NaN raises `GradientError`.
    """

    wire: ClassVar[str]
    scale: float | Literal["dynamic"]

    def __post_init__(self) -> None:
        if self.scale != "dynamic":
            check_number("a scale other than 'dynamic'", self.scale, "(0, inf)")

    def prepare(self, state: CodecState) -> None:
        """Collective. Make wire memory of 16 bits an element."""
        state.memory["wire"] = state.empty(state.bucket.size, self.wire, xp=array_module(state.bucket))
        self._scale_state(state)

    def reduce(self, state: CodecState) -> Steps:
        """Collective. Cast, sum on the wire, cast back; a dynamic scale adapts."""
        on_wire, dynamic = state.memory["wire"], self._scale_state(state)
        scale = float(dynamic[0][0]) if dynamic else float(self.scale)
        limit = _core.cast_limit(self.wire, state.topology.world_size)
        bits, factor = on_wire.view(np.uint16), scale / state.topology.world_size
        # Without a residual infinity is saturated and counted; a residual would keep it forever.
        residuals = state.renew_residual()
        state.kernels.encode16(state.bucket, residuals, bits, self.wire, factor, limit, state.findings)
        with state.comm.together():
            sent = state.send_header()
            work = state.all_reduce(on_wire, "sum", wire=self.wire)
        yield sent
        yield work
        header = state.read_header(sent, may_stay=dynamic is None)
        if dynamic:
            _adapt(*dynamic, header.overflowed)
        if not header.is_bad:
            state.kernels.decode16(bits, state.bucket, self.wire, 1 / scale)
        return header.verdict

    def _scale_state(self, state: CodecState) -> tuple[Array, Array] | None:
        """With a dynamic scale: the scale and the number of reductions since it last changed, old and new."""
        return state.renew("scale", np.array([1.0, 0.0])) if self.scale == "dynamic" else None


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
        scale: as for `Fp16`; rarely needed.
    """

    wire: ClassVar[str] = "bfloat16"
    scale: float | Literal["dynamic"] = 1.0


def _adapt(old: Array, new: Array, overflowed: bool) -> None:
    scale, calm = old
    if overflowed:
        scale, calm = scale / 2, 0
    elif calm + 1 == _GROWTH_STEPS:
        scale, calm = min(scale * 2, _LARGEST_SCALE), 0
    else:
        calm += 1
    new[:] = scale, calm
