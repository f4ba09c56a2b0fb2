"""The candidates of a benchmark, and how each is started."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeAlias

from distopt.errors import DistoptError, MissingDependencyError, pip_install

from ..networks.emulation import find_mpiexec
from ..networks.site import BY_MPI, Site
from .crew import Crew, CrewError, rank_command
from .environments import ENVIRONMENTS

# The first message to the ranks of a crew.
Setup: TypeAlias = dict[str, Any]

_OPEN_MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(eq=False)
class Candidate:
    """A library that is measured.

    Attributes:
        name: as in the table.
        crew: its ranks.
        hello: the answer of its first rank to the setup.
    """

    name: str
    crew: Crew
    hello: dict[str, Any]


class Lineup(ExitStack):
    """A context manager that starts candidates, and records why others could not be started.

    Attributes:
        candidates: those that are running.
        missing: name -> reason.
    """

    def __init__(self) -> None:
        super().__init__()
        self.candidates: list[Candidate] = []
        self.missing: dict[str, str] = {}

    def add(self, name: str, start: Callable[[], tuple[Crew, Setup]]) -> None:
        """Start a candidate; if that fails, record the reason in `missing`."""
        try:
            crew, setup = start()
            self.enter_context(crew)
            hello = crew.ask({"folder": str(crew.folder), **setup})[0]
        except (DistoptError, OSError) as error:
            self.missing[name] = str(error)
        else:
            self.candidates.append(Candidate(name, crew, hello))

    def take_turns(self, count: int, measure: Callable[[Candidate, int], None]) -> None:
        """Call `measure(candidate, turn)` for every candidate in each of `count` turns; drop one whose ranks fail.

        Each turn begins with another candidate.
        """
        for turn in range(count):
            first = turn % max(len(self.candidates), 1)
            for candidate in [*self.candidates[first:], *self.candidates[:first]]:
                try:
                    measure(candidate, turn)
                except CrewError as error:  # noqa: PERF203 - a turn takes milliseconds
                    self.candidates.remove(candidate)
                    self.missing[candidate.name] = str(error)

    def ask(self, turns: int, request: dict[str, Any]) -> dict[str, list[list[dict[str, Any]]]]:
        """Send `request` to every candidate in each of that many turns: the answers of its ranks in every turn, by name.

        Raises:
            DistoptError: a candidate could not be started, or its ranks failed.
        """
        found: dict[str, list[list[dict[str, Any]]]] = {candidate.name: [] for candidate in self.candidates}
        self.take_turns(turns, lambda candidate, _: found[candidate.name].append(candidate.crew.ask(request)))
        self.require_all()
        return found

    def require_all(self) -> None:
        """Raise a DistoptError if a candidate could not be started, or its ranks failed."""
        if self.missing:
            raise DistoptError("; ".join(f"{name}: {reason}" for name, reason in self.missing.items()))

    def describe(self) -> None:
        """Print what each candidate is."""
        width = max((len(candidate.name) for candidate in self.candidates), default=0)
        for candidate in self.candidates:
            print(f"# {candidate.name:<{width}}  {candidate.hello['about']}")

    def report_missing(self) -> None:
        """Print what was not measured, and why."""
        for name, reason in self.missing.items():
            print(f"# not measured: {name}: {reason}")


def distopt_crew(module: str, site: Site, transport: str) -> tuple[Crew, Setup]:
    """Ranks of distopt: children of this process, or started by mpiexec if the transport needs MPI.

    Raises:
        MissingDependencyError: mpiexec is missing.
    """
    launcher = [] if transport not in BY_MPI and site.hand_started else _own_launcher(site)
    setup = {"library": "distopt", "transport": transport, "secret": secrets.token_hex(16), **site.meeting()}
    return Crew(module, rank_command(), site, launcher, _as_root()), setup


def mpi_crew(module: str, site: Site, name: str = "") -> tuple[Crew, Setup]:
    """Ranks of the MPI `name`, in its own virtual environment; without a name, of the MPI that distopt runs over.

    Raises:
        MissingDependencyError: the environment cannot be made, or mpiexec is missing.
    """
    if not name:
        return Crew(module, rank_command(), site, _own_launcher(site), _as_root()), {"library": "mpi"}
    environment = ENVIRONMENTS[name]
    environment.prepare()
    launcher = site.by_mpi(environment.program("mpiexec"), open_mpi=name == "openmpi")
    rank = rank_command(environment.program("python"))
    return Crew(module, rank, site, launcher, _as_root()), {"library": "mpi"}


def torch_crew(
    module: str, site: Site, variables: dict[str, str] | None = None, group: str = "gloo"
) -> tuple[Crew, Setup]:
    """Ranks of PyTorch, with `variables` added to their environment variables.

    With Gloo they run in a virtual environment of their own; with `group` "distopt" in this one, which has distopt.

    Raises:
        MissingDependencyError: the environment cannot be made, or this one has no PyTorch.
    """
    if group == "distopt":
        if find_spec("torch") is None:
            raise MissingDependencyError(f"no PyTorch; {pip_install('torch')}")
        rank = rank_command()
    else:
        environment = ENVIRONMENTS["torch"]
        environment.prepare()
        rank = rank_command(environment.program("python"))
    launcher = [] if site.hand_started else _own_launcher(site)
    crew = Crew(module, rank, site, launcher, env=_as_root() | (variables or {}))
    return crew, {"library": "torch", "group": group, **site.meeting()}


def _own_launcher(site: Site) -> list[str]:
    try:
        path, version = find_mpiexec()
    except subprocess.TimeoutExpired as error:
        raise CrewError(str(error)) from error
    return site.by_mpi(path, open_mpi="Open MPI" in version)


def _as_root() -> dict[str, str]:
    # Open MPI refuses to run as root, the usual user in a container, unless two variables are set.
    return _OPEN_MPI_AS_ROOT if os.geteuid() == 0 else {}
