"""A communicator of CPUs for arrays of GPUs: they travel as copies on the host.

For machines with GPUs whose network NCCL does not serve, and for ranks that share a GPU. A collective enqueues copies
of its input into pinned memory on CuPy's current stream. When a later call, poll or wait finds that they have arrived,
the communicator of CPUs starts the operation. Operations start in the order of the calls, which is the same on all
ranks. `Work.wait` waits for the result on the host, and enqueues its copy to the device on the then current stream.

A collective of NumPy arrays is the other communicator's own, once the earlier ones have started.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ..errors import MissingDependencyError
from ..kernels.discovery import find_cupy
from .base import Array, Communicator, MessageWork, RaggedWork, Request, Work, overlap
from .gpu import check_device, device_memory

_POLL_SECONDS = 5e-5

# Attributes that are those of the communicator of CPUs.
_SAME = (
    *("topology", "dtypes", "ops", "sends_parts", "ordered_sums", "by_host_above_bytes", "finds_nonfinite"),
    *("overlaps", "moves_messages", "flight"),
)


class ViaHostWork(MessageWork):
    """A collective, or a message. The time-out of `wait` counts once this rank's data are on the host.

    Attributes:
        ready: event behind the copies of the input, and all that was on the stream before.
        written: the array on the device that gets the result, until its copy has been enqueued.
        on_host: the work of the communicator of CPUs, once it is started.
    """

    on_host: Any = None
    _copied: Any = None  # event behind the copy of the result

    def __init__(self, communicator: ViaHostCommunicator, start: Any, finish: Any, written: Array = None) -> None:
        """Local.

        Args:
            communicator: of the operation.
            start: starts it on the host, and returns the work.
            finish: enqueues the copy of the result, given the work; returns the memory that it is made from.
            written: see the class.
        """
        self._communicator, self._start, self._finish, self.written = communicator, start, finish, written
        self.ready = communicator.event()

    def start(self) -> None:
        """Collective, unless it is a message. Start it on the host."""
        self.on_host = self._start()

    def done(self) -> bool:
        """Local. Move the operation forward without waiting; return whether the result is on the host."""
        self._communicator.progress()
        return self.on_host is not None and bool(self.on_host.done())

    @property
    def nonfinite(self) -> tuple[int, int] | None:
        """Local, after `wait`. See `Work.nonfinite`."""
        return self.on_host.nonfinite  # type: ignore[no-any-return]

    @property
    def source(self) -> int:
        """Local. See `MessageWork.source`."""
        return int(self.on_host.source)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the result on the host, and let the current stream wait for its copy; see `Work.wait`."""
        if self._finish is not None:
            self._communicator.start_all()
            self.on_host.wait(timeout)
            memory = self._finish(self.on_host)
            self._copied = self._communicator.event()
            self._communicator.keep_until(self._copied, memory)
            self._start = self._finish = self.written = None  # and the memory that they hold
        else:
            self._communicator.stream.wait_event(self._copied)


