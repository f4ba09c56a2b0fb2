"""The environment of the ranks that `distopt run` starts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..gate import proof
from ..heal.slots import VARIABLE as SLOTS
from ..threads import thread_variables

if TYPE_CHECKING:
    from .options import RunOptions

# Variables of a launcher that has started the agent would contradict the ranks' own.
_FOREIGN_VARIABLES = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "MPI_LOCAL", "HYDI_", "TORCHELASTIC_", SLOTS)


def variables(order: dict[str, Any], options: RunOptions, key: bytes) -> dict[str, str]:
    """Local. The environment of the ranks: the variables of torchrun, and some that show which launcher it is."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN_VARIABLES)}
    return {
        "PYTHONUNBUFFERED": "1",  # a killed rank would lose unwritten output
        **env,
        **thread_variables(options.ranks, env),
        "WORLD_SIZE": str(order["size"]),
        "LOCAL_WORLD_SIZE": str(options.ranks),
        "GROUP_RANK": str(order["node"]),
        "GROUP_WORLD_SIZE": str(options.nodes),
        "MASTER_ADDR": order["address"],
        "MASTER_PORT": str(order["port"]),
        "TORCHELASTIC_RUN_ID": order["job"],
        "TORCHELASTIC_RESTART_COUNT": str(order["attempt"]),
        "TORCHELASTIC_MAX_RESTARTS": str(options.restarts),
        "DISTOPT_RUN_ID": order["job"],
        # Never sent. As secret as the key that the nodes had in common before; on one node, known to no other process.
        "DISTOPT_JOB_SECRET": proof(key, b"ranks", bytes.fromhex(order["salt"])).hex(),
    }
