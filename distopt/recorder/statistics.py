"""The cost of communication: of a bucket, and of training."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Statistics:
    """The cost of reducing a bucket on this rank.

    Attributes:
        reductions: number of reductions.
        dense_bytes: bytes that this rank would have sent in a bandwidth-optimal all_reduce of the bucket as it is.
        wire_bytes: bytes that it sent, by the same measure: for a dense reduction 2 (n - 1) / n times its size, for a
            gather n - 1 times its own part.
        select_seconds: time in selection, casts and checks before the first wait.
        comm_seconds: time in starting collectives and waiting for them; without time hidden behind other work.
        decode_seconds: time in casts, sparse sums and checks after the first wait.
        overflowed: values too large for a 16-bit wire, sent as the largest one.
        underflowed: values other than zero, sent as zero.
        fell_back: reductions of a sparse codec that went dense, because that moves fewer bytes.
    """

    reductions: int = 0
    dense_bytes: int = 0
    wire_bytes: int = 0
    select_seconds: float = 0.0
    comm_seconds: float = 0.0
    decode_seconds: float = 0.0
    overflowed: int = 0
    underflowed: int = 0
    fell_back: int = 0

    def __iadd__(self, other: Statistics) -> Statistics:
        mine = vars(self)
        for name, value in vars(other).items():
            mine[name] += value
        return self

    def __sub__(self, earlier: Statistics) -> Statistics:
        """The difference since `earlier`."""
        before = vars(earlier)
        return Statistics(**{name: value - before[name] for name, value in vars(self).items()})


@dataclass
class WorkersStatistics:
    """Workers that come and go, as one of them has met them.

    Attributes:
        average: the number of the last average that this worker holds.
        members: the numbers of the workers whose changes that average is made of.
        gone: how often a worker of one average was missing in the next one: it was lost, left out, or has left.
        waited_seconds: time in which this worker waited for others, outside of averages that counted.
    """

    average: int = 0
    members: tuple[int, ...] = ()
    gone: int = 0
    waited_seconds: float = 0.0

    def __sub__(self, earlier: WorkersStatistics) -> WorkersStatistics:
        """The difference since `earlier`, but the members as they are now."""
        waited = self.waited_seconds - earlier.waited_seconds
        return WorkersStatistics(self.average - earlier.average, self.members, self.gone - earlier.gone, waited)


@dataclass
class CommunicationStatistics:
    """The data that this rank has sent, and the time taken. `later - earlier` is the difference between two of them.

    Attributes:
        steps: training steps that have begun.
        skipped: steps among them without an update, after a gradient that was NaN or infinite, or an exception.
        buckets: the cost, by label of the bucket and kind of reduction.
        workers: that come and go, for a DiLoCo that has some.
    """

    steps: int = 0
    skipped: int = 0
    buckets: dict[tuple[str, str], Statistics] = field(default_factory=lambda: defaultdict(Statistics))
    workers: WorkersStatistics | None = None

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
            None if self.workers is None else self.workers - (earlier.workers or WorkersStatistics()),
        )

    def summary(self) -> str:
        """One line: bytes and times per step, and deviations from what was requested."""
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
