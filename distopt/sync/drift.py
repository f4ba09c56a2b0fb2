"""Drift: ranks that apply other rules to their gradients, or whose parameters are no longer equal.

Constants of the optimizer, such as the learning rate of this step, are compared by value in the first step. Later, a
rank that finds a change tells of it in the label of the next collective that it starts. Communicators compare labels
anyway, so this sends nothing more, and what has not changed need not be told again. Parameters are compared every so
many steps, by digests.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import MismatchError
from .digest import digests

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from ..comm import Communicator
    from .bucket import Parameter

__all__ = ["Drift"]

STEPS = "step_counter"  # the constant that grows with every update

_numbers: WeakKeyDictionary[Communicator, Iterator[int]] = WeakKeyDictionary()


class Drift:
    """What one engine has agreed on with those of the other ranks.

    As a context manager, it explains a MismatchError whose labels tell of constants.

    Attributes:
        number: that of the engine on its communicator, from 1.
        prefix: what labels of buckets begin with in all but the first engine, so that engines which one rank uses in
            another order are not taken for each other.
        every: steps from one comparison of parameters to the next; 0 for none.
    """

    def __init__(self, communicator: Communicator, every: int) -> None:
        """Local. Count engines."""
        self.every = every if communicator.topology.world_size > 1 else 0
        self.number = next(_numbers.setdefault(communicator, itertools.count(1)))
        self.prefix = "" if self.number == 1 else f"DistOpt {self.number}: "
        self._communicator = communicator
        self._agreed: dict[str, Any] = {}
        self._updates = 0  # when they were
        self._news = "", ""  # what no label has told yet: in short, and exactly
        self._wait = 0  # steps until the next comparison

    # -- constants ---------------------------------------------------------------------------------------------------
    def look(self, constants: Mapping[str, Any], updates: int, *, by_hand: bool = False) -> None:
        """Local. Note which constants are others than expected, for the next label.

        Args:
            constants: by name.
            updates: number of updates so far, with which `STEPS` is expected to have grown.
            by_hand: whether there may have been others, so that `STEPS` may have any value.
        """
        agreed = self._agreed
        if agreed:
            agreed[STEPS] = constants[STEPS] if by_hand else agreed[STEPS] + updates - self._updates
        self._updates = updates
        if constants == agreed:
            return
        new = {name: value for name, value in constants.items() if name not in agreed or agreed[name] != value}
        shown = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in new.items()}
        self._news = f"now {', '.join(f'{name} = {value}' for name, value in shown.items())}; ", f" {new}"
        self._agreed = dict(constants)

    def agree(self, constants: Mapping[str, Any], updates: int) -> None:
        """Local. All ranks are known to have these constants."""
        self._agreed, self._updates, self._news = dict(constants), updates, ("", "")

    def label(self, text: str) -> str:
        """Local. The label of a collective that all ranks call next: `text`, with the prefix and the news."""
        (short, exact), self._news = self._news, ("", "")
        # Messages show the beginning of a label.
        return f"{self.prefix}{short}{text.removeprefix(self.prefix)}{exact}"

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, MismatchError):
            self.explain(error)

    def explain(self, error: MismatchError) -> None:
        """Local. Raise the error anew with its reason, if the label of a call tells of constants.

        Raises:
            MismatchError: a label does.
        """
        if any(call.label.removeprefix(self.prefix).startswith("now ") for call in error.calls):
            raise MismatchError(
                f"{error}. If they differ in what follows 'now': a rank has changed this constant of its optimizer "
                "since its last step",
                cure="make the same assignments on all ranks, between the same steps",
                ranks=error.ranks,
                calls=error.calls,
            ) from None

    # -- parameters --------------------------------------------------------------------------------------------------
    def is_due(self) -> bool:
        """Local. Count a step; whether `compare` comes before it."""
        self._wait -= 1
        if not self.every or self._wait > 0:
            return False
        self._wait = self.every
        return True

    def gather(self, params: Sequence[Parameter]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Collective. Digests of the parameters of every rank, int64 [world_size, len(params)]."""
        mine = digests([param.array for param in params]).view(np.int64)
        gathered = np.empty(self._communicator.topology.world_size * mine.size, np.int64)
        self._communicator.all_gather(mine, gathered, label=f"{self.prefix}digests of parameters").wait()
        return gathered.reshape(self._communicator.topology.world_size, mine.size)

    def compare(self, params: Sequence[Parameter], step: int) -> None:
        """Collective. Compare parameters over the ranks, bit by bit.

        Args:
            params: in the same order on all ranks.
            step: its number, for the message.

        Raises:
            MismatchError: on all ranks; the message names the first parameter that differs, and the ranks.
        """
        topology = self._communicator.topology
        everyone = self.gather(params)
        if (everyone == everyone[0]).all():
            return
        differing = np.flatnonzero((everyone != everyone[0]).any(axis=0))
        found = everyone[:, differing[0]].tolist()
        usual = Counter(found).most_common(1)[0][0]  # that of rank 0 if there is no majority
        who = ", ".join(f"{rank} ({topology.hosts[rank]})" for rank, value in enumerate(found) if value != usual)
        first = found.index(usual)
        name = f"{params[differing[0]].name}{f' (and {differing.size - 1} more)' if differing.size > 1 else ''}"
        raise MismatchError(
            f"before step {step}, parameter {name} has other values on rank {who} than on rank {first} "
            f"({topology.hosts[first]}); change parameters alike on all ranks, between the same steps, or leave them "
            "unchecked with DistOpt(check_every=0)"
        )
