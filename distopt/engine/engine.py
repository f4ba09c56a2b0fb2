"""The engine: it averages the gradients of named parameters over the ranks.

It works on parameters and their gradients as arrays, from any source. A front end opens a step with
`begin`, writes each gradient where it belongs (`Bucket.grads`, views of wire memory), calls `Step.final`, and ends with
`Step.finish`. Then the views hold the means, and its optimizer applies them. A full bucket is encoded and
sent while later gradients are still being computed. Buckets start in the order of their indices, and are finished in
rounds in the same order, so that all ranks make the same calls for any order of gradients.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from ..checks import check_integer, check_number
from ..codecs import BadGradient, Codec, CommunicationStatistics
from ..codecs.kept_arrays import States
from ..comm import Communicator
from ..errors import DistoptError, StateError, UsageError
from .agreement import Agreement
from .bucket import BucketMemory, Parameter
from .layout import Layout, check_names, unique_names
from .partial import PartialStep, PartialUpdates, UpdateRule
from .shards import Shards
from .step import GradientCounter, Step
from .uneven import Recipe, RollCall

NonFinite: TypeAlias = Literal["raise", "skip", "ignore"]

DEFAULT_BUCKET_ELEMENTS = 2097152  # SINGA's default
# A comparison takes about a tenth of a step of the reference model: once every 100 steps, it costs 0.1 % of the time.
DEFAULT_CHECK_EVERY = 100
_OWN = {"steps", "partitions", "shards"}  # states that belong to no codec

log = logging.getLogger("distopt")


class _Unsettled(NamedTuple):
    step: GradientCounter
    undo: Callable[[], None]
    explain: Callable[[], None]


class Engine:
    """Averages gradients over the ranks of a communicator.

    Args:
        communicator: how bytes move.
        non_finite: what to do about a gradient that is NaN or infinite on any rank: "raise" a GradientError on all
            ranks; "skip" the update of this step on all ranks, with a warning; "ignore" it: fp32 then does not look,
            and the other codecs, which cannot carry such a value, raise.
        check_every: compare the parameters of all ranks in the first step, then once every this many steps; 0: never.
        shards: if given, steps are cut into shards: their means have the same bits for any number of ranks.

    Attributes:
        non_finite: see above; all ranks may change it between steps.
        agreement: finds ranks that deviate from the others.
        statistics: numbers of steps, and their cost.
        partial: partial updates.
        layout: the buckets in use.
        shards: see above.
        unsettled: the verdict of the last step, if it was left on the device; see `settle`.
    """

    def __init__(
        self,
        communicator: Communicator,
        non_finite: NonFinite = "raise",
        check_every: int = 0,
        shards: Shards | None = None,
    ) -> None:
        """Local."""
        self.check_options(non_finite, check_every)
        self.communicator = communicator
        self.shards = shards
        self.non_finite = non_finite
        self.agreement = Agreement(communicator, int(check_every))
        self.statistics = CommunicationStatistics()
        self.partial = PartialUpdates(self.agreement, self.statistics)
        self.layout: Layout | None = None
        self._memory = BucketMemory(communicator)
        self._loaded: States = {}  # states of kinds of codec that have not been used yet
        self._unchecked = 0  # after so many steps, look whether loaded states are in use; 0 for never
        self._roll_call: RollCall | None = None  # inside `join`
        self.unsettled: _Unsettled | None = None

    @staticmethod
    def check_options(non_finite: str, check_every: Any = 0) -> None:
        """Local. Check the arguments of the constructor before there is a communicator.

        Raises:
            UsageError: there is no such value of `non_finite`, or `check_every` is not a number of steps.
        """
        if non_finite not in get_args(NonFinite):
            raise UsageError(f"non_finite={non_finite!r} is not one of {', '.join(get_args(NonFinite))}")
        check_integer("check_every", check_every, 0)

    @contextlib.contextmanager
    def by_hand(self, rule: UpdateRule) -> Iterator[None]:
        """Local. A context for collectives that the front starts itself, labelled by `Agreement.label`."""
        self.check_unsharded("a sum over ranks")
        self.settle()
        self.agreement.note_constants(rule.constants(), self.statistics.steps - self.statistics.skipped, by_hand=True)
        with self.agreement.explained():
            yield

    # -- steps -------------------------------------------------------------------------------------------------------
    def begin(
        self,
        codec: Codec,
        bucket_elements: int,
        order: Callable[[], Sequence[Parameter]],
        rule: UpdateRule,
        *,
        version: int = 0,
        clip: float | None = None,
        defers: bool = False,
    ) -> Step:
        """Collective. Open a step in which gradients are averaged, or return the one that awaits the next shard.

        Args:
            codec: how gradients are encoded. Options and kind may change between steps, alike on all ranks: a kind used
                again resumes from the residuals that it has left.
            bucket_elements: bucket size in elements, see `layout.plan`. Buckets of another size replace the old ones
                and take over their residuals.
            order: gives the parameters in the order in which their gradients become final. Called in the first step,
                and when size or version have changed since the last step.
            rule: the optimizer's, the same on all ranks.
            version: a number that changes when different parameters may have gradients.
            clip: limit every element of a gradient to [-clip, clip] before it is sent.
            defers: whether the verdict on gradients of a GPU may stay there. The front then calls `settle` between the
                end of the step and its update, which the verdict's flag gates, and `postpone` after that.

        Raises:
            GradientError: as `settle`.
            UsageError: `clip` is not positive, or `bucket_elements` is not an integer, or is negative; or the step
                cannot be one in shards.
            MismatchError: the ranks have different models or rules, or parameters have drifted apart.
        """
        if self.shards is not None and (resumed := self.shards.resumed()) is not None:
            return resumed
        if clip is not None:
            check_number("the limit of a gradient's elements (clip)", clip, "(0, inf]")
        if self.shards is not None:
            codec = self.shards.codec_for(codec, clip)
        defers = defers and codec.defers
        if not defers:
            self.settle()
        recipe = Recipe(codec, bucket_elements, clip)
        weight = 1.0 if self._roll_call is None else self._roll_call.call(recipe)
        if self.partial.slots_pending:
            self.partial.end(rule)
        layout = self.layout
        if layout is None or (layout.bucket_elements, layout.version) != (bucket_elements, version):
            layout = self.layout = self._fitting(bucket_elements, order(), rule, version)
        return self._open(layout, recipe, rule, weight, defers=defers and not self.is_joining)

    def _fitting(self, elements: int, params: Sequence[Parameter], rule: UpdateRule, version: int) -> Layout:
        """Collective. Buckets of that size for the parameters that train now."""
        old = self.layout
        if old is None or old.bucket_of.keys() != {id(param) for param in params}:
            facts = {} if self.shards is None else self.shards.facts
            updates = self.statistics.steps - self.statistics.skipped
            self.agreement.reach(params, rule.constants(), updates, facts=facts)
        elif old.bucket_elements == elements:
            old.version = version
            return old
        else:
            self._loaded |= old.get_states()
            old = None
        names = set(unique_names(params).values())
        saved = {key.split("/", 2)[2] for key in self._loaded}
        known = {str(param.name) for param in self.agreement.attached.values()}
        if old is None:
            check_names(self._loaded, saved if saved <= known else names)
        if old is not None or saved not in (set(), names):  # layers have been frozen or thawed
            self._loaded = {}
            log.info("other parameters train than before: new buckets for %d of them, without residuals", len(params))
        small_first = self.communicator.overlaps
        return Layout(params, elements, version, self._memory, small_first=small_first, prefix=self.agreement.prefix)

    def _open(self, layout: Layout, recipe: Recipe, rule: UpdateRule, weight: float, *, defers: bool = False) -> Step:
        codec, agreement, statistics = recipe.codec, self.agreement, self.statistics
        if self._unchecked and statistics.steps > self._unchecked:
            self._tell_unused(layout, codec)
        states = layout.states.get(codec.kind)
        if states is None:
            states = layout.attach(codec, statistics, self._loaded, self.non_finite != "ignore")
        agreement.note_constants(rule.constants(), statistics.steps - statistics.skipped)
        if agreement.is_due():
            trained = {id(param): param for bucket in layout.buckets for param in bucket.params}
            agreement.compare([*(agreement.attached | trained).values()], statistics.steps)
        states[0].wire_label = agreement.label(layout.buckets[0].label)
        for state in states:
            state.defers = defers and not isinstance(state.bucket, np.ndarray)
        ended = None if self.shards is None else partial(self.shards.end_last, self.communicator)
        return Step(layout, agreement, statistics, codec, states, clip=recipe.clip, weight=weight, ended=ended)

    def _tell_unused(self, layout: Layout, codec: Codec) -> None:
        """Say, once, which of the loaded states the codecs have not taken since."""
        self._unchecked = 0
        kinds = {key.split("/", 1)[0] for key in self._loaded} | layout.kinds_with_unused_states()
        if kinds and self.communicator.topology.rank == 0:
            log.warning(
                "the loaded states of codec %s, such as gradients that it has not sent yet, are not used by codec %s; "
                "they are kept for a step that uses them",
                ", ".join(sorted(kinds)), codec.kind,
            )  # fmt: skip

    def begin_partial(
        self, partition_elements: int, order: Callable[[], Sequence[Parameter]], rule: UpdateRule, *, version: int = 0
    ) -> PartialStep:
        """Collective. Open a step whose gradients stay with this rank; after its update comes `partial.average`.

        Args:
            partition_elements: partition size in elements.
            order: see `begin`.
            rule: see `begin`. Its states are averaged before the next step of the other kind.
            version: see `begin`.

        Raises:
            UsageError: inside `join`, or `partition_elements` is not an integer, or is negative.
            MismatchError: the ranks have different models or rules.
        """
        if self.is_joining:
            raise UsageError(
                "partial updates need all ranks at every step; send gradients by a codec inside DistOpt.join"
            )
        self.check_unsharded("a partial update")
        self.settle()
        agreement, statistics = self.agreement, self.statistics
        layout = self.partial.layout_for(partition_elements, order, rule, version)
        agreement.note_constants(rule.constants(), statistics.steps - statistics.skipped)
        return PartialStep(self.partial, layout, agreement, statistics, self.non_finite != "ignore")

    def refuse(self, verdict: BadGradient) -> None:
        """Local. Refuse the gradients of this step, after a bad verdict of `finish`; the same on all ranks.

        Raises:
            GradientError: unless `non_finite` is "skip".
        """
        error = verdict.error()
        if self.non_finite != "skip":
            raise error
        skipped, steps = self.statistics.skipped, self.statistics.steps
        log.warning("update skipped, step %d of %d skipped so far: %s", skipped, steps, error)

    def postpone(self, step: GradientCounter, undo: Callable[[], None], explain: Callable[[], None]) -> None:
        """Local. Leave the verdict of a finished step to `settle`. The update that it gates may start.

        Args:
            step: the step.
            undo: `settle` calls it if the verdict is bad: it takes back what the front has counted as a step.
            explain: `settle` calls it after `undo`: it raises an error with the reason of the bad gradient, if any.
        """
        self.unsettled = _Unsettled(step, undo, explain)

    def settle(self, following: GradientCounter | None = None) -> None:
        """Collective if the gradients of the last step were bad, else local. Bad ones are refused, as by `refuse`.

        A verdict that was left on the device has long been there at the end of the next step. Methods that need it call
        this.

        Args:
            following: the step that has finished since. It is given up if an error is raised.

        Raises:
            GradientError: unless `non_finite` is "skip"; or an exception has ended the step on another rank.
        """
        unsettled, self.unsettled = self.unsettled, None
        if unsettled is None:
            return
        try:
            verdict = unsettled.step.settle(unsettled.undo)
            if verdict is not None:
                unsettled.explain()
                self.refuse(verdict)
        except DistoptError:
            if following is not None:
                following.take_back()
            raise

    def check_unsharded(self, what: str) -> None:
        """Local. Raise a UsageError if steps are cut into shards, which `what` does not allow."""
        if self.shards is not None:
            raise self.shards.refusal(what)

    @property
    def is_joining(self) -> bool:
        """Local. Whether this is inside `join`, where ranks may be out of data."""
        return self._roll_call is not None

    # -- uneven data -------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def join(self, rule: UpdateRule, update: Callable[[Layout], None]) -> Iterator[None]:
        """Collective. In the block, ranks may have different numbers of batches, as in `DistOpt.join`.

        A rank without data calls `update` where the others update.
        """
        if self._roll_call is not None:
            raise UsageError("DistOpt.join was called inside of DistOpt.join; leave the outer one first")
        self.check_unsharded("join, with ranks out of data,")
        self.settle()
        roll_call = self._roll_call = RollCall(self.communicator)
        try:
            yield
            while weight := roll_call.call(None):
                assert self.layout is not None, "a rank without any batch is refused"
                with self._open(self.layout, roll_call.last, rule, weight) as step:
                    verdict = step.finish(unused="zero")
                if verdict is None:
                    update(step.layout)
                else:
                    self.refuse(verdict)
        finally:
            self._roll_call = None

    # -- statistics and states ---------------------------------------------------------------------------------------
    def stats(self) -> CommunicationStatistics:
        """Local. The cost of communication since the first step; subtract an earlier result for the cost since then."""
        return self.statistics - CommunicationStatistics()

    def get_states(self) -> States:
        """Local. Copies of all that a later run needs to resume, except for the optimizer's slots.

        Residuals differ between ranks: every rank saves its own. The keys are `steps`; `shards`, for steps in shards;
        `partitions`, while partial updates let the ranks differ; and `KIND/NAME/PARAMETER` for the array that codecs of
        a kind keep for a parameter.

        Raises:
            GradientError: as `settle`, which makes this collective after a bad gradient.
        """
        self.settle()
        done, partial = self.statistics, self.partial
        flags = partial.pending, partial.slots_pending
        own = {"steps": np.array([done.steps, done.skipped, partial.next, *flags], np.int64)}
        if self.shards is not None:
            own["shards"] = self.shards.state()
        loaded = {key: array.copy() for key, array in self._loaded.items()}
        return own | partial.get_states() | loaded | ({} if self.layout is None else self.layout.get_states())

    def set_states(self, states: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Local. Resume from the result of `get_states` on the same rank of a job of the same size.

        Raises:
            StateError: see `check_states`; nothing was changed.
        """
        self._loaded = self.check_states(states)
        self.unsettled = None
        if self.layout is not None:
            self.layout.set_states(self._loaded)
        self.statistics.steps, self.statistics.skipped, partition, *flags = map(int, states["steps"])
        self._unchecked = self.statistics.steps + 1 if self._loaded else 0
        self.partial.set_states(partition, flags, states)

    def check_states(self, states: Mapping[str, np.ndarray[Any, Any]]) -> States:
        """Local. Check that `set_states` would accept saved states; return those of codecs.

        Raises:
            StateError: they are not of an engine, or do not fit.
        """
        arrays = all(hasattr(value, "dtype") for value in states.values())
        counts = states.get("steps", np.empty(0)) if arrays else np.empty(0)
        if counts.shape != (5,) or counts.dtype.kind != "i" or (counts < 0).any() or (counts > 2**53).any():
            raise StateError("these are not states of a DistOpt: steps is missing or negative, or not all are arrays")
        if counts[3]:
            self.partial.partitions(states)
        if (self.shards is None) != ("shards" not in states):
            here, there = ("without", "with") if self.shards is None else ("with", "without")
            raise StateError(
                f"the states are of a job {there} shards=, this one is {here}; its steps would have other batches and "
                "random numbers: use the same shards= and seed= again"
            )
        if self.shards is not None:
            self.shards.check_state(states["shards"])
        of_codecs: States = {key: states[key] for key in states.keys() - _OWN}
        for key in of_codecs:
            if key.count("/") < 2:
                raise StateError(f"{key} is not a state of a DistOpt; pass the result of DistOpt.get_states")
        if self.layout is not None:
            self.layout.check_states(of_codecs)
        return of_codecs
