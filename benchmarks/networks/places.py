"""The options that say where the ranks of a benchmark run, and the site that they name."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path
from typing import TYPE_CHECKING

from distopt.errors import UsageError

from .emulation import RATES, EmulatedSite, two_hosts
from .site import BETWEEN_HOSTS, ListedSite, Site

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from contextlib import ExitStack

__all__ = ["add_places", "is_far", "site_of"]


def add_places(parser: argparse.ArgumentParser, number: Callable[[str], int]) -> None:
    """Add the options; `number` reads the number of ranks on this machine."""
    parser.add_argument("--np", type=number, metavar="N", help="ranks on this machine (default: 2)")
    parser.add_argument(
        "--emulate", type=_hosts, metavar="2xN", help="two hosts of N ranks each, in network namespaces; as root"
    )
    parser.add_argument("--hosts", type=Path, metavar="FILE", help="the hosts of a hosts file, as mpiexec takes it")
    parser.add_argument("--rate", choices=RATES, help="of the emulated link (default: what the machine gives)")


def is_far(args: argparse.Namespace) -> bool:
    """Local. Whether the ranks are to run on several hosts."""
    return args.emulate is not None or args.hosts is not None


def site_of(args: argparse.Namespace, backends: Sequence[str], stack: ExitStack) -> Site:
    """Where the ranks run, which are to use `backends`.

    Raises:
        UsageError: options contradict each other.
        HostsUnavailableError: hosts cannot be emulated here.
    """
    given = {"--np": args.np, "--emulate": args.emulate, "--hosts": args.hosts}
    places = [option for option, value in given.items() if value is not None]
    if len(places) > 1:
        raise UsageError(f"{' and '.join(places)} contradict each other; give one of them")
    if args.rate is not None and args.emulate is None:
        raise UsageError("--rate is that of the link between emulated hosts; add --emulate 2x1")
    if is_far(args) and (local := [name for name in backends if name not in BETWEEN_HOSTS]):
        raise UsageError(f"--backend {local[0]} does not reach another host; choose {' or '.join(BETWEEN_HOSTS)}")
    if args.hosts is not None:
        return ListedSite(args.hosts)
    if args.emulate is None:
        return Site(args.np or 2)
    net = stack.enter_context(two_hosts())
    for host in net.hosts if args.rate else ():
        host.shape(args.rate)
    return EmulatedSite(net, args.emulate)


def _hosts(text: str) -> int:
    """Ranks on each of two hosts."""
    hosts, _, ranks = text.partition("x")
    if hosts != "2" or not (ranks.isascii() and ranks.isdigit() and int(ranks) > 0):
        raise ArgumentTypeError(f"{text!r} is not two hosts; write 2x1, 2x2 or so")
    return int(ranks)
