"""The `distopt` command: `distopt run`, `distopt doctor`, `distopt timeline` and `distopt diff`.

It may import every other package, and none imports it. Its functions are local: none communicates.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..errors import DistoptError, UsageError
from . import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process).

    Returns:
        The exit code: 0 for success, 1 if something requested failed, 2 for invalid arguments.
    """
    words = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    parser = Parser(prog="distopt", description="Data-parallel training in Python.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run.add_parser(commands)
    if words[:1] != ["run"]:  # `run` starts at once, without the imports of the others
        from . import diff, doctor, timeline

        doctor.add_parser(commands)
        timeline.add_parser(commands)
        diff.add_parser(commands)
    return run_command(parser, words)


def run_command(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Parse the command line `words` and call the `run` of its command; return the exit code, as `main` does."""
    try:
        args = parser.parse_args(words)
        code: int = args.run(args)
        sys.stdout.flush()
    except SystemExit as left:  # argparse, after --help or an error
        return left.code if isinstance(left.code, int) else 1
    except DistoptError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 2 if isinstance(error, UsageError) else 1
    except ImportError as error:
        sys.stderr.write(f"{parser.prog}: {error}; distopt doctor shows what is missing\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"{parser.prog}: interrupted\n")
        return 130
    except BrokenPipeError:  # the reader, e.g. `head`, has exited; Python flushes stdout again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a folder that cannot be read, a full disk behind stdout
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 1
    return code


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        from .. import __version__

        sys.stdout.write(f"distopt {__version__}\n")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """A parser that reports invalid arguments in one line, and names the subcommand that they were given to."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
        """As argparse's, but unknown arguments are an error of the subcommand."""
        known, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, []

    def error(self, message: str) -> NoReturn:
        """Print `message` in one line and exit with code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")
