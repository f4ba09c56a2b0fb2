"""Gradients on GPUs: the ranks of a process group as a job over NCCL, and CuPy on PyTorch's stream."""

from __future__ import annotations

import functools
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from secrets import token_bytes
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ...comm import begin_recording
from ...comm.gpu import gpu_stack
from ...errors import UsageError
from ...launch.job.base import Job
from ...launch.job.topology import host_identity, places_of
from ...launch.rendezvous.host_group import HostGroup
from ..join import await_all
from ..phases import watch_phases

if TYPE_CHECKING:
    from ...comm import Communicator

_F = TypeVar("_F", bound=Callable[..., Any])


class StoreJob(Job):
    """The ranks that share a store of PyTorch, as a job.

    Args:
        store: of these ranks, used for nothing else.
        rank: of this process among them.
        ranks: their numbers in the script's job, for errors.
        seconds: how long an exchange waits for a rank.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], seconds: float) -> None:
        """Collective.

        Raises:
            LaunchError: a rank did not come.
        """
        self._store, self._rank, self._ranks, self._seconds = store, rank, ranks, seconds
        self._round = 0
        note = [host_identity(), socket.gethostname(), token_bytes(16).hex()]
        notes = [json.loads(each) for each in self.all_gather(json.dumps(note).encode())]
        identities, hosts, secrets = zip(*notes, strict=True)
        self.topology, _, mine = places_of(rank, identities, hosts)
        self._secret = bytes.fromhex(secrets[mine[0]])

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Collective. See `Job.all_gather`."""
        self._round += 1
        store = dist.PrefixStore(str(self._round), self._store)
        store.set(str(self._rank), payload.hex())
        await_all(store, self._rank, self._ranks, self._seconds)
        return [bytes.fromhex(each.decode()) for each in store.multi_get([str(q) for q in range(len(self._ranks))])]

    def _meet(self) -> HostGroup:
        return HostGroup(self._secret, self.topology.local_rank, self.topology.local_size, self._seconds)


def communicator_on(device: torch.device, job: Job, ranks: Sequence[int]) -> Communicator:
    """Collective. A communicator over NCCL of ranks whose gradients are on GPUs, one for each rank.

    Args:
        device: the GPU of this rank's parameters.
        job: the ranks; it is closed.
        ranks: their numbers in the script's job.

    Raises:
        MissingDependencyError: driver, CuPy or NCCL are missing.
        LaunchError: two ranks would use the same GPU.
        UsageError: the parameters are on another GPU than the one that the ranks agree on.
    """
    from ...comm.nccl import NcclCommunicator

    try:
        gpu_stack().cupy.cuda.Device(device.index).use()
        communicator = NcclCommunicator.create(job)
        begin_recording(communicator, job, "codecs", ranks, watch_phases)
    finally:
        job.close()
    if communicator.device_id != device.index:
        communicator.close()
        raise UsageError(
            f"the parameters of rank {job.topology.rank} are on {device}, but its GPU is number "
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
