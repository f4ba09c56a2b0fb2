"""Tensors that a script reduces by hand, fused in buffers, as by SINGA's `fused_all_reduce`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..checks import check_integer
from ..codecs import BadGradient, Codec, CodecState, PendingReduction, finish_all
from ..comm import Communicator, Work
from ..comm.base import Array
from ..errors import UsageError
from ..kernels import address_of, array_module


@dataclass
class _Buffer:
    state: CodecState
    arrays: Sequence[Array]
    residual: Array | None
    reduction: PendingReduction


class Fusion:
    """Sums arrays over the ranks, small ones fused in one buffer.

    A buffer lies in wire memory of its own, which later buffers of the same codec and size use again.
    """

    def __init__(self, communicator: Communicator, capacity: int, label: Callable[[str], str] = str) -> None:
        """Local; wire memory comes with the buffers.

        Args:
            communicator: reduces the buffers.
            capacity: elements of a full buffer, which is sent. A larger array has a buffer of its own.
            label: makes the label of each buffer, see `Agreement.label`.
        """
        self._communicator = communicator
        self._capacity = check_integer("the size of a fusion buffer in elements", capacity, 1)
        self._label = label
        self._staged: dict[tuple[str, str], tuple[Codec, list[Array]]] = {}
        self._sent: list[_Buffer] = []
        self._alone: list[Work] = []
        self._free: defaultdict[tuple[str, str, int], list[CodecState]] = defaultdict(list)

    def all_reduce(self, array: Array) -> None:
        """Collective. Start the sum of an array where it lies."""
        self._alone.append(self._communicator.all_reduce(array, label=self._label("by hand")))

    def stage(self, arrays: Sequence[Array], codec: Codec) -> None:
        """Collective. Put each array into the buffer of its codec and type, once; a full buffer is sent first.

        Raises:
            UsageError: `codec` does not reduce the type of one of them; nothing was staged.
        """
        _check_types(arrays, codec)
        for array in arrays:
            key = codec.kind, array.dtype.name
            codec, staged = self._staged.setdefault(key, (codec, []))
            if any(memory_of(array) == memory_of(other) for other in staged):
                continue
            if staged and sum(other.size for other in staged) + array.size > self._capacity:
                self.send(staged, codec)
                staged = []
            self._staged[key] = codec, [*staged, array]

    def send_staged(self) -> None:
        """Collective. Start the sums of all that has been staged."""
        staged, self._staged = self._staged, {}
        for codec, arrays in staged.values():
            self.send(arrays, codec)

    def send(self, arrays: Sequence[Array], codec: Codec, residual: Array | None = None) -> None:
        """Collective. Start the sum of `arrays`, which are of one type, in one buffer.

        Args:
            arrays: `wait` replaces them by the sums.
            codec: how arrays are encoded.
            residual: flat; a codec with error feedback adds it before the selection, and leaves the rest in it.

        Raises:
            UsageError: `arrays` is empty, `codec` does not reduce their type, or the residual is of another type or
                size than they are together.
        """
        _check_types(arrays, codec)
        if not arrays:
            raise UsageError("there is nothing to send; pass one tensor or more")
        total, dtype = sum(array.size for array in arrays), arrays[0].dtype
        if residual is not None and (residual.size, residual.dtype) != (total, dtype):
            raise UsageError(
                f"a residual of {residual.size} {residual.dtype} does not fit {total} {dtype}; pass one of equal size"
            )
        free = self._free[codec.kind, dtype.name, total]
        if free:
            state = free.pop()
        else:
            memory = self._communicator.empty(total, dtype.name, xp=array_module(arrays[0]))
            state = codec.attach(memory, self._communicator, label="fused")
        for array, part in self._parts(arrays, state):
            part[...] = array.reshape(-1)
        if residual is not None:
            state.load_state_dict({f"residual/{state.label}": residual})
        state.wire_label = self._label("fused")
        self._sent.append(_Buffer(state, arrays, residual, PendingReduction(codec, state)))

    def wait(self) -> None:
        """Collective. Finish all sums, including those of staged arrays, and put them in place.

        Raises:
            GradientError: a value was NaN or infinite on some rank; arrays of other buffers hold their sums, and no
                residual has changed.
        """
        alone, self._alone = self._alone, []
        for work in alone:
            work.wait()
        self.send_staged()
        sent, self._sent = self._sent, []
        verdicts = finish_all([buffer.reduction for buffer in sent])
        for buffer, verdict in zip(sent, verdicts, strict=True):
            state = buffer.state
            if verdict is None:
                for array, part in self._parts(buffer.arrays, state):
                    array[...] = (part * self._communicator.topology.world_size).reshape(array.shape)
            if buffer.residual is not None:
                buffer.residual[...] = state.residual
        # Reversed, since `send` pops: the next step gets them in this order.
        for state in (buffer.state for buffer in reversed(sent)):
            self._free[state.kind, state.bucket.dtype.name, state.bucket.size].append(state)
        for verdict in verdicts:
            if isinstance(verdict, BadGradient):
                raise verdict.error()

    @staticmethod
    def _parts(arrays: Sequence[Array], state: CodecState) -> list[tuple[Array, Array]]:
        stops = list(accumulate(array.size for array in arrays))
        return [(array, state.bucket[stop - array.size : stop]) for array, stop in zip(arrays, stops, strict=True)]


def _check_types(arrays: Sequence[Array], codec: Codec) -> None:
    for array in arrays:
        if array.dtype.name not in codec.dtypes:
            raise UsageError(
                f"{codec.kind} cannot send an array of {array.dtype}; convert it to {' or '.join(codec.dtypes)}"
            )


def memory_of(array: Array) -> tuple[int, int, str]:
    """Local. The memory of a contiguous array: address, size and type. Views of the same memory have equal ones."""
    return address_of(array), array.size, array.dtype.name
