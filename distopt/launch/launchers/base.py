"""The interface of a launcher, and the reader of its variables."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...errors import LaunchError


@dataclass(frozen=True)
class LauncherInfo:
    """The launcher's view of this process; unknown values are None.

    Attributes:
        name: name of the launcher, for messages.
        rank: rank in the job.
        size: number of ranks in the job.
        local_rank: rank among the processes on this host.
        local_size: number of ranks on this host.
        source: the variables read, as "NAME=value NAME=value", for messages.
    """

    name: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    source: str

    def agrees(self, other: LauncherInfo) -> bool:
        """Whether both give this process the same rank of the same number."""
        return (self.rank, self.size) == (other.rank, other.size)


class Launcher(ABC):
    """A launcher: its variables, and how its ranks meet.

    Attributes:
        name: for messages.
        rank: the variable with the rank.
        size: the variable with the number of ranks.
        local_rank: the variable with the rank among the processes of the host.
        local_size: the variable with the number of ranks of the host; None without such a variable.
        prefixes: how its variables begin; a `distopt run` that it has started does not pass them on to ranks.
        may_start_launchers: whether its processes may be agents or daemons of another launcher, so that its numbers
            are not those of the ranks.
        has_agents: whether it ends all ranks when one has failed or by Ctrl-C, and reports that once for all ranks.
        job_variables: the variables whose values together belong to one job only; the first two are always set. Empty
            if the launcher connects all ranks by itself.
        address: with `job_variables`, the variable that names the host of rank 0; empty if all ranks share a host.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str | None = None
    prefixes: tuple[str, ...] = ()
    may_start_launchers = False
    has_agents = False
    job_variables: tuple[str, ...] = ()
    address = ""

    def read(self, env: Mapping[str, str]) -> LauncherInfo | None:
        """This launcher's view of the process with these variables; None if it has not started the process.

        Raises:
            LaunchError: a variable has an invalid value, or is missing.
        """
        if self.rank not in env and self.size not in env:
            return None
        names = [self.rank, self.size, self.local_rank, *([self.local_size] if self.local_size else [])]
        source = " ".join(f"{name}={env[name]}" for name in names if name in env)
        cure = f"start the job with {self.name}, or unset these variables"
        for here, missing in ((self.rank, self.size), (self.size, self.rank)):
            if missing not in env:
                raise LaunchError(f"{here}={env[here]!r} is set but {missing} is not; {cure}")
        values = {name: _number(name, env[name], cure) for name in names if name in env}
        rank, size = values[self.rank], values[self.size]
        local_rank = values.get(self.local_rank)
        local_size = values.get(self.local_size) if self.local_size else None
        if not rank < size:
            raise LaunchError(f"{source}: the rank is not below the number of ranks; {cure}")
        if (local_size is not None and not 0 < local_size <= size) or (
            local_rank is not None and not local_rank < (size if local_size is None else local_size)
        ):
            raise LaunchError(f"{source}: the numbers of this host do not fit those of the job; {cure}")
        return LauncherInfo(self.name, rank, size, local_rank, local_size, source)

    def is_certain(self, env: Mapping[str, str]) -> bool:
        """Whether the variables that have been read can only be this launcher's."""
        return True

    def one_host(self, info: LauncherInfo, env: Mapping[str, str]) -> bool:
        """Whether the variables show that all ranks run on this host."""
        return info.local_size == info.size

    def host_of_rank_0(self, env: Mapping[str, str]) -> str:
        """The host that the variable `address` names.

        Raises:
            LaunchError: there is no such variable, so the ranks must share a host.
        """
        if not self.address:
            raise LaunchError(
                f"{self.name} names no host of rank 0, where ranks of several hosts would meet; start all ranks on one "
                "host, or by distopt run"
            )
        return env[self.address]

    def connects(self, library: Callable[[], str], env: Mapping[str, str]) -> bool:
        """Whether the launcher connects the ranks for the MPI library that is installed.

        Args:
            library: returns the library's description of its version; empty without a library.
            env: the variables of the process.
        """
        return not self.job_variables

    def misfit(self, library: str, env: Mapping[str, str]) -> str:
        """Why ranks with this MPI library cannot be connected, as a clause about it; empty if they can."""
        return f"cannot connect ranks that {self.name} started"


def _number(name: str, text: str, cure: str) -> int:
    # int() alone would accept "1_0", " 1" and digits of other scripts.
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise LaunchError(f"{name}={text!r} is not a number of ranks; {cure}")
    return int(text)
