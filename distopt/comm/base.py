"""How bytes move: the one interface over shared memory, MPI and NCCL.

All collectives work on contiguous arrays in place or into an array that the caller gives, return a `Work`, and are
*collective*: every rank of the job must call the same ones in the same order with equal types and counts. A rank that
does not is found and named (`MismatchError`), never waited for without end. Sums run in rank order on every element, so
the same call gives the same bits on all ranks and on every run; `comm/hierarchical.py` has an order of its own, and so
has NCCL. Counts are elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np

from ..errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..launch.job import Job
    from ..launch.topology import Topology

__all__ = ["DTYPES", "Array", "Communicator", "DoneWork", "ReduceOp", "SparseLists", "SparseWork", "Work"]

Array: TypeAlias = Any  # numpy.ndarray or cupy.ndarray
ReduceOp: TypeAlias = Literal["sum", "max", "min", "mean"]

# Code of each wire type in csrc/base/types.h. NumPy has no bfloat16: such arrays are uint16 and say so with `wire=`.
DTYPES: dict[str, int] = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3, "int32": 4, "int64": 5}
# Looked up by dtype: numpy.dtype.name is slow to compute, and every collective asks for it.
_NAMES = {np.dtype(name): name for name in DTYPES if name != "bfloat16"}
OPS: dict[str, int] = {"sum": 0, "max": 1, "min": 2, "mean": 3}


class Work(ABC):
    """A collective under way. Results are valid, and inputs may be changed, after `wait` returns."""

    @abstractmethod
    def done(self) -> bool:
        """Local. Move the operation forward without waiting; whether it has finished."""

    @property
    def nonfinite(self) -> tuple[int, int] | None:
        """Local, after `wait`. What `find_nonfinite` of `Communicator.all_reduce` has found, else None."""
        return None

    @abstractmethod
    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end, at most `timeout` seconds (default: `Settings.timeout`).

        Raises:
            PeerLostError: a peer process has ended; raised within a second of it.
            StalledError: a peer is alive but did not arrive in time.
            MismatchError: the ranks called different collectives.
        """


