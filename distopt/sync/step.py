"""One training step of the engine: gradients come in, in any order; their means are there when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from ..compress import BadGradient, finish_all
from ..errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..comm import Communicator
    from ..compress import Reduction
    from .bucket import Bucket, Parameter
    from .layout import Layout
    from .uneven import Recipe

__all__ = ["PartialStep", "Step"]


class _Counter:
    """Which gradients of a layout have come.

    Attributes:
        layout: the buckets of this step.
    """

    def __init__(self, layout: Layout, communicator: Communicator, number: int, label: Callable[[str], str]) -> None:
        """Local.

        Args:
            layout: see above.
            communicator: of the ranks.
            number: that of the step, for messages.
            label: makes the label of the first collective, see `Drift.label`.
        """
        self.layout = layout
        self._communicator = communicator
        self._number = number
        self._label = label
        self._awaited = layout.places.copy()  # index of the bucket by id of the parameter
        self._missing = [len(bucket.params) for bucket in layout.buckets]
        self._started: list[Reduction] = []

    def final(self, param: Parameter) -> None:
        """Collective. The gradient of `param` is in its place, and will not change any more.

        Starts the buckets that are full, or moves the bytes of those under way.

        Raises:
            UsageError: `param` has no place, or its gradient was final before.
        """
        index = self._awaited.pop(id(param), None)
        if index is None:
            if id(param) in self.layout.places:
                raise UsageError(f"the gradient of {param.name} was declared final twice in one step; do so once")
            raise UsageError(
                f"parameter {param.name} was not part of the loss in the first step; make a new DistOpt for a new model"
            )
        self._missing[index] -= 1
        if not self._missing[index]:
            self._start_full()
        elif self._started:
            self._communicator.progress()

    def _start_full(self) -> None:
        """A bucket is full."""

    def _complete(self, unused: Literal["raise", "zero"]) -> None:
        """Give the parameters that had no gradient one of zeros, or raise."""
        for bucket, missing in zip(self.layout.buckets, self._missing, strict=True):
            if missing and unused == "raise":
                raise UsageError(
                    f"the loss did not reach {missing} of {len(bucket.params)} parameters from {bucket.params[0].name} "
                    f"to {bucket.params[-1].name}; every step must use the parameters of the first one"
                )
            if missing:
                for param, grad in zip(bucket.params, bucket.grads, strict=True):
                    if id(param) in self._awaited:
                        grad.fill(0)
                self._missing[bucket.index] = 0

    def _named(self, bucket: Bucket, rank: int, index: int) -> BadGradient:
        """The verdict on an element of a bucket, in terms of parameter and step."""
        return BadGradient(
            rank,
            index,
            f"step {self._number}: the gradient of {bucket.name_of(index)} is NaN, infinite or too large for a sum on "
            f"rank {rank} ({self._communicator.topology.hosts[rank]}); lower the learning rate, clip the gradients, or "
            "leave such steps out with DistOpt(non_finite='skip')",
        )


class Step(_Counter):
    """A step in which gradients are averaged over the ranks."""

    def __init__(
        self,
        layout: Layout,
        communicator: Communicator,
        number: int,
        recipe: Recipe,
        label: Callable[[str], str],
        weight: float = 1.0,
    ) -> None:
        """Local. `weight` is a factor on the means."""
        super().__init__(layout, communicator, number, label)
        self._codec, _, self._clip = recipe
        self._weight = weight

    def finish(self, unused: Literal["raise", "zero"] = "raise") -> BadGradient | None:
        """Collective. Wait until all gradients are the means over the ranks; the verdict, the same on all ranks.

        Args:
            unused: what to do where a parameter had no gradient in this step: raise an error, or take part with zeros.

        Raises:
            UsageError: see `unused`.
        """
        if self._awaited:
            self._complete(unused)
            self._start_full()
        verdicts = finish_all(self._started)
        if any(verdicts):
            place, verdict = next((i, verdict) for i, verdict in enumerate(verdicts) if verdict)
            return self._named(self.layout.buckets[place], verdict.rank, verdict.element)
        if self._weight != 1:
            for bucket in self.layout.buckets:
                bucket.flat *= self._weight
        return None

    def _start_full(self) -> None:
        """Start full buckets in the order of their indices, which is the same on all ranks."""
        while len(self._started) < len(self._missing) and not self._missing[len(self._started)]:
            bucket = self.layout.buckets[len(self._started)]
            if self._clip is not None:
                bucket.flat.clip(-self._clip, self._clip, out=bucket.flat)
            reducer = bucket.reducer(self._codec)
            if not self._started:
                reducer.wire.label = self._label(bucket.label)
            self._started.append(self._codec.start(reducer))


class PartialStep(_Counter):
    """A step in which every rank uses its own gradients."""

    def __init__(
        self, layout: Layout, communicator: Communicator, number: int, label: Callable[[str], str], look: bool
    ) -> None:
        """Local. `look`: whether NaN and infinity are looked for."""
        super().__init__(layout, communicator, number, label)
        self._look = look

    def finish(self, unused: Literal["raise", "zero"] = "raise") -> BadGradient | None:
        """Collective. The verdict on the gradients of all ranks, which are left as they are; see `Step.finish`."""
        self._complete(unused)
        for bucket in self.layout.buckets:
            bucket.keep_local()
        if not self._look:
            return None
        found = ((bucket.index, bucket.first_nonfinite()) for bucket in self.layout.buckets)
        own = next(((index, element) for index, element in found if element is not None), (-1, -1))
        everyone = np.empty(2 * self._communicator.topology.world_size, np.int64)
        self._communicator.all_gather(np.array(own, np.int64), everyone, label=self._label("non-finite")).wait()
        for rank, (index, element) in enumerate(everyone.reshape(-1, 2).tolist()):
            if index >= 0:
                return self._named(self.layout.buckets[index], rank, element)
        return None
