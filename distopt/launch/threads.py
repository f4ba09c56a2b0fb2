"""BLAS threads: ranks that share a host share its cores.

Without a cap, every rank starts one thread per core, and the threads of all ranks compete for the cores (1.3 to 1.75
times the wall-clock time).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping

from threadpoolctl import ThreadpoolController

THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_log = logging.getLogger("distopt")


def cores() -> set[int]:
    """The cores that this process may use; containers and launchers may allow fewer than the host has."""
    return os.sched_getaffinity(0)


def thread_variables(local_size: int, env: Mapping[str, str]) -> dict[str, str]:
    """Variables that give each of `local_size` processes its share of threads; empty if `env` sets one."""
    if any(name in env for name in THREAD_VARIABLES):
        return {}
    share = max(1, len(cores()) // local_size)
    _log.info("%d ranks on %d cores: %s=%d", local_size, len(cores()), "=".join(THREAD_VARIABLES), share)
    return dict.fromkeys(THREAD_VARIABLES, str(share))


def cap_threads(local_size: int, usable: Iterable[Iterable[int]] = ()) -> None:
    """Cap the BLAS threads of this process at its share of the cores, unless the user has set a number.

    Args:
        local_size: ranks on this host.
        usable: the cores that each of them may use (default: as this process). Some launchers pin each rank to its own
            cores, others give all ranks the same: their union is right for both.
    """
    chosen = [f"{name}={os.environ[name]}" for name in THREAD_VARIABLES if name in os.environ]
    if chosen:
        _log.info("BLAS threads as the environment says: %s", " ".join(chosen))
        return
    n_cores = len(set().union(*usable) or cores())
    share = max(1, n_cores // local_size)
    libraries = ThreadpoolController()
    if local_size > 1 and any(library["num_threads"] > share for library in libraries.info()):
        libraries.limit(limits=share)
        _log.info("BLAS threads capped at %d: %d ranks share %d cores", share, local_size, n_cores)
