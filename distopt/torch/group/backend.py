"""How C++ sees a group: as one with a backend, which from PyTorch 2.14 on can be Python's."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as native


class Abilities:
    """The abilities that PyTorch asks groups and backends for."""

    supports_splitting = True
    supports_coalescing = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False
    _supports_time_estimate = False


class _Backend(Abilities, native.Backend):
    """Forwards to the group what C++ does not find there itself."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = weakref.ref(group)  # the group keeps its backend

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's
        return "distopt"

    def _get_sequence_number_for_group(self) -> int:
        number: int = self._asked()._get_sequence_number_for_group()
        return number

    def _set_sequence_number_for_group(self) -> None:
        """Groups count from the start."""

    def _asked(self) -> Any:
        group = self._group()
        if group is None:
            raise dist.DistBackendError("the process group has been destroyed; make a new one")
        return group


def _forwarded(name: str) -> Any:
    def forward(self: _Backend, *args: Any) -> Any:
        return getattr(self._asked(), name)(*args)

    return forward


for _name in (
    *("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "broadcast", "allgather", "allgather_coalesced", "all_gather_single"),
    *("all_gather_single_coalesced", "gather", "scatter", "alltoall", "all_to_all_single", "barrier"),
    *("send", "recv", "recv_anysource"),
):
    setattr(_Backend, _name, _forwarded(_name))


def give_backend(group: dist.ProcessGroup) -> object:
    """Local. Register a backend with `group`, which must keep what is returned; before 2.14 there is none."""
    with contextlib.suppress(TypeError):  # no constructor
        backend = _Backend(group)
        custom = dist.ProcessGroup.BackendType.CUSTOM
        dist.ProcessGroup._register_backend(group, torch.device("cpu"), custom, backend)
        group._set_default_backend(custom)
        return backend
    return None
