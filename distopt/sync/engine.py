"""The engine: it averages the gradients of named parameters over the ranks.

It knows parameters and their gradients as arrays, and nothing of where these come from. A front opens a step with
`begin`, writes each gradient where it belongs (`Bucket.grads`, views of wire memory), says `Step.final`, and ends with
`Step.finish`, after which the views hold the means and the front's optimizer applies them. A full bucket is encoded and
sent while later gradients are still being computed. Buckets start in the order of their indices, and are finished in
rounds in the same order, so that all ranks make the same calls whatever order gradients come in.
"""

from __future__ import annotations

import contextlib
import json
import logging
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from ..compress import Statistics
from ..errors import StateError, UsageError
from .agreement import check_alike, make_equal, send_first
from .bucket import under
from .drift import Drift
from .layout import Layout
from .slots import average
from .stats import CommunicationStatistics
from .step import PartialStep, Step
from .uneven import Recipe, RollCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ..comm import Communicator
    from ..compress import BadGradient, Codec
    from .bucket import Parameter
    from .slots import Slots, States

__all__ = ["DEFAULT_BUCKET_ELEMENTS", "Engine", "NonFinite"]

NonFinite: TypeAlias = Literal["raise", "skip", "ignore"]

DEFAULT_BUCKET_ELEMENTS = 2097152  # SINGA's default
_OWN = {"steps", "partitions"}  # states that are not of a layout

log = logging.getLogger("distopt")


