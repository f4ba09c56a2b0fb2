"""The state of a bucket during its lifetime: the arrays that codecs of one kind use on it, and keep between steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from math import prod
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ..checks import check_like
from ..comm import Communicator, Work
from ..comm.base import Array, RaggedWork, ReduceOp
from ..comm.sparse import dense_wire_bytes, sparse_all_reduce
from ..errors import GradientError, StateError
from ..kernels import FINDINGS, FROM_BAD, array_module, kernels_of
from .statistics import Statistics

States: TypeAlias = "dict[str, Array]"  # by "NAME/PARAMETER"

WorkT = TypeVar("WorkT", bound=Work)

_FIELDS = 3  # number of findings that the other ranks get: all but the last


class Part(NamedTuple):
    """Where a parameter's gradient lies in its bucket: `offset` is an element index."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


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
    """A verdict that is still on the device, where it can gate what follows; see `CodecState.defers`.

    Attributes:
        flag: bool [], on the device: whether the gradient of any rank was unusable.
        read: local; gives the verdict, once the device has got to it.
    """

    flag: Array
    read: Callable[[], BadGradient | None]


Verdict: TypeAlias = "BadGradient | Doubt | None"


class Header(NamedTuple):
    """The data that ranks exchange beside a lossy reduction.

    Attributes:
        counts: lengths of the lists, by rank.
        overflowed: whether any rank saturated a value.
        verdict: the error in the gradients, if there is one.
    """

    counts: list[int]
    overflowed: bool
    verdict: BadGradient | None


