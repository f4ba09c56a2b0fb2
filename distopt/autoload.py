"""An entry point of the group "torch.backends", which `import torch` runs: registers the backend "distopt".

So a script need not import `distopt.torch`: the first group does. Until then, nothing else of the package is imported,
nor NumPy. `TORCH_DEVICE_BACKEND_AUTOLOAD=0` turns such entry points off.

With `DISTOPT_AS_GLOO=1`, groups for CPU tensors that are asked for by the name "gloo", or by none, are distopt's, too.
They keep the name: libraries compare it. Where another backend serves another device of the group, as in
"cpu:gloo,cuda:nccl", the group stays PyTorch's, and distopt is its backend for CPU tensors, from PyTorch 2.14 on.
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .torch.group.process_group import DistoptProcessGroup

AS_GLOO = "DISTOPT_AS_GLOO"
_PART = "distopt_part"  # the backend "distopt" beside others in a group


def register() -> None:
    """Register the backend. Raises nothing, since PyTorch would take that for a failure of its own import."""
    try:
        import torch.distributed as dist

        if not dist.is_available() or hasattr(dist.Backend, "DISTOPT"):
            return
        dist.Backend.register_backend("distopt", _join, extended_api=True, devices=["cpu"])
        dist.Backend.register_backend(_PART, _join_part, extended_api=True, devices=["cpu"])
        # A group has one backend of each type, and other makers' are of the type CUSTOM.
        dist.Backend.backend_type_map[_PART] = dist.ProcessGroup.BackendType.GLOO
        _serve({"distopt", "gloo"} if is_in_gloos_place() else {"distopt"})
    except Exception as error:
        warnings.warn(
            f"distopt could not be set up as a backend of torch.distributed ({error!r}); a script that needs it must "
            "import distopt.torch, and groups of Gloo remain Gloo's",
            stacklevel=2,
        )


def is_in_gloos_place() -> bool:
    """Whether groups that ask for Gloo are distopt's."""
    return os.environ.get(AS_GLOO, "0") not in ("", "0")


def serving() -> dict[str, str]:
    """Of PyTorch, which must be installed, the "version", and the backend of "gloo" groups for CPU tensors."""
    import torch
    from torch.distributed import distributed_c10d

    config: Any = distributed_c10d.BackendConfig(distributed_c10d.Backend("gloo"))
    return {"version": torch.__version__, "gloo": config.get_device_backend_map()["cpu"]}


def _join(options: Any, backend_options: object = None) -> DistoptProcessGroup:
    from .torch.join import join

    return join(options, backend_options)


def _join_part(options: Any, backend_options: object = None) -> object:
    from .torch.private import part_of

    return part_of(_join(options, backend_options))


def _serve(names: set[str]) -> None:
    """Have PyTorch find distopt for the CPU tensors of groups that ask for one of `names`."""
    import torch
    from torch.distributed import distributed_c10d

    config: Any = distributed_c10d.BackendConfig
    asked_for = config.get_device_backend_map

    def served(self: Any) -> dict[str, str]:
        asked: dict[str, str] = asked_for(self)
        name = asked.get("cpu")
        if name not in names:
            return asked
        others = {device: backend for device, backend in asked.items() if backend != name}
        if not others or "gloo" in others.values():
            return {"cpu": "distopt"}
        if torch.__version__ < (2, 14):
            _say_what_is_left(str(self), torch.__version__)
            return asked
        return {"cpu": _PART, **others}

    config.get_device_backend_map = served


@functools.cache
def _say_what_is_left(config: str, version: str) -> None:
    warnings.warn(
        f'"{config}": PyTorch {version} takes no backend of Python beside others. CPU tensors of this group go by the '
        'backend that it names, or, if that is "distopt", all tensors do. PyTorch 2.14 can do it; here, make two',
        stacklevel=1,
    )
