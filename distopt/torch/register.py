"""The backend "distopt" in `torch.distributed`."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .group.process_group import DistoptProcessGroup
from .join import join
from .private import keep_works_of_join, replace_monitored_barrier


@functools.cache
def register_backend() -> None:
    """Local. Register the backend, unless `distopt.autoload` has, and extend what else of PyTorch has to know it."""
    if not hasattr(dist.Backend, "DISTOPT"):
        dist.Backend.register_backend("distopt", join, extended_api=True, devices=["cpu"])
    _extend_monitored_barrier()
    keep_works_of_join()


def _extend_monitored_barrier() -> None:
    """Extend `torch.distributed.monitored_barrier`, which refuses all groups but Gloo's, to distopt's groups."""
    original = dist.monitored_barrier

    @functools.wraps(original)
    def extended(group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        asked = dist.group.WORLD if group is None else group
        if not isinstance(asked, DistoptProcessGroup):
            original(group, timeout, wait_all_ranks)
            return
        limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
        asked.monitored_barrier(limit, wait_all_ranks)

    replace_monitored_barrier(extended)
