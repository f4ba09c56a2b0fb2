"""The arrays that codecs of one kind keep on a bucket from step to step: the base of `CodecState`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from ..checks import check_like
from ..comm.base import Array
from ..errors import StateError
from ..kernels import array_module, kernels_of

States: TypeAlias = "dict[str, Array]"  # by "NAME/PARAMETER"


class Part(NamedTuple):
    """Where a parameter's gradient lies in its bucket: `offset` is an element index."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class KeptArrays:
    """The arrays of one bucket that outlive a step, by name; they differ between ranks.

    Attributes:
        bucket: flat array, reduced in place; elements between and behind the parts are zero and stay zero.
        parts: the parameters in it.
        names: the names of these parameters.
        size: number of elements of the parts, without padding.
        label: name of the bucket in diagnostics.
        kernels: passes over arrays like the bucket.
        renewed: names of arrays that replace others in the state, once the verdict on the step is known.
    """

    def __init__(self, bucket: Array, parts: Sequence[Part], label: str) -> None:
        """Local. Without `parts`, one parameter fills the bucket."""
        self.bucket, self.label = bucket, label
        self.parts = tuple(parts) or (Part(label, 0, (bucket.size,)),)
        self.names = {part.name for part in self.parts}
        self.size = sum(part.size for part in self.parts)
        self.kernels = kernels_of(bucket)
        self.renewed: set[str] = set()
        self._accepted: set[str] = set()  # those of the last step
        self._state: dict[str, Array] = {}  # by name, or by "NAME/PARAMETER" if it belongs to one parameter
        self._initial: dict[str, Array | None] = {}
        self._new: dict[str, Array] = {}  # spare arrays, which replace arrays of the state with these names
        self._loaded: States = {}  # arrays that no options have used yet

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

    def count_reduction(self) -> int:
        """Local. The number of this reduction, from 0; the next one gets the following, if this one is accepted."""
        step, following = self.renew("step", np.zeros(1, np.int64))
        following[...] = step + 1
        return int(step[0])

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
