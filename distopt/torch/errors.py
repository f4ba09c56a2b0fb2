"""Turns distopt's errors into errors that users of PyTorch catch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..errors import StalledError, UsageError

if TYPE_CHECKING:
    from ..errors import DistoptError


def as_torch(error: DistoptError) -> Any:
    """Local. A ValueError if an argument is wrong, else a DistBackendError, with the text of `error`."""
    if isinstance(error, UsageError):
        return ValueError(str(error))
    if isinstance(error, StalledError):  # the process group's own time-out has passed, not DISTOPT_TIMEOUT
        cure = "find out what it is busy with, or raise the timeout of the process group"
        return dist.DistBackendError(f"{error.fact}; {cure}")
    return dist.DistBackendError(str(error))
