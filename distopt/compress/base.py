"""What every codec is: a way to turn one bucket into the mean of it over the ranks.

A *bucket* is a flat array that holds gradients. A `Codec` describes a strategy and has no state; `attach` gives
the `Reducer`, which is that strategy at work on one bucket and owns whatever must outlive a step (residual, momentum)
or should not be allocated in one (wire buffers). Every step calls `start` once the bucket is full, and waits for the
`Reduction` when the means are needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from ..comm.base import Work
from ..comm.sparse import dense_wire_bytes
from ..errors import DistoptError, GradientError, StateError, UsageError
from ..kernels import FINDINGS, kernels_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ..comm.base import Array, Communicator

__all__ = ["Codec", "CodecT", "LossyReducer", "Place", "Reducer", "Reduction", "Statistics", "Stopwatch"]


@dataclass
class Statistics:
    """What reductions of a bucket cost on this rank.

    Attributes:
        reductions: how many these are.
        dense_bytes: bytes that this rank would have sent in a bandwidth-optimal all_reduce of the bucket as it is.
        wire_bytes: bytes that it sent, by the same measure: for a dense reduction 2 (n - 1) / n times its size, for a
            gather n - 1 times its own part.
        select_seconds: time in selection, casts and checks before the collective.
        comm_seconds: time in the start of collectives and in waiting for them; what was hidden behind other work is
            not in it.
        decode_seconds: time in casts and checks after the collective. A sparse sum belongs to the collective.
        overflowed: values too large for a 16-bit wire, sent as the largest one.
        underflowed: values other than zero, sent as zero.
        fell_back: reductions of a sparse codec that went dense, because that moves fewer bytes.
    """

    reductions: int = 0
    dense_bytes: int = 0
    wire_bytes: int = 0
    select_seconds: float = 0.0
    comm_seconds: float = 0.0
    decode_seconds: float = 0.0
    overflowed: int = 0
    underflowed: int = 0
    fell_back: int = 0

    def __iadd__(self, other: Statistics) -> Statistics:
        mine = vars(self)
        for name, value in vars(other).items():
            mine[name] += value
        return self

    def __sub__(self, earlier: Statistics) -> Statistics:
        """What was added since `earlier`."""
        before = vars(earlier)
        return Statistics(**{name: value - before[name] for name, value in vars(self).items()})


class Stopwatch:
    """Adds the time since it was made, or since the last call, to one field of a `Statistics`."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._last = perf_counter()

    def book(self, name: str) -> None:
        """Add the time that has passed to the field `name`."""
        now = perf_counter()
        vars(self._statistics)[name] += now - self._last
        self._last = now


@dataclass(frozen=True)
class Place:
    """Where a codec works: the arguments of `Codec.attach`, and whether there is error feedback."""

    bucket: Array
    comm: Communicator
    label: str
    check_finite: bool
    residual: bool = False


