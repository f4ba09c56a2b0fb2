"""An entry point of the group "torch.backends", which `import torch` runs: registers the backend "distopt".

So a script need not import `distopt.torch`: the first group does. Until then, nothing else of the package is imported,
nor NumPy. `TORCH_DEVICE_BACKEND_AUTOLOAD=0` turns such entry points off.

With `DISTOPT_AS_GLOO=1`, groups for CPU tensors that are asked for by the name "gloo", or by none, are distopt's, too.
They keep the name: libraries compare it. Groups that also serve a GPU, such as "cpu:gloo,cuda:nccl", stay as they are,
since a group of Python's replaces all backends of a group.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .torch.group.process_group import DistoptProcessGroup

AS_GLOO = "DISTOPT_AS_GLOO"


def register() -> None:
    """Local. Register the backend. Raises nothing, since PyTorch would take that for a failure of its own import."""
    try:
        import torch.distributed as dist

        if not dist.is_available():
            return
        if not hasattr(dist.Backend, "DISTOPT"):
            dist.Backend.register_backend("distopt", _join, extended_api=True, devices=["cpu"])
        if os.environ.get(AS_GLOO, "0") not in ("", "0"):
            _take_gloos_place()
    except Exception as error:
        warnings.warn(
            f"distopt could not be set up as a backend of torch.distributed ({error!r}); a script that needs it must "
            "import distopt.torch, and groups of Gloo remain Gloo's",
            stacklevel=2,
        )


def _join(options: Any, backend_options: object = None) -> DistoptProcessGroup:
    from .torch.join import join

    return join(options, backend_options)


def _take_gloos_place() -> None:
    """Local. Have PyTorch find "distopt" where a group's devices are served by "gloo" alone."""
    from torch.distributed import distributed_c10d

    config: Any = distributed_c10d.BackendConfig
    asked_for = config.get_device_backend_map

    def served(self: Any) -> dict[str, str]:
        asked: dict[str, str] = asked_for(self)
        return {"cpu": "distopt"} if "cpu" in asked and {*asked.values()} == {"gloo"} else asked

    config.get_device_backend_map = served
