"""Schedules: the hyperparameters of optimizers as functions of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ...checks import check_number
from ...errors import UsageError
from ..core.array import float32
from ..core.numbers import number_of
from ..core.tensor import Tensor

__all__ = ["Constant", "CosineDecay", "DecayScheduler", "ExponentialDecay", "LinearWarmUp", "StepDecay"]


class DecayScheduler:
    """A hyperparameter, such as the learning rate, as a function of the step.

    A subclass defines one of two methods. `call(step)` is SINGA's: it takes the step as a tensor of shape (1,), and
    returns such a tensor or a number. `__call__(step)` is distopt's: it takes an int, and returns a number.

    Args:
        init_value: the value at step 0.

    Raises:
        UsageError: it is negative or not finite.
    """

    def __init__(self, init_value: float) -> None:
        self.init_value = check_number("init_value", init_value, "[0, inf)")

    def __call__(self, step: Any) -> Any:
        """The value at `step`, from 0: a number for a number, a tensor [1] for a tensor of one element."""
        return _like(step, self.call(step if isinstance(step, Tensor) else Tensor(data=[step], dtype=float32)))

    def call(self, step: Tensor) -> Any:
        """The value at `step`; see the class."""
        raise NotImplementedError(f"{type(self).__name__} has no value; define call(self, step)")


class _Formula(DecayScheduler):
    """A schedule of numbers: a subclass defines `at`."""

    def __call__(self, step: Any) -> Any:
        return _like(step, self.at(number_of(step)))

    call = __call__

    def at(self, step: float) -> float:
        """The value at `step`."""
        raise NotImplementedError


class Constant(_Formula):
    """The same value at every step."""

    def at(self, step: float) -> float:
        """`init_value`."""
        return self.init_value


class ExponentialDecay(_Formula):
    """init_value * decay_rate ** (step / decay_steps).

    Args:
        init_value: the value at step 0.
        decay_steps: number of steps that multiply it by `decay_rate`.
        decay_rate: the factor; above 1, the value grows.
        staircase: change only every `decay_steps` steps.

    Raises:
        UsageError: a number makes no sense.
    """

    def __init__(self, init_value: float, decay_steps: int, decay_rate: float, staircase: bool = False) -> None:
        super().__init__(init_value)
        self.decay_steps = check_number("decay_steps", decay_steps, "(0, inf)")
        self.decay_rate = check_number("decay_rate", decay_rate, "[0, inf)")
        self.staircase = staircase

    def at(self, step: float) -> float:
        """The value at `step`."""
        exponent = step // self.decay_steps if self.staircase else step / self.decay_steps
        value: float = self.init_value * self.decay_rate**exponent
        return value


class StepDecay(_Formula):
    """init_value, multiplied by `decay_rate` from each of some steps on; for equal intervals see `ExponentialDecay`.

    Args:
        init_value: the value at step 0.
        milestones: the steps.
        decay_rate: the factor.

    Raises:
        UsageError: a number makes no sense.
    """

    def __init__(self, init_value: float, milestones: Iterable[int], decay_rate: float = 0.1) -> None:
        super().__init__(init_value)
        if not isinstance(milestones, Iterable):
            raise UsageError(f"milestones are steps, as [30, 60], not {milestones!r}; for intervals: ExponentialDecay")
        self.milestones = [check_number("a milestone", step, "(0, inf)") for step in milestones]
        self.decay_rate = check_number("decay_rate", decay_rate, "[0, inf)")

    def at(self, step: float) -> float:
        """The value at `step`."""
        return self.init_value * self.decay_rate ** sum(step >= milestone for milestone in self.milestones)


class CosineDecay(_Formula):
    """Half a wave of a cosine from init_value to end_value, which it keeps (Loshchilov and Hutter, arXiv 1608.03983).

    Args:
        init_value: the value at step 0.
        decay_steps: the first step with `end_value`.
        end_value: the last value.

    Raises:
        UsageError: a number makes no sense.
    """

    def __init__(self, init_value: float, decay_steps: int, end_value: float = 0.0) -> None:
        super().__init__(init_value)
        self.decay_steps = check_number("decay_steps", decay_steps, "(0, inf)")
        self.end_value = check_number("end_value", end_value, "[0, inf)")

    def at(self, step: float) -> float:
        """The value at `step`."""
        share = (1 + math.cos(math.pi * min(step / self.decay_steps, 1))) / 2
        return self.end_value + (self.init_value - self.end_value) * share


class LinearWarmUp(_Formula):
    """A linear rise to the first value of another schedule, which begins when the rise is over.

    Goyal et al., arXiv 1706.02677, section 2.2.

    Args:
        schedule: the schedule that follows, or a number.
        warm_up_steps: the first step that follows it.
        start_factor: the value at step 0 relative to that first value; the default is PyTorch's, of LinearLR.

    Raises:
        UsageError: a number makes no sense.
    """

    def __init__(self, schedule: float | DecayScheduler, warm_up_steps: int, start_factor: float = 1 / 3) -> None:
        self.schedule = schedule if isinstance(schedule, DecayScheduler) else Constant(schedule)
        self.warm_up_steps = check_number("warm_up_steps", warm_up_steps, "(0, inf)")
        self.start_factor = check_number("start_factor", start_factor, "[0, inf)")
        super().__init__(self.at(0))

    def at(self, step: float) -> float:
        """The value at `step`."""
        if step >= self.warm_up_steps:
            return number_of(self.schedule(step - self.warm_up_steps))
        share = self.start_factor + (1 - self.start_factor) * step / self.warm_up_steps
        return number_of(self.schedule(0)) * share


def _like(step: Any, value: Any) -> Any:
    """`value` as a tensor if `step` is one, else as a number."""
    if not isinstance(step, Tensor):
        return number_of(value)
    if isinstance(value, Tensor):
        return value
    return Tensor(data=[number_of(value)], device=step.device, dtype=float32)
