"""Schedules: the hyperparameters of optimizers as functions of the step."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np

from ..errors import UsageError
from .tensor import Tensor, float32

__all__ = ["Constant", "DecayScheduler", "ExponentialDecay", "checked", "number_of"]


class DecayScheduler:
    """A hyperparameter, such as the learning rate, as a function of the step.

    A subclass defines one of two methods. `call(step)` is SINGA's: the step is a tensor of shape (1,), and the value
    such a tensor or a number. `__call__(step)` is ours: optimizers pass the step as an int, and the value is a number.

    Args:
        init_value: the value at step 0.

    Raises:
        UsageError: it is negative or not finite.
    """

    def __init__(self, init_value: float) -> None:
        self.init_value = checked("init_value", init_value)

    def __call__(self, step: Any) -> Any:
        """Local. The value at `step`, counted from 0: of a number a number, of a tensor of one element one of (1,)."""
        return _like(step, self.call(step if isinstance(step, Tensor) else Tensor(data=[step], dtype=float32)))

    def call(self, step: Tensor) -> Any:
        """Local. The value at `step`; see the class."""
        raise NotImplementedError(f"{type(self).__name__} has no value; define call(self, step)")


class Constant(DecayScheduler):
    """The same value at every step."""

    def __call__(self, step: Any) -> Any:  # noqa: D102
        return _like(step, self.init_value)

    call = __call__


class ExponentialDecay(DecayScheduler):
    """init_value * decay_rate ** (step / decay_steps).

    Args:
        init_value: the value at step 0.
        decay_steps: number of steps in which it falls by the factor `decay_rate`.
        decay_rate: in (0, 1].
        staircase: change only every `decay_steps` steps.
    """

    def __init__(self, init_value: float, decay_steps: int, decay_rate: float, staircase: bool = False) -> None:
        super().__init__(init_value)
        if decay_steps <= 0:
            raise UsageError(f"decay_steps is a number of steps, 1 or more; got {decay_steps}")
        self.decay_steps = decay_steps
        self.decay_rate = checked("decay_rate", decay_rate)
        self.staircase = staircase

    def __call__(self, step: Any) -> Any:  # noqa: D102
        at = number_of(step)
        exponent = at // self.decay_steps if self.staircase else at / self.decay_steps
        return _like(step, self.init_value * self.decay_rate**exponent)

    call = __call__


def checked(what: str, value: Any, below: float = math.inf) -> float:
    """Local. `value` as a float.

    Raises:
        UsageError: it is no number, negative, or not less than `below`.
    """
    number = float(value) if isinstance(value, Real) else math.nan
    if not 0 <= number < below:
        limits = "a finite number of at least 0" if below == math.inf else f"a number in [0, {below})"
        raise UsageError(f"{what} {value!r} is not {limits}")
    return number


def number_of(value: Any) -> float:
    """Local. A number, or a tensor or array of one element, as a float.

    Raises:
        UsageError: it is something else.
    """
    if isinstance(value, float):
        return value
    array = value.to_numpy() if isinstance(value, Tensor) else np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise UsageError(f"{value!r} is neither a number nor a tensor of one element; schedules and states need one")
    return float(array.item())


def _like(step: Any, value: Any) -> Any:
    """`value` as a tensor if `step` is one, else as a number."""
    if not isinstance(step, Tensor):
        return number_of(value)
    if isinstance(value, Tensor):
        return value
    return Tensor(data=[number_of(value)], device=step.device, dtype=float32)