class Codec(ABC):
    """A strategy of reduction: immutable, picklable, comparable.

    Attributes:
        lossy: whether something of a gradient may stay unsent, so that error feedback has something to feed back.
        dtypes: types of bucket that it can reduce.
    """

    lossy: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)

    @property
    def kind(self) -> str:
        """Name of the strategy. Codecs of one kind differ in options only, see `retune`."""
        return type(self).__name__

    def attach(self, bucket: Array, comm: Communicator, *, label: str = "", check_finite: bool = True) -> Reducer[Any]:
        """Collective. Put this codec to work on `bucket`.

        Args:
            bucket: flat, contiguous, of a type in `dtypes`, all ranks of equal length; best in wire memory of `comm`.
            comm: what the bytes go through.
            label: name of the bucket in diagnostics.
            check_finite: whether NaN and infinity are looked for. Lossy codecs always do: they could not carry them.

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
        reducer = self._attach(Place(bucket, comm, label, check_finite))
        reducer.kind = self.kind
        return reducer

    def retune(self, reducer: Reducer[Any]) -> None:
        """Local. Let `reducer` go on by this codec's options; residual and other state stay.

        All ranks must do so between the same two reductions.

        Raises:
            UsageError: the reducer was made by a codec of another kind, or the options need error feedback.
        """
        if reducer.kind != self.kind:
            raise UsageError(f"a reducer of {reducer.kind} cannot go on as {self.kind}; attach the new codec instead")
        self._retune(reducer)

    @abstractmethod
    def _attach(self, place: Place) -> Reducer[Any]:
        """`attach`, checked."""

    def _retune(self, reducer: Reducer[Any]) -> None:
        reducer._tune(self)


CodecT = TypeVar("CodecT", bound=Codec)


class Reducer(ABC, Generic[CodecT]):
    """One codec at work on one bucket.

    Attributes:
        bucket: the array that is reduced in place.
        kind: that of the codec which was attached.
        statistics: totals of all finished reductions.
    """

    kind: str

    def __init__(self, codec: CodecT, place: Place) -> None:
        self.bucket = place.bucket
        self.statistics = Statistics()
        self._comm = place.comm
        self._label = place.label
        self._kernels = kernels_of(place.bucket)
        self._state: dict[str, Array] = {}
        self._initial: dict[str, tuple[float, ...]] = {}
        self._residual = self._keep("residual", place.bucket) if place.residual else None
        self._under_way: Reduction | None = None
        self._tune(codec)

    def start(self) -> Reduction:
        """Collective. Encode the bucket and start its reduction; leave the bucket alone until `Reduction.wait`.

        Raises:
            UsageError: the previous reduction has not been waited for.
        """
        if self._under_way is not None:
            raise UsageError(f"bucket {self._label!r} is still being reduced; wait for it before the next start")
        cost = Statistics(reductions=1, dense_bytes=self._dense_bytes(self.bucket.nbytes))
        self._start(cost)
        self._under_way = Reduction(self, cost)
        return self._under_way

    @property
    def residual(self) -> Array | None:
        """What has not been sent yet, with error feedback: the array itself, where the bucket is."""
        return self._residual

    def state_dict(self) -> dict[str, Array]:
        """Local. Copies, in NumPy arrays, of what the next steps depend on; they differ between ranks."""
        return {name: kernels_of(array).to_host(array) for name, array in self._state.items()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Local. Continue from what `state_dict` returned, or from such arrays where the bucket is.

        Raises:
            StateError: see `check_state_dict`; nothing was changed.
        """
        self.check_state_dict(state)
        for name, array in self._state.items():
            kernels_of(array).copy_into(array, state[name])

    def reset(self) -> None:
        """Local. Go back to the state of a new reducer."""
        for name, array in self._state.items():
            _fill(array, self._initial[name])

    def check_state_dict(self, state: Mapping[str, Array]) -> None:
        """Local. Whether `load_state_dict` would accept `state`.

        Raises:
            StateError: names, types or shapes do not fit this bucket.
        """
        if state.keys() != self._state.keys():
            raise StateError(
                f"state of bucket {self._label!r} has {sorted(state)}, its codec keeps {sorted(self._state)}; "
                "load it with the codec that saved it"
            )
        for name, array in self._state.items():
            if state[name].dtype != array.dtype or state[name].shape != array.shape:
                raise StateError(
                    f"{name} of bucket {self._label!r} is {state[name].dtype} of shape {state[name].shape}, not "
                    f"{array.dtype} of shape {array.shape}; load it into the same model and bucket size"
                )

    def _keep(self, name: str, like: Array, initial: tuple[float, ...] = (0.0,)) -> Array:
        """The array `name` of the state: as it is, or new, like another array and of the values `initial`."""
        if name not in self._state:
            self._state[name] = kernels_of(like).empty(like.size, like.dtype)
            _fill(self._state[name], initial)
            self._initial[name] = initial
        return self._state[name]

    def _finish_reduction(self, cost: Statistics, timeout: float | None) -> None:
        try:
            self._finish(cost, timeout)
        finally:
            self._under_way = None
        self.statistics += cost

    def _dense_bytes(self, nbytes: int) -> int:
        return dense_wire_bytes(nbytes, self._comm.topology.world_size)

    def _errors(self, from_bad: Sequence[int], fault: str = "NaN or infinite") -> Iterator[GradientError]:
        """What is wrong, given every rank's `FROM_BAD`."""
        for rank, elements in enumerate(from_bad):
            if elements:
                index = self.bucket.size - elements
                yield GradientError(
                    f"a gradient is {fault}: element {index} of bucket {self._label!r} on rank {rank} "
                    f"({self._comm.topology.hosts[rank]}); lower the learning rate or clip the gradients",
                    rank=rank,
                    index=index,
                )

    @staticmethod
    def _read(array: Array, work: Work) -> list[Any]:
        """The numbers of an array that `work`, which has been waited for, has filled."""
        numbers: list[Any] = array.tolist()
        work.done()  # the host waits for a GPU here only, and a communicator that fails meanwhile leaves rubbish
        return numbers

    def _tune(self, codec: CodecT) -> None:
        """Take over the options of `codec`, and make the state that they need."""
        self._codec = codec

    @abstractmethod
    def _start(self, cost: Statistics) -> None:
        """Encode and start the first collectives."""

    @abstractmethod
    def _done(self) -> bool:
        """Move forward without starting a collective; whether `_finish` would not wait."""

    @abstractmethod
    def _finish(self, cost: Statistics, timeout: float | None) -> None:
        """Wait, decode into the bucket."""


