"""The base of layers and models.

A layer finds its sub-layers and parameters among its attributes, so a model only needs `self.conv1 = Conv2d(...)`. A
parameter's name is its path, such as "conv1.W". Layers and parameters in lists, tuples and dictionaries are found, too,
and named by index or key; a layer that a function refers to is named by the function's variable ("downsample.conv.W").
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from ...checks import check_arrays, check_assignment
from ...errors import ShapeError, UsageError
from ..core.mode import mode
from ..core.operation import Operation
from ..core.tensor import Tensor


class Layer:
    """Base of layers and models.

    A subclass implements `forward`, and `initialize` if it has parameters. The first call of a layer initializes it.

    Attributes:
        name: path in the model once it is compiled; before that, the attribute's name or, without one, the class name.
    """

    name: str = ""
    _initialized: bool = False

    def __setattr__(self, key: str, value: object) -> None:
        if self._initialized:
            self._check_change(key, value)
        object.__setattr__(self, key, value)
        if isinstance(value, Layer) and not value.name:
            value.name = f"{self.name}.{key}" if self.name else key

    def _check_change(self, key: str, value: object) -> None:
        """Check that assigning this attribute of an initialized layer has the effect that it seems to have."""
        own = vars(self).get(key)
        if _is_parameter(own) and not _is_parameter(value):
            raise UsageError(
                f"{self._label}.{key} is a parameter, and what took its place would not be trained; change its values "
                f"by {key}.copy_from_numpy(array) or {key}.copy_data(tensor)"
            )
        check_assignment(self, key)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Call `forward`; on the first call, call `initialize` before it."""
        if not self._initialized:
            self.initialize(*inputs)
            self._initialized = True
            if mode.initialized is not None:
                mode.initialized.append(self)
        return self.forward(*inputs, **options)

    def initialize(self, *inputs: Any) -> None:
        """Create parameters with shapes that fit `inputs`."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """The layer's result."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def own_states(self) -> dict[str, Tensor]:
        """Tensors other than parameters to save with a model, by attribute name; sub-layers have their own."""
        return {}

    def use_optimizer(self, optimizer: Any) -> None:
        """Take what this layer needs of the model's optimizer; called by `Model` when it has one."""

    def register_layers(self, *layers: Layer | OrderedDict[str, Layer]) -> None:
        """Make layers attributes of this one, named "CLASS_INDEX" ("ReLU_0"), or by the keys of one OrderedDict.

        These names take precedence over positions in lists and over variables of functions.

        Raises:
            UsageError: a name is taken.
        """
        named: Mapping[str, object]
        if len(layers) == 1 and isinstance(layers[0], OrderedDict):
            named = layers[0]
        else:
            named = {f"{type(layer).__name__}_{i}": layer for i, layer in enumerate(layers)}
        for name, layer in named.items():
            if getattr(self, name, layer) is not layer:
                raise UsageError(f"{self._label} has another {name}; call register_layers once, with all layers")
        for name, layer in named.items():
            setattr(self, name, layer)

    # -- parameters and states ---------------------------------------------------------------------------------------
    def get_params(self) -> dict[str, Tensor]:
        """The parameters of this layer and its sub-layers, by path. Shared ones are listed once."""
        return {path + key: param for path, key, param in self._owned_params()}

    def _owned_params(self) -> Iterator[tuple[str, str, Tensor]]:
        """Each parameter once, after the prefix of its layer and its name there.

        Parameters in lists, tuples and dictionaries come last, so that the names of attributes take precedence.
        """
        layers, seen = list(self._sublayers()), set[int]()
        for nested in (False, True):
            for path, layer in layers:
                for key, value in vars(layer).items():
                    if isinstance(value, (list, tuple, dict)) is nested:
                        yield from ((path, *found) for found in _params_at(key, value, seen))

    @property
    def requires_grad(self) -> bool:
        """Whether a parameter of this layer or its sub-layers trains. Assigning freezes or unfreezes all of them.

        The layer must be initialized, as all are by `Model.compile`; see `Tensor.requires_grad`. Frozen parameters
        remain in states. In training mode, a frozen layer computes as before: batch normalization uses the batch and
        moves its running statistics, as in PyTorch, and dropout drops.

        Raises:
            UsageError: it has no parameters yet.
        """
        return any(param.requires_grad for param in self.get_params().values())

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        params = self.get_params().values()
        if not params and not self._initialized:
            raise UsageError(f"{self._label} has no parameters yet; compile the model before it is frozen")
        for param in params:
            param.requires_grad = value

    def get_states(self) -> dict[str, Tensor]:
        """The parameters, and other tensors to save with a model, by path."""
        states = self.get_params()
        for path, layer in self._sublayers():
            states.update({path + key: value for key, value in layer.own_states().items()})
        return states

    def set_params(self, params: Mapping[str, np.ndarray[Any, Any] | Tensor]) -> None:
        """Overwrite the values of all parameters, in place.

        Raises:
            StateError: a name is missing or unknown, or a shape or dtype differs; nothing was changed.
        """
        _overwrite(self.get_params(), params)

    def set_states(self, states: Mapping[str, np.ndarray[Any, Any] | Tensor]) -> None:
        """Overwrite the values of all states, in place.

        Raises:
            StateError: see `set_params`.
        """
        _overwrite(self.get_states(), states)

    def check_states(self, states: Mapping[str, np.ndarray[Any, Any] | Tensor]) -> None:
        """Check that `set_states` would accept these states.

        Raises:
            StateError: see `set_params`.
        """
        check_arrays("model", self.get_states(), states)

    def _sublayers(self) -> Iterator[tuple[str, Layer]]:
        """This layer and all its sub-layers, each once, with the prefix for the names of its tensors."""
        return _layers_at("", self, set())

    def __str__(self) -> str:
        """A line for this layer and for each sub-layer, with the shapes and the number of its parameters."""
        lines, owned = [], list(self._owned_params())
        for path, layer in self._sublayers():
            own = {key: param for prefix, key, param in owned if prefix == path}
            shapes = ", ".join(f"{key} {list(param.shape)}" for key, param in own.items())
            count = f": {shapes}, {sum(p.size() for p in own.values()):,} parameters" if own else ""
            lines.append(f"  {path.removesuffix('.')} {type(layer).__name__}{count}")
        total = sum(param.size() for param in self.get_params().values())
        when = "" if self._initialized or total else ", before compile"
        return "\n".join([f"{type(self).__name__}, {total:,} parameters{when}", *lines[1:]])

    # -- SINGA's, for layers of scripts ------------------------------------------------------------------------------
    def device_check(self, *inputs: Tensor) -> None:
        """Move the `inputs` to the device of the first of them."""
        for x in inputs:
            x.to_device(inputs[0].device)

    def dtype_check(self, *inputs: Tensor) -> None:
        """Convert the `inputs` to the type of the first of them; but parameters for float16 remain float32."""
        for x in inputs:
            if x.dtype != inputs[0].dtype and not (_is_parameter(x) and inputs[0].dtype == "float16"):
                x.to_type(inputs[0].dtype)

    # -- for layers --------------------------------------------------------------------------------------------------
    @property
    def _label(self) -> str:
        """Name of this layer in error messages."""
        return self.name or type(self).__name__

    def _parameter(self, key: str, shape: Sequence[int], x: Tensor) -> Tensor:
        """A new parameter of zeros, with the device and dtype of `x`."""
        if not isinstance(x, Tensor):
            raise TypeError(f"{self._label} takes tensors, got {type(x).__name__}; make one with tensor.from_numpy")
        if x.dtype not in ("float16", "float32", "float64"):
            raise UsageError(f"{self._label} takes float16, float32 or float64, got {x.dtype}; convert the input")
        name = f"{self.name}.{key}" if self.name else key
        return Tensor(shape, x.device, x.dtype, stores_grad=True, name=name)

    def _run(self, operation: Operation, *inputs: Tensor) -> Tensor:
        """The result of `operation`, whose errors name this layer."""
        try:
            return operation(*inputs)
        except UsageError as error:
            raise type(error)(f"{self._label}: {error}") from None

    def _channels(self, x: Tensor, given: int | None) -> int:
        """The number of channels: `given`, or the channels of the first input `x`."""
        if len(x.shape) != 4:
            raise ShapeError(f"{self._label} expects images [N, C, H, W], got {list(x.shape)}")
        return x.shape[1] if given is None else given

    def _check_images(self, x: Tensor, channels: int, param: Tensor) -> None:
        shape = x.array.shape
        if len(shape) != 4 or shape[1] != channels:
            raise ShapeError(f"{self._label} expects images [N, {channels}, H, W], got {list(shape)}")
        self._check_dtype(x, param)

    def _check_dtype(self, x: Tensor, param: Tensor) -> None:
        if x.array.dtype != param.array.dtype and not (x.array.dtype == "float16" and param.array.dtype == "float32"):
            raise UsageError(f"{self._label} has parameters of {param.dtype}, got an input of {x.dtype}")