class Engine:
    """Averages gradients over the ranks of a communicator.

    Args:
        communicator: how bytes move.
        slots: the optimizer. Its states are averaged where partial updates have let them differ between ranks.
        non_finite: what to do about a gradient that is NaN or infinite on any rank: "raise" a GradientError on all
            ranks; "skip" the update of this step on all ranks, with a warning; "ignore" it: fp32 then does not look,
            and the other codecs, which cannot carry such a value, raise.
        check_every: compare the parameters of all ranks in the first step and then in one of so many; 0: never.

    Attributes:
        slots: see above; the front may change it between steps, alike on all ranks.
        drift: finds ranks that go another way than the others.
        version: a number that the front changes when other parameters than before may have gradients.
        steps: number of steps that have begun.
        skipped: those of them without update.
        drifted: whether partial updates have let the ranks' parameters differ.
        own_slots: whether they have let the optimizer's states differ.
    """

    def __init__(
        self, communicator: Communicator, slots: Slots, non_finite: NonFinite = "raise", check_every: int = 0
    ) -> None:
        """Local."""
        self.check_options(non_finite, check_every)
        self.communicator = communicator
        self.non_finite = non_finite
        self.version = self.steps = self.skipped = 0
        self.drifted = self.own_slots = False
        self.slots = slots
        self.drift = Drift(communicator, check_every)
        self._attached: dict[int, Parameter] = {}  # by id
        self._layouts: dict[tuple[int, bool], Layout] = {}  # by bucket size, and whether for partial updates
        self._unclaimed: States = {}  # loaded, of bucket sizes that have not been used yet
        self._partition = 0  # the next one to be averaged
        self._partial: tuple[int, list[str]] | None = None  # size and order of the partitions that have drifted
        self._roll_call: RollCall | None = None  # inside `join`
        self._past_costs: dict[tuple[str, str], Statistics] = {}  # of layouts that are gone

    @staticmethod
    def check_options(non_finite: str, check_every: Any = 0) -> None:
        """Local. Check the arguments of the constructor before there is a communicator.

        Raises:
            UsageError: there is no such value of `non_finite`, or `check_every` is no number of steps.
        """
        if non_finite not in get_args(NonFinite):
            raise UsageError(f"non_finite={non_finite!r} is not one of {', '.join(get_args(NonFinite))}")
        if isinstance(check_every, bool) or not isinstance(check_every, int) or check_every < 0:
            raise UsageError(f"check_every={check_every!r} is no number of steps; pass 1 or more, or 0 for no check")

    def label(self, text: str) -> str:
        """Local. The label of a collective that the front starts by itself: `text`, with news as in steps."""
        self.drift.look(self.slots.constants(), self.steps - self.skipped, by_hand=True)
        return self.drift.label(f"{self.drift.prefix}{text}")

    def attach(self, params: Sequence[Parameter]) -> None:
        """Collective. Check that all ranks train the same model, and give all of them the parameters of rank 0.

        Raises:
            MismatchError: names, shapes or types differ; the message names the ranks and the first difference.
        """
        check_alike(self.communicator, self.drift.number, params)
        send_first(self.communicator, params)
        self._attached = {id(p): p for p in params}

    def layout(self, bucket_elements: int, order: Callable[[], Sequence[Parameter]], partial: bool = False) -> Layout:
        """Collective on first use of a bucket size. The buckets of that size.

        Args:
            bucket_elements: bucket size in elements, see `layout.plan`.
            order: gives the parameters in the order in which their gradients become final; called on first use.
            partial: for partial updates, whose partitions are the buckets.

        Raises:
            MismatchError: the ranks have different models or rules.
        """
        key = bucket_elements, partial
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = self._new_layout(bucket_elements, order(), partial)
        return layout

    def _new_layout(self, bucket_elements: int, order: Sequence[Parameter], partial: bool) -> Layout:
        constants = self.slots.constants()
        rule = constants | {"check_every": self.drift.every}
        check_alike(self.communicator, self.drift.number, order, self._attached, rule)
        self.drift.agree(constants, self.steps - self.skipped)
        if not self.drifted:
            make_equal(self.communicator, [p for p in order if id(p) not in self._attached])
        layout = Layout(
            order,
            bucket_elements,
            self.communicator,
            small_first=self.communicator.overlaps and not partial,
            check_finite=self.non_finite != "ignore",
            prefix=self.drift.prefix,
        )
        layout.version = self.version
        if partial:
            self._partial = bucket_elements, layout.names
        else:
            self._load(layout, bucket_elements)
        return layout

    def _renew(self, bucket_elements: int, order: Callable[[], Sequence[Parameter]], partial: bool = False) -> None:
        """Collective. Drop the buckets of that size if other parameters have gradients than when they were made."""
        layout = self._layouts.get((bucket_elements, partial))
        if layout is None or layout.version == self.version:
            return
        layout.version = self.version
        params = order()
        if {id(param) for param in params} == layout.places.keys():
            return
        self.synchronize()  # while those that have drifted are known
        layout.add_costs(self._past_costs)
        del self._layouts[bucket_elements, partial]
        log.info("other parameters train than before: new buckets for %d of them, without residuals", len(params))

    # -- steps -------------------------------------------------------------------------------------------------------
    def begin(
        self,
        bucket_elements: int,
        order: Callable[[], Sequence[Parameter]],
        codec: Codec,
        clip: float | None = None,
    ) -> Step:
        """Collective. Open a step in which gradients are averaged.

        Args:
            bucket_elements: see `layout`.
            order: see `layout`.
            codec: what is sent. Options and kind may change from step to step, alike on all ranks: a kind that returns
                goes on from the residuals that it has left.
            clip: limit every element of a gradient to [-clip, clip] before it is sent.

        Raises:
            UsageError: `clip` is not positive.
        """
        if clip is not None and not clip > 0:
            raise UsageError(f"a clipping value of {clip} leaves nothing of a gradient; pass a positive one")
        recipe = Recipe(codec, bucket_elements, clip)
        self._renew(bucket_elements, order)
        weight = 1.0 if self._roll_call is None else self._roll_call.step(recipe)
        return self._open(recipe, order, weight)

    def _open(self, recipe: Recipe, order: Callable[[], Sequence[Parameter]], weight: float) -> Step:
        layout = self.layout(recipe.bucket_elements, order)
        self._leave_partial()
        self.drift.look(self.slots.constants(), self.steps - self.skipped)
        if self.drift.is_due():
            trained = {id(param): param for bucket in layout.buckets for param in bucket.params}
            self.drift.compare([*(self._attached | trained).values()], self.steps)
        self.steps += 1
        return Step(layout, self.communicator, self.steps - 1, recipe, self.drift.label, weight)

    def begin_partial(self, partition_elements: int, order: Callable[[], Sequence[Parameter]]) -> PartialStep:
        """Collective. Open a step whose gradients stay with this rank.

        After its update comes `average_partition`. In between the ranks' parameters drift apart.

        Args:
            partition_elements: partition size in elements.
            order: see `layout`.

        Raises:
            UsageError: inside `join`.
        """
        if self._roll_call is not None:
            raise UsageError(
                "partial updates need all ranks at every step; send gradients by a codec inside DistOpt.join"
            )
        self._renew(partition_elements, order, partial=True)
        layout = self.layout(partition_elements, order, partial=True)
        self.drift.look(self.slots.constants(), self.steps - self.skipped)
        self.drifted = self.own_slots = True  # even if an exception ends the update half-way
        self.steps += 1
        look = self.non_finite != "ignore"
        return PartialStep(layout, self.communicator, self.steps - 1, self.drift.label, look)

    def may_update(self, verdict: BadGradient | None) -> bool:
        """Local. Whether the gradients of this step may be applied, given what `finish` returned; alike on all ranks.

        Raises:
            GradientError: they may not, and `non_finite` is not "skip".
        """
        if verdict is None:
            return True
        error = verdict.error()
        if self.non_finite != "skip":
            raise error
        self.skipped += 1
        log.warning("update skipped, step %d of %d skipped so far: %s", self.skipped, self.steps, error)
        return False

    # -- partial updates ---------------------------------------------------------------------------------------------
    def average_partition(self, layout: Layout) -> None:
        """Collective. After a partial update: average one partition of the parameters; steps visit them in a cycle."""
        bucket = layout.buckets[self._partition % len(layout.buckets)]
        bucket.average_params(self.drift.label(bucket.label))
        self._partition += 1

    def synchronize(self) -> None:
        """Collective. Set the parameters to their means over the ranks, where partial updates have let them drift.

        Raises:
            UsageError: states have been loaded, and neither `attach` nor a step has told whose they are.
        """
        if self.drifted and self._partial is not None:
            # The partial updates' layout, which loaded states name: other losses may have had fewer parameters.
            elements, names = self._partial
            layout = self.layout(elements, lambda: self._attached_in(names), partial=True)
            for bucket in layout.buckets:
                bucket.average_params()
            self.drifted = False

    def _attached_in(self, names: Sequence[str]) -> list[Parameter]:
        """The attached parameters in that order."""
        known = {str(param.name): param for param in self._attached.values()}
        if missing := [name for name in names if name not in known]:
            raise UsageError(
                f"the parameter {missing[0]} of the loaded states is not known yet; call DistOpt.attach(params) before "
                "DistOpt.synchronize"
            )
        return [known[name] for name in names]

    def _leave_partial(self) -> None:
        """Collective. Make the ranks equal after partial updates: equal gradients then keep them so."""
        self.synchronize()
        if self.own_slots:
            average(self.communicator, self.slots)
            self.own_slots = False

    # -- uneven data -------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def join(self, update: Callable[[Layout], None]) -> Iterator[None]:
        """Collective. Let ranks take different numbers of steps in the body of a `with`.

        A rank that leaves the body waits in it until all have left. Meanwhile it contributes gradients of zero to the
        steps of the others, and calls `update` where they do, so that the ranks end with equal parameters. A step
        averages over the ranks that still have data. It costs one exchange of 16 bytes per rank and step.

        Raises:
            UsageError: a rank had no batch, or a step is of a kind that cannot be taken without all ranks.
            MismatchError: the ranks took different kinds of steps.
        """
        if self._roll_call is not None:
            raise UsageError("DistOpt.join was called inside of DistOpt.join; leave the outer one first")
        roll_call = self._roll_call = RollCall(self.communicator)
        try:
            yield
            while weight := roll_call.without_data():
                with self.drift:
                    step = self._open(roll_call.last, list, weight)
                    if self.may_update(step.finish(unused="zero")):
                        update(step.layout)
        finally:
            self._roll_call = None

    # -- statistics and states ---------------------------------------------------------------------------------------
    def stats(self) -> CommunicationStatistics:
        """Local. What communication has cost since the first step; the difference of two is what lies between them."""
        costs = {key: cost - Statistics() for key, cost in self._past_costs.items()}
        for layout in self._layouts.values():
            layout.add_costs(costs)
        return CommunicationStatistics(self.steps, self.skipped, costs)

    def get_states(self) -> States:
        """Local. Copies of all that a later run needs to go on, except for the optimizer's slots.

        Residuals differ between ranks: every rank saves its own. The keys are `steps`; `partitions`, while partial
        updates have let the ranks drift; and `ELEMENTS/KIND/NAME/PARAMETER` for the array that codecs of a kind keep
        for a parameter with buckets of so many elements.
        """
        flags = (self.drifted, self.own_slots)
        counts = np.array([self.steps, self.skipped, self._partition, *flags], np.int64)
        own = {"steps": counts}
        if self.drifted:
            own["partitions"] = np.frombuffer(json.dumps(self._partial).encode(), np.uint8)
        existing = {
            f"{elements}/{key}": array
            for (elements, partial), layout in self._layouts.items()
            if not partial
            for key, array in layout.get_states().items()
        }
        return own | {key: array.copy() for key, array in self._unclaimed.items()} | existing

    def set_states(self, states: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Local. Go on from what `get_states` gave on the same rank of a job of the same size.

        Raises:
            StateError: see `check_states`; nothing was changed.
        """
        self.check_states(states)
        self._unclaimed = {key: array for key, array in states.items() if key not in _OWN}
        for (elements, partial), layout in self._layouts.items():
            if not partial:
                self._load(layout, elements)
        self.steps, self.skipped, self._partition, *flags = map(int, states["steps"])
        self.drifted, self.own_slots = map(bool, flags)
        if self.drifted:
            self._partial = _partitions(states)

    def check_states(self, states: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Local. Whether `set_states` would accept them.

        Raises:
            StateError: they are not of an engine, or do not fit.
        """
        arrays = all(hasattr(value, "dtype") for value in states.values())
        counts = states.get("steps", np.empty(0)) if arrays else np.empty(0)
        if counts.shape != (5,) or counts.dtype.kind != "i" or (counts < 0).any() or (counts > 2**53).any():
            raise StateError("these are no states of a DistOpt: steps is missing or negative, or a value is no array")
        if counts[3]:
            _partitions(states)
        for key in states.keys() - _OWN:
            if key.count("/") < 3 or not key.split("/")[0].isdecimal():
                raise StateError(f"{key} is no state of a DistOpt; pass what DistOpt.get_states gave")
        for (elements, partial), layout in self._layouts.items():
            if not partial:
                layout.check_states(under(str(elements), states))

    def _load(self, layout: Layout, elements: int) -> None:
        """Give the loaded states of buckets of that size to `layout`, if they fit."""
        own = under(str(elements), self._unclaimed)
        layout.set_states(own)
        for key in own:
            del self._unclaimed[f"{elements}/{key}"]


def _partitions(states: Mapping[str, np.ndarray[Any, Any]]) -> tuple[int, list[str]]:
    """Size in elements and parameters, in order, of the partitions of partial updates."""
    try:
        elements, names = json.loads(states["partitions"].tobytes())
    except (KeyError, ValueError, TypeError):
        raise StateError("these are no states of a DistOpt with partial updates: partitions is missing") from None
    return elements, names
