"""A barrier through the store. It works while other threads are in collectives of the group."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from ...launch.stopwatch import GRACE_SECONDS

_FIRST_NAP, _LONGEST_NAP = 0.0005, 0.02


def monitored_barrier(
    store: dist.Store, rank: int, who: Sequence[str], seconds: float, *, name_all: bool = False
) -> None:
    """Collective. Return when every rank has called it. The group can be used afterwards, even after an error.

    Args:
        store: used by this barrier only.
        rank: of this process.
        who: how error messages name the ranks.
        seconds: how long rank 0 waits for the others.
        name_all: whether the error of rank 0 names all absent ranks, or only the first.

    Raises:
        DistBackendError: a rank is absent.
    """
    if rank != 0:
        store.set(str(rank), "")
        if not _comes(lambda: store.check(["verdict"]), seconds + GRACE_SECONDS):
            raise dist.DistBackendError(f"rank 0 has not come to monitoredBarrier within {seconds:g} s: {who[0]}")
        verdict = store.get("verdict").decode()
        store.set(f"{rank} knows", "")  # rank 0, which may serve the store, waits for this before it leaves
        if verdict:
            raise dist.DistBackendError(
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                f"from rank 0: {verdict}"
            )
        return
    absent = list(range(1, len(who)))

    def all_have_come() -> bool:
        absent[:] = [q for q in absent if not store.check([str(q)])]
        return not absent

    verdict = ""
    if not _comes(all_have_come, seconds):
        named = absent if name_all else absent[:1]
        verdict = (
            f"Rank{'s' * (len(named) > 1)} {', '.join(map(str, named))} failed to pass monitoredBarrier in "
            f"{seconds * 1e3:g} ms: {'; '.join(who[q] for q in named)}"
        )
        if seconds <= 0:
            verdict = f"Rank 0 timed out in monitoredBarrier after {seconds * 1e3:g} ms: {verdict}"
    store.set("verdict", verdict)
    present = [f"{q} knows" for q in range(1, len(who)) if q not in absent]
    _comes(lambda: store.check(present), GRACE_SECONDS)  # until they have read the verdict
    if verdict:
        raise dist.DistBackendError(verdict)


def _comes(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether `condition` becomes true in time. It is polled: the waits of stores end in different errors."""
    deadline, nap = time.monotonic() + seconds, _FIRST_NAP
    while not condition():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(nap, left))
        nap = min(2 * nap, _LONGEST_NAP)
    return True
