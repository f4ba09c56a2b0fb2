"""Checks that all ranks train the same model from the same start, by the same rule."""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import MismatchError
from ..kernels import kernels_of

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from ..comm import Communicator
    from .bucket import Parameter

__all__ = ["check_alike", "make_equal", "send_first"]

log = logging.getLogger("distopt")


def check_alike(
    communicator: Communicator,
    number: int,
    params: Sequence[Parameter],
    attached: Container[int] = (),
    constants: Mapping[str, Any] | None = None,
) -> None:
    """Collective. Compare over the ranks what they are about to train.

    Args:
        communicator: of the ranks.
        number: that of the engine on the communicator.
        params: names, shapes and types are compared.
        attached: ids of parameters that have been compared before.
        constants: of the optimizer, by name; compared by their texts.

    Raises:
        MismatchError: on all ranks: something differs; the message names the rank and the first difference.
    """
    mine = {
        "number": number,
        "params": [[str(p.name), list(p.array.shape), p.array.dtype.name, id(p) in attached] for p in params],
        "constants": {name: repr(value) for name, value in (constants or {}).items()},
    }
    described = [json.loads(text) for text in communicator.all_gather_bytes(json.dumps(mine).encode())]
    for rank, theirs in enumerate(described):
        if theirs != described[0]:
            who = f"rank {rank} ({communicator.topology.hosts[rank]})"
            raise MismatchError(_difference(described[0], theirs, who, f"rank 0 ({communicator.topology.hosts[0]})"))


def _difference(first: Mapping[str, Any], other: Mapping[str, Any], who: str, rank_0: str) -> str:
    if other["number"] != first["number"]:
        return (
            f"{who} uses the DistOpt that it made as number {other['number']} on this communicator, {rank_0} its "
            f"number {first['number']}; make and use several of them in the same order on all ranks"
        )
    if other["params"] != first["params"]:
        pairs = zip([*first["params"], None], [*other["params"], None], strict=False)
        a, b = next((a, b) for a, b in pairs if a != b)
        return (
            f"{who} trains another model than rank 0: where rank 0 has {_describe(a)}, it has {_describe(b)}; build "
            "the same model on every rank"
        )
    names = first["constants"] | other["constants"]
    differing = [
        f"{name} is {values[0]} there, {values[1]} on rank 0"
        for name in names
        if (values := [side["constants"].get(name, "absent") for side in (other, first)])[0] != values[1]
    ]
    return (
        f"{who} updates by another rule than {rank_0}: {', '.join(differing)}; make the same optimizer, with the same "
        "values, on every rank"
    )


def _describe(entry: list[Any] | None) -> str:
    if entry is None:
        return "no further parameter"
    name, shape, dtype, known = entry
    return f"{name} of shape {shape} and type {dtype}{' of DistOpt.attach' if known else ''}"


def send_first(communicator: Communicator, params: Sequence[Parameter]) -> None:
    """Collective. Give all ranks the parameters of rank 0."""
    works = [communicator.broadcast(p.array, label=str(p.name)) for p in params]
    for work in works:
        work.wait()


def make_equal(communicator: Communicator, params: Sequence[Parameter]) -> None:
    """Collective. As `send_first`, with a warning, if parameters that were never attached differ."""
    ranks = _ranks_with_other_values(communicator, params)
    if ranks:
        send_first(communicator, params)
        if communicator.topology.rank == 0:
            log.warning(
                "the parameters of ranks %s differed from those of rank 0 before the first step, and are replaced by "
                "them; DistOpt.attach(params) before the first forward pass does so in time",
                ranks,
            )


def _ranks_with_other_values(communicator: Communicator, params: Sequence[Parameter]) -> list[int]:
    """Collective. The ranks where values of `params` differ from those of rank 0, by a digest."""
    digest = hashlib.sha256()
    for param in params:
        digest.update(np.ascontiguousarray(kernels_of(param.array).to_host(param.array)).data)
    digests = communicator.all_gather_bytes(digest.digest())
    return [rank for rank, other in enumerate(digests) if other != digests[0]]
