"""Ranks that run checks, against the results of one process. Started by test_collectives.py and test_hosts.py.

    python -m tests.torch.checks RANKS

forks RANKS ranks ("2+1": on two emulated hosts), which make a group and run all checks in turn, or those that the
variable CHECKS names, and prints for each the errors of all ranks as JSON.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import sys
import traceback
from multiprocessing.queues import Queue

import torch.distributed as dist

import distopt.torch  # noqa: F401 - registers the backend

from ..forked import CONTEXT, join, place_of
from . import CHECKS
from .ranks import TIMEOUT_SECONDS, Ranks


def rank_main(rank: int, method: str, counts: list[int], names: list[str], out: Queue[tuple[int, str, str]]) -> None:
    faulthandler.dump_traceback_later(500.0, exit=True)
    join(rank, sum(counts), method, TIMEOUT_SECONDS)
    for name in names:
        error = ""
        try:
            CHECKS[name](Ranks(rank, counts))
        except BaseException:
            error = traceback.format_exc()
            print(error, file=sys.stderr, flush=True)  # the others may wait for this rank until their end
        try:
            dist.barrier()
        except BaseException:  # the next check has a new group
            error = error or traceback.format_exc()
            dist.destroy_process_group()
            join(rank, sum(counts), method, TIMEOUT_SECONDS, f" after {name}")
        out.put((rank, name, error))
    dist.destroy_process_group()


def main() -> None:
    names = os.environ.get("CHECKS", ",".join(CHECKS)).split(",")
    out: Queue[tuple[int, str, str]] = CONTEXT.Queue()
    errors: dict[str, dict[int, str]] = {}
    with place_of(sys.argv[1]) as place:
        method = place.method()
        place.keep_store(method)
        ranks = place.start(rank_main, method, place.counts, names, out)
        while any(process.is_alive() for process in ranks) or not out.empty():
            # A rank that is ended in the middle may keep the lock of the queue, so that none can tell the end by it.
            with contextlib.suppress(queue.Empty):
                rank, name, error = out.get(timeout=0.2)
                errors.setdefault(name, {})[rank] = error
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
