"""Tensors, and operations that compute tensors from tensors.

A `Tensor` is an array with the information that training needs. An `Operation` computes one tensor and, while
`mode.training` is on, stays attached to it as its `creator`. The tensors and creators behind a loss are the graph that
`distopt.nn.core.backward` traverses. Arithmetic on tensors also uses operations, so it has gradients like any layer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from ...errors import ShapeError, UsageError
from ...kernels import array_module
from ..devices.device import Device, device_of, get_default_device
from . import changes, half
from .mode import Ran, mode
from .outside import OutsideGraph, settled
from .raw import raw
from .values import Array, c_contiguous, float16, float32, float64, int32, int64

Slope: TypeAlias = Callable[..., Array]

__all__ = [
    "Array",
    "Operation",
    "Tensor",
    "float16",
    "float32",
    "float64",
    "from_raw_tensor",
    "int32",
    "int64",
]


class Tensor(OutsideGraph):
    """An array on a device.

    Args:
        shape: dimensions of a new tensor of zeros.
        device: device of the tensor (default: the CPU, or where `data` is if that is a tensor or raw tensor).
        dtype: element type (default: float32, or that of `data`, where in arrays and numbers 64-bit types become 32-bit
            ones, and bool becomes int32). "float" is float32, "int" int32.
        data: values to copy; overrides `shape`. As in SINGA, a raw tensor (`Tensor.data`) is used without a copy,
            unless it is on another device or of another type.
        requires_grad: see the property.
        stores_grad: whether this is a parameter: `autograd.backward` yields its gradient, unless it is frozen.
        creator: the operation that computed this tensor.
        name: name of a parameter, unique in its model, such as "conv1.W".

    Attributes:
        grad: the last gradient of a parameter. If set, `backward` writes into that tensor's memory.
        creator: the operation that computed this tensor; None for inputs and parameters.

    Raises:
        UsageError: no tensor has that shape, data or dtype.
    """

    __slots__ = ("__weakref__", "_requires_grad", "creator", "grad", "name", "stores_grad")

    def __init__(
        self,
        shape: Sequence[int] = (),
        device: Device | None = None,
        dtype: DTypeLike | None = None,
        data: Any = None,
        requires_grad: bool = True,
        stores_grad: bool = False,
        creator: Operation | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(shape, device, dtype, data)
        if stores_grad and self.dtype == float16:
            super().__init__(shape, device, float32, data)  # the master weights of half precision
        self.grad: Tensor | None = None
        self.creator = creator
        self._requires_grad = requires_grad
        self.stores_grad = stores_grad
        self.name = name

    @classmethod
    def of(cls, array: Array, device: Device | None = None, requires_grad: bool = True) -> Tensor:
        """Local. A tensor that uses `array`, of any type, without a copy.

        Raises:
            UsageError: the array is not C-contiguous.
        """
        tensor = cls.__new__(cls)
        tensor.device = get_default_device() if device is None else device
        tensor.array = c_contiguous(array)
        tensor.grad = tensor.creator = tensor.name = None
        tensor._requires_grad, tensor.stores_grad = requires_grad, False
        return tensor

    def __repr__(self) -> str:
        label = f"{self.name}, " if self.name else ""
        return f"Tensor({label}{list(self.shape)}, {self.dtype}, {self.device!r})"

    @property
    def requires_grad(self) -> bool:
        """Whether its gradient is computed, if it is a parameter or `Operation.backward` is called.

        A parameter without is frozen: optimizers leave it alone. May be assigned between steps, equally on all ranks.
        """
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        mode.freezes += self.stores_grad and value != self._requires_grad
        self._requires_grad = value

    @property
    def in_graph(self) -> bool:
        """Whether it was computed from parameters, so that a backward pass goes through it."""
        return self.creator is not None and True in self.creator.needs

    def is_dummy(self) -> bool:
        """Whether it has no name."""
        return self.name is None

    # -- arithmetic --------------------------------------------------------------------------------------------------
    def reshape(self, shape: Sequence[int]) -> Tensor:
        """The same elements with other dimensions, where one may be -1."""
        return self._computed(Reshape(shape), self)

    def __add__(self, other: Any) -> Tensor:
        return self._computed(Add(), self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Tensor:
        return self._computed(Sub(), self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return self._computed(Sub(), other, self)

    def __mul__(self, other: Any) -> Tensor:
        return self._computed(Mul(), self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Tensor:
        return self._computed(Div(), self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return self._computed(Div(), other, self)

    def __matmul__(self, other: Any) -> Tensor:
        return self._computed(MatMul(), self, other)

    def __neg__(self) -> Tensor:
        return self * -1

    def __iadd__(self, other: Any) -> Tensor:
        return self._in_place(operator.iadd, operator.add, other)

    def __isub__(self, other: Any) -> Tensor:
        return self._in_place(operator.isub, operator.sub, other)

    def __imul__(self, other: Any) -> Tensor:
        return self._in_place(operator.imul, operator.mul, other)

    def __itruediv__(self, other: Any) -> Tensor:
        return self._in_place(operator.itruediv, operator.truediv, other)

    def _in_place(self, change: Callable[[Array, Array], Array], compute: Callable[..., Tensor], other: Any) -> Tensor:
        """This tensor, changed in place; a new one if it, or the other, is part of a graph with parameters.

        A backward pass that still needs the old values raises an error.
        """
        given = self.operand(other)
        if self.in_graph or given.in_graph:
            return compute(self, given)
        fits = np.can_cast(given.dtype, self.dtype, "same_kind" if given is other else "safe")
        if self.dtype.kind != "f" and (not fits or change is operator.itruediv):
            taken = given.dtype if given.dtype.kind != "f" and change is not operator.itruediv else "floats"
            raise UsageError(f"a tensor of {self.dtype} takes no {taken} in place; convert it first, by to_type")
        change(self.changed().array, given.array)
        return self

    def _computed(self, operation: Operation, *operands: Any) -> Tensor:
        """The result of an arithmetic operation: part of the graph only if a parameter is below it.

        Otherwise sums that scripts keep over many steps would keep every step's tensors alive.
        """
        out = operation(*map(self.operand, operands))
        if True not in operation.needs:
            out.creator = None
        return out

    def operand(self, value: Any) -> Tensor:
        given = super().operand(value)
        if given is not value:
            given.requires_grad = False
        return given


def from_raw_tensor(raw: Any) -> Tensor:
    """A tensor that shares the memory of a raw tensor: `Tensor.data`, or a gradient of `Operation.backward`."""
    return Tensor.of(raw.view(np.ndarray) if isinstance(raw, np.ndarray) else raw, device_of(raw))


class Operation:
    """One step of a forward pass. Subclasses implement `forward` and `gradients`; an instance is used for one call.

    Attributes:
        native: whether, on the CPU, it computes only through kernels of `distopt.nn.kernels.cpu`.
        saved: arrays that `forward` keeps for `gradients`, released after the backward pass, as are `inputs`.
        inputs: the arguments, once recorded.
        needs: for each input, whether a backward pass needs its gradient.
        half: whether it runs in half precision, see `distopt.nn.core.half`.
        own_type: whether its result has a type of its own in half precision: float32 for a loss, any for a cast.
        order: of the recorded call by `changes.clock`; descending order is a valid order for the backward pass.
    """

    native: ClassVar[bool] = False
    saved: Any = None
    inputs: tuple[Tensor, ...] | None = None
    needs: tuple[bool, ...] = ()
    half: bool = False
    own_type: ClassVar[bool] = False
    order: int

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Compute; record the call in training mode."""
        if not inputs:
            raise UsageError(f"{type(self).__name__} needs at least one tensor")
        kind = type(self).__name__
        try:
            device, arrays = inputs[0].device, [t.array for t in inputs]
            if arrays[0].dtype.char == "e":
                self.half = True
            data = device.timed(kind, self._compute, arrays) if device.verbosity else self._compute(arrays)
        except (AttributeError, TypeError):
            if strange := [type(x).__name__ for x in inputs if not isinstance(x, Tensor)]:
                raise TypeError(f"{kind} takes tensors, got {strange[0]}; make one with tensor.from_numpy") from None
            if self.native and inputs[0].dtype.kind != "f":
                raise UsageError(f"{kind} takes floats, got {inputs[0].dtype}; convert them by to_type") from None
            raise
        out = Tensor.of(data, device)
        if mode.training:
            self.inputs, self.order, out.creator = inputs, next(changes.clock), self
            self.needs = tuple([(t.stores_grad and t._requires_grad) or t.in_graph for t in inputs])
        if mode.ran is not None:
            mode.ran.append(Ran(self, inputs, out))
        return out

    def _compute(self, arrays: list[Array]) -> Array:
        return half.compute(self, arrays) if self.half else self.forward(*arrays)

    def walk(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        """`gradients`, in half precision where the forward pass was.

        Raises:
            UsageError: values that it needs were changed in place meanwhile.
        """
        changes.check(self)
        return half.gradients(self, dy, into) if self.half else self.gradients(dy, into)

    def forward(self, *inputs: Array) -> Array:
        """The result, C-contiguous. Must not change the inputs."""
        raise NotImplementedError

    def gradients(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        """The gradients of the inputs, given that of the result; None where `needs` is False.

        Args:
            dy: gradient of the result, which this call may overwrite or return.
            into: for each input that is a parameter, memory for its gradient. Writing the gradient there and returning
                that array saves a copy; any other array returned is copied there.

        Returns:
            C-contiguous arrays. No two of them may share memory, since their receivers may overwrite them.
        """
        raise NotImplementedError

    def backward(self, dy: Array = None) -> Any:
        """Local. The gradients of the inputs, for scripts that walk a graph by hand, as SINGA's unit tests do.

        Args:
            dy: gradient of the result, an array (default: 1, for a loss). It is not changed.

        Returns:
            A raw tensor, or a tuple of several; inputs that have no gradient, or do not require one, are left out.

        Raises:
            UsageError: the operation was not recorded, or a backward pass has released it.
        """
        if self.inputs is None:
            raise UsageError(
                f"{type(self).__name__} was not recorded, or its graph was walked before; compute it in training mode"
            )
        x, needs = self.inputs[0], self.needs
        xp, dtype = x.device.xp, x.dtype if x.dtype.kind == "f" else float32
        self.needs = tuple([t.requires_grad for t in self.inputs])
        try:
            gradients = self.walk(xp.ones(1, dtype) if dy is None else xp.array(dy), [None] * len(needs))
        finally:
            self.needs = needs
        pairs = zip(gradients, self.inputs, strict=True)
        wanted = tuple([raw(g) for g, t in pairs if g is not None and t.requires_grad])
        return wanted[0] if len(wanted) == 1 else wanted


class Broadcast(Operation):
    """An element-wise operation on arrays, with NumPy's broadcasting.

    Attributes:
        reads: whether `gradients` needs the operands, in `saved`.
        slopes: for each operand, a function of the gradient of the result and, if `reads`, of the operands: its
            gradient, before the sum over the axes along which it was repeated.
    """

    reads: ClassVar[bool] = False
    slopes: ClassVar[tuple[Slope, ...]] = ()

    def value(self, *operands: Array) -> Array:
        """The result, in NumPy's type for it. A `ValueError` says that the shapes do not fit."""
        raise NotImplementedError

    def forward(self, *operands: Array) -> Array:
        self.saved = operands if self.reads else None
        try:
            y = self.value(*operands)
        except ShapeError:
            raise
        except ValueError:
            shapes = " and ".join(str(list(x.shape)) for x in operands)
            raise ShapeError(
                f"{type(self).__name__} of shapes {shapes}: dimensions, counted from the last, must be equal or 1"
            ) from None
        return settled(y, *operands)

    def gradients(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        operands = self.saved if self.reads else ()
        pairs = enumerate(zip(self.slopes, self.needs, strict=True))
        return [self.reduced(slope(dy, *operands), i) if need else None for i, (slope, need) in pairs]

    def reduced(self, gradient: Array, which: int) -> Array:
        """The sum of `gradient` over the axes along which input number `which` was repeated, in its type."""
        assert self.inputs is not None
        x = self.inputs[which].array
        if gradient.shape != x.shape:
            extra = gradient.ndim - x.ndim
            axes = [i + extra for i, n in enumerate(x.shape) if n == 1]
            gradient = gradient.sum(axis=(*range(extra), *axes), keepdims=True).reshape(x.shape)
        dtype = x.dtype if x.dtype.kind == "f" else float32
        return (gradient if gradient.dtype == dtype else gradient.astype(dtype))[...]


def broadcast(name: str, value: Callable[..., Array], *slopes: Slope, reads: bool = True) -> type[Broadcast]:
    """Local. A kind of `Broadcast` by its attributes."""
    return type(name, (Broadcast,), {"value": staticmethod(value), "slopes": slopes, "reads": reads})


# No two gradients may share memory.
Add = broadcast("Add", operator.add, lambda dy: dy, lambda dy: dy.copy(), reads=False)
Sub = broadcast("Sub", operator.sub, lambda dy: dy, operator.neg, reads=False)
Mul = broadcast("Mul", operator.mul, lambda dy, a, b: dy * b, lambda dy, a, b: dy * a)
Div = broadcast("Div", operator.truediv, lambda dy, a, b: dy / b, lambda dy, a, b: -dy * a / (b * b))


class MatMul(Broadcast):
    """a [..., n, k] @ b [..., k, m]; the dimensions before the last two are broadcast."""

    reads = True

    def value(self, a: Array, b: Array) -> Array:
        if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
            raise ShapeError(f"shapes {a.shape} and {b.shape} have no matrix product; [n, k] @ [k, m] has")
        return a @ b

    def gradients(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        a, b = self.saved
        matmul = array_module(dy).matmul
        if a.ndim == b.ndim == 2 and a.dtype == b.dtype:
            da = matmul(dy, b.T, out=into[0]) if self.needs[0] else None
            return da, matmul(a.T, dy, out=into[1]) if self.needs[1] else None
        da = self.reduced(matmul(dy, b.swapaxes(-1, -2)), 0) if self.needs[0] else None
        return da, self.reduced(matmul(a.swapaxes(-1, -2), dy), 1) if self.needs[1] else None


class Reshape(Operation):
    """The elements of x with other dimensions."""

    native = True

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)

    def forward(self, x: Array) -> Array:
        self.saved = x.shape
        try:
            return x.reshape(self.shape)
        except (TypeError, ValueError):
            raise ShapeError(f"a tensor of shape {x.shape} cannot take the shape {self.shape}") from None

    def gradients(self, dy: Array, into: Sequence[Array | None]) -> Sequence[Array | None]:
        return (dy.reshape(self.saved),)
