"""Which device goes with which communicator, and memory that both of them reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .device import find_gpu, get_default_device
from .errors import UsageError
from .settings import Settings

if TYPE_CHECKING:
    from .comm.base import Array, Communicator
    from .device import Device

__all__ = ["device_of", "wire_memory"]


def device_of(communicator: Communicator) -> Device:
    """Local. The GPU that the communicator has taken for this rank, else the CPU.

    A job of one rank takes the first GPU that can be used. `DISTOPT_DEVICE` decides otherwise.

    Raises:
        MissingDependencyError: DISTOPT_DEVICE=cuda and no GPU can be used.
        UsageError: DISTOPT_DEVICE=cuda and a communicator between processes of the CPU.
    """
    index: int | None = getattr(communicator, "device_id", 0 if communicator.topology.world_size == 1 else None)
    if index is not None:
        return find_gpu(index)[0] or get_default_device()
    if Settings.from_env().device == "cuda":
        raise UsageError(
            f"DISTOPT_DEVICE=cuda, but the {communicator.name} communicator moves data of the CPU; set "
            "DISTOPT_BACKEND=nccl too"
        )
    return get_default_device()


def wire_memory(communicator: Communicator, count: int, dtype: str, device: Device) -> Array:
    """Collective. Wire memory for `count` elements that are computed on `device`.

    Raises:
        UsageError: the communicator does not reach that device.
    """
    memory = communicator.empty(count, dtype)
    if isinstance(memory, device.xp.ndarray):
        return memory
    if communicator.topology.world_size == 1:
        return device.xp.empty(count, dtype)  # it goes nowhere
    raise UsageError(
        f"the model is on {device!r}, which the {communicator.name} communicator does not reach; put it on "
        "DistOpt.device"
    )
