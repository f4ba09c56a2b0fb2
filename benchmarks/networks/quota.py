"""Shares of this machine's cores, for emulated hosts: control groups of Linux, of version 1 or 2. Needs root."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .emulation import HostsUnavailableError

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 20_000
_END_SECONDS = 10.0  # then processes that have been killed still hold the group


@contextmanager
def share_of_cores(name: str, cores: float) -> Iterator[Path]:
    """Make a group whose processes together get at most so many cores; yields the file that takes process ids.

    Raises:
        HostsUnavailableError: this machine lets nobody make such groups.
    """
    is_old = (_ROOT / "cpu").is_dir()
    group, quota_us = (_ROOT / "cpu" if is_old else _ROOT) / name, int(cores * _PERIOD_US)
    limits = {"cpu.cfs_period_us": _PERIOD_US, "cpu.cfs_quota_us": quota_us}
    try:
        if not is_old:
            (_ROOT / "cgroup.subtree_control").write_text("+cpu")
            limits = {"cpu.max": f"{quota_us} {_PERIOD_US}"}
        group.mkdir()
        for file, limit in limits.items():
            (group / file).write_text(str(limit))
    except OSError as error:
        raise HostsUnavailableError(f"no control group for the cores of a host: {error}") from error
    try:
        yield group / "cgroup.procs"
    finally:
        end = time.monotonic() + _END_SECONDS
        while (group / "cgroup.procs").read_text() and time.monotonic() < end:
            time.sleep(0.01)
        with suppress(OSError):
            group.rmdir()
