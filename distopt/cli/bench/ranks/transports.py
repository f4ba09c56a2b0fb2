"""The candidates of `distopt bench all-reduce`, as one rank runs them."""

from __future__ import annotations

import mmap
import os
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TRANSPORTS", "Call", "Transport"]

_PAGE = 4096


@dataclass(frozen=True)
class Call:
    """An all-reduce, ready to run.

    Attributes:
        run: reduces once and waits for the result.
        input: this rank's data.
        result: where the sum appears; the same array as `input` if the reduction is in place.
    """

    run: Callable[[], object]
    input: Any
    result: Any


class Transport(ABC):
    """A library that sums arrays over ranks.

    Attributes:
        rank: this rank.
        about: library and version.
        buffers: kinds of memory to measure it with.
    """

    rank: int
    about: str
    buffers: tuple[str, ...] = ("in place",)

    @abstractmethod
    def call(self, buffers: str, count: int, capacity: int, dtype: str) -> Call:
        """Collective. The all-reduce (sum) of `count` elements; no later one has more than `capacity`."""

    @abstractmethod
    def sync(self) -> None:
        """Collective. Return when all ranks have called it."""


class Distopt(Transport):
    """A communicator of distopt."""

    buffers = ("wire", "ordinary")

    def __init__(self, rank: int, world_size: int, setup: dict[str, Any]) -> None:
        from distopt import comm, launch

        backend = setup["backend"]
        if rank < 0:
            job: launch.Job = launch.MpiJob()
        else:
            job = launch.MultiprocessJob(launch.Ticket(bytes.fromhex(setup["secret"])), rank, world_size)
        self._communicator = comm.create(job, backend)
        self._wire: dict[str, Any] = {}
        self.rank = job.topology.rank
        self.about = f"distopt, {backend} communicator"

    def call(self, buffers: str, count: int, capacity: int, dtype: str) -> Call:
        if buffers == "wire":
            # Wire memory is never freed, so one array serves all sizes.
            if dtype not in self._wire:
                self._wire[dtype] = self._communicator.empty(capacity, dtype)
            array = self._wire[dtype][:count]
        else:
            array = np.empty(count, _storage(dtype))
        communicator = self._communicator
        return Call(lambda: communicator.all_reduce(array, wire=dtype).wait(), array, array)

    def sync(self) -> None:
        self._communicator.barrier()


class Mpi(Transport):
    """MPI_Allreduce and MPI_Iallreduce through mpi4py."""

    buffers = ("in place", "separate", "Iallreduce")

    def __init__(self, rank: int, world_size: int, setup: dict[str, Any]) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = MPI.COMM_WORLD
        if self._comm.size != world_size:
            raise RuntimeError(f"MPI sees {self._comm.size} ranks, not {world_size}")
        self.rank = self._comm.rank
        text = MPI.Get_library_version().strip("\0")
        match = re.match(r"(\D+?)\s*(?:Version:|v)?\s*(\d[\w.]*)", text)
        self.about = " ".join(match.groups() if match else text.split())

    def call(self, buffers: str, count: int, capacity: int, dtype: str) -> Call:
        if "16" in dtype:
            raise TypeError(f"MPI has no {dtype}")
        array = np.empty(count, dtype)
        comm, in_place = self._comm, self._mpi.IN_PLACE
        if buffers == "in place":
            return Call(lambda: comm.Allreduce(in_place, array), array, array)
        if buffers == "Iallreduce":
            return Call(lambda: comm.Iallreduce(in_place, array).Wait(), array, array)
        result = np.empty(count, dtype)
        return Call(lambda: comm.Allreduce(array, result), array, result)

    def sync(self) -> None:
        self._comm.Barrier()


class Gloo(Transport):
    """Gloo through torch.distributed."""

    def __init__(self, rank: int, world_size: int, setup: dict[str, Any]) -> None:
        import torch
        from torch import distributed

        torch.set_num_threads(1)
        if rank < 0:  # mpiexec has started it
            rank = next(int(os.environ[name]) for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ)
        store = setup.get("meeting") or f"file://{setup['folder']}/store"
        distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
        self._torch, self._distributed = torch, distributed
        self.rank = rank
        self.about = f"Gloo of torch {torch.__version__}"

    def call(self, buffers: str, count: int, capacity: int, dtype: str) -> Call:
        array = np.empty(count, _storage(dtype))
        tensor = self._torch.from_numpy(array)
        if dtype == "bfloat16":
            tensor = tensor.view(self._torch.bfloat16)
        all_reduce = self._distributed.all_reduce
        return Call(lambda: all_reduce(tensor), array, array)

    def sync(self) -> None:
        self._distributed.barrier()


class Floor(Transport):
    """The minimum work of any in-place all-reduce: a lower bound on its time.

    All buffers are in shared memory; each rank sums its share of all of them and writes the sum to all of them. The
    ranks do not wait for one another inside `run`, so this is not a correct all-reduce.
    """

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

    def call(self, buffers: str, count: int, capacity: int, dtype: str) -> Call:
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
        return Call(lambda: reduce(pieces, pieces, code, op), arrays[self.rank], arrays[self.rank])

    def sync(self) -> None:
        """Spin, yielding the processor, until all ranks have called it equally often."""
        self._turn += 1
        self._turns[self.rank] = self._turn
        while self._turns.min() < self._turn:
            os.sched_yield()


def _storage(dtype: str) -> np.dtype[Any]:
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


TRANSPORTS: dict[str, Callable[[int, int, dict[str, Any]], Transport]] = {
    "distopt": Distopt,
    "mpi": Mpi,
    "torch": Gloo,
    "floor": Floor,
}
