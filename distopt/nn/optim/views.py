"""Attributes of optimizers as scripts for SINGA see them: values and slots as tensors."""

from __future__ import annotations

from typing import Any

from ..core.numbers import number_of
from ..core.tensor import Tensor


class CurrentValue:
    """The value of a hyperparameter at this step, as a tensor; see `Optimizer.as_tensor`.

    Assigning a number or a tensor of one element changes it until the next step.

    Args:
        of: the hyperparameter's name.
    """

    def __init__(self, of: str) -> None:
        self._of = of

    def __get__(self, optimizer: Any, owner: type | None = None) -> Tensor:
        value: Tensor = optimizer.as_tensor(optimizer.values[self._of])
        return value

    def __set__(self, optimizer: Any, value: Any) -> None:
        optimizer.values[self._of] = number_of(value)


class SlotView:
    """A slot of all parameters, as tensors by name; see `Optimizer.tensors_of`.

    Args:
        slot: its name.
    """

    def __init__(self, slot: str) -> None:
        self._slot = slot

    def __get__(self, optimizer: Any, owner: type | None = None) -> dict[str | None, Tensor]:
        slots: dict[str | None, Tensor] = optimizer.tensors_of(self._slot)
        return slots
