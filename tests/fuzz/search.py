"""Look for a program that fails, and shrink it."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass
from pprint import pformat
from typing import TYPE_CHECKING, Any, Protocol

import hypothesis
from hypothesis import HealthCheck, Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

ROUND = 200  # programs of one seed; the next round has the next seed


class Family(Protocol):
    """A module of programs.

    Attributes:
        __name__: of the module.
        PROGRAMS: draws programs, each a dataclass whose `repr` makes it again.
    """

    __name__: str
    PROGRAMS: SearchStrategy[Any]

    def run(self, program: Any) -> None:
        """Raise an error if anything that the program computes is wrong."""


@dataclass
class Search:
    """How a search has ended.

    Attributes:
        seed: of the last round, with which a search finds the same program at once.
        programs: number that ran before the first that failed; those that shrink it are not counted.
        seconds: until the first failure, or the end.
        excused: failures that are known, by name.
        program: the smallest program that fails, or None.
        error: how it fails.
    """

    seed: int
    programs: int = 0
    seconds: float = 0.0
    excused: dict[str, int] | None = None
    program: Any = None
    error: str = ""

    def script(self, family: Family) -> str:
        """A Python script that fails in the same way."""
        lines = ["# " + line for line in self.error.rstrip().splitlines()[-12:]]
        program = pformat(self.program, width=110)
        return "\n".join([*lines, f"# seed {self.seed}", f"from {family.__name__} import *", f"run({program})"])


def search(
    family: Family, seed: int, seconds: float, known: dict[str, Callable[[Any, Exception], bool]], largest: int = 10**9
) -> Search:
    """Run programs for that time, or so many, until one fails.

    Args:
        family: module of the programs.
        seed: of the first round.
        seconds: time for all programs, apart from shrinking.
        known: by name, which failures of which programs do not count.
        largest: number of programs.
    """
    found = Search(seed, excused={})
    began = time.monotonic()

    def over() -> bool:
        return found.program is None and (time.monotonic() - began > seconds or found.programs >= largest)

    def check(program: Any) -> None:
        if over():
            return
        found.programs += found.program is None
        try:
            family.run(program)
        except Exception as error:
            for name, excuses in known.items():
                if excuses(program, error):
                    found.excused[name] = found.excused.get(name, 0) + 1
                    return
            if found.program is None:
                found.seconds = time.monotonic() - began
            found.program, found.error = program, traceback.format_exc()
            raise

    while not over():
        phases = (Phase.generate, Phase.shrink)
        settings = hypothesis.settings(
            max_examples=ROUND, phases=phases, database=None, deadline=None, report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck), verbosity=hypothesis.Verbosity.quiet, print_blob=False,
        )  # fmt: skip
        try:
            hypothesis.seed(found.seed)(settings(hypothesis.given(family.PROGRAMS)(check)))()
        except Exception:
            if found.program is None:
                raise
            return found
        found.seed += 1
    found.seconds = time.monotonic() - began
    return found
