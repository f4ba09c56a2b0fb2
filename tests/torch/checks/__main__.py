"""Ranks that run checks, against the results of one process. Started by test_collectives.py and test_hosts.py.

    python -m tests.torch.checks RANKS

forks RANKS ranks ("2+1": on two emulated hosts), which make a group and run all checks in turn, or those that the
variable CHECKS names, up to the first that fails. Writes the errors of all ranks by check, as JSON.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch.distributed as dist

import distopt.torch  # noqa: F401 - registers the backend

from ..forked import CONTEXT, join, place_of
from . import CHECKS
from .ranks import TIMEOUT_SECONDS, Ranks

CHECK_SECONDS = TIMEOUT_SECONDS + 30.0  # a wait for another rank ends before


def rank_main(rank: int, method: str, counts: list[int], names: list[str], out: Sequence[Connection]) -> None:
    faulthandler.dump_traceback_later(CHECK_SECONDS, exit=True)
    join(rank, sum(counts), method, TIMEOUT_SECONDS)
    ranks, error = Ranks(rank, counts), ""
    for name in names:
        faulthandler.dump_traceback_later(CHECK_SECONDS, exit=True)
        try:
            CHECKS[name](ranks)
            ranks.destroy_groups()
            dist.barrier()
        except BaseException:
            error = traceback.format_exc()
            print(error, file=sys.stderr, flush=True)  # the others may wait for this rank until their end
        out[rank].send((name, error))
        if error:
            return
    dist.destroy_process_group()


def main() -> None:
    names = os.environ.get("CHECKS", ",".join(CHECKS)).split(",")
    errors: dict[str, dict[int, str]] = {}  # by check and rank; an empty text is none
    with place_of(sys.argv[1]) as place:
        method = place.method()
        place.keep_store(method)
        # Not a queue, whose thread would lose the last results of a rank that dies.
        readers, writers = zip(*(CONTEXT.Pipe(duplex=False) for _ in range(place.size)), strict=True)
        place.start(rank_main, method, place.counts, names, writers)
        for writer in writers:
            writer.close()
        for rank, reader in enumerate(readers):
            with contextlib.suppress(EOFError):
                while True:
                    name, error = reader.recv()
                    errors.setdefault(name, {})[rank] = error
    print(json.dumps(errors), flush=True)


if __name__ == "__main__":
    main()
