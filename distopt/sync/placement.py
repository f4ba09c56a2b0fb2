"""Which device goes with which communicator, and memory that both of them reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..comm.single import SingleCommunicator
from ..errors import UsageError
from ..nn.device import find_gpu, get_default_device
from ..settings import Settings

if TYPE_CHECKING:
    from ..comm.base import Array, Communicator
    from ..nn.device import Device

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


def wire_memory(communicator: Communicator, count: int, dtype: str, xp: Any) -> Array:
    """Collective. Wire memory for `count` elements, as an array of the module `xp`.

    Raises:
        UsageError: the communicator does not reach arrays of that module.
    """
    if isinstance(communicator, SingleCommunicator):
        communicator.xp = xp  # data goes nowhere, so it may be anywhere
    memory = communicator.empty(count, dtype)
    if not isinstance(memory, xp.ndarray):
        raise UsageError(
            f"the {communicator.name} communicator moves {type(memory).__module__} arrays, and these are of "
            f"{xp.__name__}; put model and batches on DistOpt.device, or stay on the CPU with DISTOPT_DEVICE=cpu"
        )
    return memory
