"""The hierarchy of exceptions.

Every message states the fact, where it happened (rank and host, if more than one rank is involved) and the cure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class DistoptError(Exception):
    """Base of everything that distopt raises on its own account.

    Attributes:
        exit_code: exit code of a script that this error ends. With 2 the message says all that its user needs, and the
            launchers print that one line; otherwise they print the traceback.
        is_consequence: whether another rank has ended or failed before. The launchers then name that rank.
    """

    exit_code: int = 1
    is_consequence: bool = False


class UsageError(DistoptError, ValueError):
    """An argument or a setting has a value that cannot be used."""

    exit_code = 2


class ShapeError(UsageError, AssertionError):
    """Shapes that do not fit. SINGA asserts that they do, and its scripts may expect an `AssertionError`."""


class MissingDependencyError(DistoptError, ImportError):
    """An optional package or library that was asked for is absent; the message says how to install it."""

    exit_code = 2


class LaunchError(DistoptError, RuntimeError):
    """The processes of the job do not agree on who they are, or did not find each other."""

    exit_code = 2


class RankFailedError(LaunchError):
    """A rank that this process started has failed; the others have been ended.

    Attributes:
        rank: the rank that failed first.
        exit_code: its exit code; 128 + n if signal n ended it, as shells count.
        details: its traceback, or all else that is known about its end.
    """

    def __init__(self, rank: int, exit_code: int, details: str) -> None:
        super().__init__(rank, exit_code, details)
        self.rank = rank
        self.exit_code = exit_code
        self.details = details

    def __str__(self) -> str:
        return self.details


class Preempted(SystemExit):
    """All ranks leave at the same step, because a signal has announced the end of the job. No error of the job.

    Attributes:
        code: exit code: 0 if the job will be started again, else 128 + n for signal n, as shells count.
    """


class Process(NamedTuple):
    """A rank, and where it runs.

    Attributes:
        rank: its number in the job.
        host: name of its host.
        pid: its process id there.
    """

    rank: int
    host: str
    pid: int

    @property
    def name(self) -> str:
        """How messages call it, as those of csrc/base/errors.h do."""
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True)
class Call:
    """A collective as one rank has called it.

    Attributes:
        rank: number of that rank in the job.
        operation: such as "all_reduce".
        number: its place in the order of the communicator's operations.
        count: elements.
        dtype: wire type.
        reduction: such as "sum"; empty where nothing is reduced.
        root: the rank that a broadcast comes from.
        label: its label, cut to 31 bytes.
    """

    rank: int
    operation: str
    number: int
    count: int
    dtype: str
    reduction: str
    root: int
    label: str


class CommunicatorError(DistoptError, RuntimeError):
    """A collective failed. The communicator cannot be used any more.

    Attributes:
        fact: the failure, and its place.
        cure: the remedy; the message is both.
        ranks: the ranks at fault, or in disagreement, if known.
        calls: the calls of these ranks, if they disagree.
    """

    def __init__(
        self, fact: str = "", *, cure: str = "", ranks: Sequence[Process] = (), calls: Sequence[Call] = ()
    ) -> None:
        self.fact = fact
        self.cure = cure
        self.ranks = tuple(ranks)
        self.calls = tuple(calls)
        super().__init__(f"{fact}; {cure}" if cure else fact)


class CommunicatorClosedError(CommunicatorError):
    """The communicator was used after `close`, or a peer closed it while this rank was still waiting."""

    is_consequence = True


class PeerLostError(CommunicatorError):
    """A peer process ended while this rank needed it."""

    is_consequence = True


class TransportError(CommunicatorError):
    """MPI has failed, as it does where a peer has ended."""

    is_consequence = True


class StalledError(CommunicatorError, TimeoutError):
    """A peer is alive but did not arrive within the time-out."""


class MismatchError(CommunicatorError):
    """Ranks called different collectives, or the same one with different types or counts, or train differently."""


class WireMemoryError(CommunicatorError, MemoryError):
    """Shared or registered memory could not be allocated."""


class DataError(DistoptError, ValueError):
    """A data file is missing, truncated or corrupt."""

    exit_code = 2


class StateError(DistoptError, ValueError):
    """A file of saved states is truncated, foreign, or does not fit the model. Nothing was changed."""

    exit_code = 2


class CheckpointError(DistoptError, OSError):
    """Checkpoints cannot be written; the message says where, why, and the cure."""

    exit_code = 2


class GradientError(DistoptError, ArithmeticError):
    """A gradient is NaN, infinite or too large for a sum over the ranks; the message names parameter, step and rank.

    Attributes:
        rank: the rank whose gradient it is, where known.
        index: element of the bucket, where known.
    """

    def __init__(self, message: str, *, rank: int | None = None, index: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.index = index


# Packages of the extras of pyproject.toml that messages name; they need no wheel or folder of distopt.
_PACKAGES = {
    "mpi": "mpi4py mpich",
    "hosts": "libucx-cu12",
    "torch": "torch",
    "cuda12": "--upgrade 'cupy-cuda12x[ctk]' nvidia-nccl-cu12 nvidia-ml-py",
    "cuda13": "--upgrade 'cupy-cuda13x[ctk]' nvidia-nccl-cu13 nvidia-ml-py",
}


def pip_install(extra: str) -> str:
    """The command that installs the packages of an extra, for messages."""
    return f"pip install {_PACKAGES[extra]}"
