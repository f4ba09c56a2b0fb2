"""The rendezvous of ranks that their launcher has numbered and not connected, as torchrun, srun and `distopt run` do.

The ranks have no parent in common. They meet by values that their launcher gives to this job only: cluster, job and
step under srun, else the address and port of torchrun's store. A process with these values and `DISTOPT_JOB_SECRET`
holds the job's key. `distopt run` makes a secret for each job; no other launcher gives the ranks one. On one host the
kernel also names the user of a peer.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import LaunchError
from ...settings import Settings
from ..addresses import LOOPBACK
from ..launchers import LauncherInfo, launcher_of


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
    """How the ranks of `info`'s job meet; None if mpiexec connects them.

    Args:
        info: the launcher's view of this process.
        env: the environment (default: that of the process).

    Raises:
        LaunchError: variables that the launcher sets are missing.
    """
    env = os.environ if env is None else env
    one = launcher_of(info)
    if not one.job_variables:
        return None
    one_host = info.size == 1 or one.one_host(info, env)
    for name in filter(None, (*one.job_variables[:2], one.address)) if info.size > 1 else ():
        if not env.get(name):
            raise LaunchError(f"{info.source}, but {name} is not set; start the job with {info.name}, which sets it")
    identity = json.dumps([info.name, info.size, [env.get(name, "") for name in one.job_variables]])
    key = hashlib.sha256(f"distopt job {identity} {Settings.from_env(env).job_secret}".encode()).digest()
    address = LOOPBACK if one_host else one.host_of_rank_0(env)
    return Meeting(key, one_host, address, f"{one.address}={env.get(one.address, '')}")
