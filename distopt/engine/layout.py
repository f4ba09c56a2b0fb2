"""Which gradients travel together: the plan of buckets, and the buckets of a model by this plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ..checks import check_integer
from ..codecs import Codec, CodecState, CommunicationStatistics
from ..codecs.kept_arrays import States
from ..comm.base import Array
from ..errors import StateError
from .bucket import Bucket, BucketMemory, Parameter

# The last layers' gradients are final first. A small bucket of them sets out early, where bytes move while the rest of
# the backward pass runs (Li et al., arXiv 2006.15704, section 3.2.3; PyTorch's DDP has the same size).
FIRST_BUCKET_BYTES = 1 << 20


def plan(params: Sequence[Parameter], bucket_elements: int, first_elements: int | None = None) -> list[list[Parameter]]:
    """Group parameters, in the order in which their gradients become final, into buckets.

    SINGA's rule: a parameter larger than `bucket_elements` goes alone; smaller ones are fused until their sum passes
    it. Groups hold one dtype each.

    Args:
        params: the parameters in that order.
        bucket_elements: see above.
        first_elements: a smaller limit, for the first fused bucket.

    Raises:
        UsageError: `bucket_elements` is negative.
    """
    check_integer("the size of buckets or partitions in elements", bucket_elements, 0)
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
    """The buckets of one model, and the codecs' state for them.

    Attributes:
        bucket_elements: bucket size in elements, see `plan`.
        version: see `Engine.begin`.
        buckets: in the order in which their gradients become final.
        names: of all parameters, in this order.
        places: index of each parameter's bucket, by the parameter's id.
        last: for each bucket, its last parameter, if gradients come in that order.
        states: of each bucket, by kind of codec.
    """

    def __init__(
        self,
        order: Sequence[Parameter],
        bucket_elements: int,
        version: int,
        memory: BucketMemory,
        *,
        small_first: bool = False,
        prefix: str = "",
    ) -> None:
        """Collective: allocates wire memory.

        Args:
            order: the parameters in the order in which their gradients become final.
            bucket_elements: see above.
            version: see above.
            memory: the memory of the buckets; earlier layouts become invalid.
            small_first: whether the first bucket is one of `FIRST_BUCKET_BYTES`.
            prefix: of the buckets' labels.
        """
        first = FIRST_BUCKET_BYTES // order[0].array.itemsize if small_first and order else None
        groups = plan(order, bucket_elements, first)
        names = unique_names(order)
        memory.clear()
        self.bucket_elements = bucket_elements
        self.version = version
        self.buckets = [
            Bucket(i, group, [names[id(p)] for p in group], memory, prefix) for i, group in enumerate(groups)
        ]
        self.names = list(names.values())
        self.last = frozenset(group[-1] for group in groups)
        self.bucket_of = {id(param): bucket.index for bucket in self.buckets for param in bucket.params}
        self.states: dict[str, list[CodecState]] = {}
        self._memory = memory

    def attach(
        self, codec: Codec, statistics: CommunicationStatistics, loaded: States, check_finite: bool
    ) -> list[CodecState]:
        """Collective. Make the states of a kind of codec that is new here, one for each bucket.

        There is one state for each kind. It keeps its residual while other kinds are at work.

        Args:
            codec: of that kind.
            statistics: where reductions count their cost.
            loaded: saved states; states of this kind are taken out of it.
            check_finite: whether NaN and infinity are looked for.

        Raises:
            StateError: the loaded states do not fit.
        """
        states = [
            codec.attach(
                bucket.flat,
                self._memory.communicator,
                parts=bucket.parts,
                label=bucket.label,
                check_finite=check_finite,
                statistics=statistics.buckets[bucket.label, codec.kind],
                empty=self._memory.empty,
            )
            for bucket in self.buckets
        ]
        _load(codec.kind, states, loaded)
        self.states[codec.kind] = states
        return states

    # -- saved states ------------------------------------------------------------------------------------------------
    def get_states(self) -> States:
        """Local. Copies of the state that codecs keep between steps, by "KIND/NAME/PARAMETER"."""
        return {
            f"{kind}/{key}": array
            for kind, states in self.states.items()
            for state in states
            for key, array in state.state_dict().items()
        }

    def kinds_with_unused_states(self) -> set[str]:
        """Local. The kinds of codecs whose options do not use all the states that were loaded."""
        return {kind for kind, states in self.states.items() if any(state.has_unused_states for state in states)}

    def check_states(self, saved: States) -> None:
        """Local. Check that `set_states` would accept them, as far as codecs have been used.

        Raises:
            StateError: they do not fit.
        """
        check_names(saved, self.names)
        for kind, states in self.states.items():
            for state in states:
                if own := _share(saved, kind, state):
                    state.check_state_dict(own)

    def set_states(self, loaded: States) -> None:
        """Local. Resume from the result of `get_states`, which `check_states` has accepted; without states, begin anew.

        States that are used are removed from `loaded`.
        """
        for kind, states in self.states.items():
            for state in states:
                state.reset()
            _load(kind, states, loaded)


def check_names(saved: States, names: Collection[str]) -> None:
    """Local. Check that saved states belong to these parameters.

    Raises:
        StateError: a parameter is unknown, or an array of a kind of codec exists for some parameters only.
    """
    params: dict[str, set[str]] = {}
    for key in saved:
        kind, name, param = key.split("/", 2)
        if param not in names:
            raise StateError(f"{key}: the model has no parameter {param}; load the states of this model")
        params.setdefault(f"{kind}/{name}", set()).add(param)
    for array, found in params.items():
        if missing := [name for name in names if name not in found]:
            raise StateError(f"the states {array} lack that of {missing[0]}; load all that were saved")


def under(prefix: str, states: Mapping[str, Array]) -> States:
    """The entries of `states` whose keys begin with `prefix` and a slash; the new keys are without these."""
    return {key[len(prefix) + 1 :]: array for key, array in states.items() if key.startswith(f"{prefix}/")}


def _share(saved: States, kind: str, state: CodecState) -> States:
    """The saved states of that kind of codec for the parameters in a bucket."""
    return {key: array for key, array in under(kind, saved).items() if key.split("/", 1)[1] in state.names}


def _load(kind: str, states: Sequence[CodecState], loaded: States) -> None:
    for state in states:
        if own := _share(loaded, kind, state):
            state.load_state_dict(own)
        for key in own:
            del loaded[f"{kind}/{key}"]
