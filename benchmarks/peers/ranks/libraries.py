"""The candidates of `python -m benchmarks all-reduce`, as one rank runs them: libraries, and the collectives of each."""

from __future__ import annotations

import mmap
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .phases import count_seconds

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_IN_PLACE = ("all_reduce", "broadcast")
_MPI_NAMES = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reduce_scatter_block",
    "broadcast": "bcast",
}
_PAGE = 4096


@dataclass(frozen=True)
class Call:
    """A collective, ready to run.

    Attributes:
        run: runs it once and waits for the result; the argument is the root, which only a broadcast heeds.
        input: this rank's data.
        result: where the result appears; the same array as `input` if the collective is in place.
    """

    run: Callable[[int], object]
    input: Any
    result: Any


class Library(ABC):
    """A library that has collectives.

    Attributes:
        rank: this rank.
        about: library and version.
        buffers: kinds of memory to measure each collective with.
    """

    rank: int
    about: str
    buffers: ClassVar[dict[str, tuple[str, ...]]]

    @abstractmethod
    def call(self, collective: str, buffers: str, count: int, capacity: int, dtype: str) -> Call:
        """Collective. A collective on `count` elements, by `_shares` on each rank; reductions are sums.

        No later call with this dtype has more than `capacity` elements.
        """

    @abstractmethod
    def sync(self) -> None:
        """Collective. Return when all ranks have called it."""

    def phases(self) -> dict[str, float]:
        """Local. Seconds in each kind of event of the timeline since the last call of this, the first of which begins it.

        Empty if it has no timeline.
        """
        return {}


