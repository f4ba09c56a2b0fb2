"""The communicator of GPUs, over NCCL. The work is done in `csrc/nccl`; arrays are CuPy's.

Collectives run on a stream of their own. Each waits, on the device, for what the current stream of CuPy held when it
was called, and `Work.wait` makes the then current stream wait for the result, so the host waits for neither. NumPy
arrays are taken, too, for small data such as statistics: they travel through device memory, and the host waits.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from .. import _core
from ..errors import Process, UsageError
from ..launch.end_together.exit_guard import close_at_exit
from ..launch.job.base import Job
from ..settings import Settings
from .base import DTYPES, OPS, Array, Communicator, DoneWork, RaggedWork, Request, Work
from .gpu import GpuOfRank, GpuStack, check_device, choose_devices, device_memory, exchange_places, gpu_stack

_log = logging.getLogger("distopt")

_BOARD_CHUNK_BYTES = 4096  # the board carries no data


class NcclWork(Work):
    """A collective under way on the device.

    `wait` returns before the device has got there: the results are valid for everything that is put on CuPy's current
    stream afterwards. With a time-out the host waits, too; the time counts once this rank's data are ready.
    """

    core: Any  # set when it is launched, which `together` puts off

    def __init__(self, cupy: Any, number: int, operation: _core.NcclOperation, arrays: tuple[Array, ...]) -> None:
        """Local.

        Args:
            cupy: the module.
            number: of the operation in the flight record.
            operation: to be launched.
            arrays: its arrays, which the device uses until the end, though the caller may have dropped them.
        """
        self._cupy, self.number, self.operation, self.arrays = cupy, number, operation, arrays

    def done(self) -> bool:
        """Local. Whether the result is there."""
        return bool(self.core.done())

    def wait(self, timeout: float | None = None) -> None:
        """Let the current stream wait for the result; see the class."""
        if timeout is not None:
            self.core.wait(timeout)
        self.core.join(self._cupy.cuda.get_current_stream().ptr)


class NcclCommunicator(Communicator):
    """Collectives between GPUs, one for each rank.

    All ranks get the same bits, but the order of a sum is NCCL's own and 16-bit sums may be rounded at each step. `max`
    and `min` of floats may pass over NaN.

    A time-out, a lost rank of this host or an error of NCCL aborts the communicator; the next call or `wait` raises it,
    on all ranks of the host. Results that the device has not finished are then invalid.

    Attributes:
        device_id: number of this rank's GPU among those that the process sees; it is the current one.
    """

    name: ClassVar[str] = "nccl"
    sends_parts: ClassVar[bool] = True
    overlaps: ClassVar[bool] = True
    ordered_sums: ClassVar[bool] = False

    def __init__(
        self, job: Job, stack: GpuStack, places: Sequence[GpuOfRank], settings: Settings | None = None
    ) -> None:
        """Collective. Take this rank's GPU, and connect it with the GPUs of the other ranks."""
        settings = settings or Settings.from_env()
        if settings.sum_order == "rank":
            raise UsageError("NCCL sums in an order of its own; unset DISTOPT_SUM_ORDER or choose another transport")
        topology, cupy = job.topology, stack.cupy
        self.topology = topology
        self.xp = cupy
        self.device_id = choose_devices(places, stack.nccl_version)[topology.rank]
        cupy.cuda.Device(self.device_id).use()
        self._scratch = cupy.zeros(1, np.int32)  # makes the context, in which the communicator works
        mine = _core.nccl_unique_id(stack.nccl_path) if topology.rank == 0 else b""
        unique_id = job.all_gather(mine)[0]
        group = job.host_group()
        of_pid = {place.pid: rank for rank, place in enumerate(places) if place.host == topology.host}
        processes = [Process(of_pid.get(pid, -1), topology.host, pid) for pid in group.pids]
        fd = group.share_fd(lambda: _core.create_segment(group.size, _BOARD_CHUNK_BYTES))
        board = _core.NcclBoard(fd, group.rank, processes)
        group.client.barrier()  # no peer may be reported missing before it has shown that it lives
        self._timeout = settings.timeout
        self._core = _core.NcclCommunicator(
            stack.nccl_path,
            unique_id,
            topology.rank,
            topology.world_size,
            board,
            settings.timeout,
            settings.stall_warning,
            _log.warning,
        )
        self._close = weakref.finalize(self, self._core.close)
        self._in_use: deque[NcclWork] = deque()
        self._held: list[NcclWork] = []  # to be launched
        self._together = False

    @classmethod
    def create(cls, job: Job, device: int | None = None) -> NcclCommunicator:
        """Collective. The communicator of `job`, of whatever kind.

        Args:
            job: the ranks.
            device: number of the GPU of this rank (default: see `choose_devices`).

        Raises:
            MissingDependencyError: driver, CuPy or NCCL are missing.
            LaunchError: two ranks would use the same GPU.
        """
        stack = gpu_stack()
        communicator = cls(job, stack, exchange_places(job, stack, device))
        close_at_exit(communicator)
        return communicator

    @property
    def usable(self) -> bool:
        """Local. Whether it is neither closed nor has failed, as far as this host knows."""
        return not (self.closed or self._core.failed)

    # -- memory ------------------------------------------------------------------------------------------------------
    def _empty(self, count: int, dtype: str, xp: Any) -> Array:
        """Local here. Memory on this rank's GPU, as any array of CuPy's."""
        return device_memory(self.xp, self.topology, self.device_id, count, dtype)

    # -- collectives -------------------------------------------------------------------------------------------------
    def can_reduce(self, op: str, dtype: str) -> bool:
        """Local. As on every transport, except for operations on bits and reductions of int16, which NCCL lacks.

        Booleans are reduced as bytes of 0 and 1, by their maximum and minimum.
        """
        if dtype == "bool":
            return super().can_reduce(op, dtype) and op != "xor"
        return super().can_reduce(op, dtype) and dtype != "int16" and op not in ("and", "or", "xor")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Local. The operations of the block are one group of NCCL, and one launch."""
        if self._together:
            yield
            return
        self._together = True
        try:
            yield
        finally:
            self._together = False
            self._launch()

    def _start(self, request: Request, array: Array, out: Array) -> Work:
        """Through device memory where the arrays are NumPy's."""
        kind, dtype, label, op, root = request[:5]
        # Copies of a part and of its whole have equal values, which is enough for these operations.
        x = self.xp.asarray(array)
        y = x if out is array else self.xp.asarray(out)
        count = min(x.size, y.size)
        # Without elements, a rank takes part with a scratch element.
        sent, received = ([(each.data.ptr, count)] for each in ((x, y) if count else (self._scratch, self._scratch)))
        operation = _core.nccl_operation(kind, sent, received, count, DTYPES[dtype], OPS.get(op, 0), root, label)
        work = self._enqueue(operation, x, y)
        if not isinstance(out, np.ndarray):
            return work
        # At once: a later operation on the same array must see the result, and the caller need not keep the array.
        self._launch()
        work.wait(self._timeout)
        out.reshape(-1)[...] = y.get().reshape(-1)
        return DoneWork()

    def _start_ragged(self, request: Request, parts: Sequence[Array]) -> RaggedWork:
        """As one group of NCCL. Where not all ranks know the counts, they travel first, and the host waits for them."""
        kind, dtype, label = request[:3]
        sent = [self.xp.asarray(part).reshape(-1) for part in parts]
        counts = request.counts
        if counts is None:
            sizes = np.array([part.size for part in sent], np.int64)
            table = np.empty((self.topology.world_size, len(sent)), np.int64)
            self._start(Request("all_gather", "int64", label), sizes, table)
            # A single part goes to all ranks, so a rank has one count to send.
            counts = table[:, self.topology.rank if len(sent) > 1 else 0].tolist()
        ends = np.cumsum(counts).tolist()
        whole = self.xp.empty(ends[-1], sent[0].dtype)
        received = [whole[begin:end] for begin, end in pairwise([0, *ends])]
        given, wanted = ([(part.data.ptr, part.size) for part in group] for group in (sent, received))
        count = sum(part.size for part in sent)
        operation = _core.nccl_operation(kind, given, wanted, count, DTYPES[dtype], 0, 0, label)
        work = self._enqueue(operation, *sent, *received)
        if not isinstance(parts[0], np.ndarray):
            return RaggedWork(work, received)
        self._launch()
        work.wait(self._timeout)
        return RaggedWork(DoneWork(), [part.get() for part in received])

    def barrier(self) -> None:
        """Collective. Return when every rank has called it and all earlier operations have finished."""
        # One element of any value: when it has been reduced, every rank has called.
        if self.flight is not None:
            self.flight.note("barrier", DTYPES["int32"], 0, "", self._next_number())
        self._start(Request("barrier", "int32", ""), self._scratch, self._scratch).wait(self._timeout)

    # -- life cycle --------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Local. Wait a few seconds for what is under way, then leave. Idempotent."""
        self.closed = True
        self._close()
        self._in_use.clear()

    def abort(self, reason: str) -> None:
        """Local. End the communicator at once; ranks of this host that use it get a CommunicatorError."""
        self._core.abort(reason)

    # -- helpers -----------------------------------------------------------------------------------------------------
    def _enqueue(self, operation: _core.NcclOperation, *arrays: Array) -> NcclWork:
        check_device(self.topology, self.device_id, arrays)
        work = NcclWork(self.xp, 0 if self.flight is None else self.flight.last, operation, arrays)
        self._held.append(work)
        if not self._together:
            self._launch()
        return work

    def _launch(self) -> None:
        held, self._held = self._held, []
        if not held:
            return
        core = self._core.start([work.operation for work in held], self.xp.cuda.get_current_stream().ptr)
        while self._in_use and self._in_use[0].done():
            finished = self._in_use.popleft()
            finished.arrays = ()
            if self.flight is not None:
                self.flight.note_end(finished.number)
        for work in held:
            work.core = core
        self._in_use += held