class ViaHostCommunicator(Communicator):
    """Collectives of arrays of GPUs, with the sums, the errors and the time-outs of a communicator of CPUs.

    An operation on an array that an earlier one has yet to fill waits for that one. A result that nothing waits for is
    copied by the next barrier.

    Args:
        on_host: the communicator of CPUs, which is closed with this one.
        device_id: number of this rank's GPU among those that the process sees (default: that of the local rank).

    Attributes:
        device_id: number of this rank's GPU; it is the current one.

    Raises:
        MissingDependencyError: CuPy or a GPU is missing.
    """

    name: ClassVar[str] = "via-host"

    def __init__(self, on_host: Communicator, device_id: int | None = None) -> None:
        """Local."""
        self.xp, missing = find_cupy()
        if missing:
            raise MissingDependencyError(missing)
        from ..kernels import gpu

        self._on_host, self.keep_until, self._pinned_like = on_host, gpu.keep_until, gpu.pinned_like
        for name in _SAME:
            setattr(self, name, getattr(on_host, name))
        n_devices = self.xp.cuda.runtime.getDeviceCount()
        self.device_id = self.topology.local_rank % n_devices if device_id is None else device_id
        self.xp.cuda.Device(self.device_id).use()
        self._queue: deque[ViaHostWork] = deque()  # to be started
        self._unfinished: list[ViaHostWork] = []  # of those with results on the device

    @property
    def stream(self) -> Any:
        """Local. CuPy's current stream."""
        return self.xp.cuda.get_current_stream()

    def event(self) -> Any:
        """Local. An event behind all that is on the current stream."""
        return self.stream.record(self.xp.cuda.Event(disable_timing=True))

    def _empty(self, count: int, dtype: str, xp: Any) -> Array:
        """Local here. Memory on this rank's GPU, as any array of CuPy's."""
        return device_memory(self.xp, self.topology, self.device_id, count, dtype)

    def can_reduce(self, op: str, dtype: str) -> bool:
        """Local. Whether the communicator of CPUs can."""
        return self._on_host.can_reduce(op, dtype)

    # -- progress ----------------------------------------------------------------------------------------------------
    def progress(self) -> None:
        """Local. Start what is ready, and move outstanding operations forward without waiting."""
        while self._queue and self._queue[0].ready.done:
            self._queue[0].start()
            self._queue.popleft()
        self._on_host.progress()

    def start_all(self) -> None:
        """Collective. Start all that has been called, each as soon as its copies are there.

        All waits begin so: another rank may wait for a later operation, or for a message behind it.
        """
        self.progress()
        while self._queue:
            time.sleep(_POLL_SECONDS)
            self.progress()

    def barrier(self) -> None:
        """Collective. Return when every rank has called it and all earlier operations have finished."""
        self.start_all()
        self._on_host.barrier()
        for work in self._unfinished:
            work.wait()

    # -- operations --------------------------------------------------------------------------------------------------
    def _start(self, request: Request, array: Array, out: Array) -> Work:
        if isinstance(array, np.ndarray):
            self.start_all()
            return self._on_host._start(request, array, out)
        self._prepare(array, out)
        sent = self._to_host(array)
        received = sent if out is array else self._pinned_like(out)
        work = ViaHostWork(
            self,
            lambda: self._on_host._start(request, sent, received),
            lambda _: self._to_device(out, received),
            out,
        )
        return self._enqueue(work)

    def _start_ragged(self, request: Request, parts: Sequence[Array]) -> RaggedWork:
        if isinstance(parts[0], np.ndarray):
            self.start_all()
            return self._on_host._start_ragged(request, parts)
        self._prepare(*parts)
        sent, received = [self._to_host(part) for part in parts], list[Array]()
        work = ViaHostWork(
            self,
            lambda: self._on_host._start_ragged(request, sent),
            lambda work: received.extend(map(self.xp.asarray, work.parts)),
        )
        return RaggedWork(self._enqueue(work), received)

    def _start_message(self, sends: bool, array: Array, dtype: str, peer: int, tag: int) -> MessageWork:
        """Start it at once, as it has no place in the order of collectives. The host waits for the stream."""
        memory = array
        if is_on_device := not isinstance(array, np.ndarray):
            self._prepare(array)
            memory = self._to_host(array) if sends else self._pinned_like(array)
        work = ViaHostWork(
            self,
            lambda: self._on_host._start_message(sends, memory, dtype, peer, tag),
            lambda _: self._to_device(array, memory) if is_on_device and not sends else memory,
        )
        if is_on_device:
            work.ready.synchronize()
        work.start()
        return work

    def _enqueue(self, work: ViaHostWork) -> ViaHostWork:
        self._unfinished = [each for each in (*self._unfinished, work) if each.written is not None]
        self._queue.append(work)
        self.progress()
        return work

    def _next_number(self) -> int:
        return self._on_host._next_number() + len(self._queue)

    # -- copies ------------------------------------------------------------------------------------------------------
    def _prepare(self, *arrays: Array) -> None:
        """Check the arrays of an operation, and wait for earlier ones that have yet to write one of them."""
        check_device(self.topology, self.device_id, arrays)
        for work in self._unfinished:
            if work.written is not None and any(overlap(work.written, array) for array in arrays):
                work.wait()

    def _to_host(self, array: Array) -> Array:
        copy = self._pinned_like(array)
        array.reshape(-1).get(self.stream, out=copy, blocking=False)
        return copy

    def _to_device(self, array: Array, copy: Array) -> Array:
        array.reshape(-1).set(copy, self.stream)
        return copy

    # -- life cycle --------------------------------------------------------------------------------------------------
    def _subgroup(self, ranks: Sequence[int], key: bytes) -> ViaHostCommunicator:
        return ViaHostCommunicator(self._on_host._subgroup(ranks, key), self.device_id)

    def record(self, name: str, ranks: Sequence[int], rank: int, offers: Sequence[Any] = ()) -> None:
        """Local. Have the communicator of CPUs note the operations."""
        self._on_host.record(name, ranks, rank, offers)
        self.flight = self._on_host.flight

    def close(self) -> None:
        """Local. Close the communicator of CPUs. Idempotent."""
        self.closed = True
        self._on_host.close()
