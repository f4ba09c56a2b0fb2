"""Train in shards on every layout: a line for each, with what ran and its hash. Fails where two of a net differ.

python -m instruments.one_hash
python -m instruments.one_hash --nets norm --ranks 1,2,3
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from tests.processes import Program, mpiexec_command

from . import nets

SECONDS = 900.0  # for one run on a busy machine


class Layout(NamedTuple):
    """A way to run a job."""

    front: str
    text: str
    ranks: int
    command: list[str]
    options: tuple[str, ...] = ()


def layouts() -> Iterator[Layout]:
    """All of them; the first of each front has one rank."""
    for front, ranks in (("nn", (1, 2, 3, 4, 8)), ("torch", (1, 2, 3, 4, 8)), ("ddp", (1, 2, 4))):
        for n in ranks:
            yield Layout(front, "one host", n, run(n))
    for n in (2, 4, 8):
        yield Layout("nn", "one host", n, mpi(n), ("--transport", "mpi"))
    for n, hosts, text in ((4, "blocks", "2 x 2"), (3, "blocks", "2 + 1"), (4, "round-robin", "2 x 2, round robin")):
        yield Layout("nn", text, n, mpi(n), ("--hosts", hosts))
        yield Layout("torch", text, n, run(n), ("--hosts", hosts))
    for n in (2, 3):
        yield Layout("ddp", "one host", n, run(n), ("--backend", "gloo"))


def run(ranks: int) -> list[str]:
    return [sys.executable, "-m", "distopt", "run", "--nproc-per-node", str(ranks), "-m"]


def mpi(ranks: int) -> list[str]:
    return [*mpiexec_command(ranks), sys.executable, "-m"]


def ended(layout: Layout, net: str) -> tuple[str, str]:
    """How ranks communicated, and the hash that all of them print."""
    command = [*layout.command, "instruments.one_hash.job", layout.front, net, *layout.options]
    it = Program(command).end(SECONDS)
    found = re.findall(r"rank (\d+) over (\w+): (\w+)$", it.stdout, re.MULTILINE)
    if it.code or sorted(int(rank) for rank, *_ in found) != list(range(layout.ranks)):
        raise SystemExit(f"{' '.join(command)} ended with {it.code}\n{it.stdout}{it.stderr}")
    hashes = {each for *_, each in found}
    return found[0][1], hashes.pop() if len(hashes) == 1 else f"several: {', '.join(sorted(hashes))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default=",".join(nets.SIDES), help="which to train")
    parser.add_argument("--ranks", default="1,2,3,4,8", help="layouts of so many ranks")
    args = parser.parse_args()
    numbers = {int(word) for word in args.ranks.split(",")}
    differ = []
    for net in args.nets.split(","):
        expected: dict[str, str] = {}  # by framework
        for layout in layouts():
            if layout.ranks not in numbers:
                continue
            (over, found), framework = ended(layout, net), "nn" if layout.front == "nn" else "torch"
            same = found == expected.setdefault(framework, found)
            ranks = "1 rank " if layout.ranks == 1 else f"{layout.ranks} ranks"
            line = f"{net:9} {layout.front:6} {ranks}  {layout.text:19} {over:13} {found}"
            print(line if same else f"{line}  differs", flush=True)
            if not same:
                differ.append(line)
    if differ:
        raise SystemExit(f"{len(differ)} layouts differ")


if __name__ == "__main__":
    main()
