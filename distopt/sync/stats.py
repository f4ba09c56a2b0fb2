"""What the communication of training has cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..compress import Statistics

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CommunicationStatistics", "Progress"]


@dataclass
class Progress:
    """How far training is.

    Attributes:
        steps: number of steps that have begun.
        skipped: those of them without update, because of a gradient that was NaN or infinite, or of an exception.
    """

    steps: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class CommunicationStatistics:
    """What this rank has sent, and how long it took. `later - earlier` is what lies between two of them.

    Attributes:
        steps: training steps.
        skipped: those of them without update, because of a gradient that was NaN or infinite, or of an exception.
        buckets: what it cost, by label of the bucket and kind of reduction.
    """

    steps: int
    skipped: int
    buckets: Mapping[tuple[str, str], Statistics]

    @property
    def total(self) -> Statistics:
        """The sum over buckets."""
        total = Statistics()
        for cost in self.buckets.values():
            total += cost
        return total

    def __sub__(self, earlier: CommunicationStatistics) -> CommunicationStatistics:
        new = {key: cost - earlier.buckets.get(key, Statistics()) for key, cost in self.buckets.items()}
        return CommunicationStatistics(
            self.steps - earlier.steps,
            self.skipped - earlier.skipped,
            {key: cost for key, cost in new.items() if cost != Statistics()},
        )

    def summary(self) -> str:
        """One line: bytes and times per step, and whatever went differently than asked for."""
        total, steps = self.total, max(self.steps, 1)
        kinds = dict.fromkeys(kind for _, kind in self.buckets)
        line = (
            f"Communication: {total.wire_bytes / steps / 1e6:.3f} MB/step of {total.dense_bytes / steps / 1e6:.3f} MB "
            f"dense ({', '.join(kinds) or 'nothing'}), {total.select_seconds / steps * 1e3:.2f} ms select, "
            f"{total.comm_seconds / steps * 1e3:.2f} ms wait, {total.decode_seconds / steps * 1e3:.2f} ms decode"
        )
        events = {
            f"of {total.reductions} reductions dense": total.fell_back,
            "values too large for 16 bits": total.overflowed,
            "values too small for 16 bits": total.underflowed,
            "steps skipped": self.skipped,
        }
        return line + "".join(f", {count} {event}" for event, count in events.items() if count)
