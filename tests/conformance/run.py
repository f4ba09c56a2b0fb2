"""Run the checks in the processes of a job, e.g. under mpiexec:

mpiexec -n 3 python -m tests.conformance.run --transport mpi --job distopt.launch.job.mpi:MpiJob
"""

import argparse
import re
import sys
import traceback
from collections.abc import Iterable
from importlib import import_module

from distopt.comm import TRANSPORTS
from distopt.comm.base import Communicator
from distopt.launch.job.base import Job

from .checks import CHECKS, refused


def load(path: str) -> type:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def run_checks(job: Job, transport: str, names: Iterable[str] = tuple(CHECKS)) -> dict[str, str | None]:
    """Run each check twice, that of another type than float32 once: the traceback of each, or None where it passed.

    A failed check ends the run of this rank.
    """
    communicator: Communicator = load(TRANSPORTS.get(transport, transport)).create(job)
    n, rank = job.topology.world_size, job.topology.rank
    report: dict[str, str | None] = {}
    with communicator:
        for name in names:
            check, args = CHECKS[name]
            try:
                times = 1 if args and args[0] != "float32" else 2
                for _ in range(0 if args and refused(communicator, *args) else times):
                    check(communicator, n, rank, *args)
                report[name] = None
            except Exception:
                report[name] = traceback.format_exc()
                break  # the ranks are no longer in step
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", required=True, help="a key of distopt.comm.TRANSPORTS, or module:class")
    parser.add_argument("--job", required=True, help="module:callable that gives this rank's Job")
    parser.add_argument("-k", default="", help="only checks whose name this regular expression finds")
    args = parser.parse_args()
    job = load(args.job)()
    report = run_checks(job, args.transport, [name for name in CHECKS if re.search(args.k, name)])
    failed = [f"rank {job.topology.rank}: {name}\n{trace}" for name, trace in report.items() if trace]
    print(f"rank {job.topology.rank}: {len(report) - len(failed)} checks passed", *failed, sep="\n", flush=True)
    job.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