class CodecState:
    """One bucket as codecs of one kind see it. Codecs are options; all state that outlives a step is here.

    Attributes:
        kind: `Codec.kind` of the attached codec.
        bucket: flat array, reduced in place; elements between and behind the parts are zero and stay zero.
        parts: the parameters in it.
        names: the names of these parameters.
        size: number of elements of the parts, without padding.
        dense_bytes: bytes that each rank sends in a bandwidth-optimal all_reduce of the bucket.
        label: name of the bucket in diagnostics.
        check_finite: whether a codec that could carry NaN and infinity looks for them.
        comm: the communicator, to be used by the methods here, which count bytes.
        topology: the topology of the communicator.
        empty: gives wire memory, as `Communicator.empty` does; collective.
        wire_label: the label of the collectives that follow, equal on all ranks; communicators compare it.
        kernels: passes over arrays like the bucket.
        memory: wire memory and scratch of the codec, by name; not part of the state.
        findings: int64 [4], the results of a pass over the bucket; see `kernels.base`. Only with headers.
        statistics: totals of all reductions.
        pending: the `Work` that the reduction in progress waits for.
        renewed: names of arrays that replace others in the state, once the verdict on the step is known.
        defers: whether a reduction may leave its verdict on the device, as a `Doubt`.
    """

    defers = False

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
        """Local. See `Codec.attach`."""
        self.kind, self.bucket, self.label, self.check_finite = kind, bucket, label, check_finite
        self.parts = tuple(parts) or (Part(label, 0, (bucket.size,)),)
        self.names = {part.name for part in self.parts}
        self.size = sum(part.size for part in self.parts)
        self.statistics = Statistics() if statistics is None else statistics
        self.comm, self.topology, self.wire_label = comm, comm.topology, label
        self.empty = empty or comm.empty
        self.dense_bytes = dense_wire_bytes(bucket.nbytes, comm.topology.world_size)
        self.kernels = kernels_of(bucket)
        self.memory: dict[str, Any] = {}
        self.findings: Array = None
        self.pending: Work | None = None
        self.renewed: set[str] = set()
        self._accepted: set[str] = set()  # those of the last step
        self._state: dict[str, Array] = {}  # by name, or by "NAME/PARAMETER" if it belongs to one parameter
        self._initial: dict[str, Array | None] = {}
        self._new: dict[str, Array] = {}  # spare arrays, which replace arrays of the state with these names
        self._loaded: States = {}  # arrays that no options have used yet

    # -- state -------------------------------------------------------------------------------------------------------
    @property
    def residual(self) -> Array | None:
        """With error feedback, gradients not sent before this step: the array itself, on the bucket's device."""
        return self._state.get("residual")

    def keep(self, name: str, initial: Array | None = None, part: Part | None = None) -> Array:
        """Local. The array `name` of the state. The first call makes it: of `initial`, or of zeros like the bucket.

        Saved states do not depend on which parameters share a bucket. So an array made of `initial` either belongs to
        one `part`, or holds for all parts equally.
        """
        name = name if part is None else f"{name}/{part.name}"
        array = self._state.get(name)
        if array is None:
            if initial is None:
                array = self.kernels.empty(self.bucket.size, self.bucket.dtype)
                array.fill(0)
            else:
                array = initial.copy()
            self._state[name], self._initial[name] = array, initial
            self._claim()
        return array

    def renew(self, name: str, initial: Array | None = None, part: Part | None = None) -> tuple[Array, Array]:
        """Local. The current array, which `keep` gives, and one to fill, which `accept` makes the current one."""
        old = self.keep(name, initial, part)
        name = name if part is None else f"{name}/{part.name}"
        if name not in self._new:
            self._new[name] = array_module(old).empty_like(old)
        self.renewed.add(name)
        return old, self._new[name]

    def renew_residual(self) -> tuple[Array, Array] | tuple[None, None]:
        """Local. `renew` of the residual, if there is error feedback."""
        return (None, None) if self.residual is None else self.renew("residual")

    def accept(self, unless: Array | None = None) -> None:
        """Local. Make the renewed arrays current: all gradients of the step are good, also in other buckets.

        Args:
            unless: bool [], on the device, if only that knows: where it is true, the arrays keep their values.
        """
        for name in self.renewed:
            if unless is not None:
                self.kernels.copy_where(unless, self._state[name], self._new[name])
            self._state[name], self._new[name] = self._new[name], self._state[name]
        self._accepted, self.renewed = self.renewed, set()

    def take_back(self) -> None:
        """Local. Undo `accept`, before the next reduction: the step is not taken after all."""
        for name in self._accepted:
            self._state[name], self._new[name] = self._new[name], self._state[name]
        self._accepted = set()

    @property
    def may_doubt(self) -> bool:
        """Local. Whether the verdict may be a `Doubt`: all that the step renews is on the device."""
        return self.defers and not any(isinstance(self._new[name], np.ndarray) for name in self.renewed)

    def state_dict(self) -> States:
        """Local. Copies, in NumPy arrays, of the state that the next steps depend on; they differ between ranks."""
        views = {key: kernels_of(view).to_host(view) for key, view in self._views().items()}
        return {key: array.copy() for key, array in self._loaded.items()} | views

    def load_state_dict(self, state: States) -> None:
        """Local. Continue from the result of `state_dict`, perhaps under other options of the codec.

        Arrays that these do not use are kept for options that do; missing arrays begin anew.

        Raises:
            StateError: see `check_state_dict`; nothing was changed.
        """
        self.check_state_dict(state)
        self._loaded = dict(state)
        self._claim()

    def _claim(self) -> None:
        for key, view in self._views().items():
            if key in self._loaded:
                given = self._loaded.pop(key)
                check_like(f"{key} of bucket {self.label!r}", view, given)
                kernels_of(view).copy_into(view, given)

    @property
    def has_unused_states(self) -> bool:
        """Local. Whether arrays were loaded that no options have used yet."""
        return bool(self._loaded)

    def reset(self) -> None:
        """Local. Return to the initial state."""
        self._loaded.clear()
        for name, array in self._state.items():
            array[...] = 0 if self._initial[name] is None else self._initial[name]

    def check_state_dict(self, state: States) -> None:
        """Local. Whether `load_state_dict` would accept `state`.

        Raises:
            StateError: parameters, types or shapes do not fit this bucket, or nothing is there that the codec keeps.
        """
        views, names = self._views(), {key.split("/", 1)[0] for key in state}
        expected = {key: view for key, view in views.items() if key.split("/", 1)[0] in names}
        if (
            expected.keys() - state.keys()
            or bool(expected) < bool(views)
            or {key.split("/", 1)[1] for key in state} - self.names
        ):
            raise StateError(
                f"state of bucket {self.label!r} has {sorted(state)}, its codec keeps {sorted(views)}; load it with "
                "the codec that saved it"
            )
        for key, view in expected.items():
            check_like(f"{key} of bucket {self.label!r}", view, state[key])

    def _views(self) -> States:
        """The state by "NAME/PARAMETER". An array that all parts share appears once for each part."""
        views: States = {}
        for name, array in self._state.items():
            if "/" in name:
                views[name] = array
                continue
            like_bucket = self._initial[name] is None
            for part in self.parts:
                place = slice(part.offset, part.offset + part.size)
                views[f"{name}/{part.name}"] = array[place].reshape(part.shape) if like_bucket else array
        return views

    # -- collectives -------------------------------------------------------------------------------------------------
    def all_reduce(self, array: Array, op: ReduceOp, *, wire: str | None = None, find_nonfinite: bool = False) -> Work:
        """Collective. See `Communicator.all_reduce`."""
        n_bytes = dense_wire_bytes(array.nbytes, self.topology.world_size)
        return self._counted(n_bytes, self.comm.all_reduce, array, op, wire=wire, find_nonfinite=find_nonfinite)

    def all_gather(self, array: Array, out: Array) -> Work:
        """Collective. See `Communicator.all_gather`."""
        return self._counted(array.nbytes * (self.topology.world_size - 1), self.comm.all_gather, array, out)

    def all_to_all_ragged(self, parts: Sequence[Array]) -> RaggedWork:
        """Collective. See `Communicator.all_to_all_ragged`."""
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

    # -- findings ----------------------------------------------------------------------------------------------------
    def prepare_header(self) -> None:
        """Collective. Make the memory of findings and headers."""
        gathered = _FIELDS * self.topology.world_size
        # The headers of all ranks, then the findings of this one, so that the host reads both at once.
        self._report = self.empty(gathered + FINDINGS, "int64", xp=array_module(self.bucket))
        self._report.fill(0)
        self._headers, self.findings = self._report[:gathered], self._report[gathered:]

    def send_header(self) -> Work:
        """Collective. Start to exchange the findings, except for the last one, with all ranks."""
        return self.all_gather(self.findings[:_FIELDS], self._headers)

    def read_header(self, work: Work, fault: str = "NaN or infinite") -> Header:
        """Local. The findings of all ranks, after the wait for `work` of `send_header`; `fault` is for errors."""
        return self._header(self.read(self._report, work), fault)

    def _header(self, report: list[Any], fault: str) -> Header:
        counts, overflowed, from_bad = (report[field:-FINDINGS:_FIELDS] for field in range(_FIELDS))
        self.statistics.overflowed += overflowed[self.topology.rank]
        self.statistics.underflowed += report[-1]
        return Header(counts, any(overflowed), self.verdict(from_bad, fault))

    def doubt(self, work: Work, fault: str = "NaN or infinite") -> Doubt:
        """Local. As `read_header`, with the verdict left on the device."""
        arrived = self.kernels.fetch(self._report)

        def read() -> BadGradient | None:
            report = arrived().tolist()
            work.done()  # as in `read`
            return self._header(report, fault).verdict

        return Doubt(self._headers[FROM_BAD::_FIELDS].any(), read)

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
