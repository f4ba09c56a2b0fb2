"""The base of all operations, which compute tensors from tensors.

This module does not import `core.tensor`, whose operators use it: the first input makes the result, by `Tensor.of`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

from ...errors import UsageError
from . import changes, half
from .array import Array, float32
from .mode import mode
from .raw import raw

Arrays: TypeAlias = Sequence[Array | None]  # one for each input of an operation, or None
T = TypeVar("T")  # always Tensor
F = TypeVar("F", bound=Callable[..., Any])


def wants_gradient(tensor: Any) -> bool:
    """Whether a backward pass needs the gradient of `tensor`; it does not if the tensor is constant data."""
    return bool((tensor.stores_grad and tensor.requires_grad) or tensor.in_graph)


def named(function: F, name: str, text: str) -> F:
    """`function`, which another one has made, with a name of its own and the docstring `text`."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = text
    return function


class Operation:
    """One step of a forward pass. Subclasses implement `forward` and `gradients`; an instance is used for one call.

    In training mode it stays attached to its result, as the tensor's `creator`, until a backward pass has used it.

    Attributes:
        saved: arrays that `forward` keeps for `gradients`, released after the backward pass, as are `inputs`.
        inputs: the arguments, once recorded.
        needs: for each input, whether a backward pass needs its gradient.
        half: whether it runs in half precision, see `distopt.nn.core.half`.
        own_type: whether it chooses the type of its result in half precision, too: float32 for a loss, any for a cast.
        order: number of the recorded call by `changes.clock`; a backward pass may visit operations in descending order.
    """

    saved: Any = None
    inputs: tuple[Any, ...] | None = None
    needs: tuple[bool, ...] = ()
    half: bool = False
    own_type: ClassVar[bool] = False
    order: int

    def __call__(self, *tensors: T) -> T:
        """Compute; record the call in training mode."""
        kind, inputs = type(self).__name__, cast("tuple[Any, ...]", tensors)
        if not inputs:
            raise UsageError(f"{kind} needs at least one tensor")
        try:
            device, arrays = inputs[0].device, [t.array for t in inputs]
            if arrays[0].dtype.char == "e":
                self.half = True
            data = device.timed(kind, self._compute, arrays) if device.verbosity else self._compute(arrays)
        except (AttributeError, TypeError) as error:
            if strange := [type(x).__name__ for x in inputs if not hasattr(x, "creator")]:
                raise TypeError(f"{kind} takes tensors, got {strange[0]}; make one with tensor.from_numpy") from None
            # The words are nanobind's, where a kernel of the CPU does not take an array's type, and NumPy's `random`.
            words = "incompatible function arguments", "Unsupported dtype"
            if inputs[0].dtype.kind != "f" and any(text in str(error) for text in words):
                raise UsageError(f"{kind} takes floats, got {inputs[0].dtype}; convert them by to_type") from None
            raise
        out = inputs[0].of(data, device)
        if mode.training:
            self.inputs, self.order, out.creator = inputs, next(changes.clock), self
            self.needs = tuple(map(wants_gradient, inputs))
        return cast("T", out)

    def _compute(self, arrays: list[Array]) -> Array:
        return half.compute(self, arrays) if self.half else self.forward(*arrays)

    def propagate(self, dy: Array, into: Arrays) -> Arrays:
        """`gradients`, in half precision where the forward pass was.

        Raises:
            UsageError: values that it needs have been changed in place since.
        """
        changes.check(self)
        return half.gradients(self, dy, into) if self.half else self.gradients(dy, into)

    def forward(self, *inputs: Array) -> Array:
        """The result, C-contiguous. Must not change the inputs."""
        raise NotImplementedError

    def gradients(self, dy: Array, into: Arrays) -> Arrays:
        """The gradients of the inputs, given the gradient of the result; None where `needs` is False.

        Args:
            dy: gradient of the result, which this call may overwrite or return.
            into: for each input that is a parameter, memory for its gradient. A gradient that is written there, and
                whose array is returned, is not copied; any other array is copied there by the caller.

        Returns:
            C-contiguous arrays. No two of them may share memory, since their receivers may overwrite them.
        """
        raise NotImplementedError

    def backward(self, dy: Array = None) -> Any:
        """The gradients of the inputs, for scripts that traverse a graph by hand, as SINGA's unit tests do.

        Args:
            dy: gradient of the result, an array (default: 1, for a loss). It is not changed.

        Returns:
            A raw tensor, or a tuple of several; inputs that have no gradient, or do not require one, are left out.

        Raises:
            UsageError: the operation was not recorded, or a backward pass has released it.
        """
        if self.inputs is None:
            raise UsageError(
                f"{type(self).__name__} was not recorded, or its graph was used before; compute it in training mode"
            )
        x, needs = self.inputs[0], self.needs
        xp, dtype = x.device.xp, x.dtype if x.dtype.kind == "f" else float32
        self.needs = tuple([t.requires_grad for t in self.inputs])
        try:
            gradients = self.propagate(xp.ones(1, dtype) if dy is None else xp.array(dy), [None] * len(needs))
        finally:
            self.needs = needs
        pairs = zip(gradients, self.inputs, strict=True)
        wanted = tuple([raw(g) for g, t in pairs if g is not None and t.requires_grad])
        return wanted[0] if len(wanted) == 1 else wanted
