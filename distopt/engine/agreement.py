"""Checks that all ranks train the same model from the same start by the same rule, in every step.

Constants of the optimizer, such as the learning rate of this step, are compared by value in the first step. Later, a
rank that finds a change puts it into the label of the next collective that it starts. Communicators compare labels
anyway, so this sends nothing more, and constants that have not changed are not sent again. Parameters are compared
at intervals, by digests.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..comm import Communicator, Work
from ..errors import MismatchError, UsageError
from ..kernels.digest import digests
from .bucket import Parameter

STEPS = "step_counter"  # the constant that grows with every update

log = logging.getLogger("distopt")

_UNDER_WAY_BYTES = 16 << 20
_numbers: WeakKeyDictionary[Communicator, Iterator[int]] = WeakKeyDictionary()


class Agreement:
    """The agreement of one engine with the engines of the other ranks.

    Attributes:
        communicator: connects the ranks.
        number: number of the engine on its communicator, from 1.
        prefix: start of the labels of buckets in all but the first engine, so that engines that one rank uses in
            another order are not taken for each other.
        every: steps from one comparison of parameters to the next; 0 for none.
        attached: parameters that have been compared, by id.
    """

    def __init__(self, communicator: Communicator, every: int) -> None:
        """Local. Count engines."""
        self.communicator = communicator
        self.every = every if communicator.topology.world_size > 1 else 0
        self.number = next(_numbers.setdefault(communicator, itertools.count(1)))
        self.prefix = "" if self.number == 1 else f"DistOpt {self.number}: "
        self.attached: dict[int, Parameter] = {}
        self._agreed: dict[str, Any] = {}  # constants
        self._updates = 0  # number of updates when they were agreed
        self._news = "", ""  # changes that no label has carried yet: in short, and exactly
        self._wait = 0  # steps until the next comparison

    # -- before a first step -----------------------------------------------------------------------------------------
    def attach(self, params: Sequence[Parameter]) -> None:
        """Collective. Check that all ranks train the same model, and give all of them the parameters of rank 0.

        Raises:
            MismatchError: see `check`.
        """
        self.attached = {}
        self.check(params)
        self._make_equal(params)
        self.attached = {id(p): p for p in params}

    def attached_in(self, names: Sequence[str]) -> list[Parameter]:
        """Local. The attached parameters in that order.

        Raises:
            UsageError: one of them is not attached.
        """
        known = {str(param.name): param for param in self.attached.values()}
        if missing := [name for name in names if name not in known]:
            raise UsageError(
                f"the parameter {missing[0]} of the loaded states is not known yet; call DistOpt.attach(params) before "
                "DistOpt.synchronize"
            )
        return [known[name] for name in names]

    def check(self, params: Sequence[Parameter], constants: Mapping[str, Any] | None = None) -> None:
        """Collective. Compare between the ranks the model that they are about to train.

        Args:
            params: names, shapes, types and the orders of dimensions in memory are compared.
            constants: of the optimizer, by name; compared by their texts.

        Raises:
            MismatchError: on all ranks: something differs; the message names the rank and the first difference.
        """
        mine = {
            "number": self.number,
            "params": [
                [str(p.name), list(p.array.shape), p.array.dtype.name, _order(p), id(p) in self.attached]
                for p in params
            ],
            "constants": {name: repr(value) for name, value in (constants or {}).items()},
        }
        texts = self.communicator.all_gather_bytes(json.dumps(mine).encode(), label="models compared")
        described = [json.loads(text) for text in texts]
        hosts = self.communicator.topology.hosts
        for rank, theirs in enumerate(described):
            if theirs != described[0]:
                who, rank_0 = f"rank {rank} ({hosts[rank]})", f"rank 0 ({hosts[0]})"
                raise MismatchError(_difference(described[0], theirs, who, rank_0))

    def reach(
        self,
        params: Sequence[Parameter],
        constants: Mapping[str, Any],
        updates: int,
        *,
        equal: bool = True,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Collective. Compare these parameters, and the rule of their updates, before their first step.

        With `equal`, parameters that were never attached and differ become equal to rank 0's, with a warning. `facts`
        never change afterwards.

        Raises:
            MismatchError: see `check`.
        """
        self.check(params, {**constants, **(facts or {}), "check_every": self.every})
        self._agreed, self._updates, self._news = dict(constants), updates, ("", "")
        strangers = [p for p in params if id(p) not in self.attached]
        if not equal or not strangers:
            return
        ranks = self._make_equal(strangers)
        if ranks and self.communicator.topology.rank == 0:
            log.warning(
                "the parameters of ranks %s differed from those of rank 0 before the first step, and are replaced "
                "by them; DistOpt.attach(params) before the first forward pass does so in time",
                ranks,
            )

    def _make_equal(self, params: Sequence[Parameter]) -> list[int]:
        """Collective. Give all ranks rank 0's values of the parameters that differ; the ranks that had others.

        Parameters with equal digests are not sent: over a slow link, a model takes minutes. The others travel a few
        megabytes at a time, so that each wait ends before its timeout.
        """
        if not params or self.communicator.topology.world_size == 1:
            return []
        everyone = self._gather(params)
        differs = everyone != everyone[0]
        under_way: deque[tuple[Work, int]] = deque()
        n_bytes = 0
        for param in itertools.compress(params, differs.any(axis=0)):
            under_way.append((self.communicator.broadcast(param.array, label=str(param.name)), param.array.nbytes))
            n_bytes += param.array.nbytes
            while len(under_way) > 1 and n_bytes > _UNDER_WAY_BYTES:
                work, arrived = under_way.popleft()
                work.wait()
                n_bytes -= arrived
        for work, _ in under_way:
            work.wait()
        ranks: list[int] = np.flatnonzero(differs.any(axis=1)).tolist()
        return ranks

    # -- constants ---------------------------------------------------------------------------------------------------
    def note_constants(self, constants: Mapping[str, Any], updates: int, *, by_hand: bool = False) -> None:
        """Local. Note which constants differ from those expected, for the next label.

        Args:
            constants: by name.
            updates: number of updates so far, by which `STEPS` should have grown.
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

    def label(self, text: str) -> str:
        """Local. The label of a collective that all ranks call next: `text`, with the prefix and the news."""
        (short, exact), self._news = self._news, ("", "")
        # Messages show the beginning of a label.
        return f"{self.prefix}{short}{text.removeprefix(self.prefix)}{exact}"

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Local. Around collectives with labels of `label`; see `explain`."""
        try:
            yield
        except MismatchError as error:
            self.explain(error)
            raise

    def explain(self, error: MismatchError) -> None:
        """Local. Raise the error again with its reason, if the label of a call contains constants.

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
        """Local. Count a step; return whether `compare` comes before it."""
        self._wait -= 1
        if not self.every or self._wait > 0:
            return False
        self._wait = self.every
        return True

    def _gather(self, params: Sequence[Parameter]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Collective. Digests of the parameters of every rank, int64 [world_size, len(params)]."""
        mine = digests([param.array for param in params]).view(np.int64)
        gathered = np.empty(self.communicator.topology.world_size * mine.size, np.int64)
        self.communicator.all_gather(mine, gathered, label=f"{self.prefix}digests of parameters").wait()
        return gathered.reshape(self.communicator.topology.world_size, mine.size)

    def compare(self, params: Sequence[Parameter], step: int) -> None:
        """Collective. Compare parameters over the ranks, bit by bit.

        Args:
            params: in the same order on all ranks.
            step: its number, for the message.

        Raises:
            MismatchError: on all ranks; the message names the first parameter that differs, and the ranks.
        """
        topology = self.communicator.topology
        everyone = self._gather(params)
        if (everyone == everyone[0]).all():
            return
        differing = np.flatnonzero((everyone != everyone[0]).any(axis=0))
        found = everyone[:, differing[0]].tolist()
        usual = Counter(found).most_common(1)[0][0]  # the value of rank 0 without a majority
        who = ", ".join(f"{rank} ({topology.hosts[rank]})" for rank, value in enumerate(found) if value != usual)
        first = found.index(usual)
        name = f"{params[differing[0]].name}{f' (and {differing.size - 1} more)' if differing.size > 1 else ''}"
        raise MismatchError(
            f"before step {step}, parameter {name} has other values on rank {who} than on rank {first} "
            f"({topology.hosts[first]}); change parameters equally on all ranks, between the same steps, or leave them "
            "unchecked with DistOpt(check_every=0)"
        )


