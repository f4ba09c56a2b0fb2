"""The reductions of one bucket: what a codec reduces it with, and the driver of its steps.

A `CodecState` has the collectives that a codec may call, which count bytes and time, and the verdict on the gradients.
A `PendingReduction` drives the generator of `Codec.reduce` through one step: see `distopt.codecs.base`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from time import perf_counter
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from ..comm import Communicator, Work
from ..comm.base import Array, DoneWork, RaggedWork, ReduceOp
from ..comm.sparse import dense_wire_bytes, sparse_all_reduce
from ..errors import GradientError, UsageError
from ..kernels import FINDINGS, array_module
from ..recorder.statistics import Statistics
from ..recorder.timeline import timeline
from .kept_arrays import KeptArrays, Part

WorkT = TypeVar("WorkT", bound=Work)

_FIELDS = 3  # number of findings that the other ranks get: all but the last


class BadGradient(NamedTuple):
    """The verdict on a reduction that failed, the same on all ranks: which rank's gradient was unusable.

    Attributes:
        rank: the rank at fault.
        element: its index in the bucket.
        text: the error, in a sentence with the cure.
    """

    rank: int
    element: int
    text: str

    def error(self) -> GradientError:
        """The verdict as an exception."""
        return GradientError(self.text, rank=self.rank, index=self.element)


@dataclass(frozen=True)
class Doubt:
    """A verdict that is still on the device, where it can gate what follows; see `CodecState.read_header`.

    Attributes:
        headers: int64 [3 * ranks], on the device: the headers of the reduction.
        read: local; gives the verdict, once the device has got to it.
        flag: bool [], on the device, from `finish_all`: whether a gradient of any of its reductions was unusable.
    """

    headers: Array
    read: Callable[[], BadGradient | None]
    flag: Array | None = None


Verdict: TypeAlias = "BadGradient | Doubt | None"


class Header(NamedTuple):
    """The data that ranks exchange beside a lossy reduction.

    Attributes:
        verdict: the error in the gradients, if there is one; or a `Doubt`, where the host has not read the rest.
        counts: lengths of the lists, by rank.
        overflowed: whether any rank saturated a value.
    """

    verdict: Verdict
    counts: Sequence[int] = ()
    overflowed: bool = False

    @property
    def is_bad(self) -> bool:
        """Whether the gradients are known to be unusable."""
        return isinstance(self.verdict, BadGradient)


class CodecState(KeptArrays):
    """One bucket as codecs of one kind see it. Codecs are options; all state that outlives a step is here.

    Attributes:
        kind: `Codec.kind` of the attached codec.
        dense_bytes: bytes that each rank sends in a bandwidth-optimal all_reduce of the bucket.
        check_finite: whether a codec that could carry NaN and infinity looks for them.
        comm: the communicator, to be used by the methods here, which count bytes.
        topology: the topology of the communicator.
        empty: gives wire memory, as `Communicator.empty` does; collective.
        defers: whether `read_header` may leave the verdict on the device.
        wire_label: the label of the collectives that follow, equal on all ranks; communicators compare it.
        memory: wire memory and scratch of the codec, by name; not part of the state.
        findings: int64 [4], the results of a pass over the bucket; see `kernels.base`. Only with headers.
        statistics: totals of all reductions.
        pending: the `Work` that the reduction in progress waits for.
    """

    def __init__(
        self,
        kind: str,
        bucket: Array,
        comm: Communicator,
        parts: Sequence[Part],
        label: str,
        check_finite: bool,
        statistics: Statistics | None,
        empty: Callable[..., Array] | None,
    ) -> None:
        """Local. The arguments are those of `Codec.attach`, which completes the state."""
        super().__init__(bucket, parts, label)
        self.kind, self.check_finite = kind, check_finite
        self.statistics = Statistics() if statistics is None else statistics
        self.comm, self.topology, self.wire_label = comm, comm.topology, label
        self.empty = empty or comm.empty
        self.defers = False
        self.dense_bytes = dense_wire_bytes(bucket.nbytes, comm.topology.world_size)
        self.memory: dict[str, Any] = {}
        self.findings: Array = None
        self.pending: Work | None = None

    # -- collectives -------------------------------------------------------------------------------------------------
    def all_reduce(self, array: Array, op: ReduceOp, *, wire: str | None = None, find_nonfinite: bool = False) -> Work:
        """Collective. Start to reduce an array, as `Communicator.all_reduce`; counts its bytes."""
        n_bytes = dense_wire_bytes(array.nbytes, self.topology.world_size)
        return self._counted(n_bytes, self.comm.all_reduce, array, op, wire=wire, find_nonfinite=find_nonfinite)

    def all_gather(self, array: Array, out: Array) -> Work:
        """Collective. Start to gather arrays, as `Communicator.all_gather`; counts their bytes."""
        return self._counted(array.nbytes * (self.topology.world_size - 1), self.comm.all_gather, array, out)

    def all_to_all_ragged(self, parts: Sequence[Array]) -> RaggedWork:
        """Collective. Start to exchange arrays, as `Communicator.all_to_all_ragged`; counts their bytes."""
        n_bytes = sum(part.nbytes for rank, part in enumerate(parts) if rank != self.topology.rank)
        return self._counted(n_bytes, self.comm.all_to_all_ragged, parts)

    def sparse_all_reduce(self, indices: Array, values: Array, counts: Sequence[int]) -> Generator[Work, None, None]:
        """Collective. Replace the bucket by the mean of the ranks' lists; see `comm.sparse.sparse_all_reduce`."""
        self.statistics.wire_bytes += yield from sparse_all_reduce(
            self.comm, indices, values, self.bucket, counts, scale=1 / len(counts), label=self.wire_label
        )

    def _counted(self, n_bytes: int, start: Callable[..., WorkT], *args: Any, **options: Any) -> WorkT:
        began = perf_counter()
        work = start(*args, label=self.wire_label, **options)
        self.statistics.wire_bytes += n_bytes
        self.statistics.comm_seconds += perf_counter() - began
        return work

    def wait(self, work: Work) -> float:
        """Wait for `work`, and record the time; when the wait ended, by `perf_counter`."""
        began = timeline.begin_wait() if timeline.is_on else perf_counter()
        work.wait()
        ended = perf_counter()
        self.statistics.comm_seconds += ended - began
        if timeline.is_on:
            timeline.end_wait("wait", began, ended, bucket=self.label)
        return ended

    # -- findings ----------------------------------------------------------------------------------------------------
    def prepare_header(self) -> None:
        """Collective. Make the memory of findings and headers."""
        ranks = self.topology.world_size
        gathered = _FIELDS * ranks
        # The headers of all ranks, then the findings of this one, so that the host reads both at once. The findings of
        # a rank alone are its header.
        begin = gathered if ranks > 1 else 0
        self._report = self.empty(begin + FINDINGS, "int64", xp=array_module(self.bucket))
        self._report.fill(0)
        self._headers, self.findings = self._report[:gathered], self._report[begin:]

    def send_header(self) -> Work:
        """Collective. Start to exchange the findings, except for the last one, with all ranks."""
        if self.topology.world_size == 1:
            return DoneWork()
        return self.all_gather(self.findings[:_FIELDS], self._headers)

    def read_header(self, work: Work, fault: str = "NaN or infinite", *, may_stay: bool = False) -> Header:
        """Local. The findings of all ranks, after the wait for `work` of `send_header`; `fault` is for errors.

        If it `may_stay` on the device, and all that the step renews is there, the verdict may be a `Doubt`.
        """
        if not (may_stay and self.defers) or any(isinstance(self._new[name], np.ndarray) for name in self.renewed):
            return self._header(self.read(self._report, work), fault)
        arrived = self.kernels.fetch(self._report)

        def read() -> BadGradient | None:
            report = arrived().tolist()
            work.done()  # as in `read`
            verdict = self._header(report, fault).verdict
            return verdict if isinstance(verdict, BadGradient) else None

        return Header(Doubt(self._headers, read))

    def _header(self, report: list[Any], fault: str) -> Header:
        end = _FIELDS * self.topology.world_size
        counts, overflowed, from_bad = (report[field:end:_FIELDS] for field in range(_FIELDS))
        self.statistics.overflowed += overflowed[self.topology.rank]
        self.statistics.underflowed += report[-1]
        return Header(self.verdict(from_bad, fault), counts, any(overflowed))

    def verdict(self, from_bad: Sequence[int], fault: str) -> BadGradient | None:
        """Local. The verdict on the gradients, given every rank's `FROM_BAD`."""
        for rank, elements in enumerate(from_bad):
            if elements:
                index = self.bucket.size - elements
                return BadGradient(
                    rank,
                    index,
                    f"a gradient is {fault}: element {index} of bucket {self.label!r} on rank {rank} "
                    f"({self.topology.hosts[rank]}); lower the learning rate or clip the gradients",
                )
        return None

    @staticmethod
    def read(array: Array, work: Work) -> list[Any]:
        """Local. The numbers in an array that `work` has filled, after the wait for `work`."""
        numbers: list[Any] = array.tolist()
        work.done()  # raises if the communicator has failed: tolist, which waits for a GPU, has read garbage then
        return numbers


