"""`python -m benchmarks NAME`: one benchmark; see README.md beside this file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from types import ModuleType

from distopt.cli import Parser, run_command

# Each is a module of this package, with `add_options` and `run`.
BENCHMARKS = {
    "all-reduce": "all-reduce and other collectives beside Open MPI, MPICH and Gloo, over a range of sizes",
    "train": "training steps of the reference CNN beside PyTorch DDP",
    "pytorch": "all-reduce and what communication adds to a DDP step, over Gloo and over distopt",
    "kernels": "codec kernels beside NumPy and PyTorch",
    "scaling": "a prediction of steps on up to 1,024 ranks, from tables of all-reduce and train",
    "collectives": "the tables of collectives between emulated hosts in docs/network.md",
    "network": "the tables of training steps between emulated hosts in docs/network.md, with every codec",
    "overlap": "an all-reduce between emulated hosts beside a computation",
    "startup": "the start of a job on two emulated hosts, by distopt run and by mpiexec",
    "checks": "what finding failures and drift costs a training step",
    "checkpoint": "what checkpoints cost a training step",
    "convergence": "accuracy, bytes and speed with every codec: docs/convergence.md",
    "memory": "resident memory of a training rank beside PyTorch DDP",
    "step-profile": "where a training step spends its time, by part of the package",
    "gpu": "GPU kernels and steps beside a copy, other libraries and the bare collective: docs/gpu.md",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark that the command line `argv` (default: that of the process) names; return the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = Parser(prog="python -m benchmarks", description="Measure distopt, and compare it with other software.")
    commands = parser.add_subparsers(required=True, metavar="NAME")
    for name, summary in BENCHMARKS.items():
        if words[:1] != [name]:  # the others need not be imported
            commands.add_parser(name, help=summary)
            continue
        module = import_module(f".{name.replace('-', '_')}", __package__)
        command = commands.add_parser(
            name, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_options(command)
        command.set_defaults(run=partial(_run, module))
    return run_command(parser, words)


def _run(module: ModuleType, args: argparse.Namespace) -> int:
    del args.run  # ranks may get the rest
    return module.run(args) or 0


if __name__ == "__main__":
    sys.exit(main())