def _difference(first: Mapping[str, Any], other: Mapping[str, Any], who: str, rank_0: str) -> str:
    if other["number"] != first["number"]:
        return (
            f"{who} uses the DistOpt that it made as number {other['number']} on this communicator, {rank_0} its "
            f"number {first['number']}; make and use several of them in the same order on all ranks"
        )
    if other["params"] != first["params"]:
        pairs = zip([*first["params"], None], [*other["params"], None], strict=False)
        a, b = next((a, b) for a, b in pairs if a != b)
        memory = ", in the same memory format," if a and b and a[3] != b[3] else ""
        return (
            f"{who} trains another model than rank 0: where rank 0 has {_describe(a)}, it has {_describe(b)}; build "
            f"the same model{memory} on every rank"
        )
    names = first["constants"] | other["constants"]
    differing = [
        f"{name} is {values[0]} there, {values[1]} on rank 0"
        for name in names
        if (values := [side["constants"].get(name, "absent") for side in (other, first)])[0] != values[1]
    ]
    return (
        f"{who} updates by another rule than {rank_0}: {', '.join(differing)}; make the same optimizer, with the same "
        "values, on every rank"
    )


def _order(param: Parameter) -> list[int]:
    """The dimensions of a tensor in the order of its memory, if that differs from their own, as in `channels_last`."""
    return list(getattr(param, "permuted", ()))


def _describe(entry: list[Any] | None) -> str:
    if entry is None:
        return "no further parameter"
    name, shape, dtype, order, known = entry
    memory = f" in memory, which has its dimensions in the order {order}," if order else ""
    return f"{name} of shape {shape}{memory} and type {dtype}{' of DistOpt.attach' if known else ''}"
