"""Run random programs against slow oracles, for minutes: see docs/reference/fuzz.md."""

import argparse
import importlib
import secrets
import sys

from .search import search

FAMILIES = ("communicators", "operations")


def main():
    parser = argparse.ArgumentParser(prog="python -m instruments.fuzz", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"{', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--minutes", type=float, default=5.0, help="of all families together (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the first programs (default: a random one, which is printed)")
    args = parser.parse_args()
    if unknown := set(args.families) - set(FAMILIES):
        parser.error(f"there is no family {', '.join(sorted(unknown))}; choose from {', '.join(FAMILIES)}")
    seed = secrets.randbelow(10**6) * 1000 if args.seed is None else args.seed
    names, failed = args.families or FAMILIES, False
    for name in names:
        family = importlib.import_module(f"instruments.fuzz.{name}")
        print(f"{name}: seed {seed}", flush=True)
        found = search(family, seed, args.minutes * 60 / len(names))
        rate = found.programs / max(found.seconds, 1e-3) * 60
        print(f"{name}: {found.programs} programs in {found.seconds:.0f} s, {rate:.0f} a minute")
        if found.program is not None:
            failed = True
            print(f"{name}: one has failed; the smallest that does:\n\n{found.script(family)}\n", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
