"""Partial updates: every rank updates by its own gradients, and one partition of the parameters is averaged.

In between, the parameters and the optimizer's states differ between ranks, as they are meant to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..codecs import BadGradient, CodecState, CommunicationStatistics
from ..codecs.kept_arrays import States
from ..errors import StateError
from ..kernels import kernels_of
from .agreement import Agreement
from .bucket import Bucket, BucketMemory, Parameter
from .layout import Layout
from .step import GradientCounter

PARAMETERS = "parameters"  # the kind of reduction that an average of parameters is, in statistics
_NOTHING = -1  # in place of a bucket: no gradient is unusable


class UpdateRule(Protocol):
    """The rule of an optimizer's updates: states such as momentum, and constants, by name."""

    def get_states(self) -> States:
        """Return copies of the states."""

    def set_states(self, states: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Replace the states."""

    def constants(self) -> dict[str, Any]:
        """Return all other values that the next update depends on, by name; `step_counter` is one of them."""


class PartialUpdates:
    """The partitions of partial updates, and the states to average before ranks are equal again.

    Attributes:
        pending: whether the ranks' parameters differ, and `synchronize` is to average them.
        slots_pending: whether the states of the optimizer differ.
        next: number of the partition that comes next in the cycle.
        layout: the partitions in use are its buckets.
        states: of these buckets; they send the parameters.
        keeps_gradients: whether an average restores the gradients, whose place in wire memory it uses; they are read
            after an update where a front lends that memory to its users.
    """

    def __init__(self, agreement: Agreement, statistics: CommunicationStatistics) -> None:
        """Local. `statistics`: where steps and their cost are counted."""
        self.pending = self.slots_pending = False
        self.keeps_gradients = False
        self.next = 0
        self.layout: Layout | None = None
        self.states: list[CodecState] = []
        self._agreement = agreement
        self._statistics = statistics
        self._memory = BucketMemory(agreement.communicator)
        self._plan: tuple[int, list[str]] | None = None  # size and order of the partitions, which loaded states name

    def layout_for(
        self, elements: int, order: Callable[[], Sequence[Parameter]], rule: UpdateRule, version: int
    ) -> Layout:
        """Collective. The partitions for a step with these arguments; see `Engine.begin_partial`."""
        layout = self.layout
        if layout is not None and (layout.bucket_elements, layout.version) == (elements, version):
            return layout
        params = order()
        if layout is not None and layout.bucket_of.keys() != {id(param) for param in params}:
            self.synchronize()  # while the parameters that differ are known
        elif layout is not None and layout.bucket_elements == elements:
            layout.version = version
            return layout
        self._agreement.reach(
            params, rule.constants(), self._statistics.steps - self._statistics.skipped, equal=not self.pending
        )
        return self._new_layout(elements, params, version)

    def _new_layout(self, elements: int, params: Sequence[Parameter], version: int) -> Layout:
        layout = self.layout = Layout(params, elements, version, self._memory, prefix=self._agreement.prefix)
        self._plan = elements, layout.names
        communicator, costs = self._agreement.communicator, self._statistics.buckets
        self.states = [
            CodecState(
                PARAMETERS,
                one.flat,
                communicator,
                one.parts,
                one.label,
                check_finite=False,
                statistics=costs[one.label, PARAMETERS],
                empty=None,
            )
            for one in layout.buckets
        ]
        return layout

    def average(self, layout: Layout) -> None:
        """Collective. After a partial update: average one partition of the parameters; steps visit them in a cycle."""
        bucket = layout.buckets[self.next % len(layout.buckets)]
        with self._agreement.explained():
            self._average(bucket, self._agreement.label(bucket.label))
        self.next += 1

    def _average(self, bucket: Bucket, label: str) -> None:
        # The gradients in the bucket have been used; their place in wire memory carries the parameters.
        kept = bucket.flat.copy() if self.keeps_gradients else None
        for param, grad in zip(bucket.params, bucket.grads, strict=True):
            grad[...] = param.array
        state = self.states[bucket.index]
        state.wire_label = label
        state.wait(state.all_reduce(bucket.flat, "mean"))
        state.statistics.reductions += 1
        for param, grad in zip(bucket.params, bucket.grads, strict=True):
            param.array[...] = grad
        if kept is not None:
            bucket.flat[...] = kept

    def synchronize(self) -> None:
        """Collective. Set the parameters to their means over the ranks, where partial updates let them differ.

        Raises:
            UsageError: states have been loaded, and neither `attach` nor a step has assigned them to parameters.
        """
        if not self.pending or self._plan is None:
            return
        elements, names = self._plan
        layout = self.layout
        if layout is None or (layout.bucket_elements, layout.names) != (elements, names):
            params = self._agreement.attached_in(names)
            self._agreement.check(params)
            layout = self._new_layout(elements, params, -1)
        for bucket in layout.buckets:
            self._average(bucket, bucket.label)
        self.pending = False

    def end(self, rule: UpdateRule) -> None:
        """Collective. Make the ranks equal: equal gradients then keep them so."""
        self.synchronize()
        states = rule.get_states()
        for name, array in _floats_of(states):
            self._agreement.communicator.all_reduce(array, "mean", label=name).wait()
        rule.set_states(states)
        self.slots_pending = False

    # -- saved states ------------------------------------------------------------------------------------------------
    def get_states(self) -> dict[str, np.ndarray[Any, Any]]:
        """Local. `partitions`, while the parameters differ."""
        return {"partitions": np.frombuffer(json.dumps(self._plan).encode(), np.uint8)} if self.pending else {}

    def set_states(self, number: int, flags: Sequence[int], states: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Local. Continue with partition `number`; flags: `pending`, `slots_pending`."""
        self.next = number
        self.pending, self.slots_pending = map(bool, flags)
        if self.pending:
            self._plan = self.partitions(states)

    @staticmethod
    def partitions(states: Mapping[str, np.ndarray[Any, Any]]) -> tuple[int, list[str]]:
        """Local. Size in elements and parameters, in order, of the partitions in saved states.

        Raises:
            StateError: they are missing.
        """
        try:
            elements, names = json.loads(states["partitions"].tobytes())
        except (KeyError, ValueError, TypeError):
            raise StateError("these are not states of a DistOpt with partial updates: partitions is missing") from None
        return elements, names


def _floats_of(states: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arrays of floats in an optimizer's states. Users' states may contain dicts of tensors, as in SINGA."""
    for name, value in states.items():
        array = getattr(value, "array", value)
        if isinstance(value, dict):
            yield from _floats_of(value)
        elif not isinstance(array, np.generic) and getattr(array, "dtype", np.dtype(int)).kind == "f":
            yield name, array


class PartialStep(GradientCounter):
    """A step in which every rank uses its own gradients."""

    def __init__(self, partial: PartialUpdates, *rest: Any) -> None:
        """Local. `partial`: the cycle of the step; `rest`: see `GradientCounter`."""
        super().__init__(*rest)
        self._partial, self._flags = partial, (partial.pending, partial.slots_pending)
        partial.pending = partial.slots_pending = True  # even if an exception ends the update half-way

    def _start_full(self) -> None:
        pass

    def _end(self) -> BadGradient | None:
        """Collective. The verdict on all ranks' gradients, which are left as they are."""
        verdict = self._verdict()
        if verdict is not None:  # no rank updates
            self._partial.pending, self._partial.slots_pending = self._flags
        return verdict

    def _verdict(self) -> BadGradient | None:
        buckets, world_size = self.layout.buckets, self._communicator.topology.world_size
        for state in self._partial.states:
            state.statistics.dense_bytes += state.dense_bytes
        if not self._looks:
            return None
        found = ((bucket.index, kernels_of(bucket.flat).first_nonfinite(bucket.flat)) for bucket in buckets)
        own = next(((index, element) for index, element in found if element is not None), (_NOTHING, 0))
        everyone = np.empty(2 * world_size, np.int64)
        self._calling = True
        label = self._agreement.label("non-finite")
        # One collective for all partitions: its time counts as the first one's.
        self._partial.states[0].wait(self._communicator.all_gather(np.array(own, np.int64), everyone, label=label))
        self._calling = False
        for rank, (index, element) in enumerate(everyone.reshape(-1, 2).tolist()):
            if index != _NOTHING:
                return self._named(buckets[index], rank, element)
        return None
