"""`distopt doctor`: what this machine offers, row by row, and cures for missing parts.

Every probe is isolated: an exception in it becomes its row. Probes load foreign libraries in a
child process with a timeout, so a crash or hang of the library does not affect the doctor.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from . import gpu, host, hosts, mpi
from .report import Probe, Style, examine

# Training on CPUs requires the rows marked `needed`; the others are optional.
PROBES = (
    Probe("Python", host.python, needed=True),
    Probe("platform", host.operating_system, needed=True),
    Probe("settings", host.settings, needed=True),
    Probe("packages", host.packages, needed=True),
    Probe("NumPy", host.numpy, needed=True),
    Probe("_core", host.core, needed=True),
    Probe("PyTorch", host.torch),
    Probe("cores", host.cores),
    Probe("shared memory", host.shared_memory, needed=True),
    Probe("healing", host.healing),
    Probe("host name", host.host_name),
    Probe("launcher", host.launcher_variables),
    Probe("MPI", mpi.library),
    Probe("mpiexec", mpi.launcher),
    Probe("UCX", hosts.ucx),
    Probe("several hosts", hosts.transport),
    Probe("CUDA driver", gpu.driver),
    Probe("GPUs", gpu.devices),
    Probe("CuPy", gpu.cupy),
    Probe("NCCL", gpu.nccl),
)


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="show what this machine offers, and how to fix what is missing",
        description="Show what this machine offers, and how to fix what is missing. The exit code is 0 if training on "
        "the CPUs of this machine works, else 1.",
    )
    parser.set_defaults(run=run)


def run(_: argparse.Namespace, probes: tuple[Probe, ...] = PROBES) -> int:
    """Run all `probes` and print their rows; return 0 if all rows that are needed are in order.

    A terminal shows each row at once. Elsewhere, as under srun, rows of several ranks would mix.
    """
    style, at_once = Style.of(sys.stdout), sys.stdout.isatty()
    blocked = []
    for probe in probes:
        finding = examine(probe)
        if probe.needed and finding.state != "ok":
            blocked.append(probe.name)
        print(style.row(probe.name, finding), flush=at_once)
    if blocked:
        print(f"\nTraining on the CPUs of this machine does not work: see {', '.join(blocked)}.")
    else:
        print("\nTraining on the CPUs of this machine works.")
    return 1 if blocked else 0
