"""One training step of the engine: gradients arrive in any order; their means are ready when it ends."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Literal

import numpy as np

from ..codecs import (
    BadGradient,
    Codec,
    CodecState,
    CommunicationStatistics,
    PendingReduction,
    Verdict,
    finish_all,
)
from ..codecs.reduction import Doubt
from ..errors import CommunicatorError, GradientError, MismatchError, UsageError
from .agreement import Agreement
from .bucket import Bucket, Parameter
from .layout import Layout


class GradientCounter(ABC):
    """Which gradients of a step are final.

    As a context manager, it keeps the ranks in step where an exception ends the body: this rank takes part in the rest
    of the step, and all others get a GradientError that names it. Where that is impossible they get a
    MismatchError, and every rank's communicator is unusable: after an exception in the middle of a collective call,
    and with codecs that do not check for NaN.

    Attributes:
        layout: the buckets of this step.
    """

    def __init__(self, layout: Layout, agreement: Agreement, statistics: CommunicationStatistics, looks: bool) -> None:
        """Local. Count the step in `statistics`; `looks`: whether to check its gradients for NaN."""
        self.layout = layout
        self._looks = looks
        self._agreement = agreement
        self._communicator = agreement.communicator
        self._statistics = statistics
        self._number = statistics.steps
        statistics.steps += 1
        self._ended = False  # whether all collectives of the step have ended
        self._calling = False  # whether it is inside of a call that cannot be repeated
        self._started: list[PendingReduction] = []
        self._doubt: Doubt | None = None  # the verdict, if it was left on the device
        self._awaited = layout.bucket_of.copy()  # index of the bucket by id of the parameter
        self._missing = [len(bucket.params) for bucket in layout.buckets]

    def __enter__(self) -> GradientCounter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, MismatchError):
            self._agreement.explain(error)
        elif error is not None and not self._ended and not isinstance(error, CommunicatorError):
            self._leave(error)

    @property
    def is_complete(self) -> bool:
        """Local. Whether all gradients are final."""
        return not self._awaited

    def awaits(self, param: Parameter) -> bool:
        """Local. Whether the gradient of `param` is part of the step, and not final yet."""
        return id(param) in self._awaited

    def fills(self, param: Parameter) -> bool:
        """Local. Whether the gradient of `param` is the last one of its bucket, or cannot be counted."""
        index = self._awaited.get(id(param))
        return index is None or self._missing[index] == 1

    @abstractmethod
    def _start_full(self) -> None:
        """Collective. Start all that can start: a bucket is full."""

    @abstractmethod
    def _end(self) -> Verdict:
        """Collective. Wait for the end of all that has been started; the verdict on the gradients."""

    def final(self, param: Parameter) -> None:
        """Collective. Count the gradient of `param` as final: it is in its place, and will not change any more.

        Starts the buckets that are full, or moves the bytes of those under way.

        Raises:
            UsageError: `param` has no place, or its gradient was final before.
        """
        index = self._awaited.pop(id(param), None)
        if index is None:
            if id(param) in self.layout.bucket_of:
                raise UsageError(f"the gradient of {param.name} was declared final twice in one step; do so once")
            raise UsageError(
                f"parameter {param.name} was not part of the loss in the first step; make a new DistOpt for a new model"
            )
        self._missing[index] -= 1
        if not self._missing[index]:
            self._start_full()
        elif self._started:
            self._communicator.progress()

    def finish(self, unused: Literal["raise", "zero"] = "raise") -> BadGradient | None:
        """Collective. Wait for the end of the step; the verdict on its gradients, the same on all ranks.

        Args:
            unused: the action if a parameter had no gradient in this step: raise an error, or take part with zeros.

        Raises:
            UsageError: see `unused`.
            GradientError: an exception has ended the step on another rank.
        """
        verdict = self.finish_deferred(unused)
        assert not isinstance(verdict, Doubt), "the step has been begun with `defers`"
        return verdict

    def finish_deferred(self, unused: Literal["raise", "zero"] = "raise") -> Verdict:
        """Collective. As `finish`; a `Doubt` stays with the step for `Engine.postpone`."""
        if self._awaited:
            self._complete(unused)
            self._start_full()
        verdict = self._end()
        if isinstance(verdict, BadGradient):
            self._refuse()
        self._ended = True
        self._doubt = verdict if isinstance(verdict, Doubt) else None
        return verdict

    def take_back(self) -> None:
        """Local. Give this step up, after `finish_deferred` and without an update."""
        for reduction in self._started:
            reduction.state.take_back()

    def settle(self, undo: Callable[[], None]) -> BadGradient | None:
        """Collective if a gradient was bad. Wait for the verdict of `finish_deferred` that was left on the device.

        Args:
            undo: called after a bad one; it undoes what the caller has counted since.

        Raises:
            GradientError: an exception has ended the step on another rank.
        """
        verdict = None if self._doubt is None else self._doubt.read()
        if verdict is not None:
            undo()
            self._refuse()
        return verdict

    def _complete(self, unused: Literal["raise", "zero"]) -> None:
        """Give zeros to the parameters that had no gradient, or raise."""
        for bucket, missing in zip(self.layout.buckets, self._missing, strict=True):
            if missing and unused == "raise":
                raise self.unreached(bucket, missing)
            if missing:
                for param, grad in zip(bucket.params, bucket.grads, strict=True):
                    if id(param) in self._awaited:
                        grad.fill(0)
                self._missing[bucket.index] = 0

    @staticmethod
    def unreached(bucket: Bucket, missing: int) -> UsageError:
        """Local. An error that says that so many parameters of the bucket have no gradient."""
        return UsageError(
            f"the loss did not reach {missing} of {len(bucket.params)} parameters from {bucket.params[0].name} to "
            f"{bucket.params[-1].name}; every step must use the parameters of the first one"
        )

    def _named(self, bucket: Bucket, rank: int, index: int) -> BadGradient:
        """The verdict on an element of a bucket, in terms of parameter and step."""
        return BadGradient(
            rank,
            index,
            f"step {self._number}: the gradient of {bucket.name_of(index)} is NaN, infinite or too large for a sum on "
            f"rank {rank} ({self._communicator.topology.hosts[rank]}); lower the learning rate, clip the gradients, or "
            "leave such steps out with DistOpt(non_finite='skip')",
        )

    # -- exceptions --------------------------------------------------------------------------------------------------
    def abandon(self, reason: str) -> None:
        """Collective. End the step without gradients of this rank; the others get an error with the reason."""
        if not self._ended:
            self._leave(UsageError(reason))

    def _leave(self, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        try:
            if self._looks and not self._calling:
                for bucket in self.layout.buckets[len(self._started) :]:
                    for grad in bucket.grads:  # the padding stays zero
                        grad.fill(np.nan)
                self._missing = [0] * len(self._missing)
                self._start_full()
                verdict = self._end()
                if isinstance(verdict, BadGradient):
                    self._refuse(reason)
                if not isinstance(verdict, Doubt):  # the other ranks would not read one now
                    return
        except GradientError:  # another rank has left, too
            return
        except BaseException as second:
            if isinstance(second, CommunicatorError):
                return
        # No other rank calls this collective: they find a mismatch at once, and do not wait.
        topology = self._communicator.topology
        with contextlib.suppress(CommunicatorError):  # this collective is meant to fail
            self._communicator.all_gather(
                np.zeros(1, np.int64),
                np.empty(topology.world_size, np.int64),
                label=f"rank {topology.rank} left step {self._number}: {reason}",
            )

    def _refuse(self, reason: str = "") -> None:
        """Collective. After a bad verdict, find out whether a gradient is unusable or a rank has left the step.

        Args:
            reason: why this rank has left, if it has.

        Raises:
            GradientError: a rank has left.
        """
        self._statistics.skipped += 1
        reasons = self._communicator.all_gather_bytes(reason.encode(), label="why a step failed")
        self._ended = True
        for rank, other in enumerate(reasons):
            if other:
                raise GradientError(
                    f"step {self._number}: rank {rank} ({self._communicator.topology.hosts[rank]}) has no gradients, "
                    f"because of {other.decode()}; no rank has changed its parameters: continue with the next step on "
                    "all ranks, or end all of them",
                    rank=rank,
                )


class Step(GradientCounter):
    """A step in which gradients are averaged over the ranks.

    Attributes:
        states: of the codec, for each bucket.
    """

    def __init__(
        self,
        layout: Layout,
        agreement: Agreement,
        statistics: CommunicationStatistics,
        codec: Codec,
        states: Sequence[CodecState],
        *,
        clip: float | None,
        weight: float,
        ended: Callable[[Verdict], object] | None = None,
    ) -> None:
        """Local.

        Args:
            layout: the buckets.
            agreement: the agreement with the other ranks.
            statistics: see `GradientCounter`.
            codec: how gradients are encoded.
            states: its state for each bucket.
            clip: see `Engine.begin`.
            weight: a factor on the means.
            ended: collective; called with the verdict at the end of the step.
        """
        super().__init__(layout, agreement, statistics, codec.lossy or states[0].check_finite)
        self.states, self._codec, self._clip, self._weight, self._after = states, codec, clip, weight, ended

    def finish_deferred(self, unused: Literal["raise", "zero"] = "raise") -> Verdict:
        """Collective. Finish as `GradientCounter` does, and call what follows a step with its verdict."""
        verdict = super().finish_deferred(unused)
        if self._after is not None:
            self._after(verdict)
        return verdict

    def _start_full(self) -> None:
        """Start full buckets in the order of their indices, which is the same on all ranks."""
        while (index := len(self._started)) < len(self._missing) and not self._missing[index]:
            bucket = self.layout.buckets[index]
            if self._clip is not None:
                bucket.flat.clip(-self._clip, self._clip, out=bucket.flat)
            self._calling = True
            self._started.append(PendingReduction(self._codec, self.states[index]))
            self._calling = False

    def _end(self) -> Verdict:
        """Collective. Wait until all gradients are the means over the ranks."""
        doubts: list[tuple[Bucket, Doubt]] = []
        for bucket, verdict in zip(self.layout.buckets, finish_all(self._started), strict=True):
            if isinstance(verdict, BadGradient):
                return self._named(bucket, verdict.rank, verdict.element)
            if verdict is not None:
                doubts.append((bucket, verdict))
        if self._weight != 1:
            for bucket in self.layout.buckets:
                bucket.flat *= self._weight
        return self._joined(doubts) if doubts else None

    def _joined(self, doubts: Sequence[tuple[Bucket, Doubt]]) -> Doubt:
        """One verdict for all buckets: the first bad one."""

        def read() -> BadGradient | None:
            found = [(bucket, doubt.read()) for bucket, doubt in doubts]  # all: reading updates statistics
            return next((self._named(bucket, bad.rank, bad.element) for bucket, bad in found if bad), None)

        return replace(doubts[0][1], read=read)
