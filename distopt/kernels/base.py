"""The kernels that `host` and `gpu` both have.

The host's compute at once. The GPU's are enqueued on CuPy's current stream and never wait, which is why
the results of a pass go into an array, its *findings*: `FINDINGS` int64 on the bucket's device. The ranks exchange
the first three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

Array: TypeAlias = Any  # numpy.ndarray or cupy.ndarray

# Places in the findings: entries in the lists; values too large for a 16-bit wire; elements from the first unusable one
# to the end of the bucket, or 0 if all are usable; values other than zero that became zero.
ENTRIES, OVERFLOWED, FROM_BAD, UNDERFLOWED = range(4)
FINDINGS = 4


class Accumulation(NamedTuple):
    """The accumulation of the gradient during a selection.

    new_residual = residual + scale * gradient, and the selection is from it; with momentum, new_momentum = decay *
    momentum + scale * gradient and new_residual = residual + new_momentum.

    Attributes:
        residual: float32, as long as the gradient, or None: the selection is from the gradient itself.
        momentum: the same, or None; needs a residual.
        scale: a number, or the result of `Kernels.clip_scale`.
        decay: factor on the momentum.
        new_residual: an array like residual, or None: the sum takes its place.
        new_momentum: the same of momentum.
    """

    residual: Array | None = None
    momentum: Array | None = None
    scale: Any = 1.0
    decay: float = 0.0
    new_residual: Array | None = None
    new_momentum: Array | None = None

    def source(self, x: Array) -> Array:
        """The array that is selected from, once the gradient `x` has been accumulated."""
        if self.residual is None:
            return x
        return self.residual if self.new_residual is None else self.new_residual


class Lists:
    """Room for a selection, which grows with need.

    Args:
        xp: the array module, numpy or cupy.
        capacity: number of entries that there is room for.

    Attributes:
        indices: int32; the selected ones come first, ascending.
        values: float32.
    """

    def __init__(self, xp: Any, capacity: int) -> None:
        self._xp = xp
        self.indices: Array = xp.empty(capacity, "int32")
        self.values: Array = xp.empty(capacity, "float32")

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` entries; existing entries may be lost."""
        if self.values.size < capacity:
            self.indices = self._xp.empty(capacity, "int32")
            self.values = self._xp.empty(capacity, "float32")


class Kernels(Protocol):
    """Flat float32 arrays, unless it says otherwise.

    A pass that fills findings reports an unusable element: NaN or infinite; for a cast without a residual only NaN.
    """

    def empty(self, count: int, dtype: Any, /) -> Array:
        """An uninitialised flat array."""

    def to_host(self, array: Array) -> Array:
        """A copy as a NumPy array."""

    def copy_into(self, target: Array, source: Array, /) -> None:
        """Overwrite `target`, by a NumPy array too."""

    def copy_where(self, flag: Array, source: Array, target: Array) -> None:
        """Overwrite `target`, of any type, by `source` if `flag`, bool [], is true; without a wait of the host."""

    def fetch(self, array: Array) -> Callable[[], Array]:
        """Start to copy a flat array of any type to the host; the result waits for the copy, and returns it."""

    def new_lists(self, capacity: int) -> Lists:
        """Room for selections."""

    def encode16(
        self,
        x: Array,
        residuals: tuple[Array, Array],
        wire: Array,
        dtype: str,
        scale: float,
        limit: float,
        findings: Array,
    ) -> None:
        """Cast x * scale, or (residual + x) * scale, into the uint16 array `wire`, clamped to +-limit.

        The loss of the cast goes to the second of `residuals`, perhaps the same array; without, both are None.
        """

    def decode16(self, wire: Array, x: Array, dtype: str, scale: float, /) -> None:
        """Cast back into x, times scale."""

    def encode_blocks(
        self, x: Array, residuals: tuple[Array, Array], wire: Array, bits: int, seed: int | None, findings: Array
    ) -> None:
        """Encode x, or residual + x, into the uint8 array `wire` as integers of 8, 4 or 2 bits; see csrc/cpu/blocks.h.

        The loss goes to the second of `residuals`, perhaps the same array; without, both are None. With a seed (uint32)
        rounding is stochastic.
        """

    def decode_blocks(self, wire: Array, x: Array, bits: int, factor: float, adds: bool, /) -> None:
        """Set x to the elements times factor, or add them to it."""

    def encode_chunks(
        self, x: Array, residuals: tuple[Array, Array], wire: Array, k: int, bits: int, findings: Array
    ) -> None:
        """Encode the k largest elements of each chunk of x, or of residual + x; see csrc/cpu/chunks.h.

        The part that is not sent goes to the second of `residuals`, as for `encode_blocks`.
        """

    def decode_chunks(self, wires: Array, x: Array, k: int, bits: int, factor: float, /) -> None:
        """Set x to the sum of encoded arrays, uint8 [lists, bytes], times factor."""

    def squared_norm(self, x: Array) -> Any:
        """The sum of squares in float64, a number or an array of shape (); float64 too."""

    def clip_scale(self, x: Array, limit: float) -> Any:
        """The factor that shrinks x to an l2 norm of `limit`; 1 where the norm is less, or not finite."""

    def find_beyond(self, x: Array, limit: float, from_bad: Array) -> None:
        """Set from_bad[0] (int64) as in findings, of elements that are NaN or beyond +-limit; float64 too."""

    def any_bad(self, headers: Sequence[Array]) -> Array:
        """Bool []: whether one of these int64 arrays, all of one length, has from_bad above 0 in one of its headers."""

    def first_nonfinite(self, x: Array) -> int | None:
        """Index of the first NaN or infinity; float64 too. Waits for the answer."""

    def accumulate(self, x: Array, accumulation: Accumulation, lists: Lists, findings: Array) -> None:
        """The accumulation of a selection, without one. The lists are scratch."""

    def top_k(self, x: Array, k: int, accumulation: Accumulation, lists: Lists, findings: Array) -> None:
        """List the k >= 1 elements of largest magnitude, among equals those with the lowest index."""

    def threshold(self, x: Array, bound: float, accumulation: Accumulation, lists: Lists, findings: Array) -> None:
        """List the elements with |x| >= bound, and NaN.

        On a GPU nothing is listed if there are more than the lists have room for; the findings say how many.
        """

    def nonzero(self, x: Array) -> tuple[Array, Array]:
        """Indices (int32) and values of the elements other than zero. Waits for their number."""

    def clear_at(self, dense: Array, indices: Array, /) -> None:
        """Set dense[indices] to 0."""

    def scatter_sum(
        self, dense: Array, indices: Sequence[Array], values: Sequence[Array], lo: int, hi: int, scale: float = 1.0
    ) -> None:
        """Set dense[lo:hi] to the sum of values[r] * scale at indices[r], list after list; other indices are left out.

        The indices (int32) ascend strictly within each list.
        """

    def cuts(self, indices: Array, bounds: Sequence[int]) -> list[int]:
        """Where the bounds would be inserted into ascending indices. Waits for the answer."""
