"""Ranks that run checks, against the results of one process. Started by test_collectives.py and test_hosts.py.

    python -m tests.torch.checks RANKS

forks RANKS ranks ("2+1": on two emulated hosts), which make a group and run all checks in turn, or those that the
variable CHECKS names. Each check has a limit of its own: ranks that exceed it are ended, and others run the rest. After
each check a line of JSON has the errors of all ranks so far.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait

import torch.distributed as dist

import distopt.torch  # noqa: F401 - registers the backend

from ..forked import CONTEXT, Place, join, place_of
from . import CHECKS
from .ranks import TIMEOUT_SECONDS, Ranks

CHECK_SECONDS = TIMEOUT_SECONDS + 30.0  # a wait for another rank ends before

Errors = dict[str, dict[int, str]]  # by check and rank; an empty text is none


def rank_main(rank: int, method: str, counts: list[int], names: list[str], out: Sequence[Connection]) -> None:
    faulthandler.dump_traceback_later(CHECK_SECONDS, exit=True)
    join(rank, sum(counts), method, TIMEOUT_SECONDS)
    for name in names:
        error = ""
        faulthandler.dump_traceback_later(CHECK_SECONDS, exit=True)
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
        out[rank].send((name, error))
    dist.destroy_process_group()


def run(place: Place, names: list[str], errors: Errors) -> None:
    """Run the checks on new ranks, up to one that ends a rank."""
    # Not a queue, whose thread would lose the last results of a rank that dies.
    readers, writers = zip(*(CONTEXT.Pipe(duplex=False) for _ in range(place.size)), strict=True)
    method = place.method()
    place.keep_store(method)
    ranks = place.start(rank_main, method, place.counts, names, writers)
    while True:
        alive = any(process.is_alive() for process in ranks)
        told = wait(readers, timeout=0.2 if alive else 0)
        for reader in told:
            name, error = reader.recv()
            errors.setdefault(name, {})[readers.index(reader)] = error
            if len(errors[name]) == place.size:
                print(json.dumps(errors), flush=True)
        if not (alive or told):
            return
        if not told and any(process.exitcode for process in ranks):
            for process in ranks:
                if process.pid and process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)


def main() -> None:
    names = os.environ.get("CHECKS", ",".join(CHECKS)).split(",")
    errors: Errors = {}
    with place_of(sys.argv[1]) as place:
        while names:
            run(place, names, errors)
            failed = next((name for name in names if len(errors.get(name, {})) < place.size), None)
            if failed is None:
                break
            for rank in range(place.size):
                text = f"it ended in the middle, or did not end within {CHECK_SECONDS:g} s: see the stacks on stderr"
                errors.setdefault(failed, {}).setdefault(rank, text)
            names = names[names.index(failed) + 1 :]
    print(json.dumps(errors), flush=True)


if __name__ == "__main__":
    main()
