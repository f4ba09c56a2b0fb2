"""Checks, before the first collective, that all ranks of a job have the same environment."""

from __future__ import annotations

import contextlib
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import __version__  # looked up at import, which ranks forked from a warm process do not repeat
from ..errors import LaunchError
from ..launch.job.base import Job
from ..launch.mpi_quirks import library_of
from ..settings import Settings
from .gpu import dotted_version, gpu_stack

_MAX_BYTES = 1 << 16


def environment(transport: str) -> dict[str, str]:
    """Local. Values that must be equal on all ranks, by the name that messages use for them.

    Args:
        transport: name of the communicator that this rank is about to create.

    Raises:
        MissingDependencyError: the communicator needs something that is missing here.
    """
    found = {
        "communicator": transport,
        "DISTOPT_SUM_ORDER": Settings.from_env().sum_order,
        "distopt": __version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "NumPy": np.__version__,
        "byte order": sys.byteorder,
    }
    MPI = sys.modules.get("mpi4py.MPI")
    if transport == "mpi" and MPI is not None:
        found["MPI library"] = library_of(MPI)
    if transport == "nccl":
        stack = gpu_stack()
        found["NCCL"] = dotted_version(stack.nccl_version)
        found["CuPy"] = stack.cupy.__version__
        found["CUDA of CuPy"] = str(stack.cupy.cuda.runtime.runtimeGetVersion() // 1000)
    return found


def check_same_environment(job: Job, mine: Mapping[str, str]) -> None:
    """Collective. Compare the results of `environment` on all ranks, in one exchange.

    Raises:
        LaunchError: ranks differ; the message names the ranks and their values.
    """
    payloads = job.all_gather(json.dumps(dict(mine)).encode())
    described = [_decode(rank, payload) for rank, payload in enumerate(payloads)]
    for key in mine:
        values = {rank: theirs.get(key, "nothing") for rank, theirs in enumerate(described)}
        if len(set(values.values())) > 1:
            by_value = ranks_by_value(values, job.topology.hosts)
            facts = "; ".join(f"{value} on {ranks}" for value, ranks in by_value.items())
            raise LaunchError(f"the ranks differ in {key}: {facts}; give all of them the same environment")


def _decode(rank: int, payload: bytes) -> dict[str, str]:
    found = None
    if len(payload) <= _MAX_BYTES:
        with contextlib.suppress(ValueError, RecursionError):  # another version of distopt, or another program
            found = json.loads(payload)
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise LaunchError(f"rank {rank} does not say what it runs; install the same version of distopt everywhere")
    return found


def ranks_by_value(
    values: Mapping[int, Any], hosts: Sequence[str], numbers: Sequence[int] | None = None
) -> dict[Any, str]:
    """Local. For each value, the ranks that have it and their hosts, in words.

    Args:
        values: by rank.
        hosts: of all ranks.
        numbers: of the ranks in messages (default: themselves).
    """
    numbers = numbers or range(len(hosts))
    ranks: dict[Any, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return {
        value: f"rank{'s' if len(own) > 1 else ''} {', '.join(str(numbers[rank]) for rank in own)} "
        f"({', '.join(dict.fromkeys(hosts[rank] for rank in own))})"
        for value, own in ranks.items()
    }
