"""Buckets: flat runs of gradients in wire memory, so that one collective carries many parameters.

A parameter's gradient *is* a view of its bucket: autograd writes it there, the communicator reduces it there and the
optimizer reads it there. Adding a gradient to a bucket is therefore counting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from ..comm.sparse import dense_wire_bytes
from ..compress import Statistics, Stopwatch
from ..errors import StateError, UsageError
from ..kernels import kernels_of
from ..nn.tensor import Tensor
from .placement import wire_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..comm.base import Array, Communicator
    from ..compress import Codec, Reducer

__all__ = ["Bucket", "Layout", "LayoutStates", "plan"]

# Arrays that a reducer keeps between steps, by name; reducers by kind of codec, buckets by index.
BucketStates: TypeAlias = "dict[str, dict[str, Array]]"
LayoutStates: TypeAlias = dict[int, BucketStates]

PARAMETERS = "parameters"  # the kind of reduction that `Bucket.average_params` is, in statistics


def plan(params: Sequence[Tensor], threshold: int) -> list[list[Tensor]]:
    """Group parameters, in the order in which their gradients become final, into buckets.

    SINGA's rule: a parameter larger than `threshold` elements goes alone; smaller ones are fused until their sum
    passes it. Groups hold one dtype each.

    Raises:
        UsageError: `threshold` is negative.
    """
    if threshold < 0:
        raise UsageError(f"threshold is a number of elements; {threshold} is negative")
    groups: list[list[Tensor]] = []
    fused: list[Tensor] = []
    elements = 0
    for param in params:
        if param.data.size > threshold:
            groups.append([param])
            continue
        if fused and fused[0].data.dtype != param.data.dtype:
            groups.append(fused)
            fused, elements = [], 0
        fused.append(param)
        elements += param.data.size
        if elements > threshold:
            groups.append(fused)
            fused, elements = [], 0
    if fused:
        groups.append(fused)
    return groups


class Bucket:
    """The gradients of some parameters, side by side in one wire array.

    Attributes:
        index: position in its layout.
        params: the parameters, in the order of their views.
        flat: wire memory, 1-D, the gradients of `params` without gaps.
        label: short text for diagnostics.
        statistics: what reductions have cost, by kind: those of codecs, or `PARAMETERS`.
    """

    def __init__(
        self, index: int, params: Sequence[Tensor], communicator: Communicator, *, check_finite: bool = True
    ) -> None:
        """Collective: allocates wire memory."""
        self.index = index
        self.params = tuple(params)
        count, first = sum(p.data.size for p in params), params[0]
        self.flat: Array = wire_memory(communicator, count, first.data.dtype.name, first.device.xp)
        self.label = f"bucket {index}: {params[0].name}"
        self.statistics: dict[str, Statistics] = {}
        self._communicator = communicator
        self._check_finite = check_finite
        self._grads: list[Tensor] = []
        self._reducers: dict[str, Reducer[Any]] = {}
        self._unclaimed: BucketStates = {}  # loaded states of reducers that do not exist yet
        start = 0
        for param in self.params:
            stop = start + param.data.size
            view = self.flat[start:stop].reshape(param.data.shape)
            self._grads.append(Tensor(data=view, device=param.device, requires_grad=False))
            start = stop
        self.begin()

    # -- gradients ---------------------------------------------------------------------------------------------------
    def adopt(self) -> None:
        """Local. Make the views of this bucket the places where autograd writes the gradients."""
        for param, grad in self.pairs():
            param.grad = grad

    def begin(self) -> None:
        """Local. Start counting gradients."""
        self._missing = len(self.params)

    def add(self) -> bool:
        """Local. Count one more final gradient; whether the bucket is full now."""
        self._missing -= 1
        return not self._missing

    def check_complete(self) -> None:
        """Local. Raise unless the bucket is full.

        Raises:
            UsageError: gradients are missing.
        """
        if self._missing:
            raise UsageError(
                f"the loss did not reach {self._missing} of {len(self.params)} parameters from {self.params[0].name} "
                f"to {self.params[-1].name}; every step must use the parameters of the first one"
            )

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Local. The parameters and their gradients."""
        return zip(self.params, self._grads, strict=True)

    def name_of(self, element: int) -> str:
        """Local. Name of the parameter whose gradient holds the given element of `flat`."""
        for param in self.params:
            if element < param.data.size:
                return str(param.name)
            element -= param.data.size
        raise IndexError(element)

    def first_nonfinite(self) -> int | None:
        """Local. Index of the first NaN or infinity in `flat`."""
        return kernels_of(self.flat).first_nonfinite(self.flat)

    # -- reduction ---------------------------------------------------------------------------------------------------
    def reducer(self, codec: Codec) -> Reducer[Any]:
        """Collective on first use of a kind of codec. What reduces this bucket, with its state of earlier steps.

        There is one reducer per kind. It goes on with the options of `codec`, so that these may change from step to
        step, and it waits with its residual while other kinds are at work.
        """
        kind = codec.kind
        reducer = self._reducers.get(kind)
        if reducer is not None:
            codec.retune(reducer)
            return reducer
        reducer = codec.attach(self.flat, self._communicator, label=self.label, check_finite=self._check_finite)
        if kind in self._unclaimed:
            reducer.load_state_dict(self._unclaimed[kind])
            del self._unclaimed[kind]
        self._reducers[kind] = reducer
        self.statistics[kind] = reducer.statistics
        return reducer

    def keep_local(self) -> None:
        """Local. Book that the gradients of a step are not sent."""
        self.statistics.setdefault(PARAMETERS, Statistics()).dense_bytes += self._dense_bytes

    def average_params(self) -> None:
        """Collective. Replace the parameters by their means over the ranks."""
        # The gradients in the bucket have been used; their place in wire memory carries the parameters.
        for param, grad in self.pairs():
            grad.data[...] = param.data
        cost = self.statistics.setdefault(PARAMETERS, Statistics())
        watch = Stopwatch(cost)
        self._communicator.all_reduce(self.flat, "mean", label=self.label).wait()
        watch.book("comm_seconds")
        cost.reductions += 1
        cost.wire_bytes += self._dense_bytes
        for param, grad in self.pairs():
            param.data[...] = grad.data

    @property
    def _dense_bytes(self) -> int:
        return dense_wire_bytes(self.flat.nbytes, self._communicator.topology.world_size)

    # -- states ------------------------------------------------------------------------------------------------------
    def get_states(self) -> BucketStates:
        """Local. By kind of codec, copies of what its reducer keeps between steps."""
        states = {kind: reducer.state_dict() for kind, reducer in self._reducers.items()}
        return self._unclaimed | {kind: state for kind, state in states.items() if state}

    def check_states(self, states: BucketStates) -> None:
        """Local. Whether `set_states` would accept them, as far as reducers exist.

        Raises:
            StateError: they do not fit.
        """
        for kind, reducer in self._reducers.items():
            if kind in states:
                reducer.check_state_dict(states[kind])

    def set_states(self, states: BucketStates) -> None:
        """Local. Go on from what `get_states` gave.

        Raises:
            StateError: they do not fit; here, or when their reducer comes into being.
        """
        for kind, reducer in self._reducers.items():
            reducer.reset()
            if kind in states:
                reducer.load_state_dict(states[kind])
        self._unclaimed = {kind: dict(state) for kind, state in states.items() if kind not in self._reducers}


