"""How the members of a subgroup meet: by messages of the communicator that they are part of."""

from __future__ import annotations

from collections.abc import Sequence
from secrets import token_bytes
from typing import Any

import numpy as np

from ..errors import UsageError

_TAG = -(1 << 63)


def meet(comm: Any, ranks: Sequence[int]) -> bytes:
    """Collective among `ranks` of a communicator. Return 16 secret bytes from the first of them, once all have joined.

    Raises:
        UsageError: a member names other ranks, or another order.
        StalledError: a member has not joined in time; PeerLostError if it has ended.
    """
    first, members = ranks[0], np.array(ranks, np.int64)
    if comm.topology.rank != first:
        key = np.empty(16, np.uint8)
        comm.send(members, first, tag=_TAG).wait()
        comm.receive(key, first, tag=_TAG).wait()
        return key.tobytes()
    for other in ranks[1:]:
        theirs = np.empty_like(members)
        comm.receive(theirs, other, tag=_TAG).wait()
        if not np.array_equal(theirs, members):
            raise UsageError(
                f"rank {other} makes a subgroup of ranks {theirs.tolist()}, rank {first} one of {list(ranks)}; name "
                "the same ones in the same order"
            )
    made = token_bytes(16)
    for work in [comm.send(np.frombuffer(made, np.uint8), other, tag=_TAG) for other in ranks[1:]]:
        work.wait()
    return made
