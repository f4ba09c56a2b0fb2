"""A barrier through the store, which no collective that other threads are in can hold up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

_GRACE_SECONDS = 5.0  # for which ranks wait longer than rank 0, which can tell why, and rank 0 until all know
_FIRST_NAP, _LONGEST_NAP = 0.0005, 0.02


def monitored_barrier(
    store: dist.Store, rank: int, who: Sequence[str], seconds: float, *, name_all: bool = False
) -> None:
    """Collective. Return when every rank has called it. Whatever comes of it, the group can be used afterwards.

    Args:
        store: of this barrier alone.
        rank: of this process.
        who: what messages call the ranks.
        seconds: for which rank 0 waits for the others.
        name_all: whether its message names all ranks that have not come, or the first.

    Raises:
        DistBackendError: ranks have not come.
    """
    if rank != 0:
        store.set(str(rank), "")
        if not _comes(lambda: store.check(["verdict"]), seconds + _GRACE_SECONDS):
            raise dist.DistBackendError(f"rank 0 has not come to monitoredBarrier within {seconds:g} s: {who[0]}")
        verdict = store.get("verdict").decode()
        store.set(f"{rank} knows", "")  # then rank 0, which may keep the store, may end
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
    _comes(lambda: store.check(present), _GRACE_SECONDS)
    if verdict:
        raise dist.DistBackendError(verdict)


def _comes(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it holds before the time is over. Stores differ in how their own waiting ends, so they are asked."""
    deadline, nap = time.monotonic() + seconds, _FIRST_NAP
    while not condition():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(nap, left))
        nap = min(2 * nap, _LONGEST_NAP)
    return True