class Layout:
    """The buckets of one model at one threshold.

    Attributes:
        buckets: in the order in which their gradients become final.
        last: the parameters with which a bucket becomes full.
    """

    def __init__(
        self, order: Sequence[Tensor], threshold: int, communicator: Communicator, *, check_finite: bool = True
    ) -> None:
        """Collective: allocates wire memory.

        Args:
            order: the parameters in the order in which their gradients become final.
            threshold: bucket size in elements, see `plan`.
            communicator: what the buckets are reduced by.
            check_finite: whether NaN and infinity are looked for.
        """
        groups = plan(order, threshold)
        self.buckets = [Bucket(i, group, communicator, check_finite=check_finite) for i, group in enumerate(groups)]
        self.last = frozenset(group[-1] for group in groups)
        self._bucket_of = {id(param): bucket for bucket in self.buckets for param in bucket.params}

    def adopt(self) -> None:
        """Local. Make the buckets the places where autograd writes the gradients."""
        for bucket in self.buckets:
            bucket.adopt()

    def begin(self) -> None:
        """Local. Start counting gradients."""
        for bucket in self.buckets:
            bucket.begin()

    def zeros(self) -> Iterator[Bucket]:
        """Local. Every bucket, with gradients of zero in it."""
        for bucket in self.buckets:
            bucket.flat.fill(0)
            yield bucket

    def bucket_of(self, param: Tensor) -> Bucket:
        """Local. Where the gradient of `param` is.

        Raises:
            UsageError: in no bucket.
        """
        try:
            return self._bucket_of[id(param)]
        except KeyError:
            raise UsageError(
                f"parameter {param.name} was not part of the loss in the first step; make a new DistOpt for a new model"
            ) from None

    def check_complete(self) -> None:
        """Local. Raise unless all gradients have come.

        Raises:
            UsageError: some are missing.
        """
        for bucket in self.buckets:
            bucket.check_complete()

    # -- states ------------------------------------------------------------------------------------------------------
    def get_states(self) -> LayoutStates:
        """Local. Copies of what the reducers keep between steps."""
        return {bucket.index: bucket.get_states() for bucket in self.buckets}

    def check_states(self, states: LayoutStates) -> None:
        """Local. Whether `set_states` would accept them, as far as reducers exist.

        Raises:
            StateError: they do not fit.
        """
        beyond = states.keys() - {bucket.index for bucket in self.buckets}
        if beyond:
            raise StateError(
                f"there are states of bucket {min(beyond)}, where the model has {len(self.buckets)} buckets; load them "
                "into the model that saved them"
            )
        for bucket in self.buckets:
            bucket.check_states(states.get(bucket.index, {}))

    def set_states(self, states: LayoutStates) -> None:
        """Local. Go on from what `get_states` gave; reducers without states begin anew.

        Raises:
            StateError: see `check_states`.
        """
        self.check_states(states)
        for bucket in self.buckets:
            bucket.set_states(states.get(bucket.index, {}))
