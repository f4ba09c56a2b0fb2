"""The names that SINGA's scripts take from `singa.singa_wrap`.

Attributes:
    USE_CUDA: whether a GPU can be used, `device.gpu_is_usable` at each look-up. The first look-up loads CUDA's driver,
        so read it in the processes that use the GPU, not before a fork.
    USE_DIST: True. Every build can run several ranks: those of one host need nothing further, those of `mpiexec` need
        mpi4py, and `distopt doctor` lists it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..checks import absent_name
from ..launch.job.multiprocess import Ticket as NcclIdHolder
from ..nn.core.raw import RawTensor as Tensor
from ..nn.core.tensor import from_raw_tensor
from ..nn.devices.discovery import gpu_is_usable

__all__ = ["USE_CUDA", "USE_DIST", "Gaussian", "NcclIdHolder", "Tensor"]

USE_CUDA: bool
USE_DIST = True


def Gaussian(mean: float, std: float, raw: Any) -> None:  # noqa: N802 - SINGA's name
    """Overwrite a raw tensor with normal random numbers, as `Tensor.gaussian` does."""
    from_raw_tensor(raw).gaussian(mean, std)


_ABSENT = "SINGA's C++ functions are absent; use those of distopt.tensor and distopt.autograd"

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "USE_CUDA":
            return gpu_is_usable()
        raise absent_name("distopt.singa_wrap", name, __all__, otherwise=_ABSENT)
