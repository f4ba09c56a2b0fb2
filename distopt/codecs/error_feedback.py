"""Error feedback: the part of a gradient that a codec loses in one step is added to the gradient of the next."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property

from ..checks import check_number
from ..comm.base import Array
from ..errors import UsageError
from .base import Codec
from .reduction import BadGradient, CodecState, Steps


@dataclass(frozen=True)
class ErrorFeedback(Codec):
    """Any lossy codec, with a residual per bucket (Karimireddy et al., arXiv 1901.09847, algorithm 2).

    A step reduces residual + gradient; the part that this rank did not send becomes the residual. The residual is in
    `CodecState.state_dict()` and belongs in checkpoints, each rank's own. For a 16-bit codec it covers this rank's
    cast, not the one rounding of the sum.

    Args:
        codec: the codec that loses something.
        decay: factor on the residual from step to step, in (0, 1]. Below 1, old parts fade, and the residual acts as
            momentum (SparseLoCo, arXiv 2508.15706, algorithm 1).
    """

    codec: Codec
    _: KW_ONLY
    decay: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec) or isinstance(self.codec, ErrorFeedback) or not self.codec.lossy:
            raise UsageError(f"error feedback wraps a codec that loses something, not {self.codec!r}")
        object.__setattr__(self, "defers", self.codec.defers)
        check_number("decay of error feedback", self.decay, "(0, 1]")

    @cached_property
    def kind(self) -> str:
        """Name of the codec, with the name of the wrapped one."""
        return f"ErrorFeedback({self.codec.kind})"

    @property
    def wire_format(self) -> int:
        """The version of the wrapped codec."""
        return self.codec.wire_format

    def prepare(self, state: CodecState) -> None:
        """Collective. Make the residual, and what the wrapped codec needs."""
        state.keep("residual")
        self.codec.prepare(state)

    def reduce(self, state: CodecState) -> Steps:
        """Collective. As the wrapped codec, whose passes apply the residual; then the residual decays."""
        verdict = yield from self.codec.reduce(state)
        if self.decay != 1 and not isinstance(verdict, BadGradient):
            residual: Array = state.renew("residual")[1] if "residual" in state.renewed else state.residual
            residual *= self.decay
        return verdict
