"""Buckets: flat runs of gradients in wire memory, so that one collective carries many parameters.

A parameter's gradient *is* a view of its bucket: the front writes it there, the communicator reduces it there and the
optimizer reads it there. Adding a gradient to a bucket is therefore counting.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from ..comm.sparse import dense_wire_bytes
from ..compress import Part, Statistics
from ..kernels import array_module, kernels_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..comm import Communicator
    from ..comm.base import Array
    from ..compress import Codec, Reducer
    from ..compress.reducer import State

__all__ = ["ALIGNMENT_BYTES", "Bucket", "Parameter", "under"]

PARAMETERS = "parameters"  # the kind of reduction that `Bucket.average_params` is, in statistics
ALIGNMENT_BYTES = 256  # of every gradient in its bucket: what cuDNN and vector loads of GPUs want


class Parameter(Protocol):
    """What the engine needs to know of a parameter.

    Attributes:
        name: unique in its model.
        array: its values, of NumPy or CuPy, contiguous.
    """

    name: str | None
    array: Array


class Bucket:
    """The gradients of some parameters in one wire array.

    Attributes:
        index: position in its layout.
        params: the parameters, in the order of their views.
        grads: their gradients, views of `flat` in the parameters' shapes.
        flat: wire memory, 1-D. Every gradient begins at a multiple of `ALIGNMENT_BYTES`; between them are zeros.
        label: short text for diagnostics.
        statistics: what reductions have cost, by kind: those of codecs, or `PARAMETERS`.
    """

    def __init__(
        self,
        index: int,
        params: Sequence[Parameter],
        names: Sequence[str],
        communicator: Communicator,
        *,
        check_finite: bool = True,
        prefix: str = "",
    ) -> None:
        """Collective: allocates wire memory.

        Args:
            index: see above.
            params: see above.
            names: those of `params`, unique in the model.
            communicator: what the bytes go through.
            check_finite: whether NaN and infinity are looked for.
            prefix: of the label.
        """
        self.index = index
        self.params = tuple(params)
        self.label = f"{prefix}bucket {index}: {names[0]}"
        self.statistics: dict[str, Statistics] = {}
        self._communicator = communicator
        self._check_finite = check_finite
        self._reducers: dict[str, Reducer] = {}
        self._unclaimed: State = {}  # loaded states of reducers that do not exist yet
        first = params[0].array
        unit = ALIGNMENT_BYTES // first.itemsize
        self._parts: list[Part] = []
        end = 0
        for param, name in zip(params, names, strict=True):
            offset = -(-end // unit) * unit
            self._parts.append(Part(name, offset, param.array.shape))
            end = offset + param.array.size
        self.flat: Array = communicator.empty(end, first.dtype.name, xp=array_module(first))
        self.flat.fill(0)
        self.grads = [self.flat[p.offset : p.offset + p.size].reshape(p.shape) for p in self._parts]

    def name_of(self, element: int) -> str:
        """Local. Name of the parameter whose gradient holds the given element of `flat`."""
        return next(part.name for part in reversed(self._parts) if part.offset <= element)

    def first_nonfinite(self) -> int | None:
        """Local. Index of the first NaN or infinity in `flat`."""
        return kernels_of(self.flat).first_nonfinite(self.flat)

    # -- reduction ---------------------------------------------------------------------------------------------------
    def reducer(self, codec: Codec) -> Reducer:
        """Collective on first use of a kind of codec. What it keeps for this bucket.

        There is one reducer for each kind. It keeps its residual while other kinds are at work.
        """
        kind = codec.kind
        if kind in self._reducers:
            return self._reducers[kind]
        reducer = codec.attach(
            self.flat, self._communicator, parts=self._parts, label=self.label, check_finite=self._check_finite
        )
        self._claim(kind, reducer)
        self._reducers[kind] = reducer
        self.statistics[kind] = reducer.statistics
        return reducer

    def keep_local(self) -> None:
        """Local. Book that the gradients of a step are not sent."""
        self.statistics.setdefault(PARAMETERS, Statistics()).dense_bytes += self._dense_bytes

    def average_params(self, label: str | None = None) -> None:
        """Collective. Replace the parameters by their means over the ranks; `label` replaces that of the bucket."""
        # The gradients in the bucket have been used; their place in wire memory carries the parameters.
        for param, grad in zip(self.params, self.grads, strict=True):
            grad[...] = param.array
        began = perf_counter()
        self._communicator.all_reduce(self.flat, "mean", label=label or self.label).wait()
        cost = Statistics(reductions=1, wire_bytes=self._dense_bytes, comm_seconds=perf_counter() - began)
        total = self.statistics.setdefault(PARAMETERS, Statistics())
        total += cost
        for param, grad in zip(self.params, self.grads, strict=True):
            param.array[...] = grad

    @property
    def _dense_bytes(self) -> int:
        return dense_wire_bytes(self.flat.nbytes, self._communicator.topology.world_size)

    # -- states ------------------------------------------------------------------------------------------------------
    def get_states(self) -> State:
        """Local. Copies of what the reducers keep between steps, by "KIND/NAME/PARAMETER"."""
        return self._unclaimed | {
            f"{kind}/{key}": array
            for kind, reducer in self._reducers.items()
            for key, array in reducer.state_dict().items()
        }

    def check_states(self, states: State) -> None:
        """Local. Whether `set_states` would accept them, as far as reducers exist.

        Raises:
            StateError: they do not fit.
        """
        for kind, reducer in self._reducers.items():
            if own := under(kind, states):
                reducer.check_state_dict(own)

    def set_states(self, states: State) -> None:
        """Local. Go on from what `get_states` gave; reducers without states begin anew.

        Raises:
            StateError: they do not fit; here, or when their reducer comes into being.
        """
        self._unclaimed = dict(states)
        for kind, reducer in self._reducers.items():
            reducer.reset()
            self._claim(kind, reducer)

    def _claim(self, kind: str, reducer: Reducer) -> None:
        if own := under(kind, self._unclaimed):
            reducer.load_state_dict(own)
            for key in own:
                del self._unclaimed[f"{kind}/{key}"]


def under(prefix: str, states: Mapping[str, Array]) -> State:
    """Those of `states` whose keys begin with `prefix` and a slash, without these."""
    return {key[len(prefix) + 1 :]: array for key, array in states.items() if key.startswith(f"{prefix}/")}