# The steps of a reduction: each Work is waited for before the next step; the value is the verdict, None if all is well.
# After a None, the last step changes the state in place: it is taken once the verdicts on all buckets are good.
Steps: TypeAlias = "Generator[Work | None, None, Verdict]"


class Reduces(Protocol):
    """A `Codec`, for this file."""

    @property
    def kind(self) -> str:
        """Name of the codec: the same as of its states."""

    def reduce(self, state: CodecState) -> Steps:
        """Collective. The steps that replace the bucket by its mean over the ranks."""


class PendingReduction:
    """One step's reduction of a bucket to its mean over the ranks.

    Attributes:
        state: the `CodecState` of the bucket.
        finished: whether the codec has finished: the bucket holds the mean, unless the verdict is a bad gradient.
        verdict: the result of `Codec.reduce`, when it has finished.
    """

    def __init__(self, codec: Reduces, state: CodecState) -> None:
        """Collective. Encode the bucket of `state` and start its reduction; do not touch the bucket until the end.

        The options of `codec` may differ from those of the step before, equally on all ranks; residual and other state
        stay.

        Raises:
            UsageError: the state is of another kind of codec, the previous reduction has not been finished, or the
                options need error feedback.
            CommunicatorError: the previous reduction has failed.
        """
        if state.kind != codec.kind:
            raise UsageError(f"a state of {state.kind} cannot continue as {codec.kind}; attach the new codec instead")
        if state.pending is not None:
            state.pending.done()  # raises a better error if the communicator has failed
            raise UsageError(
                f"bucket {state.label!r} is still being reduced; wait for it before the next start, or make a new "
                "DistOpt where an exception has ended the step"
            )
        self.finished = False
        self.verdict: Verdict = None
        self.state = state
        state.renewed.clear()  # a step without an update may have left some
        self._steps = codec.reduce(state)
        self._sent, self._number = perf_counter(), 0  # when the last collective was started; its number
        state.statistics.select_seconds += self._run("encode", self._sent)
        state.statistics.dense_bytes += state.dense_bytes

    def resume(self) -> None:
        """Collective. Wait for the `Work` that the codec waits for, and run up to its next wait or its end.

        An error of the communicator is raised by every further call.
        """
        state = self.state
        if not self.finished and state.pending is not None:
            state.statistics.decode_seconds += self._run("decode", state.wait(state.pending))

    def conclude(self, *, take: bool) -> None:
        """Local. Take or leave out the last step, which has waited for the verdicts on the other buckets."""
        if take:
            self.state.statistics.decode_seconds += self._run("decode", perf_counter())
        else:
            self._steps.close()
            self.finished = True

    def _run(self, part: str, began: float) -> float:
        """Run the codec up to its next wait or its end; the seconds since `began`, except for starts of collectives."""
        cost, last = self.state.statistics, self._last() if timeline.is_on else 0
        before = cost.comm_seconds
        try:
            self.state.pending = next(self._steps)
        except StopIteration as end:
            self.verdict, self.finished, self.state.pending = end.value, True, None
            cost.reductions += 1
        except BaseException as error:
            self._steps = _failed(error)  # a generator that has raised would look like one that has finished
            raise
        ended = perf_counter()
        if timeline.is_on:
            self._record(part, began, ended, last)
        return ended - began - (cost.comm_seconds - before)

    def _last(self) -> int:
        flight = self.state.comm.flight
        return 0 if flight is None else flight.last  # the number of the last collective

    def _record(self, part: str, began: float, ended: float, last: int) -> None:
        label, flight, now = self.state.label, self.state.comm.flight, self._last()
        if part == "decode":
            if not self.finished and now == last:
                return  # collectives that were started earlier are still under way
            arrived = began if flight is None else flight.end_time(self._number, began)
            timeline.add("wire", self._sent, arrived, label, bucket=label)
        timeline.add(part, began, ended, bucket=label)
        self._sent, self._number = ended, now


def _failed(error: BaseException) -> Steps:
    yield from ()
    raise error


def finish_all(reductions: Sequence[PendingReduction]) -> list[Verdict]:
    """Collective. Finish reductions that are under way together, in rounds and in their order; return their verdicts.

    If one verdict is bad, the states of all codecs stay as they were. All `Doubt`s get one flag.
    """
    under_way = True
    while under_way:
        under_way = False
        for reduction in reductions:
            reduction.resume()
            under_way |= reduction.state.pending is not None
    is_bad = any(isinstance(reduction.verdict, BadGradient) for reduction in reductions)
    for reduction in reductions:
        if not reduction.finished:
            reduction.conclude(take=not is_bad)
    verdicts = list(map(attrgetter("verdict"), reductions))
    if is_bad:
        return verdicts
    doubts = [verdict for verdict in verdicts if isinstance(verdict, Doubt)]
    flag = reductions[0].state.kernels.any_bad([doubt.headers for doubt in doubts]) if doubts else None
    for each in reductions:
        if each.state.renewed:
            each.state.accept(unless=flag)
    return [replace(verdict, flag=flag) if isinstance(verdict, Doubt) else verdict for verdict in verdicts]
