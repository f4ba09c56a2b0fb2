"""The optimizer as the engine sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ..comm import Communicator

__all__ = ["Slots", "States", "average"]

States: TypeAlias = "dict[str, np.ndarray[Any, Any]]"


class Slots(Protocol):
    """An optimizer: its states, such as momentum, by name, and its constants."""

    def get_states(self) -> States:
        """Copies of the states."""

    def set_states(self, states: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Take states over."""

    def constants(self) -> dict[str, Any]:
        """What else decides about the next update, by name; `step_counter` among it."""


def average(communicator: Communicator, slots: Slots) -> None:
    """Collective. Set the floats in the states to their means over the ranks."""
    states = slots.get_states()
    for name, array in _floats_of(states):
        communicator.all_reduce(array, "mean", label=name).wait()
    slots.set_states(states)


def _floats_of(states: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arrays of floats in an optimizer's states. Those of users may have dicts of tensors in them, as in SINGA."""
    for name, value in states.items():
        array = getattr(value, "array", value)
        if isinstance(value, dict):
            yield from _floats_of(value)
        elif not isinstance(array, np.generic) and getattr(array, "dtype", np.dtype(int)).kind == "f":
            yield name, array
