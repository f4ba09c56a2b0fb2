"""Optimizers: rules that update a parameter in place from its gradient.

Rules, names and the order of arguments are SINGA's, or PyTorch's where SINGA has none. Every hyperparameter is a number
or a schedule. For `clip_grad_norm` see `Optimizer.clip_gradients`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from numpy.typing import DTypeLike

from ...errors import UsageError
from ..core.array import Array, float32
from ..core.tensor import Tensor
from ..numerics import numerics_of
from ..numerics.cpu import Update
from .hyperparameters import Hyperparameter
from .optimizer import Optimizer
from .schedules import Constant, DecayScheduler
from .views import CurrentValue, SlotView

__all__ = ["SGD", "AdaGrad", "Adam", "AdamW", "RMSProp"]


class _Rule(Optimizer):
    """A rule that one kernel applies; see `distopt.nn.numerics.cpu.update`."""

    _kernel: ClassVar[str]  # its name
    _kernel_slots: ClassVar[tuple[str, ...]]  # the slots that it takes, in its order; a missing one is None
    _kernel_values: ClassVar[tuple[str, ...]]  # the hyperparameters that it takes, in its order
    _waiting: list[Update] | None = None  # inside `update_all`

    @property
    def can_gate(self) -> bool:
        """Whether a step can be gated. The kernel reads the gate, so no other code may update."""
        kind, base = type(self), _Rule
        own = kind.apply, kind.update, kind.step, kind._apply
        return own == (base.apply, base.update, base.step, base._apply) and self._clip_grad_norm is None

    def update_all(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Update many parameters by few kernels; one by one if a subclass has its own `update` or `apply`."""
        if (type(self).apply, type(self).update) != (_Rule.apply, _Rule.update):
            return super().update_all(pairs)
        self._waiting = []
        try:
            super().update_all(pairs)
            self._update_waiting()
        finally:
            self._waiting = None

    def _apply(self, param: Array, grad: Array, slots: dict[str, Array]) -> None:
        one = param, grad, [slots.get(name) for name in self._kernel_slots]
        if self._waiting is None:
            self._update([one])
            return
        self._waiting.append(one)
        if len(self._waiting) >= numerics_of(param).UPDATES_AT_ONCE:
            self._update_waiting()

    def _update_waiting(self) -> None:
        if self._waiting:
            self._update(self._waiting)
            self._waiting = []

    def _update(self, several: Sequence[Update]) -> None:
        numerics_of(several[0][0]).update(self._kernel, several, *self._numbers(), gate=self._gate)

    def _numbers(self) -> list[float]:
        """The numbers that the kernel takes."""
        return [self.values[name] for name in self._kernel_values]


class SGD(_Rule):
    """Stochastic gradient descent.

    g = grad + weight_decay * param; with momentum, buffer = momentum * buffer + (1 - dampening) * g (initially 0), and
    g = buffer, or with Nesterov g + momentum * buffer; then param -= lr * g.

    Raises:
        UsageError: a value is negative or not finite, or nesterov without momentum or with dampening.
    """

    nesterov: bool
    _kernel, _kernel_slots, _kernel_values = "sgd", ("momentum",), ("lr", "momentum", "dampening", "weight_decay")
    former_slots: ClassVar[tuple[str, ...]] = ("momentum",)
    moments = SlotView("momentum")
    momentum, mom_value = Hyperparameter(), CurrentValue("momentum")
    dampening, dam_value = Hyperparameter(), CurrentValue("dampening")
    weight_decay, decay_value = Hyperparameter(), CurrentValue("weight_decay")

    def __init__(
        self,
        lr: float | DecayScheduler = 0.1,
        momentum: float | DecayScheduler = 0.0,
        dampening: float | DecayScheduler = 0.0,
        weight_decay: float | DecayScheduler = 0.0,
        nesterov: bool = False,
        dtype: DTypeLike = float32,
        *,
        clip_grad_norm: float | None = None,
    ) -> None:
        super().__init__(lr, dtype, clip_grad_norm=clip_grad_norm)
        self.momentum, self.dampening, self.weight_decay = momentum, dampening, weight_decay
        self.nesterov = nesterov
        if nesterov and (self.values["momentum"] == 0 or self.values["dampening"] != 0):
            raise UsageError("nesterov needs a momentum above 0 and a dampening of 0")

    @property
    def slots(self) -> tuple[str, ...]:
        """A buffer, unless the momentum is always 0."""
        never = isinstance(self.momentum, Constant) and self.momentum.init_value == 0
        return () if never else ("momentum",)

    def constants(self) -> dict[str, Any]:
        """The constants of the base class, and `nesterov`."""
        return super().constants() | {"nesterov": self.nesterov}

    def _numbers(self) -> list[float]:
        return [*super()._numbers(), self.nesterov]


