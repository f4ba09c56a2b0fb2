"""The ranks of any process group as a communicator of distopt."""

from __future__ import annotations

import atexit
import contextlib
import weakref

import torch
import torch.distributed as dist

from ...comm import Communicator
from ...errors import DistoptError, UsageError
from ...settings import Settings
from ..join import connected
from .gpu import communicator_on, via_host_of

_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


_CPU = torch.device("cpu")


def communicator_of(
    group: dist.ProcessGroup | None = None, device: torch.device = _CPU, *, via_host: bool = False
) -> Communicator:
    """Collective. A communicator of the ranks of `group` for arrays on a device.

    On CPUs, it is a new one: shared memory on a host and UCX between hosts. On GPUs, one for each rank, it
    is NCCL, and all groups of the same ranks share one; or, with `via_host`, a new one of the CPUs, by copies.

    The ranks meet in the group's store; afterwards it depends on the group no more. Its operations have an order of
    their own, so it does not disturb those that PyTorch calls. An operation waits for a rank for $DISTOPT_TIMEOUT.

    Args:
        group: a group with this process, over any backend (default: all ranks).
        device: of this rank's arrays.
        via_host: whether arrays of a GPU travel by the CPUs' transport.

    Raises:
        UsageError: the process group is missing, or does not have this process.
        LaunchError: the ranks did not meet, or two of them would use the same GPU.
        MissingDependencyError: the arrays are on a GPU, and CuPy is missing, or NCCL without `via_host`.
    """
    if not dist.is_initialized():
        raise UsageError('there is no process group; call torch.distributed.init_process_group("distopt") before')
    group = group or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError("this process is not in the process group; make it on the ranks of the group only")
    rank, store = dist.get_rank(group), group.get_group_store()
    # All ranks make the communicators of a group in the same order, so equal numbers belong to the same one.
    number = store.add(f"distopt.codecs/{rank}", 1)
    store = dist.PrefixStore(f"distopt.codecs/{number}", store.clone())
    seconds = Settings.from_env().timeout
    ranks = dist.get_process_group_ranks(group)
    if device.type == "cuda" and not via_host:
        return communicator_on(device, store, rank, ranks, seconds)
    communicator = connected(store, rank, ranks, seconds, "codecs")[0]
    if not _open:
        atexit.register(_close_at_exit)
    _open.add(communicator)
    return via_host_of(communicator, device)


def _close_at_exit() -> None:
    """Local. Close what scripts leave open while Python's threads still run."""
    for communicator in list(_open):
        with contextlib.suppress(DistoptError):  # it has failed, which the script knows
            communicator.close()