class DoneWork(Work):
    """An operation that was finished when it was started."""

    def done(self) -> bool:
        """Local. True."""
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Return at once."""


@dataclass(frozen=True)
class SparseLists:
    """The arguments of `Communicator.sparse_all_reduce`, checked."""

    indices: Array
    values: Array
    dense: Array
    counts: tuple[int, ...]
    scale: float
    label: str


class SparseWork(Work):
    """A `sparse_all_reduce` under way.

    Attributes:
        wire_bytes: bytes that this rank sent, valid after `wait`.
    """

    wire_bytes: int = 0


class Communicator(ABC):
    """Collectives over the ranks of a job.

    The public methods check their arguments and call the underscore method of the backend; they are no-ops (apart
    from the checks) in a job of one rank.
    """

    name: ClassVar[str]
    # Whether `all_to_all_ragged` sends each rank only its own part; if not, everything goes to everyone.
    sends_parts: ClassVar[bool] = False
    # Whether sums run in rank order on every element; if not, in an order of the library's, the same on all ranks.
    ordered_sums: ClassVar[bool] = True
    # Whether `all_reduce` takes `find_nonfinite`.
    finds_nonfinite: ClassVar[bool] = False
    # The array module of `empty`: numpy or cupy.
    xp: Any = np
    topology: Topology

    @classmethod
    @abstractmethod
    def create(cls, job: Job) -> Communicator:
        """Collective. Build the communicator of `job`."""

    # -- memory ------------------------------------------------------------------------------------------------------
    @abstractmethod
    def empty(self, count: int, dtype: str = "float32") -> Array:
        """Collective. An uninitialised flat array in *wire memory*, which this transport reduces without copying.

        All ranks must call it in the same order with the same arguments. `dtype` is a key of `DTYPES`; bfloat16 gives
        uint16. The memory lives as long as the communicator or any view of it.

        Raises:
            WireMemoryError: the memory does not fit.
        """

    # -- collectives -------------------------------------------------------------------------------------------------
    def all_reduce(
        self,
        array: Array,
        op: ReduceOp = "sum",
        *,
        wire: str | None = None,
        label: str = "",
        find_nonfinite: bool = False,
    ) -> Work:
        """Collective. Replace `array` on every rank by the element-wise reduction over all ranks.

        Args:
            array: any shape; 16-bit floats are accumulated in float32 and rounded once.
            op: "mean" is the sum divided by the world size, for floating types.
            wire: wire type, where the array's own dtype cannot tell it ("bfloat16" in uint16).
            label: shown in diagnostics (at most 31 bytes are kept).
            find_nonfinite: look for NaN and infinity in a sum or mean of float32 or float64 while it is made, which
                costs next to nothing; only where `finds_nonfinite`. `Work.nonfinite` of every rank is then None or the
                first such element, as rank at fault and index. That rank is the first whose own value is not finite
                or, where a sum of finite values overflowed, the first whose value has the largest magnitude.
        """
        dtype = self._check(array, wire)
        if op not in OPS:
            raise UsageError(f"unknown reduction {op!r}; choose one of {', '.join(OPS)}")
        if op == "mean" and dtype in ("int32", "int64"):
            raise UsageError(f"the mean of {dtype} would not be an integer; use op='sum'")
        if not find_nonfinite:
            return self._all_reduce(array, dtype, op, label)
        if not self.finds_nonfinite or op not in ("sum", "mean") or dtype not in ("float32", "float64"):
            raise UsageError(f"the {self.name} communicator cannot look for NaN in a {op} of {dtype}")
        return self._all_reduce_and_look(array, dtype, op, label)

    def reduce_scatter(
        self, array: Array, out: Array, op: ReduceOp = "sum", *, wire: str | None = None, label: str = ""
    ) -> Work:
        """Collective. `out` (count elements) = this rank's part of the reduction of `array` (world_size * count)."""
        dtype = self._check(array, wire)
        if op not in OPS or (op == "mean" and dtype in ("int32", "int64")):
            raise UsageError(f"reduction {op!r} cannot be used with {dtype}")
        self._check_pair(out, array)
        return self._reduce_scatter(array, out, dtype, op, label)

    def all_gather(self, array: Array, out: Array, *, wire: str | None = None, label: str = "") -> Work:
        """Collective. `out` (world_size * count) = the `array` (count elements) of every rank, in rank order."""
        dtype = self._check(array, wire)
        self._check(out, wire)
        self._check_pair(array, out)
        return self._all_gather(array, out, dtype, label)

    def all_gather_ragged(self, array: Array, *, label: str = "") -> list[Array]:
        """Collective. The flat arrays of every rank, in rank order; counts may differ, zero included.

        Waits for the result. The arrays returned are the caller's own.
        """
        return self._all_gather_ragged(array, self._check(array, None), label)

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Collective. The payload of every rank, in rank order; lengths may differ. For set-up only."""
        words = np.frombuffer(len(payload).to_bytes(8, "little") + payload + bytes(-len(payload) % 4), np.int32)
        gathered = [part.tobytes() for part in self.all_gather_ragged(words.copy(), label="bytes")]
        return [raw[8 : 8 + int.from_bytes(raw[:8], "little")] for raw in gathered]

    def all_to_all_ragged(self, parts: Sequence[Array], *, label: str = "") -> list[Array]:
        """Collective. Send `parts[r]` to rank r; the parts that the ranks sent here, in rank order.

        Parts are flat, of one type and any length, zero included. Waits for the result, which is the caller's own.
        """
        if len(parts) != self.topology.world_size:
            raise UsageError(f"{len(parts)} parts were given for {self.topology.world_size} ranks")
        dtypes = {self._check(part, None) for part in parts}
        if len(dtypes) != 1:
            raise UsageError(f"the parts are of several types: {', '.join(sorted(dtypes))}")
        return self._all_to_all_ragged(parts, dtypes.pop(), label)

    def sparse_all_reduce(
        self,
        indices: Array,
        values: Array,
        dense: Array,
        *,
        counts: Sequence[int] | None = None,
        scale: float = 1.0,
        label: str = "",
    ) -> SparseWork:
        """Collective. Overwrite `dense` by the sum over ranks, in rank order, of `scale * values` put at `indices`.

        Args:
            indices: int32, strictly ascending, inside `dense`; the length may differ between ranks.
            values: float32, as long as `indices`.
            dense: flat float32; zero where no rank has an entry.
            counts: length of every rank's list, where the ranks know it; otherwise it is exchanged, which waits.
            scale: factor on every value.
            label: shown in diagnostics.
        """
        if self._check(indices, None) != "int32" or self._check(values, None) != "float32":
            raise UsageError(f"a sparse list is int32 and float32, not {indices.dtype} and {values.dtype}")
        if indices.shape != values.shape or indices.ndim != 1:
            raise UsageError(f"indices of shape {indices.shape} and values of shape {values.shape} make no flat list")
        if self._check(dense, None) != "float32" or dense.ndim != 1:
            raise UsageError(f"the dense array is {dense.dtype} of shape {dense.shape}; pass a flat float32 one")
        if counts is None:
            own = np.array([indices.size], np.int64)
            counts = [int(count[0]) for count in self.all_gather_ragged(own, label=label)]
        if len(counts) != self.topology.world_size or counts[self.topology.rank] != indices.size:
            raise UsageError(f"counts {list(counts)} do not fit a list of {indices.size} on rank {self.topology.rank}")
        return self._sparse_all_reduce(SparseLists(indices, values, dense, tuple(counts), scale, label))

    def broadcast(self, array: Array, root: int = 0, *, wire: str | None = None, label: str = "") -> Work:
        """Collective. Overwrite `array` on every rank with that of rank `root`."""
        dtype = self._check(array, wire)
        if not 0 <= root < self.topology.world_size:
            raise UsageError(f"broadcast root {root} is not a rank of a world of {self.topology.world_size}")
        return self._broadcast(array, root, dtype, label)

    @abstractmethod
    def barrier(self) -> None:
        """Collective. Return when every rank has called it; all earlier operations have finished then."""

    def progress(self) -> None:  # noqa: B027 - a backend that progresses by itself has nothing to do
        """Local. Move outstanding operations forward without waiting."""

    # -- life cycle --------------------------------------------------------------------------------------------------
    @abstractmethod
    def close(self) -> None:
        """Collective in spirit, local in effect: give up membership. Idempotent; peers that still wait get an error."""

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- for backends ------------------------------------------------------------------------------------------------
    @abstractmethod
    def _all_reduce(self, array: Array, dtype: str, op: ReduceOp, label: str) -> Work: ...
    @abstractmethod
    def _reduce_scatter(self, array: Array, out: Array, dtype: str, op: ReduceOp, label: str) -> Work: ...
    @abstractmethod
    def _all_gather(self, array: Array, out: Array, dtype: str, label: str) -> Work: ...
    @abstractmethod
    def _all_gather_ragged(self, array: Array, dtype: str, label: str) -> list[Array]: ...
    @abstractmethod
    def _broadcast(self, array: Array, root: int, dtype: str, label: str) -> Work: ...

    def _all_reduce_and_look(self, array: Array, dtype: str, op: ReduceOp, label: str) -> Work:
        raise NotImplementedError("for backends with finds_nonfinite")

    def _all_to_all_ragged(self, parts: Sequence[Array], dtype: str, label: str) -> list[Array]:
        # Correct on every transport, and no cheaper than a gather: see `sends_parts`.
        rank = self.topology.rank
        lengths = np.array([part.size for part in parts], np.int64)
        cuts = [np.cumsum(row)[:-1] for row in self._all_gather_ragged(lengths, "int64", label)]
        rows = self._all_gather_ragged(np.concatenate(parts), dtype, label)
        return [np.split(row, cut)[rank].copy() for row, cut in zip(rows, cuts, strict=True)]

    def _sparse_all_reduce(self, lists: SparseLists) -> SparseWork:
        from .sparse import start_sparse  # which imports this module

        return start_sparse(self, lists)

    def _check(self, array: Array, wire: str | None) -> str:
        """The wire type of `array`, or an error that says why it cannot be sent."""
        dtype: str = _NAMES.get(array.dtype) or array.dtype.name
        if wire is not None:
            if (dtype, wire) != ("uint16", "bfloat16") and dtype != wire:
                raise UsageError(f"an array of {dtype} cannot travel as {wire}")
            dtype = wire
        if dtype not in DTYPES:
            raise UsageError(f"arrays of {dtype} cannot be sent; convert to one of {', '.join(DTYPES)}")
        flags = array.flags
        if not flags.c_contiguous:
            raise UsageError(
                "a strided array cannot be reduced in place; pass a contiguous one (numpy.ascontiguousarray)"
            )
        if isinstance(array, np.ndarray) and not flags.writeable:
            raise UsageError("a read-only array cannot receive the result; pass a writable one")
        return dtype

    def _check_pair(self, part: Array, whole: Array) -> None:
        if part.dtype != whole.dtype or part.size * self.topology.world_size != whole.size:
            raise UsageError(
                f"parts of {part.size} {part.dtype} do not make a whole of {whole.size} {whole.dtype} "
                f"on {self.topology.world_size} ranks"
            )
        if not part.flags.c_contiguous:
            raise UsageError("a strided array cannot receive the result; pass a contiguous one")
