"""Jobs whose launcher numbers the ranks and does no more: torchrun, srun, `distopt run`, or variables set by hand.

The ranks have no parent in common. They meet by values that their launcher gives to this job only: for srun,
cluster, job and step; otherwise the address and port of torchrun's store. A process with these and `DISTOPT_JOB_SECRET`
holds the job's key; `distopt run` makes a secret for each job, and no other launcher gives the ranks any. On one host
the kernel also gives the user of a peer.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import LaunchError
from ...settings import Settings
from ..threads import cap_threads, cores
from ..watch.siblings import end_with_parent
from ..watch.watch import Watch, watch_ranks
from .env import RUN, LauncherInfo
from .multiprocess import MultiprocessJob, Ticket

_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_SLURM = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")


@dataclass(frozen=True)
class Meeting:
    """How the ranks of a job find each other.

    Attributes:
        key: 32 bytes that the ranks of the job have in common.
        one_host: whether all ranks are known to run on this host.
        address: host of rank 0.
        source: the variable that gave the address, as "NAME=value", for messages.
    """

    key: bytes = field(repr=False)
    one_host: bool
    address: str
    source: str


def meeting(info: LauncherInfo, env: Mapping[str, str] | None = None) -> Meeting | None:
    """Local. How the ranks of `info`'s job meet; None if mpiexec, or srun by PMI-2, connects them.

    Args:
        info: the launcher's view of this process.
        env: the environment (default: that of the process).

    Raises:
        LaunchError: variables that the launcher sets are missing.
    """
    env = os.environ if env is None else env
    if info.name in {"torchrun", RUN}:
        names, place, one_host = _TORCHRUN, "MASTER_ADDR", info.local_size == info.size
    elif info.name == "srun":
        names, place, one_host = _SLURM, "SLURM_STEP_NODELIST", env.get("SLURM_STEP_NUM_NODES") == "1"
    else:
        return None
    one_host = one_host or info.size == 1
    for name in (*names[:2], place) if info.size > 1 else ():
        if not env.get(name):
            raise LaunchError(f"{info.source}, but {name} is not set; start the job with {info.name}, which sets it")
    identity = json.dumps([info.name, info.size, [env.get(name, "") for name in names]])
    key = hashlib.sha256(f"distopt job {identity} {Settings.from_env(env).job_secret}".encode()).digest()
    address = "localhost" if one_host else _first_host(env[place])
    return Meeting(key, one_host, address, f"{place}={env.get(place, '')}")


def _first_host(nodes: str) -> str:
    """The first name of Slurm's compressed list: node[07-12,20],other gives node07. A plain name is its own list."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group() if first else nodes)


class LaunchedJob(MultiprocessJob):
    """One rank of a job that torchrun, srun or `distopt run` started on this host alone; no MPI is needed.

    Collective.

    Args:
        info: the launcher's view of this process.
        place: how the ranks meet.

    Raises:
        LaunchError: a rank is missing or duplicated, or another user's process listens for this job.
    """

    def __init__(self, info: LauncherInfo, place: Meeting) -> None:
        self._watch: Watch | None = None
        self._has_agents = info.name == RUN  # which end the other ranks when one fails
        super().__init__(Ticket(place.key[:16]), info.rank, info.size)

    def _settle(self) -> None:
        end_with_parent(launched=True)
        usable = self.all_gather(json.dumps(sorted(cores())).encode())
        cap_threads(self.topology.world_size, map(json.loads, usable))
        if self.topology.world_size > 1 and not self._has_agents:
            self._watch = watch_ranks(self.topology, self.all_gather, Settings.from_env().timeout)
        if self._watch is not None:
            self._watch.end_with_others()
            atexit.register(_leave, self._watch)

    def close(self) -> None:
        """Local. Leave the job; idempotent."""
        super().close()
        if self._watch is not None:
            self._watch.leave()


def _leave(watch: Watch) -> None:
    """At the end of the interpreter: an uncaught exception is a failure, which the others are notified of."""
    if getattr(sys, "last_value", None) is None:
        watch.leave()
