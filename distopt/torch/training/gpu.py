"""Gradients on GPUs: communicators, and CuPy on PyTorch's stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from secrets import token_hex
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ...comm.gpu import order_launches
from ..join import connected

if TYPE_CHECKING:
    from ...comm import Communicator
    from ...comm.nccl import NcclCommunicator
    from ...launch.job.base import Job

if torch.version.cuda:
    order_launches()  # PyTorch's communicators are launched beside ours, perhaps by the same library

_F = TypeVar("_F", bound=Callable[..., Any])


# By ranks and GPU, the last communicator and its identity, which is the same on all ranks.
_shared: dict[tuple[tuple[int, ...], int], tuple[str, NcclCommunicator]] = {}


def communicator_on(
    device: torch.device, store: dist.Store, rank: int, ranks: Sequence[int], seconds: float
) -> Communicator:
    """Collective. The communicator over NCCL of ranks whose gradients are on GPUs, one for each rank.

    The same ranks share one, since several need memory, and an order of launches on the device: see 'GPUs' in the
    documentation.
    If it has failed or is closed on any rank, a new one takes its place.

    Args:
        device: the GPU of this rank's parameters.
        store: see `connected`, as for the others.
        rank: of this process.
        ranks: their numbers in the script's job.
        seconds: how long the ranks wait for each other.

    Raises:
        MissingDependencyError: driver, CuPy or NCCL are missing.
        LaunchError: two ranks would use the same GPU.
    """
    from ...comm.nccl import NcclCommunicator

    key = tuple(ranks), device.index

    def create(job: Job) -> Communicator:
        name, shared = _shared.get(key, ("", None))
        known = name if shared is not None and shared.usable else token_hex(8)
        offers = job.all_gather(known.encode())
        if shared is not None and set(offers) == {name.encode()}:
            return shared
        communicator = NcclCommunicator.create(job, device.index)
        _shared[key] = offers[0].decode(), communicator
        return communicator

    return connected(store, rank, ranks, seconds, "codecs", create)[0]


def via_host_of(communicator: Communicator, device: torch.device) -> Communicator:
    """Local. A communicator of CPUs for arrays on a device: itself on a CPU, and of one rank, which sends nothing.

    Raises:
        MissingDependencyError: driver or CuPy are missing.
    """
    if device.type != "cuda" or communicator.topology.world_size == 1:
        return communicator
    from ...comm.via_host import ViaHostCommunicator

    return ViaHostCommunicator(communicator, device.index)


@functools.cache
def _memory_of_torch() -> Callable[[int], Any]:
    """Local. An allocator for CuPy that takes memory from PyTorch's: neither then holds what the other lacks."""
    from cupy.cuda import PythonFunctionAllocator, get_current_stream

    free = torch.cuda.caching_allocator_delete

    def allocate(n_bytes: int, device: int) -> int:
        try:
            address: int = torch.cuda.caching_allocator_alloc(n_bytes, device, get_current_stream().ptr)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        return address

    malloc: Callable[[int], Any] = PythonFunctionAllocator(allocate, lambda address, _: free(address)).malloc
    return malloc


@contextmanager
def current_stream(device: torch.device) -> Iterator[None]:
    """Local. In the body of a `with`, CuPy computes on PyTorch's current stream of `device`; without effect on a CPU.

    The device is the current one meanwhile: kernels are launched there, and CuPy takes no stream of another. CuPy's
    memory is PyTorch's.
    """
    if device.type != "cuda":
        yield
        return
    import cupy

    stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream(device))
    with torch.cuda.device(device), stream, cupy.cuda.using_allocator(_memory_of_torch()):
        yield


def on_current_stream(method: _F) -> _F:
    """Run a method of an object with a `device` on PyTorch's current stream; see `current_stream`."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        with current_stream(self.device):
            return method(self, *args, **options)

    return run  # type: ignore[return-value]
