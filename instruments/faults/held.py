"""The memory that `distopt run --heal` holds: that of each agent, its files of states, and the process that forks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Held(NamedTuple):
    """Of an agent, in bytes.

    Attributes:
        files: its memory files.
        agent: its resident memory.
        server: the process that forks ranks, and its spares: their memory, where shared pages count in part.
        ranks: the same of its ranks; pages of the files that a rank has mapped count.
    """

    files: int = 0
    agent: int = 0
    server: int = 0
    ranks: int = 0

    def at_most(self, other: Held) -> Held:
        """The larger number of each."""
        return Held(*map(max, self, other))

    def __str__(self) -> str:
        files, agent, server, ranks = (f"{each / 1e6:.2f} MB" for each in self)
        return f"{files} in files, {agent} itself, {server} in the process that forks ranks (ranks: {ranks})"


def held_by(agents: Iterable[int]) -> Held:
    """The most of any of these agents, given by their pids."""
    most = Held()
    for pid in agents:
        with contextlib.suppress(OSError):  # it has ended
            most = most.at_most(_held(pid))
    return most


def _held(agent: int) -> Held:
    files = {}
    for path in Path(f"/proc/{agent}/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(path.readlink()).startswith("/memfd:distopt states"):
                found = path.stat()
                files[found.st_ino] = 512 * found.st_blocks
    server = ranks = 0
    for child in map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split()):
        with contextlib.suppress(OSError):
            is_rank = not Path(f"/proc/{child}/comm").read_text().startswith("distopt ")
            n_bytes = _kib(child, "smaps_rollup", "Pss")
            ranks += n_bytes if is_rank else 0
            server += 0 if is_rank else n_bytes
    return Held(sum(files.values()), _kib(agent, "status", "VmRSS"), server, ranks)


def _kib(pid: int, file: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/{file}").read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0
