"""PyTorch: the backend "distopt" of `torch.distributed` for CPU tensors, codecs, SyncBatchNorm, and checkpoints.

To import this package registers the backend. Then `init_process_group("distopt")`, or "cpu:distopt,cuda:nccl", is all
that a script for Gloo has to change; see 'Coming from PyTorch' in the documentation.

`register` names the backend, and `join` has the ranks of a group meet. `group` carries out what PyTorch calls, over a
communicator of `comm`. `ddp` and `checkpoint` serve training loops, and `training` brings gradients to the engine. No
other package imports torch. It imports `engine`, `codecs`, `comm`, `launch`, `data` and the package `checkpoint`, and
knows nothing of `nn`. Names of PyTorch that are not documented are in `private` only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import MissingDependencyError, pip_install

try:
    import torch.distributed  # noqa: F401 - says what is missing, before the modules below import it
except ModuleNotFoundError as error:
    raise MissingDependencyError(f"PyTorch cannot be imported ({error}); {pip_install('torch')}") from error

from .register import register_backend

if TYPE_CHECKING:
    from .checkpoint.checkpoint import Checkpoint, load
    from .checkpoint.sampler import ResumableSampler
    from .ddp.sync_batch_norm import SyncBatchNorm
    from .group.process_group import DistoptProcessGroup
    from .training.diloco import DiLoCo
    from .training.dist_opt import DistOpt
    from .training.hook import hook

__all__ = [
    "Checkpoint",
    "DiLoCo",
    "DistOpt",
    "DistoptProcessGroup",
    "ResumableSampler",
    "SyncBatchNorm",
    "hook",
    "load",
]

# A group, for which PyTorch imports this package, needs none of them.
_MODULES = {
    "Checkpoint": "checkpoint.checkpoint",
    "load": "checkpoint.checkpoint",
    "ResumableSampler": "checkpoint.sampler",
    "SyncBatchNorm": "ddp.sync_batch_norm",
    "DistoptProcessGroup": "group.process_group",
    "DiLoCo": "training.diloco",
    "DistOpt": "training.dist_opt",
    "hook": "training.hook",
}


def __getattr__(name: str) -> Any:
    """Local. Import a name of `__all__` when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


register_backend()
