"""Transfer of batches to the device while it still computes on the previous batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import DTypeLike, NDArray

from .core.tensor import Tensor
from .devices.device import Device

# A batch is used until the `send` after the next, and filled while the next one is used.
_BUFFERS = 3


class _Buffer:
    """Memory for one batch on a GPU: pinned on the host, and on the device.

    Attributes:
        host: NumPy arrays to fill.
        tensors: on the device.
        copied: event: the copy has finished.
        used: event: the work that may use the tensors.
    """

    def __init__(self, device: Device, arrays: Sequence[tuple[Sequence[int], DTypeLike]]) -> None:
        from ..kernels.gpu import pinned_like

        cuda = device.xp.cuda
        self.tensors = [Tensor(shape, device, dtype) for shape, dtype in arrays]
        self.host: list[NDArray[Any]] = [pinned_like(each.array).reshape(each.shape) for each in self.tensors]
        self.copied, self.used = cuda.Event(disable_timing=True), cuda.Event(disable_timing=True)


class Staging:
    """Memory for assembling batches, and their transfer to the device.

    In each step, `fill` returns NumPy arrays to write a batch into, and `send` returns the tensors to train on. There
    are three of each, used in turn. On a GPU, the copy runs on its own stream, and the host waits only if it is three
    batches ahead of the copies. On the CPU, the arrays are the tensors' own memory and nothing is copied.

    The tensors of a batch may be used until the `send` after the next, on the stream that is current at that call; so
    a script may send the next batch before it trains on this one.

    Args:
        device: where the tensors are.
        arrays: shape and dtype of each array of a batch.
    """

    def __init__(self, device: Device, *arrays: tuple[Sequence[int], DTypeLike]) -> None:
        self._buffers: list[_Buffer] = []
        self._tensors: list[list[Tensor]] = []
        if device.kind == "cpu":
            self._tensors = [[Tensor(shape, device, dtype) for shape, dtype in arrays] for _ in range(_BUFFERS)]
            return
        from ..kernels.gpu import keep_until

        self._cuda, self._keep_until = device.xp.cuda, keep_until
        self._buffers = [_Buffer(device, arrays) for _ in range(_BUFFERS)]
        self._stream = self._cuda.Stream(non_blocking=True)
        # The tensors are zeroed on the current stream; copies must come after that.
        self._stream.wait_event(self._cuda.get_current_stream().record())

    def fill(self) -> list[NDArray[Any]]:
        """The arrays to write the next batch into; their contents are undefined."""
        if not self._buffers:
            return [tensor.array for tensor in self._tensors[0]]
        self._buffers[0].copied.synchronize()  # returns at once if nothing was sent from this buffer yet
        return self._buffers[0].host

    def send(self) -> list[Tensor]:
        """The tensors of the batch that was written into the arrays of `fill`; does not wait."""
        if not self._buffers:
            self._tensors.append(self._tensors.pop(0))
            return self._tensors[-1]
        buffer, used_up, _ = self._buffers
        current = self._cuda.get_current_stream()
        # The batch before the previous one may be used no more. The work on the previous one, which is on the stream,
        # too, does not hold up this copy: `buffer.used` was recorded at the last call.
        used_up.used.record(current)
        self._stream.wait_event(buffer.used)
        for tensor, array in zip(buffer.tensors, buffer.host, strict=True):
            tensor.array.set(array, self._stream)
        buffer.copied.record(self._stream)
        self._keep_until(buffer.copied, buffer.host)
        current.wait_event(buffer.copied)
        self._buffers.append(self._buffers.pop(0))
        return buffer.tensors
