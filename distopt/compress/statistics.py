"""What reductions cost."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Statistics"]


@dataclass
class Statistics:
    """What reductions of a bucket cost on this rank.

    Attributes:
        reductions: how many these are.
        dense_bytes: bytes that this rank would have sent in a bandwidth-optimal all_reduce of the bucket as it is.
        wire_bytes: bytes that it sent, by the same measure: for a dense reduction 2 (n - 1) / n times its size, for a
            gather n - 1 times its own part.
        select_seconds: time in selection, casts and checks before the first wait.
        comm_seconds: time in starting collectives and waiting for them; what was hidden behind other work is not in it.
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
        """What was added since `earlier`."""
        before = vars(earlier)
        return Statistics(**{name: value - before[name] for name, value in vars(self).items()})
