"""Gradients on GPUs: a communicator over NCCL, and CuPy on PyTorch's stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ...comm.gpu import gpu_stack
from ...errors import UsageError
from ..join import connected

if TYPE_CHECKING:
    from ...comm import Communicator

_F = TypeVar("_F", bound=Callable[..., Any])


def communicator_on(
    device: torch.device, store: dist.Store, rank: int, ranks: Sequence[int], seconds: float
) -> Communicator:
    """Collective. A communicator over NCCL of ranks whose gradients are on GPUs, one for each rank.

    Args:
        device: the GPU of this rank's parameters.
        store: see `connected`, as for the others.
        rank: of this process.
        ranks: their numbers in the script's job.
        seconds: how long the ranks wait for each other.

    Raises:
        MissingDependencyError: driver, CuPy or NCCL are missing.
        LaunchError: two ranks would use the same GPU.
        UsageError: the parameters are on another GPU than the one that the ranks agree on.
    """
    from ...comm.nccl import NcclCommunicator

    gpu_stack().cupy.cuda.Device(device.index).use()
    communicator, _ = connected(store, rank, ranks, seconds, "codecs", NcclCommunicator.create)
    assert isinstance(communicator, NcclCommunicator)
    if communicator.device_id != device.index:
        communicator.close()
        raise UsageError(
            f"the parameters of rank {rank} are on {device}, but its GPU is number "
            f"{communicator.device_id}; put each rank's model on the GPU of its local rank"
        )
    return communicator


@contextmanager
def current_stream(device: torch.device) -> Iterator[None]:
    """Local. In the body of a `with`, CuPy computes on PyTorch's current stream of `device`; without effect on a CPU.

    The device is the current one meanwhile: kernels are launched there, and CuPy takes no stream of another.
    """
    if device.type != "cuda":
        yield
        return
    import cupy

    with torch.cuda.device(device), cupy.cuda.Stream.from_external(torch.cuda.current_stream(device)):
        yield


def on_current_stream(method: _F) -> _F:
    """Run a method of an object with a `device` on PyTorch's current stream; see `current_stream`."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        with current_stream(self.device):
            return method(self, *args, **options)

    return run  # type: ignore[return-value]
