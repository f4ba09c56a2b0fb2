"""The world: one object for the collectives of a script outside of training."""

from __future__ import annotations

import os
import weakref
from types import TracebackType
from typing import Any, Literal, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from .. import launch
from ..checks import check_integer
from ..errors import CommunicatorClosedError, UsageError
from ..kernels import array_module
from ..launch import Job, Ticket
from . import create
from .base import Communicator
from .objects import packed, unpacked
from .values import carried, reducible, take

T = TypeVar("T")
WorldOp: TypeAlias = Literal["sum", "mean", "max", "min"]


class World:
    """The ranks of a job, and their collectives. Made by `distopt.init()`.

    All methods but `close` are collective and wait for their result: every rank must call the same ones in the same
    order. Ranks that do not, or that pass other shapes or types, get a MismatchError that names them.

    Values are numbers, NumPy arrays of any layout, Tensors, and arrays of other libraries through DLPack, such as
    PyTorch's; over NCCL those of a GPU, too. A result has the type of the argument, its shape and its element type,
    with the exceptions that the methods name; a number gives a Python number. Arguments are never changed. A value
    that cannot be sent raises a UsageError before anything is sent.

    As a context manager, it is closed at the end of a body without exception. An exception leaves it open, so that its
    launcher notifies the other ranks how this process ends.

    Args:
        job: this rank's membership, which the world closes; None with `communicator`.
        communicator: a communicator to share, which the world leaves open (default: a new one for the job).

    Attributes:
        rank: number of this process in the job, 0 ... world_size - 1.
        world_size: number of processes in the job.
        local_rank: number of this process among those on its host.
        local_size: number of processes on its host.
        hosts: host name of every rank, in rank order.
        is_main: whether this is rank 0, which prints and writes files.
        communicator: collectives on arrays in place, in the background; `DistOpt` uses it, too.
    """

    def __init__(self, job: Job | None, communicator: Communicator | None = None) -> None:
        """Collective without `communicator`, else local."""
        if communicator is None:
            assert job is not None
            communicator = create(job)
        self.communicator = communicator
        topology = communicator.topology
        self.rank = topology.rank
        self.world_size = topology.world_size
        self.local_rank = topology.local_rank
        self.local_size = topology.local_size
        self.hosts = topology.hosts
        self.is_main = self.rank == 0
        self._job = job
        self._closed = False

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return (
            f"World(rank {self.rank} of {self.world_size}, local rank {self.local_rank} of {self.local_size} on "
            f"{self.hosts[self.rank]}, {self.communicator.name}{closed})"
        )

    @property
    def closed(self) -> bool:
        """Local. Whether this rank has left."""
        return self._closed

    # -- collectives -------------------------------------------------------------------------------------------------
    @overload
    def all_reduce(self, value: int, op: Literal["sum", "max", "min"] = "sum") -> int: ...
    @overload
    def all_reduce(self, value: float, op: WorldOp = "sum") -> float: ...
    @overload
    def all_reduce(self, value: NDArray[Any], op: WorldOp = "sum") -> NDArray[Any]: ...
    @overload
    def all_reduce(self, value: T, op: WorldOp = "sum") -> T: ...
    def all_reduce(self, value: Any, op: WorldOp = "sum") -> Any:
        """Collective. The element-wise reduction over all ranks; as `comm.allreduce` of mpi4py.

        It waits, changes nothing and returns the result; `Communicator.all_reduce` changes its array and returns at
        once. Horovod's `hvd.allreduce` is the mean.

        Args:
            value: a number or array of floats, integers or booleans; see the class. Equal shapes and types on all
                ranks.
            op: "sum", "mean", "max" or "min".

        Returns:
            The same kind as `value`. Sums of integers are exact; sums of booleans are int64. Means of integers and
            booleans are float64. Sums of float16 are rounded once, from float32.

        Raises:
            UsageError: the value cannot be reduced; or, on all ranks, a sum does not fit in its integer type.
        """
        communicator, given = self._communicator(), take(value)
        wire, restored = reducible(given.array, op)
        communicator.all_reduce(wire, op, label=given.label).wait()
        return given.give(restored(wire))

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Collective. The value of rank `root`; as `comm.Bcast` of mpi4py, `hvd.broadcast`.

        Args:
            value: a number or array of any element type without Python objects; equal shapes and types on all ranks.
            root: whose values all ranks get.

        Returns:
            The same kind as `value`, with the bits of `root`.

        Raises:
            UsageError: the value cannot be sent, or rank `root` does not exist.
        """
        communicator, given, root = self._communicator(), take(value), check_integer("root", root, 0, self.world_size)
        wire, restored = carried(given.array)
        communicator.broadcast(wire, root, label=given.label).wait()
        return given.give(restored(wire[None])[0, ...])

    def all_gather(self, value: Any) -> Any:
        """Collective. The values of all ranks, in rank order; as `comm.allgather` of mpi4py.

        Args:
            value: a number or array of any element type without Python objects; equal shapes and types on all ranks.

        Returns:
            The same kind as `value`, stacked along a new first axis: [world_size, *shape]. Numbers give a NumPy array
            [world_size].

        Raises:
            UsageError: the value cannot be sent.
        """
        communicator, given = self._communicator(), take(value)
        wire, restored = carried(given.array)
        rows = array_module(wire).empty((self.world_size, wire.size), wire.dtype)
        communicator.all_gather(wire, rows, label=given.label).wait()
        return given.give(restored(rows))

    def broadcast_object(self, obj: Any = None, root: int = 0) -> Any:
        """Collective. Data of rank `root`; as `comm.bcast` of mpi4py, `hvd.broadcast_object`, but without pickle.

        Args:
            obj: on rank `root`, None, a bool, int, float, str, bytes, NumPy array or NumPy scalar, or a list, tuple or
                dict of such, nested at will. The other ranks' value is ignored.
            root: whose data all ranks get.

        Returns:
            A copy, with equal types, on every rank.

        Raises:
            UsageError: on all ranks: a part of `obj` is of another type; the message names it.
        """
        communicator, root = self._communicator(), check_integer("root", root, 0, self.world_size)
        data, refused = b"", False
        if self.rank == root:
            try:
                data = packed(obj)
            except UsageError as error:  # sent to all, so that they remain in step
                data, refused = str(error).encode(), True
        header = np.array([len(data), refused], np.int64)
        communicator.broadcast(header, root, label="length of an object").wait()
        length, refused = int(header[0]), bool(header[1])
        words = np.frombuffer(bytearray(data.ljust(-(-length // 4) * 4, b"\0")), np.int32)
        communicator.broadcast(words, root, label="object").wait()
        data = words.tobytes()[:length]
        if refused:
            raise UsageError(f"broadcast_object on rank {root}: {data.decode()}")
        return unpacked(data)

    def barrier(self) -> None:
        """Collective. Return when every rank has called it; as `comm.Barrier` of mpi4py."""
        self._communicator().barrier()

    # -- life cycle --------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Local. Leave; idempotent. Ranks that still wait for this one get a CommunicatorClosedError.

        A `DistOpt` that uses this world's communicator cannot train any more; one that was made before the world, and
        whose communicator the world uses, can.
        """
        if not self._closed:
            self._closed = True
            if self._job is not None:
                self.communicator.close()
                self._job.close()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()

    def _communicator(self) -> Communicator:
        if self._closed:
            raise CommunicatorClosedError(f"rank {self.rank} has closed its world; call distopt.init() again")
        return self.communicator


