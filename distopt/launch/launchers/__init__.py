"""Which launcher started a process: everything that is true of one launcher is in its file.

Imports the launchers' base and quirks of MPI libraries, and never knows how ranks are connected or supervised.
A new launcher is a file with a subclass of `Launcher`, and a line in `LAUNCHERS`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ...errors import LaunchError
from .base import Launcher, LauncherInfo
from .distopt_run import DISTOPT_RUN
from .horovodrun import Horovodrun
from .mpich import Mpich
from .open_mpi import OpenMpi
from .srun import SRUN
from .submitit import Submitit
from .torchrun import Torchrun

__all__ = ["LAUNCHERS", "LauncherInfo", "launcher", "launcher_of"]

# From the innermost to the outermost.
LAUNCHERS = (DISTOPT_RUN, Torchrun(), OpenMpi(), Mpich(), Horovodrun(), SRUN, Submitit())


def launcher(env: Mapping[str, str] | None = None) -> LauncherInfo | None:
    """The launcher that started this process, or None for a process started by hand.

    Args:
        env: the environment (default: that of the process).

    Raises:
        LaunchError: a variable has an invalid value, or two launchers disagree.
    """
    env = os.environ if env is None else env
    found = [(one, info) for one in LAUNCHERS if (info := one.read(env)) is not None]
    if not found:
        return None
    (innermost, first), *others = found
    for other, info in others:
        if not other.may_start_launchers and not info.agrees(first):
            raise LaunchError(
                f"two launchers disagree about this process: {first.source} ({first.name}) and {info.source} "
                f"({info.name}); unset the variables of the one that did not start this job"
            )
    if innermost.is_certain(env):
        return first
    return next((info for _, info in others if info.agrees(first)), first)


def launcher_of(info: LauncherInfo) -> Launcher:
    """The launcher whose view `info` is."""
    return next(one for one in LAUNCHERS if one.name == info.name)
