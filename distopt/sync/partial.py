"""Partial updates: every rank updates by its own gradients, and one partition of the parameters is averaged.

In between, the parameters and the optimizer's states differ between ranks, as they are meant to.
"""

from __future__ import annotations

import json
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..comm.sparse import dense_wire_bytes
from ..compress import Statistics
from ..errors import StateError
from .layout import Layout
from .memory import WireMemory
from .slots import average
from .step import GradientCounter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..compress import BadGradient
    from .agreement import Agreement
    from .bucket import Bucket, Parameter
    from .layout import Costs
    from .slots import Slots
    from .stats import Progress

__all__ = ["PartialStep", "PartialUpdates"]

PARAMETERS = "parameters"  # the kind of reduction that an average of parameters is, in statistics
_NOTHING, _LEFT = -1, -2  # in place of a bucket: no gradient is unusable, there are none


class PartialUpdates:
    """The partitions of partial updates, and what is to be averaged before ranks are equal again.

    Attributes:
        pending: whether the ranks' parameters differ, and `synchronize` is to average them.
        slots_pending: whether the states of the optimizer do.
        next: number of the partition that comes next in the cycle.
        layout: the partitions in use are its buckets.
    """

    def __init__(self, agreement: Agreement, costs: Costs) -> None:
        """Local. `costs`: where reductions count what they cost."""
        self.pending = self.slots_pending = False
        self.next = 0
        self.layout: Layout | None = None
        self._agreement = agreement
        self._costs = costs
        self._memory = WireMemory(agreement.communicator)
        self._plan: tuple[int, list[str]] | None = None  # size and order of the partitions, which loaded states name

    def begin(
        self,
        elements: int,
        order: Callable[[], Sequence[Parameter]],
        slots: Slots,
        version: int,
        progress: Progress,
        look: bool,
    ) -> PartialStep:
        """Collective. See `Engine.begin_partial`; `look`: whether NaN and infinity are looked for."""
        layout = self.layout
        if layout is None or (layout.bucket_elements, layout.version) != (elements, version):
            layout = self._fitting(elements, order(), slots, version, progress)
        self._agreement.drift.look(slots.constants(), progress.steps - progress.skipped)
        self.pending = self.slots_pending = True  # even if an exception ends the update half-way
        return PartialStep(layout, self._agreement, progress, self._costs, look)

    def _fitting(
        self, elements: int, params: Sequence[Parameter], slots: Slots, version: int, progress: Progress
    ) -> Layout:
        layout = self.layout
        if layout is not None and layout.places.keys() != {id(param) for param in params}:
            self.synchronize()  # while the parameters that differ are known
        elif layout is not None and layout.bucket_elements == elements:
            layout.version = version
            return layout
        self._agreement.reach(params, slots.constants(), progress, equal=not self.pending)
        return self._new_layout(elements, params, version)

    def _new_layout(self, elements: int, params: Sequence[Parameter], version: int) -> Layout:
        layout = self.layout = Layout(params, elements, version, self._memory, prefix=self._agreement.drift.prefix)
        self._plan = elements, layout.names
        return layout

    def average(self, layout: Layout) -> None:
        """Collective. After a partial update: average one partition of the parameters; steps visit them in a cycle."""
        bucket = layout.buckets[self.next % len(layout.buckets)]
        with self._agreement.drift:
            self._average(bucket, self._agreement.drift.label(bucket.label))
        self.next += 1

    def _average(self, bucket: Bucket, label: str) -> None:
        # The gradients in the bucket have been used; their place in wire memory carries the parameters.
        for param, grad in zip(bucket.params, bucket.grads, strict=True):
            grad[...] = param.array
        cost, began = self._costs.setdefault((bucket.label, PARAMETERS), Statistics()), perf_counter()
        self._agreement.communicator.all_reduce(bucket.flat, "mean", label=label).wait()
        cost.comm_seconds += perf_counter() - began
        cost.reductions += 1
        cost.wire_bytes += dense_wire_bytes(bucket.flat.nbytes, self._agreement.communicator.topology.world_size)
        for param, grad in zip(bucket.params, bucket.grads, strict=True):
            param.array[...] = grad

    def synchronize(self) -> None:
        """Collective. Set the parameters to their means over the ranks, where partial updates let them differ.

        Raises:
            UsageError: states have been loaded, and neither `attach` nor a step has told whose they are.
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

    def end(self, slots: Slots) -> None:
        """Collective. Make the ranks equal: equal gradients then keep them so."""
        self.synchronize()
        average(self._agreement.communicator, slots)
        self.slots_pending = False

    # -- saved states ------------------------------------------------------------------------------------------------
    def get_states(self) -> dict[str, np.ndarray[Any, Any]]:
        """Local. `partitions`, while the parameters differ."""
        return {"partitions": np.frombuffer(json.dumps(self._plan).encode(), np.uint8)} if self.pending else {}

    def set_states(self, number: int, flags: Sequence[int], states: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Local. Go on from partition `number`; flags: `pending`, `slots_pending`."""
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
            raise StateError("these are no states of a DistOpt with partial updates: partitions is missing") from None
        return elements, names


class PartialStep(GradientCounter):
    """A step in which every rank uses its own gradients."""

    def __init__(self, layout: Layout, agreement: Agreement, progress: Progress, costs: Costs, look: bool) -> None:
        """Local. `look`: whether NaN and infinity are looked for."""
        super().__init__(layout, agreement.communicator, agreement.drift, progress, look)
        self._costs = costs

    def finish(self, unused: Literal["raise", "zero"] = "raise") -> BadGradient | None:
        """Collective. The verdict on all ranks' gradients, which are left as they are; see `GradientCounter.finish`."""
        self._complete(unused)
        for bucket in self.layout.buckets:
            cost = self._costs.setdefault((bucket.label, PARAMETERS), Statistics())
            cost.dense_bytes += dense_wire_bytes(bucket.flat.nbytes, self._communicator.topology.world_size)
        if not self._looks:
            self._ended = True
            return None
        found = ((bucket.index, bucket.first_nonfinite()) for bucket in self.layout.buckets)
        return self._exchange(*next(((i, element) for i, element in found if element is not None), (_NOTHING, 0)))

    def _exchange(self, index: int, element: int, reason: str = "") -> BadGradient | None:
        everyone = np.empty(2 * self._communicator.topology.world_size, np.int64)
        own = np.array([index, element], np.int64)
        self._calling = True
        self._communicator.all_gather(own, everyone, label=self._drift.label("non-finite")).wait()
        self._calling = False
        for rank, (bad, place) in enumerate(everyone.reshape(-1, 2).tolist()):
            if bad != _NOTHING:
                self._refuse(reason)
                return self._named(self.layout.buckets[bad], rank, place)
        self._ended = True
        return None

    def _start_full(self) -> None:
        pass

    def _give_up(self, reason: str) -> None:
        self._exchange(_LEFT, 0, reason)
