"""Checks that all ranks train the same model from the same start, by the same rule."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import MismatchError, UsageError

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from ..comm import Communicator
    from .bucket import Parameter
    from .drift import Drift
    from .stats import Progress

__all__ = ["Agreement"]

log = logging.getLogger("distopt")


class Agreement:
    """What all ranks are known to train.

    Attributes:
        communicator: of the ranks.
        drift: finds ranks that go another way later.
        attached: parameters that have been compared, by id.
    """

    def __init__(self, communicator: Communicator, drift: Drift) -> None:
        """Local."""
        self.communicator = communicator
        self.drift = drift
        self.attached: dict[int, Parameter] = {}

    def attach(self, params: Sequence[Parameter]) -> None:
        """Collective. See `Engine.attach`."""
        self.check(params, ())
        self._send_first(params)
        self.attached = {id(p): p for p in params}

    def attached_in(self, names: Sequence[str]) -> list[Parameter]:
        """Local. The attached parameters in that order.

        Raises:
            UsageError: one of them is not attached.
        """
        known = {str(param.name): param for param in self.attached.values()}
        if missing := [name for name in names if name not in known]:
            raise UsageError(
                f"the parameter {missing[0]} of the loaded states is not known yet; call DistOpt.attach(params) before "
                "DistOpt.synchronize"
            )
        return [known[name] for name in names]

    def check(
        self,
        params: Sequence[Parameter],
        attached: Container[int] | None = None,
        constants: Mapping[str, Any] | None = None,
    ) -> None:
        """Collective. Compare over the ranks what they are about to train.

        Args:
            params: names, shapes and types are compared.
            attached: ids of parameters that have been compared before (default: those of `attached`).
            constants: of the optimizer, by name; compared by their texts.

        Raises:
            MismatchError: on all ranks: something differs; the message names the rank and the first difference.
        """
        known = self.attached if attached is None else attached
        mine = {
            "number": self.drift.number,
            "params": [[str(p.name), list(p.array.shape), p.array.dtype.name, id(p) in known] for p in params],
            "constants": {name: repr(value) for name, value in (constants or {}).items()},
        }
        described = [json.loads(text) for text in self.communicator.all_gather_bytes(json.dumps(mine).encode())]
        hosts = self.communicator.topology.hosts
        for rank, theirs in enumerate(described):
            if theirs != described[0]:
                who, rank_0 = f"rank {rank} ({hosts[rank]})", f"rank 0 ({hosts[0]})"
                raise MismatchError(_difference(described[0], theirs, who, rank_0))

    def reach(
        self, params: Sequence[Parameter], constants: Mapping[str, Any], progress: Progress, *, equal: bool = True
    ) -> None:
        """Collective. Before a first step with these parameters: compare them, and the rule of their updates.

        With `equal`, parameters that were never attached and differ become those of rank 0, with a warning.

        Raises:
            MismatchError: see `check`.
        """
        self.check(params, constants={**constants, "check_every": self.drift.every})
        self.drift.agree(constants, progress.steps - progress.skipped)
        strangers = [p for p in params if id(p) not in self.attached]
        if not equal or not strangers:
            return
        gathered = self.drift.gather(strangers)
        if ranks := np.flatnonzero((gathered != gathered[0]).any(axis=1)).tolist():
            self._send_first(strangers)
            if self.communicator.topology.rank == 0:
                log.warning(
                    "the parameters of ranks %s differed from those of rank 0 before the first step, and are replaced "
                    "by them; DistOpt.attach(params) before the first forward pass does so in time",
                    ranks,
                )

    def _send_first(self, params: Sequence[Parameter]) -> None:
        """Collective. Give all ranks the parameters of rank 0."""
        works = [self.communicator.broadcast(p.array, label=str(p.name)) for p in params]
        for work in works:
            work.wait()


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
