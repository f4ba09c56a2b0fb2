"""`python -m benchmarks NAME`: one benchmark; see README.md beside this file."""

from __future__ import annotations

import argparse
import ast
import signal
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

from distopt.cli import Parser, run_command

FOLDER = Path(__file__).parent
# Every other module of this package, with `add_options` and `run`.
BENCHMARKS = sorted(
    {path.stem.replace("_", "-") for path in FOLDER.glob("[a-z]*.py")} - {"models", "options", "output"}
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark that the command line `argv` (default: that of the process) names; return the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = Parser(prog="python -m benchmarks", description="Measure distopt, and compare it with other software.")
    commands = parser.add_subparsers(required=True, metavar="NAME")
    for name in BENCHMARKS:
        stem = name.replace("-", "_")
        if words[:1] != [name]:  # the others need not be imported
            source = ast.parse((FOLDER / f"{stem}.py").read_text())
            commands.add_parser(name, help=ast.get_docstring(source).partition("\n\n")[0].replace("%", "%%"))
            continue
        module = import_module(f".{stem}", __package__)
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
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what is emulated goes, as at Ctrl-C
    sys.exit(main())
