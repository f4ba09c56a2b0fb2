"""Look for a program that fails, and shrink it."""

import time
import traceback
from dataclasses import dataclass
from pprint import pformat
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase

_SETTINGS = hypothesis.settings(
    max_examples=200, phases=(Phase.generate, Phase.shrink), database=None, deadline=None, report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck), verbosity=hypothesis.Verbosity.quiet, print_blob=False,
)  # fmt: skip


@dataclass
class Search:
    """How a search has ended.

    Attributes:
        seed: of the last programs, with which a search finds the same failure at once.
        programs: number that ran before the first that failed; those that shrink it are not counted.
        seconds: until the first failure, or the end.
        program: the smallest program that fails, or None.
        error: how it fails.
    """

    seed: int
    programs: int = 0
    seconds: float = 0.0
    program: Any = None
    error: str = ""

    def script(self, family):
        """A Python script that fails in the same way."""
        lines = ["# " + line for line in self.error.rstrip().splitlines()[-12:]]
        program = pformat(self.program, width=110)
        return "\n".join([*lines, f"# seed {self.seed}", f"from {family.__name__} import *", f"run({program})"])


def search(family, seed, seconds, least=0):
    """Run programs for that time, or until one fails, which is then shrunk; the seed grows by 1 every 200 programs.

    Args:
        family: a module whose `PROGRAMS` draws programs, dataclasses whose `repr` makes them again, and whose `run`
            raises an error if anything that a program computes is wrong.
        least: number of programs that run on a machine of any speed.
    """
    found, began = Search(seed), time.monotonic()

    def check(program):
        if found.program is None:
            if time.monotonic() - began > seconds and found.programs >= least:
                return
            found.programs += 1
            found.seconds = time.monotonic() - began
        try:
            family.run(program)
        except Exception:
            found.program, found.error = program, traceback.format_exc()
            raise

    while time.monotonic() - began < seconds:
        try:
            hypothesis.seed(found.seed)(_SETTINGS(hypothesis.given(family.PROGRAMS)(check)))()
        except Exception:
            if found.program is None:
                raise
            break
        found.seed += 1
    return found