# By process id: a forked child is not a rank of its parent's job, and must not drop, which closes, the parent's world.
_worlds: dict[int, tuple[World, tuple[Ticket | None, int | None, int | None]]] = {}


def init(ticket: Ticket | None = None, local_rank: int | None = None, world_size: int | None = None) -> World:
    """Collective. See `distopt.init`."""
    asked = ticket, local_rank, world_size
    world = current()
    if world is None:
        offered = _offered() if asked == (None, None, None) else None
        world = World(launch.join(*asked) if offered is None else None, offered)
        _worlds[os.getpid()] = world, asked
    elif asked not in ((None, None, None), _worlds[os.getpid()][1]):
        raise UsageError(f"this process has an open {world}; close it before it joins another job")
    return world


_offers: dict[int, weakref.ref[Communicator]] = {}  # by process id, too


def offer(communicator: Communicator) -> None:
    """Local. The world that this process may open later shares this communicator, unless it is closed by then.

    If one rank alone opens a world, its collectives mismatch those of the others, and all get an error that names both.
    """
    if _offered() is None:
        _offers[os.getpid()] = weakref.ref(communicator)


def _offered() -> Communicator | None:
    known = _offers.get(os.getpid())
    communicator = None if known is None else known()
    return None if communicator is None or communicator.closed else communicator


def current() -> World | None:
    """Local. The open world of this process, if there is one."""
    world, _ = _worlds.get(os.getpid(), (None, None))
    return None if world is None or world.closed else world
