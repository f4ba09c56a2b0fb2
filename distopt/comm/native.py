"""The base of communicators that a communicator of `distopt._core` carries out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import _core
from .base import DTYPES, OPS, Array, Communicator, RaggedWork, ReduceOp, Request, Work


class NativeCommunicator(Communicator):
    """Checks arguments, and passes them on.

    Attributes:
        core: the communicator of csrc.
    """

    core: _core.ShmCommunicator | _core.NetCommunicator

    def all_reduce(
        self,
        array: Array,
        op: ReduceOp = "sum",
        *,
        wire: str | None = None,
        label: str = "",
        find_nonfinite: bool = False,
    ) -> Work:
        """Collective. Reduce in csrc at once where it can, else as `Communicator.all_reduce`, which raises errors."""
        # Most arrays need no more than the look that csrc takes at their buffer.
        flight = self.flight
        place = -1 if flight is None else flight.caller("all_reduce", label)
        work = self.core.all_reduce_plain(array, op, wire, label, find_nonfinite, place)
        if work is not None:
            return work
        return super().all_reduce(array, op, wire=wire, label=label, find_nonfinite=find_nonfinite)

    def reduce_memory(self, owner: object, address: int, count: int, dtype: int, op: int, timeout: float) -> None:
        """Collective; waits. `all_reduce` in place of memory that the caller has checked, without an array of it.

        Args:
            owner: keeps the memory.
            address: where it begins, aligned to elements.
            count: elements.
            dtype: a value of `DTYPES`.
            op: a value of `OPS`, which the type has.
            timeout: see `Work.wait`, which has the errors.
        """
        place = -1 if self.flight is None else self.flight.caller("all_reduce", "")
        self.core.reduce_memory(owner, address, count, dtype, op, timeout, place)

    def progress(self) -> None:
        """Local. Move what can be moved without waiting."""
        self.core.progress()

    def barrier(self) -> None:
        """Collective. Return when every rank has called it; all earlier operations have finished then."""
        if self.flight is not None:
            self.flight.note("barrier", DTYPES["uint8"], 0, "", self.core.next_number)
        self.core.barrier().wait()

    def record(self, name: str, ranks: Sequence[int], rank: int, offers: Sequence[Any] = ()) -> None:
        """Local. Begin the flight record; csrc notes the operations that it starts."""
        super().record(name, ranks, rank, offers)
        if self.flight is not None:
            self.core.record_in(*self.flight.layout)

    def _next_number(self) -> int:
        return self.core.next_number

    def _start(self, request: Request, array: Array, out: Array) -> Work:
        kind, dtype, label, op, root, looks = request[:6]
        return self.core.start(kind, array, out, DTYPES[dtype], OPS.get(op, 0), root, label, looks)

    def _start_ragged(self, request: Request, parts: Sequence[Array]) -> RaggedWork:
        return self.core.start_ragged(request.kind, list(parts), DTYPES[request.dtype], request.label)
