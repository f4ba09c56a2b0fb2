"""The interface of codecs: ways to replace a bucket of gradients by its mean over the ranks.

A *bucket* is a flat array of gradients. A `Codec` is a set of frozen options with two methods. `prepare` runs once for
a bucket and completes its `CodecState`: wire memory, residual and all that outlives a step. `reduce` is a generator
that runs in every step and reads as the algorithm in its paper: it encodes, starts collectives, yields every `Work`
that it waits for, decodes, and returns its verdict.

A `PendingReduction` drives one such generator through one step. The code before the first `yield` runs as soon as the
bucket is full, in the middle of the backward pass; so it must not wait for other ranks. The rest may start further
collectives, which must come in the same order on all ranks: **a generator is resumed only at points that are the same
on all ranks**, after the last gradient, in rounds, in the order of the buckets (`finish_all`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from operator import attrgetter, or_
from time import perf_counter
from typing import ClassVar, TypeAlias

from ..comm import Communicator, Work
from ..comm.base import Array
from ..errors import UsageError
from ..timeline import timeline
from .state import BadGradient, CodecState, Doubt, Part, Verdict
from .statistics import Statistics

# The steps of a reduction: each Work is waited for before the next step; the value is the verdict, None if all is well.
Steps: TypeAlias = "Generator[Work, None, Verdict]"


class Codec(ABC):
    """A way to encode and reduce a bucket: immutable, picklable, comparable.

    Attributes:
        lossy: whether something of a gradient may stay unsent, so that error feedback has something to feed back. The
            ranks of a lossy codec exchange a header with every reduction; see `CodecState.findings`.
        needs: by name, options of which one must be given, each with an example.
        dtypes: types of bucket that it can reduce.
    """

    lossy: ClassVar[bool] = True
    needs: ClassVar[Mapping[str, float]] = {}
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)

    @cached_property
    def kind(self) -> str:
        """Name of the codec. Codecs of one kind differ in options only, and share a `CodecState`."""
        return type(self).__name__

    def attach(
        self,
        bucket: Array,
        comm: Communicator,
        *,
        parts: Sequence[Part] = (),
        label: str = "",
        check_finite: bool = True,
        statistics: Statistics | None = None,
        empty: Callable[..., Array] | None = None,
    ) -> CodecState:
        """Collective. Make all that this kind of codec needs for `bucket` and keeps from step to step.

        Args:
            bucket: flat, contiguous, of a type in `dtypes`, all ranks of equal length; best in wire memory of `comm`.
            comm: the communicator to send by.
            parts: where the parameters lie in it, with zeros between them (default: one parameter that fills it).
            label: name of the bucket in diagnostics.
            check_finite: whether to check for NaN and infinity. Lossy codecs always do: they cannot carry them.
            statistics: where costs are added (default: new ones).
            empty: gives wire memory in place of `Communicator.empty`.

        Raises:
            UsageError: the array cannot be a bucket, or the codec's options need error feedback.
        """
        dtype = str(getattr(bucket, "dtype", type(bucket).__name__))
        if dtype not in self.dtypes:
            raise UsageError(
                f"{label or 'a bucket'} of {dtype} cannot be reduced by {self.kind}, which takes "
                f"{' and '.join(self.dtypes)}"
            )
        # CuPy's arrays are all writable.
        if bucket.ndim != 1 or not bucket.flags.c_contiguous or not getattr(bucket.flags, "writeable", True):
            raise UsageError(f"a bucket of shape {bucket.shape} is not a flat, contiguous, writable array")
        state = CodecState(self.kind, bucket, comm, parts, label, check_finite, statistics, empty)
        if self.lossy:
            state.prepare_header()
        self.prepare(state)
        return state

    def start(self, state: CodecState) -> PendingReduction:
        """Collective. Encode the bucket of `state` and start its reduction; do not touch the bucket until the end.

        The options may differ from those of the step before, equally on all ranks; residual and other state stay.

        Raises:
            UsageError: the state is of another kind of codec, the previous reduction has not been finished, or the
                options need error feedback.
            CommunicatorError: the previous reduction has failed.
        """
        if state.kind != self.kind:
            raise UsageError(f"a state of {state.kind} cannot continue as {self.kind}; attach the new codec instead")
        if state.pending is not None:
            state.pending.done()  # raises a better error if the communicator has failed
            raise UsageError(
                f"bucket {state.label!r} is still being reduced; wait for it before the next start, or make a new "
                "DistOpt where an exception has ended the step"
            )
        return PendingReduction(self, state)

    def prepare(self, state: CodecState) -> None:  # noqa: B027 - a codec without memory or state has nothing to do
        """Collective. Make wire memory and state.

        Raises:
            UsageError: the options cannot be used on this bucket, or need error feedback.
        """

    @abstractmethod
    def reduce(self, state: CodecState) -> Steps:
        """Collective. The steps that replace the bucket by its mean over the ranks.

        Returns:
            The verdict, the same on all ranks: None, or whose gradient was unusable. The bucket holds no mean then.
            Where `CodecState.defers`, it may be a `Doubt`.
        """


class PendingReduction:
    """One step's reduction of a bucket to its mean over the ranks.

    Attributes:
        state: the `CodecState` of the bucket.
        finished: whether the codec has finished: the bucket holds the mean, unless the verdict is a bad gradient.
        verdict: the result of `Codec.reduce`, when it has finished.
    """

    def __init__(self, codec: Codec, state: CodecState) -> None:
        """Collective. Run up to the first wait."""
        self.finished = False
        self.verdict: Verdict = None
        self.state = state
        state.renewed.clear()  # a step without an update may have left some
        self._steps = codec.reduce(state)
        cost, began = state.statistics, perf_counter()
        before = cost.comm_seconds
        self._run()
        self._sent = perf_counter()  # when the last collective was started
        cost.select_seconds += self._sent - began - (cost.comm_seconds - before)
        self._number = state.comm.flight.last if state.comm.flight is not None else 0  # of the last of them
        if timeline.is_on:
            timeline.add("encode", began, self._sent, bucket=state.label)
        cost.dense_bytes += state.dense_bytes

    def resume(self) -> None:
        """Collective. Wait for the `Work` that the codec waits for, and run up to its next wait or its end.

        An error of the communicator is raised by every further call.
        """
        pending = self.state.pending
        if self.finished or pending is None:
            return
        cost, began, flight = self.state.statistics, timeline.begin_wait(), self.state.comm.flight
        pending.wait()
        waited, before = perf_counter(), cost.comm_seconds
        last = flight.last if flight is not None else 0
        self._run()
        decoded = perf_counter()
        cost.decode_seconds += decoded - waited - (cost.comm_seconds - before)
        cost.comm_seconds += waited - began
        if timeline.is_on:
            label = self.state.label
            timeline.add("wait", began, waited, bucket=label)
            started = flight is not None and flight.last != last
            if self.finished or started:  # all earlier collectives have ended
                arrived = waited if flight is None else flight.ended(self._number, waited)
                timeline.add("wire", self._sent, arrived, label, bucket=label)
                timeline.add("decode", waited, decoded, bucket=label)
                self._sent, self._number = decoded, flight.last if flight is not None else 0

    def _run(self) -> None:
        try:
            self.state.pending = next(self._steps)
        except StopIteration as end:
            self.verdict, self.finished, self.state.pending = end.value, True, None
            self.state.statistics.reductions += 1
        except BaseException as error:
            self._steps = _failed(error)  # a generator that has raised would look like one that has finished
            raise


def _failed(error: BaseException) -> Steps:
    yield from ()
    raise error


def finish_all(reductions: Sequence[PendingReduction]) -> list[Verdict]:
    """Collective. Finish reductions that are under way together, in rounds and in their order; return their verdicts.

    If one verdict is bad, the states of all codecs stay as they were. The flags of all `Doubt`s are one.
    """
    under_way = True
    while under_way:
        under_way = False
        for reduction in reductions:
            reduction.resume()
            under_way |= not reduction.finished
    verdicts = list(map(attrgetter("verdict"), reductions))
    if any(isinstance(verdict, BadGradient) for verdict in verdicts):
        return verdicts
    doubts = [verdict for verdict in verdicts if isinstance(verdict, Doubt)]
    flag = reduce(or_, [doubt.flag for doubt in doubts]) if doubts else None
    for each in reductions:
        if each.state.renewed:
            each.state.accept(unless=flag)
    return [replace(verdict, flag=flag) if isinstance(verdict, Doubt) else verdict for verdict in verdicts]