class Distopt(Library):
    """A communicator of distopt."""

    buffers: ClassVar[dict[str, tuple[str, ...]]] = dict.fromkeys(COLLECTIVES, ("wire", "ordinary"))

    def __init__(self, rank: int, world_size: int, setup: dict[str, Any]) -> None:
        transport = setup["transport"]
        self._communicator = communicator(rank, world_size, setup)
        self._wire: dict[tuple[str, str], Any] = {}
        self.rank = self._communicator.topology.rank
        self._world_size = world_size
        self.about = f"distopt, transport {transport}"
        if rank < 0:
            self.about += f" over {_mpi_library()}"

    def call(self, collective: str, buffers: str, count: int, capacity: int, dtype: str) -> Call:
        sent, received = _shares(collective, count, self._world_size)
        in_place = collective in _IN_PLACE

        def memory(role: str, share: int) -> Any:
            if buffers != "wire":
                return np.empty(share, _storage(dtype))
            # Wire memory is never freed, so one array serves all sizes.
            if (role, dtype) not in self._wire:
                self._wire[role, dtype] = self._communicator.empty(capacity * share // count, dtype)
            return self._wire[role, dtype][:share]

        array = memory("input", sent)
        result = array if in_place else memory("result", received)
        function = getattr(self._communicator, collective)
        if collective == "broadcast":
            return Call(lambda root: function(array, root, wire=dtype).wait(), array, array)
        arguments = (array,) if in_place else (array, result)
        return Call(lambda _: function(*arguments, wire=dtype).wait(), array, result)

    def sync(self) -> None:
        self._communicator.barrier()


class Mpi(Library):
    """MPI's own collectives through mpi4py, blocking and (MPI calls them "immediate") nonblocking."""

    buffers: ClassVar[dict[str, tuple[str, ...]]] = {
        "all_reduce": ("in place", "separate", "immediate"),
        "all_gather": ("separate", "immediate"),
        "reduce_scatter": ("separate", "immediate"),
        "broadcast": ("in place", "immediate"),
    }

    def __init__(self, rank: int, world_size: int, setup: dict[str, Any]) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = MPI.COMM_WORLD
        if self._comm.size != world_size:
            raise RuntimeError(f"MPI sees {self._comm.size} ranks, not {world_size}")
        self.rank = self._comm.rank
        self.about = _mpi_library()

    def call(self, collective: str, buffers: str, count: int, capacity: int, dtype: str) -> Call:
        if "16" in dtype:
            raise TypeError(f"MPI has no {dtype}")
        sent, received = _shares(collective, count, self._comm.size)
        in_place = collective in _IN_PLACE and buffers != "separate"
        array = np.empty(sent, dtype)
        result = array if in_place else np.empty(received, dtype)
        name = _MPI_NAMES[collective]
        if buffers == "immediate":
            start = getattr(self._comm, f"I{name}")

            def function(*arguments: Any) -> None:
                start(*arguments).Wait()
        else:
            function = getattr(self._comm, name.capitalize())
        if collective == "broadcast":
            return Call(lambda root: function(array, root), array, array)
        given = self._mpi.IN_PLACE if in_place else array
        return Call(lambda _: function(given, result), array, result)

    def sync(self) -> None:
        self._comm.Barrier()


class Torch(Library):
    """A backend of torch.distributed: Gloo or distopt.

    With "memory" "bucket" in the setup, arrays of reductions in place are where distopt's groups move DDP's buckets.
    """

    buffers: ClassVar[dict[str, tuple[str, ...]]] = {
        collective: ("in place" if collective in _IN_PLACE else "separate",) for collective in COLLECTIVES
    }

    def __init__(self, rank: int, world_size: int, setup: dict[str, Any]) -> None:
        import torch

        self.rank = join_torch(setup, rank, world_size)
        self._phases: Callable[[], dict[str, float]] | None = None
        self._torch, self._distributed = torch, torch.distributed
        self._world_size = world_size
        group = torch.distributed.group.WORLD
        self._empty = group._channels.first.communicator.empty if setup.get("memory") == "bucket" else np.empty
        self.about = f"{setup['group']} through torch.distributed, torch {torch.__version__}"

    def call(self, collective: str, buffers: str, count: int, capacity: int, dtype: str) -> Call:
        sent, received = _shares(collective, count, self._world_size)
        array = self._empty(sent, _storage(dtype).name)
        result = array if collective in _IN_PLACE else np.empty(received, _storage(dtype))
        given, taken = self._tensor(array, dtype), self._tensor(result, dtype)
        in_place = collective in _IN_PLACE
        function = getattr(self._distributed, collective if in_place else f"{collective}_single")
        if collective == "broadcast":
            return Call(lambda root: function(given, root), array, result)
        arguments = (given,) if in_place else (taken, given)
        return Call(lambda _: function(*arguments), array, result)

    def _tensor(self, array: Any, dtype: str) -> Any:
        tensor = self._torch.from_numpy(array)
        return tensor.view(self._torch.bfloat16) if dtype == "bfloat16" else tensor

    def sync(self) -> None:
        self._distributed.barrier()

    def phases(self) -> dict[str, float]:
        if not self.about.startswith("distopt"):
            return {}
        if self._phases is None:
            self._phases = count_seconds()
        return self._phases()


class Floor(Library):
    """The minimum work of any in-place all-reduce: a lower bound on its time.

    All buffers are in shared memory; each rank sums its share of all of them and writes the sum to all of them. The
    ranks do not wait for one another inside `run`, so this is not a correct all-reduce.
    """

    buffers: ClassVar[dict[str, tuple[str, ...]]] = {"all_reduce": ("in place",)}

    def __init__(self, rank: int, world_size: int, setup: dict[str, Any]) -> None:
        from distopt import _core
        from distopt.comm.base import DTYPES, OPS

        self._reduce, self._dtypes, self._sum = _core.reduce, DTYPES, OPS["sum"]
        self.rank, self._world_size = rank, world_size
        self.about = f"each rank reduces its share in place, unsynchronised ({_core.isa()})"
        with open(setup["memory"], "r+b") as file:  # noqa: PTH123 - a descriptor of another process
            self._memory = mmap.mmap(file.fileno(), 0)
        # One cache line per rank. Plain loads and stores suffice: each line has one writer, which only counts up.
        self._turns = np.frombuffer(self._memory, np.int64, 8 * world_size)[::8]
        self._turn = 0

    def call(self, collective: str, buffers: str, count: int, capacity: int, dtype: str) -> Call:
        """Reduce this rank's share of all buffers."""
        item = _storage(dtype).itemsize
        stride = -(-capacity * item // _PAGE) * _PAGE
        arrays = [
            np.frombuffer(self._memory, _storage(dtype), count, _PAGE + stride * rank)
            for rank in range(self._world_size)
        ]
        share = slice(count * self.rank // self._world_size, count * (self.rank + 1) // self._world_size)
        pieces = [array[share] for array in arrays]
        reduce, code, op = self._reduce, self._dtypes[dtype], self._sum
        return Call(lambda _: reduce(pieces, pieces, code, op), arrays[self.rank], arrays[self.rank])

    def sync(self) -> None:
        """Spin, yielding the processor, until all ranks have called it equally often."""
        self._turn += 1
        self._turns[self.rank] = self._turn
        while self._turns.min() < self._turn:
            os.sched_yield()


def communicator(rank: int, world_size: int, setup: dict[str, Any]) -> Any:
    """Collective. The communicator of distopt that `setup` names; mpiexec has started ranks of -1."""
    from distopt import comm, launch

    if rank < 0:
        return comm.create(launch.MpiJob(), setup["transport"])
    if "meeting" in setup:  # on several hosts, as under torchrun
        address, _, port = setup["meeting"].removeprefix("tcp://").rpartition(":")
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": address, "MASTER_PORT": port}
        return comm.create(launch.join(), setup["transport"])
    job = launch.MultiprocessJob(launch.Ticket(bytes.fromhex(setup["secret"])), rank, world_size)
    return comm.create(job, setup["transport"] if world_size > 1 else "single")


def join_torch(setup: dict[str, Any], rank: int, world_size: int) -> int:
    """Collective. Initialize the group that `setup` names, with one thread per rank; the rank, which mpiexec knows of -1.

    PyTorch's group "fake" moves no bytes between ranks.
    """
    import torch

    if setup["group"] == "distopt":
        import distopt.torch  # noqa: F401 - registers it
    torch.set_num_threads(1)
    if rank < 0:
        rank = next(int(os.environ[name]) for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ)
    if setup["group"] == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        return rank
    store = setup.get("meeting") or f"file://{setup['folder']}/store"
    torch.distributed.init_process_group(setup["group"], init_method=store, rank=rank, world_size=world_size)
    return rank


def _shares(collective: str, count: int, world_size: int) -> tuple[int, int]:
    """Elements that a rank gives and gets in a collective on `count` elements, a multiple of `world_size`."""
    part = count // world_size
    return {"all_gather": (part, count), "reduce_scatter": (count, part)}.get(collective, (count, count))


def _mpi_library() -> str:
    """Name and version of the MPI that mpi4py has loaded."""
    from mpi4py import MPI

    text = MPI.Get_library_version().strip("\0")
    match = re.match(r"(\D+?)\s*(?:Version:|v)?\s*(\d[\w.]*)", text)
    return " ".join(match.groups() if match else text.split())


def _storage(dtype: str) -> np.dtype[Any]:
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


LIBRARIES: dict[str, Callable[[int, int, dict[str, Any]], Library]] = {
    "distopt": Distopt,
    "mpi": Mpi,
    "torch": Torch,
    "floor": Floor,
}
