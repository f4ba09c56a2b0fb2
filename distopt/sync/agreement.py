"""Checks that all ranks train the same model from the same start."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import numpy as np

from ..errors import MismatchError
from ..kernels import kernels_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..comm import Communicator
    from .bucket import Parameter

__all__ = ["check_same_model", "ranks_with_other_values"]


def check_same_model(communicator: Communicator, params: Sequence[Parameter]) -> None:
    """Collective. Compare names, shapes and types of `params` over the ranks.

    Raises:
        MismatchError: they differ; the message names the rank and the first difference.
    """
    mine = [[str(p.name), list(p.array.shape), p.array.dtype.name] for p in params]
    described = [json.loads(text) for text in communicator.all_gather_bytes(json.dumps(mine).encode())]
    for rank, theirs in enumerate(described):
        if theirs == described[0]:
            continue
        pairs = zip([*described[0], None], [*theirs, None], strict=False)
        first, other = next((a, b) for a, b in pairs if a != b)
        raise MismatchError(
            f"rank {rank} ({communicator.topology.hosts[rank]}) trains another model than rank 0: where "
            f"rank 0 has {_describe(first)}, it has {_describe(other)}; build the same model on every rank"
        )


def ranks_with_other_values(communicator: Communicator, params: Sequence[Parameter]) -> list[int]:
    """Collective. The ranks where values of `params` differ from those of rank 0, by a digest."""
    digest = hashlib.sha256()
    for param in params:
        digest.update(np.ascontiguousarray(kernels_of(param.array).to_host(param.array)).data)
    digests = communicator.all_gather_bytes(digest.digest())
    return [rank for rank, other in enumerate(digests) if other != digests[0]]


def _describe(entry: list[object] | None) -> str:
    return "no further parameter" if entry is None else f"{entry[0]} of shape {entry[1]} and type {entry[2]}"
