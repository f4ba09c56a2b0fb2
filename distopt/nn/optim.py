"""Optimizers: rules that update a parameter in place from its gradient.

Rules and their state follow PyTorch; class and argument names follow SINGA.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import StateError, UsageError
from . import autograd
from .kernels import kernels_of
from .tensor import float32

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import DTypeLike

    from .tensor import Array, Tensor

__all__ = [
    "SGD",
    "AdaGrad",
    "Adam",
    "Constant",
    "DecayScheduler",
    "ExponentialDecay",
    "Optimizer",
    "RMSProp",
]


class DecayScheduler(ABC):
    """The learning rate as a function of the step.

    Args:
        init_value: learning rate of step 0.
    """

    def __init__(self, init_value: float) -> None:
        self.init_value = _at_least_zero("learning rate", init_value)

    @abstractmethod
    def __call__(self, step: int) -> float:
        """The learning rate of `step`, counted from 0."""


class Constant(DecayScheduler):
    """The same learning rate at every step."""

    def __call__(self, step: int) -> float:  # noqa: D102
        return self.init_value


class ExponentialDecay(DecayScheduler):
    """init_value * decay_rate ** (step / decay_steps).

    Args:
        init_value: learning rate of step 0.
        decay_steps: number of steps in which the rate falls by the factor `decay_rate`.
        decay_rate: in (0, 1].
        staircase: change only every `decay_steps` steps.
    """

    def __init__(self, init_value: float, decay_steps: int, decay_rate: float, staircase: bool = False) -> None:
        super().__init__(init_value)
        if decay_steps <= 0:
            raise UsageError(f"decay_steps is a number of steps, 1 or more; got {decay_steps}")
        self.decay_steps = decay_steps
        self.decay_rate = _at_least_zero("decay_rate", decay_rate)
        self.staircase = staircase

    def __call__(self, step: int) -> float:  # noqa: D102
        exponent = step // self.decay_steps if self.staircase else step / self.decay_steps
        return self.init_value * float(self.decay_rate**exponent)


class Optimizer(ABC):
    """Base of all optimizers.

    An optimizer keeps arrays for each parameter, its *slots*, with the parameter's shape and dtype. A step is an
    `update` of every parameter, followed by `step()`; calling the optimizer on a loss does both.

    Args:
        lr: learning rate, a number or a schedule.
        dtype: accepted for SINGA's scripts; slots have the dtype of their parameter.

    Attributes:
        lr: the schedule.
        lr_value: the learning rate of this step.
        step_counter: number of finished steps.
    """

    slots: tuple[str, ...] = ()

    def __init__(self, lr: float | DecayScheduler, dtype: DTypeLike = float32) -> None:
        self.lr = lr if isinstance(lr, DecayScheduler) else Constant(lr)
        self.dtype = dtype
        self.step_counter = 0
        self.lr_value = self.lr(0)
        self._slots: dict[Tensor, dict[str, Array]] = {}
        self._unclaimed: dict[str, dict[str, Array]] = {}  # loaded states of parameters not seen yet

    def __call__(self, loss: Tensor) -> None:
        """Local. One training step from `loss`."""
        self.backward_and_update(loss)
        self.step()

    def backward_and_update(self, loss: Tensor) -> None:
        """Local. Update every parameter behind `loss`, each as soon as its gradient is final."""
        for param, grad in autograd.backward(loss):
            self.update(param, grad)

    def update(self, param: Tensor, grad: Tensor) -> None:
        """Local. Update `param` from `grad`, which is not changed; both have the same shape and dtype.

        Raises:
            UsageError: the shapes differ.
        """
        if param.shape != grad.shape:
            raise UsageError(f"a gradient of shape {grad.shape} is none of {param.name} of shape {param.shape}")
        slots = self._slots.get(param)
        self._apply(param.array, grad.array, self._claim(param) if slots is None else slots)

    def step(self) -> None:
        """Local. Count a finished step and set the learning rate of the next one."""
        self.step_counter += 1
        self.lr_value = self.lr(self.step_counter)

    def attach(self, params: Iterable[Tensor]) -> None:
        """Local. Receive the parameters before the first step; called by `Model`.

        Raises:
            UsageError: two of them share a name.
            StateError: loaded states do not fit.
        """
        seen: set[str | None] = set()
        for param in params:
            if param.name in seen:
                raise UsageError(f"two parameters are named {param.name}; give every parameter a name of its own")
            seen.add(param.name)
            self._unclaimed_for(param)

    # -- states ------------------------------------------------------------------------------------------------------
    def get_states(self) -> dict[str, np.ndarray[Any, Any]]:
        """Local. Copies of the state that a later run needs to continue: "step_counter", and "PARAMETER:SLOT" per slot.

        Raises:
            UsageError: a parameter has no unique name.
        """
        states = {"step_counter": np.array(self.step_counter)}
        for param, slots in self._slots.items():
            for slot, array in slots.items():
                key = f"{param.name}:{slot}"
                if param.name is None or key in states:
                    raise UsageError(
                        f"the states of parameter {param.name} cannot be told apart; give every parameter a name of "
                        "its own (Model.compile does)"
                    )
                states[key] = np.array(param.device.host(array))
        for name, slots in self._unclaimed.items():
            states.update({f"{name}:{slot}": array.copy() for slot, array in slots.items()})
        return states

    def set_states(self, states: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Local. Continue from the result of `get_states`; parameters are identified by name.

        Raises:
            StateError: the states are not those of this optimizer or do not fit its parameters; nothing was changed.
        """
        loaded = self._loaded(states)
        self.step_counter = int(states["step_counter"])
        self.lr_value = self.lr(self.step_counter)
        self._unclaimed = {
            name: {slot: array.copy() for slot, array in slots.items()} for name, slots in loaded.items()
        }
        known = list(self._slots)
        self._slots.clear()
        for param in known:
            if param.name in loaded:
                self._claim(param)

    def check_states(self, states: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Local. Whether `set_states` would accept them.

        Raises:
            StateError: see `set_states`.
        """
        self._loaded(states)

    def _loaded(self, states: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, dict[str, Array]]:
        """The states by parameter and slot, once they have been checked."""
        if "step_counter" not in states:
            raise StateError("these are no states of an optimizer: step_counter is missing")
        loaded: dict[str, dict[str, Array]] = {}
        for key, array in states.items():
            if key != "step_counter":
                name, _, slot = key.rpartition(":")
                loaded.setdefault(name, {})[slot] = array
        for name, slots in loaded.items():
            if set(slots) != set(self.slots):
                raise StateError(
                    f"the states of parameter {name} are {sorted(slots)}, where {type(self).__name__} as it is set up "
                    f"has {sorted(self.slots)}"
                )
        for param in self._slots:
            _check_fit(param, loaded.get(str(param.name), {}))
        return loaded

    def _unclaimed_for(self, param: Tensor) -> dict[str, Array] | None:
        slots = self._unclaimed.get(param.name) if param.name else None
        if slots is not None:
            _check_fit(param, slots)
        return slots

    def _claim(self, param: Tensor) -> dict[str, Array]:
        """Slots of a parameter seen for the first time: loaded ones, or new ones of zeros."""
        xp = param.device.xp
        loaded = self._unclaimed_for(param)
        if loaded is None:
            slots = self._new_slots(param)
        else:
            slots = {slot: array if slot == "step" else xp.asarray(array) for slot, array in loaded.items()}
            del self._unclaimed[str(param.name)]
        self._slots[param] = slots
        return slots

    def _new_slots(self, param: Tensor) -> dict[str, Array]:
        zeros = param.device.xp.zeros_like
        return {slot: np.zeros((), np.int64) if slot == "step" else zeros(param.array) for slot in self.slots}

    @abstractmethod
    def _apply(self, param: Array, grad: Array, slots: dict[str, Array]) -> None:
        """Apply the rule to `param`, in place."""


class SGD(Optimizer):
    """Stochastic gradient descent.

    g = grad + weight_decay * param; with momentum, buffer = momentum * buffer + (1 - dampening) * g (initially g), and
    g = buffer, or with Nesterov g + momentum * buffer; then param -= lr * g.

    Raises:
        UsageError: a value is negative or not finite, or nesterov without momentum or with dampening.
    """

    def __init__(
        self,
        lr: float | DecayScheduler = 0.1,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        dtype: DTypeLike = float32,
    ) -> None:
        super().__init__(lr, dtype)
        self.momentum = _at_least_zero("momentum", momentum)
        self.dampening = _at_least_zero("dampening", dampening)
        self.weight_decay = _at_least_zero("weight_decay", weight_decay)
        self.nesterov = nesterov
        if nesterov and (momentum == 0 or dampening != 0):
            raise UsageError("nesterov needs a momentum above 0 and a dampening of 0")
        self.slots = ("momentum",) if momentum else ()

    def _apply(self, param: Array, grad: Array, slots: dict[str, Array]) -> None:
        kernels = kernels_of(param)
        first = bool(self.slots) and not slots
        if first:
            slots["momentum"] = kernels.empty(param.shape, param.dtype)
        kernels.sgd_update(
            param,
            grad,
            slots.get("momentum"),
            self.lr_value,
            self.momentum,
            self.dampening,
            self.weight_decay,
            self.nesterov,
            first,
        )

    def _new_slots(self, param: Tensor) -> dict[str, Array]:
        return {}  # the rule fills the buffer with the first gradient


class Adam(Optimizer):
    """Adam (Kingma and Ba, arXiv 1412.6980, algorithm 1), with weight decay added to the gradient.

    Raises:
        UsageError: a value is negative or not finite, or a beta is not below 1.
    """

    slots = ("m", "v", "step")

    def __init__(
        self,
        lr: float | DecayScheduler = 0.1,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
        dtype: DTypeLike = float32,
    ) -> None:
        super().__init__(lr, dtype)
        self.beta_1, self.beta_2 = _below_one("beta_1", beta_1), _below_one("beta_2", beta_2)
        self.epsilon = _at_least_zero("epsilon", epsilon)
        self.weight_decay = _at_least_zero("weight_decay", weight_decay)

    def _apply(self, param: Array, grad: Array, slots: dict[str, Array]) -> None:
        step = slots["step"]
        step += 1
        kernels_of(param).adam_update(
            param,
            grad,
            slots["m"],
            slots["v"],
            int(step),
            self.lr_value,
            self.beta_1,
            self.beta_2,
            self.epsilon,
            self.weight_decay,
        )


class RMSProp(Optimizer):
    """RMSProp (Tieleman and Hinton, lecture 6.5, 2012): steps divided by the root of the mean squared gradient.

    Raises:
        UsageError: a value is negative or not finite, or rho is not below 1.
    """

    slots = ("running",)

    def __init__(
        self,
        lr: float | DecayScheduler = 0.1,
        rho: float = 0.9,
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
        dtype: DTypeLike = float32,
    ) -> None:
        super().__init__(lr, dtype)
        self.rho = _below_one("rho", rho)
        self.epsilon = _at_least_zero("epsilon", epsilon)
        self.weight_decay = _at_least_zero("weight_decay", weight_decay)

    def _apply(self, param: Array, grad: Array, slots: dict[str, Array]) -> None:
        kernels_of(param).rmsprop_update(
            param, grad, slots["running"], self.lr_value, self.rho, self.epsilon, self.weight_decay
        )


class AdaGrad(Optimizer):
    """AdaGrad (Duchi et al., JMLR 12, 2011): steps divided by the root of the sum of squared gradients.

    Raises:
        UsageError: a value is negative or not finite.
    """

    slots = ("history",)

    def __init__(
        self,
        lr: float | DecayScheduler = 0.1,
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
        dtype: DTypeLike = float32,
    ) -> None:
        super().__init__(lr, dtype)
        self.epsilon = _at_least_zero("epsilon", epsilon)
        self.weight_decay = _at_least_zero("weight_decay", weight_decay)

    def _apply(self, param: Array, grad: Array, slots: dict[str, Array]) -> None:
        kernels_of(param).adagrad_update(param, grad, slots["history"], self.lr_value, self.epsilon, self.weight_decay)


def _at_least_zero(what: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise UsageError(f"{what} {value} is not a finite number of at least 0")
    return value


def _below_one(what: str, value: float) -> float:
    if not 0 <= value < 1:
        raise UsageError(f"{what} {value} is not in [0, 1)")
    return value


def _check_fit(param: Tensor, slots: Mapping[str, Array]) -> None:
    for slot, array in slots.items():
        shape, dtype = ((), np.dtype(np.int64)) if slot == "step" else (param.shape, param.dtype)
        if array.shape != shape or array.dtype != dtype:
            raise StateError(
                f"state {param.name}:{slot} is {array.dtype} of shape {array.shape}; expected {dtype} of shape {shape}"
            )
