"""PyTorch: the backend "distopt" of `torch.distributed`, for CPU tensors.

To import this module registers it. Then `init_process_group("distopt")`, or "cpu:distopt,cuda:nccl", is all that a
script for Gloo has to change. `docs/pytorch.md` says what it does and does not.
"""

from __future__ import annotations

from .._core import set_leak_warnings
from ..errors import MissingDependencyError, pip_install

try:
    import torch.distributed as dist
except ModuleNotFoundError as error:
    raise MissingDependencyError(f"PyTorch cannot be imported ({error}); {pip_install('torch')}") from error

from .checkpoint.checkpoint import Checkpoint, load
from .checkpoint.sampler import ResumableSampler
from .ddp.sync_batch_norm import SyncBatchNorm
from .group.monitored_barrier import extend_monitored_barrier
from .group.process_group import DistoptProcessGroup
from .join import meet

__all__ = ["Checkpoint", "DistoptProcessGroup", "ResumableSampler", "SyncBatchNorm", "load"]

if dist.is_available() and not hasattr(dist.Backend, "DISTOPT"):
    dist.Backend.register_backend("distopt", meet, extended_api=True, devices=["cpu"])
    extend_monitored_barrier(DistoptProcessGroup)
    set_leak_warnings(False)  # DTensor keeps its groups, and they their communicators, until the process has ended
