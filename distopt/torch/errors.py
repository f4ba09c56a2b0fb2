"""distopt's errors as those that PyTorch's users expect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..errors import StalledError, UsageError

if TYPE_CHECKING:
    from ..errors import DistoptError


def as_torch(error: DistoptError) -> Any:
    """Local. `error` as a ValueError, if an argument is wrong, or a DistBackendError."""
    if isinstance(error, UsageError):
        return ValueError(str(error))
    if isinstance(error, StalledError):  # a process group has a time-out of its own, not that of the environment
        cure = "find out what it is busy with, or raise the timeout of the process group"
        return dist.DistBackendError(f"{error.fact}; {cure}")
    return dist.DistBackendError(str(error))
