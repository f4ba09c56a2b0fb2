"""The base of optimizers: steps, hyperparameters and states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike

from ...checks import check_assignment, check_count, check_number
from ...errors import StateError, UsageError
from ...kernels import kernels_of
from ..core import autograd, changes
from ..core.array import Array, float32
from ..core.mode import mode
from ..core.numbers import number_of
from ..core.tensor import Tensor
from ..devices.device import get_default_device
from .accumulation import GradientAccumulation
from .hyperparameters import Hyperparameter
from .schedules import DecayScheduler
from .slots import SlotStore
from .views import CurrentValue


class Optimizer:
    """Base of all optimizers.

    An optimizer keeps arrays for each parameter, its *slots*, with the parameter's shape and dtype. A step is an
    `apply` to every parameter, followed by `step()`; calling the optimizer on a loss does both.

    A subclass defines one of two methods. `apply(param_name, param_value, param_grad)` is SINGA's: it gets tensors, and
    it may keep any state. `_apply(param, grad, slots)` is distopt's: it gets arrays, and those
    that `slots` names, which begin as zeros. State kept elsewhere belongs in `get_states` and `set_states`, too, as a
    dict of arrays; `DistOpt` averages it over the ranks where partial updates have let it drift.

    Args:
        lr: learning rate, a number or a schedule.
        dtype: accepted for SINGA's scripts; slots have the dtype of their parameter.
        clip_grad_norm: see `clip_gradients`.

    Attributes:
        lr: the schedule of the learning rate. An assigned number becomes a constant schedule. An assignment takes
            effect with the next step, as with every hyperparameter.
        lr_value: the learning rate of this step, as a tensor of shape (1,).
        values: all hyperparameters of this step, by name.
        grad_norm: the norm that `clip_gradients` measured in the last update, None before.

    Raises:
        UsageError: a value makes no sense.
    """

    dtype: DTypeLike
    values: dict[str, float]
    former_slots: ClassVar[tuple[str, ...]] = ()  # names that `slots` may have had under other hyperparameters
    lr = Hyperparameter()
    lr_value = CurrentValue("lr")
    grad_norm: float | None = None
    _clip_grad_norm: float | None = None
    _gate: Array | None = None

    def __init__(
        self, lr: float | DecayScheduler, dtype: DTypeLike = float32, *, clip_grad_norm: float | None = None
    ) -> None:
        self.dtype = dtype
        self.clip_grad_norm = clip_grad_norm
        self._steps = 0
        self._schedules: dict[str, DecayScheduler] = {}
        self.values = {}
        self._device = get_default_device()
        self._store = SlotStore()
        self._updated: dict[Tensor, int] = {}  # when, by `changes.clock`
        self._accumulation = GradientAccumulation()
        self.lr = lr

    if not TYPE_CHECKING:  # with it, type checkers accept every name

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in vars(self):
                check_assignment(self, name)
            object.__setattr__(self, name, value)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the slots; a subclass may set it as an attribute of the class."""
        return ()

    def __call__(self, loss: Tensor) -> None:
        """One training step from `loss`."""
        self.call(loss)
        self.step()

    def backward_and_update(self, loss: Tensor) -> None:
        """The same as a call of the optimizer; SINGA's name."""
        self(loss)

    def call(self, loss: Tensor) -> None:
        """Update every parameter behind `loss`, each as soon as its gradient is final. `step` must follow."""
        pairs: Iterable[tuple[Tensor, Tensor]] = autograd.backward(loss)
        if self._accumulation.active:
            self._accumulation.add(pairs)
            return
        if self._accumulation.sums:
            pairs = self._accumulation.taken(pairs)
        if self._clip_grad_norm is not None:
            pairs = list(pairs)
            self.clip_gradients([grad.array.reshape(-1) for _, grad in pairs])
        self.update_all(pairs)

    def no_sync(self) -> AbstractContextManager[None]:
        """In the body of a `with`, a call of the optimizer only adds the gradients of its loss to earlier ones.

        The next call outside adds them to its own and updates. To have the gradient of a mean over n such batches,
        divide each loss by n. `DistOpt.no_sync` has the same effect on every rank; the name is PyTorch's.
        """
        return self._accumulation.collecting()

    @property
    def can_gate(self) -> bool:
        """Whether `gated` can keep this optimizer from updating. False for a rule that a script defines."""
        return False

    @contextmanager
    def gated(self, flag: Array) -> Iterator[Callable[[], None]]:
        """Updates inside change nothing if `flag` is true, without a wait of the host; only if `can_gate`.

        Args:
            flag: bool [], on the device of the parameters.

        Yields:
            A function that, if the flag was true, takes back the count of the step inside.
        """
        self._gate, before = flag, self._steps
        try:
            yield lambda: self._go_to(before)
        finally:
            self._gate = None

    @property
    def clip_grad_norm(self) -> float | None:
        """The largest norm that `clip_gradients` leaves; None for no limit, `math.inf` to measure only."""
        return self._clip_grad_norm

    @clip_grad_norm.setter
    def clip_grad_norm(self, value: Any) -> None:
        self._clip_grad_norm = None if value is None else check_number("clip_grad_norm", value, "(0, inf]")

    def clip_gradients(self, grads: Sequence[Array]) -> None:
        """Scale all gradients of a step down, so that their common l2 norm is at most `clip_grad_norm`.

        The factor is that of `torch.nn.utils.clip_grad_norm_`; `grad_norm` is the norm before. Steps from a loss call
        this before they update; loops that call `update` by hand call it themselves.

        Args:
            grads: flat arrays, changed in place.
        """
        assert self._clip_grad_norm is not None
        self.grad_norm = math.sqrt(float(sum(kernels_of(grad).squared_norm(grad) for grad in grads)))
        factor = self._clip_grad_norm / (self.grad_norm + 1e-6)
        if not factor >= 1:  # it may be NaN
            for grad in grads:
                grad *= factor

    def update(self, param: Tensor, grad: Tensor) -> None:
        """`apply` to a parameter under its own name.

        Raises:
            UsageError: shapes or dtypes differ.
        """
        training, mode.training = mode.training, False  # a rule may compute with tensors, which must not record a graph
        if self._device is not param.device:
            self._device = param.device
        try:
            self._updated[param] = next(changes.clock)
            self.apply(param.name or f"{id(param):#x}", param, grad)
        finally:
            mode.training = training

    def update_all(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """`update` of each parameter by its gradient, as they come; rules may do several at once on a GPU."""
        for param, grad in pairs:
            self.update(param, grad)

    def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
        """Update a parameter in place.

        Args:
            param_name: for subclasses that keep states by name. Slots are kept by tensor, so it need not be unique.
            param_value: the parameter.
            param_grad: its gradient, of the same shape and dtype. It is not changed; subclasses may change it.

        Raises:
            UsageError: shapes or dtypes differ.
        """
        check_gradient(param_value, param_grad)
        slots = self._store.slots.get(param_value)
        if slots is None:
            slots = self._store.meet(param_value, self.slots)
        self._apply(param_value.array, param_grad.array, slots)

    def _apply(self, param: Array, grad: Array, slots: dict[str, Array]) -> None:
        """Apply the rule to `param`, in place. `values` has the hyperparameters."""
        raise NotImplementedError(
            f"{type(self).__name__} has no rule; define apply(self, param_name, param_value, param_grad)"
        )

    def constants(self) -> dict[str, Any]:
        """By name, the state that decides the next update, except parameters, gradients and slots.

        The values are numbers, booleans and strings. `DistOpt` checks in every step that all ranks have the same. A
        subclass with more constants adds them to this dict.
        """
        return {
            "optimizer": type(self).__name__,
            **self.values,
            "clip_grad_norm": self._clip_grad_norm,
            "step_counter": self._steps,
        }

    def step(self) -> None:
        """Count a finished step, and set the hyperparameters of the next one; do nothing inside `no_sync`."""
        if not self._accumulation.active:
            changes.updated(self, self._updated)
            self._go_to(self._steps + 1)

    def _go_to(self, step: int) -> None:
        self.values = {name: number_of(schedule(step)) for name, schedule in self._schedules.items()}
        self._steps = step

    def attach(self, params: Iterable[Tensor]) -> None:
        """Receive the parameters before the first step; called by `Model`.

        Raises:
            UsageError: two of them share a name.
            StateError: loaded states do not fit.
        """
        seen: set[str | None] = set()
        for param in params:
            if param.name in seen:
                raise UsageError(f"two parameters are named {param.name}; give every parameter a name of its own")
            seen.add(param.name)
            self._store.check_waiting(param)

    # -- states ------------------------------------------------------------------------------------------------------
    def get_states(self) -> dict[str, np.ndarray[Any, Any]]:
        """Copies of the state that a later run needs to continue: "step_counter", and "PARAMETER:SLOT" per slot.

        Raises:
            UsageError: a parameter has no unique name, or gradients of `no_sync` wait for an update.
        """
        self._accumulation.check_empty()
        return {"step_counter": np.array(self._steps), **self._store.states()}

    def set_states(self, states: Mapping[str, np.ndarray[Any, Any] | Tensor]) -> None:
        """Continue from the result of `get_states`; parameters are identified by name.

        Values may be tensors, as `Model.load_states` returns them. Names without a colon, other than "step_counter",
        are left to subclasses. Gradients accumulated in `no_sync` are dropped.

        Raises:
            StateError: the states are not those of this optimizer or do not fit its parameters; nothing was changed.
        """
        steps, slots = self._checked(states)
        self._go_to(steps)
        self._accumulation.sums.clear()
        self._store.load(slots)

    def check_states(self, states: Mapping[str, np.ndarray[Any, Any] | Tensor]) -> None:
        """Check that `set_states` would accept these states.

        Raises:
            StateError: see `set_states`.
        """
        self._checked(states)

    def _checked(self, states: Mapping[str, np.ndarray[Any, Any] | Tensor]) -> tuple[int, dict[str, dict[str, Array]]]:
        """The number of steps and the slots in states of this optimizer."""
        if "step_counter" not in states:
            raise StateError("these are not states of an optimizer: step_counter is missing")
        steps = check_count("step_counter", states["step_counter"])
        return steps, self._store.checked(states, self.slots, self.former_slots, type(self).__name__)

    # -- SINGA's view ------------------------------------------------------------------------------------------------
    @property
    def step_counter(self) -> Tensor:
        """Number of finished steps, as a tensor of shape (1,). A number or such a tensor may be assigned."""
        return self.as_tensor(self._steps)

    @step_counter.setter
    def step_counter(self, value: Any) -> None:
        self._go_to(int(number_of(value)))

    def as_tensor(self, value: float) -> Tensor:
        """A number as a float32 tensor of shape (1,), where the parameters are.

        It is a copy, on the CPU a read-only one: to change a hyperparameter, assign to it.
        """
        array = self._device.xp.full((1,), value, float32)
        if self._device.kind == "cpu":
            array.flags.writeable = False
        return Tensor.of(array, self._device, requires_grad=False)

    def tensors_of(self, slot: str) -> dict[str | None, Tensor]:
        """A slot of all parameters, by their names, as tensors that share its memory."""
        return self._store.tensors(slot)

    def device_check(self, *inputs: Tensor) -> None:
        """Move the `inputs`, and later results of `as_tensor`, to the device of the first of them."""
        self._device = inputs[0].device
        for tensor in inputs:
            tensor.to_device(self._device)


def check_gradient(param: Tensor, grad: Tensor) -> None:
    """Check that `grad` can be the gradient of `param`.

    Raises:
        UsageError: shapes or dtypes differ.
    """
    own, given = param.array, grad.array
    if own.shape != given.shape or own.dtype != given.dtype:
        raise UsageError(
            f"a gradient of {given.dtype} and shape {given.shape} is none of {param.name or 'a parameter'} of "
            f"{own.dtype} and shape {own.shape}"
        )
