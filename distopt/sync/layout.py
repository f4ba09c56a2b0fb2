"""Which gradients travel together: the plan of buckets, and the buckets of a model by this plan."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..compress import Statistics
from ..errors import StateError, UsageError
from .bucket import Bucket, under

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..comm import Communicator
    from ..compress.reducer import State
    from .bucket import Parameter

__all__ = ["FIRST_BUCKET_BYTES", "Layout", "plan", "unique_names"]

# The last layers' gradients are final first. A small bucket of them sets out early, where bytes move while the rest of
# the backward pass runs (Li et al., arXiv 2006.15704, section 3.2.3; the size is that of PyTorch's DDP).
FIRST_BUCKET_BYTES = 1 << 20


def plan(params: Sequence[Parameter], bucket_elements: int, first_elements: int | None = None) -> list[list[Parameter]]:
    """Group parameters, in the order in which their gradients become final, into buckets.

    SINGA's rule: a parameter larger than `bucket_elements` goes alone; smaller ones are fused until their sum passes
    it. Groups hold one dtype each.

    Args:
        params: the parameters in that order.
        bucket_elements: see above.
        first_elements: a smaller sum at which the first fused bucket is full.

    Raises:
        UsageError: `bucket_elements` is negative.
    """
    if bucket_elements < 0:
        raise UsageError(f"bucket_elements is a number of elements; {bucket_elements} is negative")
    groups: list[list[Parameter]] = []
    fused: list[Parameter] = []
    elements = 0
    limit = bucket_elements if first_elements is None else min(first_elements, bucket_elements)
    for param in params:
        if param.array.size > bucket_elements:
            groups.append([param])
            continue
        if fused and fused[0].array.dtype != param.array.dtype:
            groups.append(fused)
            fused, elements = [], 0
        fused.append(param)
        elements += param.array.size
        if elements > limit:
            groups.append(fused)
            fused, elements, limit = [], 0, bucket_elements
    if fused:
        groups.append(fused)
    return groups


def unique_names(params: Sequence[Parameter]) -> dict[int, str]:
    """A name for each parameter, by its id: its own, or its place in `params` where that is missing or not unique."""
    counts = Counter(param.name for param in params)
    return {
        id(param): param.name if param.name and counts[param.name] == 1 else f"parameter {place}"
        for place, param in enumerate(params)
    }


class Layout:
    """The buckets of one model.

    Attributes:
        buckets: in the order in which their gradients become final.
        names: of all parameters, in this order.
        places: index of the bucket of each parameter, by its id.
        last: the parameters with which a bucket becomes full, if gradients come in that order.
        version: the value of `Engine.version` with which it is known to fit.
    """

    version: int = 0

    def __init__(
        self,
        order: Sequence[Parameter],
        bucket_elements: int,
        communicator: Communicator,
        *,
        small_first: bool = False,
        check_finite: bool = True,
        prefix: str = "",
    ) -> None:
        """Collective: allocates wire memory.

        Args:
            order: the parameters in the order in which their gradients become final.
            bucket_elements: bucket size in elements, see `plan`.
            communicator: what the buckets are reduced by.
            small_first: whether the first bucket is one of `FIRST_BUCKET_BYTES`.
            check_finite: whether NaN and infinity are looked for.
            prefix: of the buckets' labels.
        """
        first = FIRST_BUCKET_BYTES // order[0].array.itemsize if small_first and order else None
        groups = plan(order, bucket_elements, first)
        self._names = unique_names(order)
        self.buckets = [
            Bucket(
                i, group, [self._names[id(p)] for p in group], communicator, check_finite=check_finite, prefix=prefix
            )
            for i, group in enumerate(groups)
        ]
        self.names = [self._names[id(p)] for p in order]
        self.last = frozenset(group[-1] for group in groups)
        self.places = {id(param): bucket.index for bucket in self.buckets for param in bucket.params}

    def add_costs(self, costs: dict[tuple[str, str], Statistics]) -> None:
        """Local. Add what reductions have cost, by label of the bucket and kind of reduction."""
        for bucket in self.buckets:
            for kind, cost in bucket.statistics.items():
                total = costs.setdefault((bucket.label, kind), Statistics())
                total += cost

    # -- states ------------------------------------------------------------------------------------------------------
    def get_states(self) -> State:
        """Local. Copies of what the reducers keep between steps, by "KIND/NAME/PARAMETER"."""
        return {key: array for bucket in self.buckets for key, array in bucket.get_states().items()}

    def check_states(self, states: State) -> list[State]:
        """Local. The states of each bucket, if `set_states` would accept them, as far as reducers exist.

        Raises:
            StateError: they do not fit.
        """
        index_of = {self._names[key]: index for key, index in self.places.items()}
        shares: list[State] = [{} for _ in self.buckets]
        for key, array in states.items():
            param = key.split("/", 2)[-1]
            if param not in index_of:
                raise StateError(f"{key}: the model has no parameter {param}; load the states of this model")
            shares[index_of[param]][key] = array
        for bucket, own in zip(self.buckets, shares, strict=True):
            for kind in {key.split("/")[0] for key in states}:
                if not under(kind, own):
                    raise StateError(f"the states of {kind} lack those of {bucket.label!r}; load all that were saved")
            bucket.check_states(own)
        return shares

    def set_states(self, states: State) -> None:
        """Local. Go on from what `get_states` gave; reducers without states begin anew.

        Raises:
            StateError: see `check_states`.
        """
        for bucket, own in zip(self.buckets, self.check_states(states), strict=True):
            bucket.set_states(own)
