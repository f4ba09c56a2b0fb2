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
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import ClassVar
from weakref import WeakKeyDictionary

from ..comm import Communicator
from ..comm.base import Array
from ..errors import MismatchError, UsageError
from ..recorder.statistics import Statistics
from .kept_arrays import Part
from .reduction import CodecState, Steps

_compared: WeakKeyDictionary[Communicator, set[str]] = WeakKeyDictionary()


class Codec(ABC):
    """A way to encode and reduce a bucket: immutable, picklable, comparable.

    Attributes:
        lossy: whether something of a gradient may stay unsent, so that error feedback has something to feed back. The
            ranks of a lossy codec exchange a header with every reduction; see `CodecState.findings`.
        needs: options by name, each with an example, if one of them must be given.
        dtypes: types of bucket that it can reduce.
        defers: whether its verdict may stay on the device, where the front allows that; see `CodecState.defers`.
    """

    lossy: ClassVar[bool] = True
    needs: ClassVar[Mapping[str, float]] = {}
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    defers: bool = True

    @cached_property
    def kind(self) -> str:
        """Name of the codec. Codecs of one kind differ in options only, and share a `CodecState`."""
        return type(self).__name__

    @property
    def wire_format(self) -> int:
        """Version of the bytes that it sends, where these are a format of its own, else 0. Ranks compare it."""
        return 0

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
            MismatchError: the ranks send other formats.
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
        if self.wire_format:
            _compare_formats(f"{self.kind} in format {self.wire_format}", comm, label)
        if self.lossy:
            state.prepare_header()
        self.prepare(state)
        return state

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
            Where `CodecState.defers`, it may still be on the device.
        """


def _compare_formats(mine: str, comm: Communicator, label: str) -> None:
    """Collective, once for each communicator. Compare the formats of the ranks, which may be of other releases."""
    if mine in _compared.setdefault(comm, set()):
        return
    for rank, theirs in enumerate(comm.all_gather_bytes(mine.encode(), label=f"{label}: format")):
        if theirs.decode() != mine:
            me, hosts = comm.topology.rank, comm.topology.hosts
            raise MismatchError(
                f"rank {rank} ({hosts[rank]}) sends {theirs.decode()}, rank {me} ({hosts[me]}) {mine}; install the "
                "same release of distopt on all hosts"
            )
    _compared[comm].add(mine)