class Reduction(Work):
    """A bucket on its way to being the mean over ranks.

    `wait` is collective: it may start a further collective, so all ranks call `start` and `wait` of all their buckets
    in one order.

    Attributes:
        statistics: what it cost, complete after `wait`.
    """

    def __init__(self, reducer: Reducer[Any], statistics: Statistics) -> None:
        self.statistics = statistics
        self._reducer: Reducer[Any] | None = reducer
        self._error: DistoptError | None = None

    def done(self) -> bool:
        """Local. Move the reduction forward without waiting; whether `wait` would return without waiting."""
        return self._reducer is None or self._reducer._done()

    def wait(self, timeout: float | None = None) -> None:
        """Collective. Wait until the bucket holds the mean over ranks.

        Raises:
            GradientError: a rank's gradient was NaN or infinite; raised on every rank, and the communicator stays
                usable. The bucket holds no mean then, and of this step's gradients part may be lost.
        """
        if self._error is not None:
            raise self._error
        if self._reducer is None:
            return
        reducer, self._reducer = self._reducer, None
        try:
            reducer._finish_reduction(self.statistics, timeout)
        except DistoptError as error:
            self._error = error
            raise


class LossyReducer(Reducer[CodecT]):
    """A reducer whose ranks tell each other a few numbers with every reduction.

    These make an unusable gradient an error on every rank at once, in place of one that ends and others that wait for
    it, and they carry the lengths of ragged lists.
    """

    _FIELDS = 3  # of the findings: all but the last are for the others

    def __init__(self, codec: CodecT, place: Place) -> None:
        super().__init__(codec, place)
        # Everyone's headers and then the own findings, so that the host reads both at once.
        gathered = self._FIELDS * place.comm.topology.world_size
        self._report = place.comm.empty(gathered + FINDINGS, "int64")
        self._headers, self._findings = self._report[:gathered], self._report[gathered:]
        self._header = self._findings[: self._FIELDS]
        self._header_work: Work

    def _start_header(self, cost: Statistics) -> None:
        self._header_work = self._comm.all_gather(self._header, self._headers, label=self._label)
        cost.wire_bytes += self._header.nbytes * (self._comm.topology.world_size - 1)

    def _wait_header(self, cost: Statistics, timeout: float | None) -> tuple[list[int], bool, GradientError | None]:
        """List lengths per rank, whether any saturated a value, and what is wrong with the gradients, if it is."""
        self._header_work.wait(timeout)
        report = self._read(self._report, self._header_work)
        counts, overflowed, from_bad = (report[field : -FINDINGS : self._FIELDS] for field in range(self._FIELDS))
        cost.overflowed = overflowed[self._comm.topology.rank]
        cost.underflowed = report[-1]
        return counts, any(overflowed), next(self._errors(from_bad), None)


def _fill(array: Array, values: tuple[float, ...]) -> None:
    if len(values) == 1:
        array.fill(values[0])
    else:
        array[...] = values