class TensorLayer(Layer):
    """A layer whose result is one tensor, so that type checkers know it."""

    if TYPE_CHECKING:

        def __call__(self, *inputs: Any, **options: Any) -> Tensor: ...  # noqa: D102


def _is_parameter(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.stores_grad


def _params_at(path: str, value: object, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """The parameters that an attribute refers to, by name; `seen` has the identities of those listed before."""
    if id(value) in seen:
        return
    if _is_parameter(value):
        seen.add(id(value))
        yield path, value
    elif isinstance(value, (list, tuple, dict)):
        seen.add(id(value))
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _params_at(f"{path}.{key}", item, seen)


def has_relu(activation: str | None) -> bool:
    """Whether an argument `activation` asks for a ReLU."""
    if activation not in (None, "NOTSET", "RELU"):
        raise UsageError(f"unknown activation {activation!r}; choose 'RELU', or None and a layer of its own")
    return activation == "RELU"


def _layers_at(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Layer]]:
    """The layers that an attribute refers to, and all below them; see `Layer._sublayers`."""
    items: Iterable[tuple[Any, object]]
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Layer):
        yield path, value
        items = sorted(vars(value).items(), key=_rank)
    elif isinstance(value, FunctionType):
        items = _variables(value)
    else:
        items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, (Layer, list, tuple, dict, FunctionType)):
            yield from _layers_at(f"{path}{key}.", item, seen)


def _rank(attribute: tuple[str, object]) -> int:
    """Sort key of attributes: first those that are layers, so that a layer is named by its own attribute."""
    return 0 if isinstance(attribute[1], Layer) else 2 if isinstance(attribute[1], FunctionType) else 1


def _variables(function: FunctionType) -> Iterator[tuple[str, object]]:
    """The variables of enclosing functions that a function refers to, in the order of their names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents


def _overwrite(have: Mapping[str, Tensor], given: Mapping[str, np.ndarray[Any, Any] | Tensor]) -> None:
    check_arrays("model", have, given)
    for name, tensor in have.items():
        tensor.copy_from(given[name])
