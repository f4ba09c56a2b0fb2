"""PyTorch's own tests of `torch.distributed` on the CPU, from the installed wheel, over Gloo and over distopt.

    python instruments/torch/suite.py --ranks 2
    python instruments/torch/suite.py --ranks 3 --backends distopt --expect instruments/torch/passes.txt
    python instruments/torch/suite.py --ranks 4 --hosts 2

Prints what passes and what differs: four tests whose bodies ask for the word "gloo". With `--expect`, fails if a test
of that file does not pass over each backend. Every test runs in processes of its own, forked from one that has imported
PyTorch. With two hosts, which are network namespaces and need root, each has half of the ranks.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

MEETING_SECONDS = 60  # for the ranks of a test; PyTorch's own 10 are too few where a shared machine stands still
TESTS = "torch.testing._internal.distributed.distributed_test"
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks.emulation import LINK, two_hosts  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backends", type=lambda text: text.split(","), default=["gloo", "distopt"])
    parser.add_argument("--jobs", type=int, default=2, help="tests at the same time (2)")
    parser.add_argument("--tests", type=lambda text: text.split(","), help="only these")
    parser.add_argument("--expect", type=Path, help="file with the names of tests that must pass")
    parser.add_argument("--hosts", type=int, default=1, choices=(1, 2))
    parser.add_argument("--verbose", action="store_true", help="show why any test fails, expected to pass or not")
    parser.add_argument("--shard", help=argparse.SUPPRESS)
    parser.add_argument("--namespaces", type=lambda text: text.split(","), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.shard:
        return serve(args)
    expected = set(args.expect.read_text().split()) if args.expect else set()
    chosen = args.tests or (sorted(expected) if expected else None)
    with contextlib.ExitStack() as stack:
        namespaces = []
        if args.hosts == 2:
            namespaces = [host.namespace for host in stack.enter_context(two_hosts()).hosts]
        return compare(args, expected, chosen, namespaces)


def compare(args: argparse.Namespace, expected: set[str], chosen: list[str] | None, namespaces: list[str]) -> int:
    """Run the tests over each backend, and print what differs."""
    passed = {}
    for backend in args.backends:
        start = time.monotonic()
        outcomes = run(backend, args.ranks, args.jobs, chosen, namespaces)
        by_kind: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
        for name, (kind, reason) in sorted(outcomes.items()):
            by_kind[kind].append(name)
            if kind == "failed" and (args.verbose or name in expected):
                print(f"--- {name}\n{reason}")
        passed[backend] = set(by_kind["passed"])
        counts = ", ".join(f"{len(names)} {kind}" for kind, names in by_kind.items())
        print(f"# {backend}, {args.ranks} ranks: {counts}, in {time.monotonic() - start:.0f} s")
        print("\n".join(f"{kind} {name}" for kind in ("passed", "failed") for name in by_kind[kind]), flush=True)
    for first, second in zip(args.backends, args.backends[1:], strict=False):
        for one, other in ((first, second), (second, first)):
            for name in sorted(passed[one] - passed[other]):
                print(f"# passes with {one}, not with {other}: {name}")
    missing = {name for names in passed.values() for name in expected - names}
    print("\n".join(f"# expected to pass: {name}" for name in sorted(missing)))
    return 1 if missing else 0


def run(
    backend: str, ranks: int, jobs: int, tests: list[str] | None, namespaces: list[str]
) -> dict[str, tuple[str, str]]:
    """Name of every test -> passed, failed or skipped, and why."""
    with contextlib.ExitStack() as stack:
        shards = []
        for shard in range(jobs):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="distopt-suite-"))
            command = [sys.executable, __file__, "--ranks", str(ranks), "--backends", backend]
            command += ["--shard", f"{shard}/{jobs}", *(["--tests", ",".join(tests)] if tests else [])]
            command += ["--namespaces", ",".join(namespaces)] if namespaces else []
            # PyTorch's file decides by BACKEND, when it is imported, which tests there are.
            variables = {"BACKEND": "gloo", "WORLD_SIZE": str(ranks), "TEMP_DIR": folder, "OMP_NUM_THREADS": "1"}
            variables |= {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "60", "PYTHONPATH": str(ROOT)}
            variables |= {"GLOO_SOCKET_IFNAME": LINK} if namespaces else {}
            shards.append(
                subprocess.Popen(
                    command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        outcomes: dict[str, tuple[str, str]] = {}
        for process in shards:
            output, errors = process.communicate()
            if process.returncode:
                raise SystemExit(
                    f"the tests over {backend} ended with exit code {process.returncode}\n{output}{errors}"
                )
            of_shard = json.loads(output.splitlines()[-1])
            for name, (kind, reason) in of_shard.items():
                outcomes[name] = kind, f"{reason}\n{errors}" if kind == "failed" else reason
    return outcomes


def serve(args: argparse.Namespace) -> int:
    """Run a share of the tests, and print the outcomes."""
    import torch.multiprocessing as mp
    from torch.testing._internal.distributed import distributed_test

    import distopt.torch  # noqa: F401 - registers the backend

    (backend,) = args.backends
    distributed_test.BACKEND = os.environ["BACKEND"] = backend
    distributed_test.Barrier.sync.__func__.__defaults__ = (None, MEETING_SECONDS)
    faulthandler.enable()

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            # Where PyTorch's own tests spawn, which imports PyTorch for every rank of every test.
            self._start_processes(mp.get_context("fork").Process)

        @classmethod
        def _run(cls, rank: int, *given: object, **named: object) -> None:
            if args.namespaces:
                enter(args.namespaces[rank * len(args.namespaces) // args.ranks])
            faulthandler.dump_traceback_later(MEETING_SECONDS - 10)  # a rank that the others miss
            super()._run(rank, *given, **named)

    shard, shards = map(int, args.shard.split("/"))
    names = args.tests or unittest.TestLoader().getTestCaseNames(Suite)
    outcomes = {}
    for name in list(names)[shard::shards]:
        result = unittest.TestResult()
        with contextlib.redirect_stdout(io.StringIO()):
            Suite(name).run(result)
        if result.skipped:
            outcomes[name] = "skipped", result.skipped[0][1]
        elif result.errors or result.failures:
            outcomes[name] = "failed", (result.errors + result.failures)[0][1]
        else:
            outcomes[name] = "passed", ""
    print(json.dumps(outcomes))
    return 0


def enter(namespace: str) -> None:
    """Move this process into a network namespace."""
    with Path("/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


if __name__ == "__main__":
    sys.exit(main())
