"""`distopt bench`: medians and ratios, measured in one run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

__all__ = ["add_parser"]


def add_parser(commands: argparse._SubParsersAction[Any], *, whole: bool) -> None:
    """Add the subcommand and, if `whole`, its benchmarks, which import NumPy."""
    parser = commands.add_parser(
        "bench", help="measure communication and training", description="Measure communication and training."
    )
    if not whole:
        return
    from . import all_reduce, kernels, model, train

    benchmarks = parser.add_subparsers(required=True, metavar="BENCHMARK")
    for benchmark in (all_reduce, train, kernels, model):
        benchmark.add_parser(benchmarks)
