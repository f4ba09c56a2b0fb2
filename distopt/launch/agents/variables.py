"""The environment of the ranks that `distopt run` starts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..gate import proof
from ..heal.state_slots import VARIABLE as STATE_SLOTS
from ..launchers import LAUNCHERS
from ..launchers.distopt_run import DISTOPT_RUN
from ..threads import thread_variables

if TYPE_CHECKING:
    from .options import RunOptions

# Variables of a launcher that has started the agent would contradict the ranks' own.
_FOREIGN_PREFIXES = (STATE_SLOTS, *(prefix for one in LAUNCHERS for prefix in one.prefixes))


def variables(order: dict[str, Any], options: RunOptions, key: bytes) -> dict[str, str]:
    """The environment of the ranks: the variables of torchrun, and some that show which launcher it is."""
    return {
        **common_variables(options),
        **DISTOPT_RUN.variables(
            job=order["job"],
            size=order["size"],
            local_size=order["ranks"],
            node=order["node"],
            nodes=order["nodes"],
            address=order["address"],
            port=order["port"],
            attempt=order["attempt"],
            restarts=options.restarts,
            role=options.role,
        ),
        "DISTOPT_JOB_SECRET": secret_of_ranks(key, order["salt"]).hex(),
    }


def common_variables(options: RunOptions) -> dict[str, str]:
    """The part of the environment of the ranks that is known before the job."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN_PREFIXES)}
    return {
        "PYTHONUNBUFFERED": "1",  # a killed rank loses output that it has not written
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun has it
        **env,
        **thread_variables(options.ranks, env),  # as many with fewer ranks: bits may depend on that
    }


def secret_of_ranks(key: bytes, salt: str) -> bytes:
    """The secret of the ranks of a job. It is never sent, and cannot be guessed without the nodes' key.

    Args:
        key: of the nodes.
        salt: hexadecimal digits that the owner has chosen.
    """
    return proof(key, b"ranks", bytes.fromhex(salt))
