"""Ranks that run checks, against the results of one process. `make torch` starts some as a command:

    python -m tests.torch.checks RANKS

runs all checks, or those that the variable CHECKS names, up to the first that fails.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch.distributed as dist

import distopt.torch  # noqa: F401 - registers the backend

from ..forked import CONTEXT, counts_of, join, place_of
from . import CHECKS
from .ranks import TIMEOUT_SECONDS, Ranks

CHECK_SECONDS = TIMEOUT_SECONDS + 30.0  # a wait for another rank ends before


def rank_main(rank: int, method: str, counts: list[int], names: Sequence[str], out: Sequence[Connection]) -> None:
    faulthandler.enable(sys.__stderr__)  # not `dump_traceback_later`, which pytest uses: a forked process cannot
    warnings.simplefilter("ignore")  # PyTorch's own
    join(rank, sum(counts), method, TIMEOUT_SECONDS)
    ranks, error = Ranks(rank, counts), ""
    for name in names:
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


def outcomes(ranks: str, names: Sequence[str]) -> dict[str, dict[int, str]]:
    """By check, the errors of all ranks that have got so far; an empty text is none. "2+1": on two emulated hosts."""
    errors: dict[str, dict[int, str]] = {}
    with place_of(ranks) as place:
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
                    if not reader.poll(CHECK_SECONDS):
                        place.end(signal.SIGABRT)  # which has all ranks say where they are
                    name, error = reader.recv()
                    errors.setdefault(name, {})[rank] = error
    return errors


if __name__ == "__main__":
    names = os.environ.get("CHECKS", ",".join(CHECKS)).split(",")
    found = outcomes(sys.argv[1], names)
    size = sum(counts_of(sys.argv[1]))
    sys.exit(any(len(found.get(name, {})) < size or any(found[name].values()) for name in names))
