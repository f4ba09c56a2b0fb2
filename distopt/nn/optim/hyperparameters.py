"""Hyperparameters of optimizers, which are numbers or schedules."""

from __future__ import annotations

from numbers import Real
from typing import Any

from ...checks import check_number
from ...errors import UsageError
from ..core.numbers import number_of
from .schedules import Constant, DecayScheduler


class Hyperparameter:
    """An attribute of an optimizer: assigned a number or a schedule, and read as a schedule.

    `Optimizer.values` has its value at this step.

    Args:
        interval: where a number must lie.
    """

    def __init__(self, interval: str = "[0, inf)") -> None:
        self._interval = interval

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, owner: type | None = None) -> DecayScheduler:
        schedule: DecayScheduler = optimizer._schedules[self._name]
        return schedule

    def __set__(self, optimizer: Any, value: Any) -> None:
        if not isinstance(value, (Real, DecayScheduler)):
            raise UsageError(f"{self._name} is a number or a DecayScheduler, not {value!r}")
        schedule = (
            value if isinstance(value, DecayScheduler) else Constant(check_number(self._name, value, self._interval))
        )
        optimizer.values[self._name] = number_of(schedule(optimizer._steps))
        optimizer._schedules[self._name] = schedule
        if optimizer._store.slots:  # a momentum that was 0 until now needs a slot
            optimizer._store.add(optimizer.slots)
