"""The code that runs inside the ranks of a benchmark.

These files also run in the environments of the peers, where distopt is not installed. They are therefore loaded as a
separate package (`crew.BOOT`), import one another relatively, and need only NumPy and the library under test.
"""

from __future__ import annotations

import sys
from importlib import import_module

from .session import Session


def main(argv: list[str]) -> None:
    """Serve one benchmark as one rank.

    Args:
        argv: module of this package that answers the requests, path of the parent's socket, rank (-1 if the launcher
            sets it), number of ranks.
    """
    module, address, rank, world_size = argv
    with Session(address) as session:
        serve = import_module(f".{module}", __name__).serve
        try:
            serve(session, int(rank), int(world_size))
        except Exception as error:
            session.send({"error": f"{type(error).__name__}: {error}"})
            sys.exit(1)
