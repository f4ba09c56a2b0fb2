"""Communicators whose work is done by one of `distopt._core`."""

from __future__ import annotations

from collections.abc import Sequence

from .. import _core
from .base import DTYPES, OPS, Array, Communicator, RaggedWork, ReduceOp, Work


class NativeCommunicator(Communicator):
    """Checks arguments, and passes them on.

    Attributes:
        core: the communicator of csrc.
    """

    core: _core.ShmCommunicator | _core.MpiCommunicator

    def all_reduce(
        self,
        array: Array,
        op: ReduceOp = "sum",
        *,
        wire: str | None = None,
        label: str = "",
        find_nonfinite: bool = False,
    ) -> Work:
        """Collective. See `Communicator.all_reduce`, which makes the errors."""
        # Most arrays need no more than the look that csrc takes at their buffer.
        work = self.core.all_reduce_plain(array, op, wire, label, find_nonfinite)
        return work or super().all_reduce(array, op, wire=wire, label=label, find_nonfinite=find_nonfinite)

    def progress(self) -> None:  # noqa: D102
        self.core.progress()

    def _all_reduce(self, array: Array, dtype: str, op: ReduceOp, label: str) -> Work:
        return self.core.all_reduce(array, DTYPES[dtype], OPS[op], label)

    def _reduce_scatter(self, array: Array, out: Array, dtype: str, op: ReduceOp, label: str) -> Work:
        return self.core.reduce_scatter(array, out, DTYPES[dtype], OPS[op], label)

    def _all_gather(self, array: Array, out: Array, dtype: str, label: str) -> Work:
        return self.core.all_gather(array, out, DTYPES[dtype], label)

    def _all_gather_ragged(self, array: Array, dtype: str, label: str) -> RaggedWork:
        return self.core.all_gather_ragged(array, DTYPES[dtype], label)

    def _all_to_all_ragged(self, parts: Sequence[Array], dtype: str, label: str) -> RaggedWork:
        return self.core.all_to_all_ragged(list(parts), DTYPES[dtype], label)

    def _broadcast(self, array: Array, root: int, dtype: str, label: str) -> Work:
        return self.core.broadcast(array, root, DTYPES[dtype], label)
