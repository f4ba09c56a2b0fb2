"""The arrays that an optimizer keeps for each parameter, and how they are saved and loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from ...checks import check_like
from ...errors import StateError, UsageError
from ..core.array import Array
from ..core.tensor import Tensor


class SlotStore:
    """The slots of parameters; loaded ones wait until their parameter is met. All methods are local.

    Attributes:
        slots: the slots of each parameter that has been met, by name.
    """

    def __init__(self) -> None:
        self.slots: dict[Tensor, dict[str, Array]] = {}
        self._waiting: dict[str, dict[str, Array]] = {}  # loaded slots of parameters not met yet, by name

    def meet(self, param: Tensor, names: Iterable[str]) -> dict[str, Array]:
        """The slots of a parameter that is met for the first time: loaded ones, or zeros with these names.

        Raises:
            StateError: loaded slots do not fit.
        """
        xp, loaded = param.device.xp, self.check_waiting(param)
        if loaded is None:
            slots = _new(param, names)
        else:
            slots = {name: xp.asarray(array) for name, array in loaded.items()}
            del self._waiting[str(param.name)]
        self.slots[param] = slots
        return slots

    def check_waiting(self, param: Tensor) -> dict[str, Array] | None:
        """The loaded slots of a parameter that has not been met, if there are any.

        Raises:
            StateError: they do not fit.
        """
        loaded = self._waiting.get(param.name) if param.name else None
        if loaded is not None:
            _check_fit(param, loaded)
        return loaded

    def add(self, names: Iterable[str]) -> None:
        """Give all parameters slots of zeros with those of the names that they do not have yet."""
        for param, slots in self.slots.items():
            self.slots[param] = {**_new(param, names), **slots}

    def tensors(self, name: str) -> dict[str | None, Tensor]:
        """A slot of all parameters, by their names, as tensors that share its memory."""
        return {
            param.name: Tensor.of(slots[name], param.device, requires_grad=False)
            for param, slots in self.slots.items()
            if name in slots
        }

    def states(self) -> dict[str, np.ndarray[Any, Any]]:
        """Copies of all slots, by "PARAMETER:SLOT".

        Raises:
            UsageError: a parameter has no unique name.
        """
        states: dict[str, np.ndarray[Any, Any]] = {}
        for param, slots in self.slots.items():
            for name, array in slots.items():
                key = f"{param.name}:{name}"
                if param.name is None or key in states:
                    raise UsageError(
                        f"the states of parameter {param.name} cannot be told apart; give every parameter a name of "
                        "its own (Model.compile does)"
                    )
                states[key] = np.array(param.device.host(array))
        for owner, slots in self._waiting.items():
            states.update({f"{owner}:{name}": array.copy() for name, array in slots.items()})
        return states

    def checked(
        self,
        states: Mapping[str, np.ndarray[Any, Any] | Tensor],
        names: Collection[str],
        former_names: Collection[str],
        rule: str,
    ) -> dict[str, dict[str, Array]]:
        """Copies of the slots among saved states, by parameter and name.

        Args:
            states: the result of `states`, and others, whose names have no colon.
            names: of the slots that each parameter must have.
            former_names: of slots that it may have besides.
            rule: the name of the optimizer, for errors.

        Raises:
            StateError: the names are others, or slots do not fit the parameters that have been met.
        """
        loaded: dict[str, dict[str, Array]] = {}
        for key, value in states.items():
            owner, colon, name = key.rpartition(":")
            if not colon:
                continue
            array = value.to_numpy() if isinstance(value, Tensor) else value
            dtype = getattr(array, "dtype", None)
            if dtype is None or dtype.kind != "f":
                raise StateError(f"state {key} is {dtype or type(value).__name__}; expected an array of floats")
            loaded.setdefault(owner, {})[name] = array.copy()
        for owner, slots in loaded.items():
            if not set(names) <= set(slots) <= {*names, *former_names}:
                raise StateError(
                    f"the states of parameter {owner} are {sorted(slots)}, where {rule} as it is set up has "
                    f"{sorted(names)}"
                )
        for param in self.slots:
            _check_fit(param, loaded.get(str(param.name), {}))
        return loaded

    def load(self, loaded: dict[str, dict[str, Array]]) -> None:
        """Continue with slots that `checked` has returned; those of other parameters begin anew."""
        met, self.slots, self._waiting = self.slots, {}, loaded
        for param in met:
            if param.name in loaded:
                self.meet(param, ())


def _new(param: Tensor, names: Iterable[str]) -> dict[str, Array]:
    return {name: param.device.xp.zeros_like(param.array) for name in names}


def _check_fit(param: Tensor, slots: Mapping[str, Array]) -> None:
    for name, array in slots.items():
        check_like(f"{param.name}:{name}", param, array)