class Adam(_Rule):
    """Adam (Kingma and Ba, arXiv 1412.6980, algorithm 1), with weight decay added to the gradient.

    The t of its bias corrections is the number of this step, counted from 1, for all parameters.

    Raises:
        UsageError: a value is negative or not finite, or a beta is not below 1.
    """

    slots = _kernel_slots = ("m", "v")
    _kernel, _kernel_values = "adam", ("lr", "beta_1", "beta_2", "epsilon", "weight_decay")
    m, v = SlotView("m"), SlotView("v")
    beta_1, beta_1_value = Hyperparameter("[0, 1)"), CurrentValue("beta_1")
    beta_2, beta_2_value = Hyperparameter("[0, 1)"), CurrentValue("beta_2")
    epsilon, epsilon_value = Hyperparameter(), CurrentValue("epsilon")
    weight_decay, decay_value = Hyperparameter(), CurrentValue("weight_decay")

    def __init__(
        self,
        lr: float | DecayScheduler = 0.1,
        beta_1: float | DecayScheduler = 0.9,
        beta_2: float | DecayScheduler = 0.999,
        epsilon: float | DecayScheduler = 1e-8,
        weight_decay: float | DecayScheduler = 0.0,
        dtype: DTypeLike = float32,
        *,
        clip_grad_norm: float | None = None,
    ) -> None:
        super().__init__(lr, dtype, clip_grad_norm=clip_grad_norm)
        self.beta_1, self.beta_2, self.epsilon, self.weight_decay = beta_1, beta_2, epsilon, weight_decay

    def _numbers(self) -> list[float]:
        return [self._steps + 1, *super()._numbers()]


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2).

    param *= 1 - lr * weight_decay; then Adam without weight decay. The defaults are PyTorch's.

    Raises:
        UsageError: as `Adam`.
    """

    def __init__(
        self,
        lr: float | DecayScheduler = 0.001,
        beta_1: float | DecayScheduler = 0.9,
        beta_2: float | DecayScheduler = 0.999,
        epsilon: float | DecayScheduler = 1e-8,
        weight_decay: float | DecayScheduler = 0.01,
        dtype: DTypeLike = float32,
        *,
        clip_grad_norm: float | None = None,
    ) -> None:
        super().__init__(lr, beta_1, beta_2, epsilon, weight_decay, dtype, clip_grad_norm=clip_grad_norm)

    def _apply(self, param: Array, grad: Array, slots: dict[str, Array]) -> None:
        param *= 1 - self.values["lr"] * self.values["weight_decay"]
        super()._apply(param, grad, slots)

    def _numbers(self) -> list[float]:
        return [*super()._numbers()[:-1], 0.0]  # the kernel adds no weight decay to the gradient


class RMSProp(_Rule):
    """RMSProp (Tieleman and Hinton, lecture 6.5, 2012): steps divided by the root of the mean squared gradient.

    g = grad + weight_decay * param; mean = rho * mean + (1 - rho) * g * g (initially 0);
    param -= lr * g / sqrt(mean + epsilon).

    Raises:
        UsageError: a value is negative or not finite, or rho is not below 1.
    """

    slots = _kernel_slots = ("running",)
    _kernel, _kernel_values = "rmsprop", ("lr", "rho", "epsilon", "weight_decay")
    running_average = SlotView("running")
    rho, rho_value = Hyperparameter("[0, 1)"), CurrentValue("rho")
    epsilon, epsilon_value = Hyperparameter(), CurrentValue("epsilon")
    weight_decay, decay_value = Hyperparameter(), CurrentValue("weight_decay")

    def __init__(
        self,
        lr: float | DecayScheduler = 0.1,
        rho: float | DecayScheduler = 0.9,
        epsilon: float | DecayScheduler = 1e-8,
        weight_decay: float | DecayScheduler = 0.0,
        dtype: DTypeLike = float32,
        *,
        clip_grad_norm: float | None = None,
    ) -> None:
        super().__init__(lr, dtype, clip_grad_norm=clip_grad_norm)
        self.rho, self.epsilon, self.weight_decay = rho, epsilon, weight_decay


class AdaGrad(_Rule):
    """AdaGrad (Duchi et al., JMLR 12, 2011): steps divided by the root of the sum of squared gradients.

    g = grad + weight_decay * param; history += g * g (initially 0); param -= lr * g / sqrt(history + epsilon).

    Raises:
        UsageError: a value is negative or not finite.
    """

    slots = _kernel_slots = ("history",)
    _kernel, _kernel_values = "adagrad", ("lr", "epsilon", "weight_decay")
    history = SlotView("history")
    epsilon, epsilon_value = Hyperparameter(), CurrentValue("epsilon")
    weight_decay, decay_value = Hyperparameter(), CurrentValue("weight_decay")

    def __init__(
        self,
        lr: float | DecayScheduler = 0.1,
        epsilon: float | DecayScheduler = 1e-8,
        weight_decay: float | DecayScheduler = 0.0,
        dtype: DTypeLike = float32,
        *,
        clip_grad_norm: float | None = None,
    ) -> None:
        super().__init__(lr, dtype, clip_grad_norm=clip_grad_norm)
        self.epsilon, self.weight_decay = epsilon, weight_decay
