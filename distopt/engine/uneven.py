"""Ranks with different numbers of batches.

A rank that has no more batches takes part in the others' steps with gradients of zero, and applies the same updates, so
all ranks keep equal parameters. Every step begins with a roll call: the ranks say whether they have data, and how they
will reduce.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np

from ..codecs import Codec, ErrorFeedback
from ..comm import Communicator
from ..errors import MismatchError, UsageError

_NO_STEP = 0


class Recipe(NamedTuple):
    """How a step reduces: codec, bucket size in elements, and limit of a gradient's elements."""

    codec: Codec
    bucket_elements: int
    clip: float | None


class RollCall:
    """The exchange at the beginning of every step, while ranks may run out of data.

    Attributes:
        last: how this rank's last own step was reduced.
    """

    last: Recipe

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._plan = _NO_STEP
        self._answers = np.empty(2 * communicator.topology.world_size, np.int64)

    def call(self, recipe: Recipe | None) -> float:
        """Collective. Announce a step with data, or with None that this rank has no more batches.

        Returns:
            The factor from a mean over all ranks to the mean over those that still have data; 0 if none has.

        Raises:
            UsageError: a codec with error feedback, or, on all ranks, a rank without any batch.
            MismatchError: the ranks are about to send different things; on all ranks.
        """
        if recipe is not None:
            if isinstance(recipe.codec, ErrorFeedback):
                raise UsageError(
                    "error feedback would keep sending the residual of a rank without data, at a weight that is "
                    "not its own; use a codec without it inside DistOpt.join"
                )
            self.last = recipe
            self._plan = zlib.crc32(repr(recipe).encode()) + 1
        mine = np.array([recipe is not None, self._plan], np.int64)
        self._communicator.all_gather(mine, self._answers, label="join").wait()
        have_data, plans = self._answers.reshape(-1, 2).T.tolist()
        topology = self._communicator.topology
        first = next((rank for rank, has in enumerate(have_data) if has), None)
        for rank, plan in enumerate(plans):
            if first is None or plan == plans[first]:
                continue
            who = f"rank {rank} ({topology.hosts[rank]})"
            if plan == _NO_STEP:
                raise UsageError(f"{who} has no batch at all; inside DistOpt.join every rank needs one or more")
            raise MismatchError(
                f"{who} reduces with another codec, bucket size or clipping than rank {first} "
                f"({topology.hosts[first]}); inside DistOpt.join all ranks take the same steps"
            )
        return 0.0 if first is None else topology.world_size / sum(have_data)
