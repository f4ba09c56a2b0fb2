"""Parameters and update rules of PyTorch as the engine sees them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from ...codecs import CommunicationStatistics
from ...comm import Communicator
from ...comm.base import Array
from ...engine.layout import Layout
from ...errors import StateError, UsageError
from ..private import current_autograd_node, untraced_function
from ..tensors import array_of, is_of

_views: weakref.WeakKeyDictionary[Layout, dict[int, torch.Tensor]] = weakref.WeakKeyDictionary()  # see `views_of`


class TrainedParameter:
    """A parameter of a model, for the engine.

    Its array has the order of the parameter's memory, so dimensions of a parameter in `channels_last` are permuted.

    Attributes:
        name: unique in the model.
        tensor: the parameter.
        permuted: the dimensions of the parameter in the order of its memory, if that is another one.
    """

    def __init__(self, name: str, tensor: torch.nn.Parameter) -> None:
        """Local.

        Raises:
            UsageError: it is on a device or of a type that codecs do not reduce, or its memory has gaps.
        """
        if is_of(tensor, "torch.distributed.tensor", "DTensor"):
            raise UsageError(
                f"parameter {name} is a DTensor; FSDP2 averages the gradients of its shards, so use the optimizer alone"
            )
        if not (tensor.is_cpu or tensor.is_cuda):
            raise UsageError(
                f"parameter {name} is on {tensor.device}; codecs reduce gradients on CPUs and NVIDIA's GPUs"
            )
        if tensor.dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"parameter {name} is of {tensor.dtype}; codecs reduce float32 and float64: keep parameters in "
                "float32, and compute in 16 bits by torch.autocast"
            )
        self.name, self.tensor, self._kind = name, tensor, (tensor.dtype, tensor.device)
        dims = range(tensor.dim())  # strides of dimensions of one element say nothing
        self._dims = [*dims] if tensor.is_contiguous() else sorted(dims, key=tensor.stride, reverse=True)
        if not tensor.permute(self._dims).is_contiguous():
            raise UsageError(f"parameter {name} of strides {tensor.stride()} has gaps; make it contiguous()")
        self.permuted = () if tensor.is_contiguous() else tuple(self._dims)
        self._strides = tensor.stride()

    def check_order(self) -> None:
        """Local. Check that its dimensions have the order in memory that they had.

        Raises:
            UsageError: they have another one.
        """
        if self.tensor.stride() != self._strides and not self.tensor.permute(self._dims).is_contiguous():
            raise UsageError(
                f"parameter {self.name} of strides {self.tensor.stride()} had another memory format when the hook was "
                "made; convert the model before DDP and its hook"
            )

    def check_unconverted(self) -> None:
        """Local. Check that it has the type and the device that it had.

        Raises:
            UsageError: it has others.
        """
        if (kind := (self.tensor.dtype, self.tensor.device)) != self._kind:
            raise UsageError(
                "parameter {} is {} on {} now, and was {} on {} when its optimizer was wrapped; convert or move the "
                "model before".format(self.name, *kind, *self._kind)
            )

    def has_grad_in(self, view: torch.Tensor) -> bool:
        """Local. Whether `.grad` lies in the memory of `view`."""
        grad = self.tensor.grad
        return grad is not None and not grad.is_sparse and grad.data_ptr() == view.data_ptr()

    def give(self, view: torch.Tensor) -> None:
        """Local. Have `.grad` lie in the memory of `view`, not be `view`: `model.to` and scripts set `.grad.data`."""
        if not self.has_grad_in(view):
            self.tensor.grad = view.detach()

    @property
    def array(self) -> Array:
        """Local. Its values, a view."""
        return _array_on_device(self.tensor.detach().permute(self._dims))

    def array_like(self, grad: torch.Tensor | None) -> Array:
        """Local. A gradient of the parameter as an array like `array`; a view, unless it is sparse.

        Raises:
            UsageError: it has derivatives.
        """
        assert grad is not None
        check_plain(grad)
        row = (grad.to_dense() if grad.is_sparse else grad).permute(self._dims)
        return row.numpy()

    def tensor_of(self, array: Array) -> torch.Tensor:
        """Local. An array like `array` as a tensor of the parameter's shape and strides; a view."""
        return self.from_memory(torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.from_dlpack(array))

    def from_memory(self, row: torch.Tensor) -> torch.Tensor:
        """Local. A contiguous tensor in the order of the parameter's memory, as one of its shape; a view."""
        if not self.permuted:
            return row.view(self.tensor.shape)
        shape = [self.tensor.shape[dim] for dim in self._dims]
        return row.view(shape).permute([self._dims.index(dim) for dim in range(len(shape))])


class GradientHook:
    """Has a method take the gradients of a parameter, after all hooks of the tensor, which may change them.

    Args:
        param: the parameter.
        taker: the method; it is not kept alive.
    """

    def __init__(
        self, param: TrainedParameter, taker: weakref.WeakMethod[Callable[[TrainedParameter, torch.Tensor], None]]
    ) -> None:
        tensor, trains, this = param.tensor, param.tensor.requires_grad, weakref.ref(self)

        @untraced_function
        def take(_: object, grads: tuple[torch.Tensor | None, ...]) -> None:
            if grads[0] is not None and (method := taker()) is not None:
                method(param, tensor)

        # The tensor keeps this, and the node keeps the tensor: with the node in it, gc could free none of them.
        @untraced_function
        def follow(_: torch.Tensor) -> None:
            if (hook := this()) is not None:
                hook._follow()

        self._take = take
        tensor.requires_grad_()  # a frozen one has no node, and no hooks
        node = torch.autograd.graph.get_gradient_edge(tensor).node
        self._node, self._handles = node, [node.register_hook(take), tensor.register_hook(follow)]
        tensor.requires_grad_(trains)

    def _follow(self) -> None:
        """Local, in a backward pass, before the gradient is added to `.grad`."""
        node = current_autograd_node()
        if node is not None and node is not self._node:  # a tensor that was converted, and back, has another one
            self._node, self._handles[0] = node, node.register_hook(self._take)

    def remove(self) -> None:
        """Local. Leave the gradients alone."""
        for handle in self._handles:
            handle.remove()


def check_plain(grad: torch.Tensor) -> None:
    """Local. Check that a gradient can be averaged.

    Raises:
        UsageError: it has derivatives.
    """
    if grad.requires_grad:
        raise UsageError(
            "means of gradients have no derivatives; instead of backward(create_graph=True), compute the gradients of "
            "a penalty by torch.autograd.grad"
        )


class HeldParameters:
    """The parameters of a model, which scripts may replace without the optimizer's noticing.

    Args:
        model: the model.
        params: its parameters; others may be among them.
    """

    def __init__(self, model: torch.nn.Module, params: Iterable[TrainedParameter]) -> None:
        held = {id(tensor) for tensor in model.parameters()}
        self._model, self._params = model, [param for param in params if id(param.tensor) in held]

    def check(self) -> None:
        """Local. Check that the model still has them.

        Raises:
            UsageError: it has others.
        """
        held = {id(tensor) for tensor in self._model.parameters()}
        for param in self._params:
            if id(param.tensor) not in held:
                raise UsageError(
                    f"the model has another parameter in place of {param.name}, which the optimizer trains, as after "
                    "load_state_dict(assign=True); replace parameters before the optimizer is made, or make both anew"
                )


def trained_parameters(named: Iterable[tuple[str, torch.nn.Parameter]]) -> list[TrainedParameter]:
    """Local. The parameters that require gradients.

    Raises:
        UsageError: see `TrainedParameter`; or there are none.
    """
    params = [TrainedParameter(name, tensor) for name, tensor in named if tensor.requires_grad]
    if not params:
        raise UsageError("no parameter requires a gradient, or the optimizer is of another model")
    return params


def device_of(params: Sequence[TrainedParameter]) -> torch.device:
    """Local. The device of the parameters.

    Raises:
        UsageError: they are on several.
    """
    for param in params:
        if param.tensor.device != params[0].tensor.device:
            raise UsageError(
                f"parameter {param.name} is on {param.tensor.device}, and {params[0].name} on "
                f"{params[0].tensor.device}; codecs reduce the gradients of one device: put the model on one"
            )
    return params[0].tensor.device


def _array_on_device(row: torch.Tensor) -> Array:
    """A contiguous tensor as an array of its shape, a view."""
    if row.is_cuda:
        import cupy

        return cupy.from_dlpack(row)
    return array_of(row).reshape(row.shape)


def send_first(communicator: Communicator, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Collective. Give all ranks rank 0's values of tensors of any type that are not averaged.

    Raises:
        MismatchError: a tensor has another name, size or type on another rank.
    """
    for name, tensor in named:
        if not tensor.numel():
            continue
        row = tensor.detach().reshape(-1).view(torch.uint8)
        communicator.broadcast(_array_on_device(row), label=f"{name} of {tensor.dtype}").wait()
        tensor.detach().copy_(row.view(tensor.dtype).view(tensor.shape))


def mean_of(communicator: Communicator, tensor: torch.Tensor, label: str, *, changes: bool) -> torch.Tensor:
    """Collective. The mean of a tensor over the ranks, in new memory; rank 0's values if it is constant or no float.

    Args:
        communicator: of the ranks.
        tensor: of the same shape and type on all of them.
        label: names it in errors.
        changes: whether training changes it.

    Raises:
        MismatchError: another rank has another tensor or label.
    """
    result = tensor.detach().clone()
    if not tensor.numel():
        return result
    if not (changes and tensor.is_floating_point()):
        send_first(communicator, [(label, result)])
        return result
    # A sum in a type with more bits is exact where all ranks have the same numbers, so that the mean has their bits.
    wide = torch.float32 if tensor.dtype.itemsize < 4 else torch.float64
    row = result.to(wide, copy=True, memory_format=torch.contiguous_format).reshape(-1)
    communicator.all_reduce(_array_on_device(row), "mean", label=label).wait()
    return result.copy_(row.view(tensor.shape))


def unused_on_all(communicator: Communicator, layout: Layout, unused: set[int]) -> set[int]:
    """Collective. Of parameters that this rank has not used, by id, those that no rank has."""
    own = bytes(key in unused for key in layout.bucket_of)
    gathered = communicator.all_gather_bytes(own, label="unused parameters")
    everywhere = [all(flags) for flags in zip(*gathered, strict=True)]
    return {key for key, flag in zip(layout.bucket_of, everywhere, strict=True) if flag}


def is_in_ddp(params: Sequence[TrainedParameter]) -> bool:
    """Local. Whether a DDP averages gradients of the parameters."""
    ids = {id(param.tensor) for param in params}

    def found() -> bool:
        things = gc.get_objects()
        kinds = {kind for kind in set(map(type, things)) if issubclass(kind, DistributedDataParallel)}
        ddps = [thing for thing in things if type(thing) in kinds] if kinds else []
        return any(id(tensor) in ids for ddp in ddps for tensor in ddp.parameters())

    if not found():
        return False
    gc.collect()  # a DDP that the script has dropped averages nothing
    return found()


def views_of(layout: Layout) -> dict[int, torch.Tensor]:
    """Local. The gradients in the buckets as tensors like their parameters, by id of the parameter."""
    if (views := _views.get(layout)) is None:
        views = _views[layout] = {}
        for bucket in layout.buckets:
            for param, grad in zip(bucket.params, bucket.grads, strict=True):
                assert isinstance(param, TrainedParameter)
                views[id(param)] = param.tensor_of(grad)
    return views


def tensors_of(arrays: Mapping[str, Array], params: Iterable[TrainedParameter]) -> dict[str, torch.Tensor]:
    """Local. The states of an engine as tensors, which share the memory of the arrays.

    A state with an element for each one of a parameter gets the shape of the parameter, so that a later run may keep
    the parameter in another memory format.
    """
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    for key, param in _permuted(arrays, params):
        if arrays[key].shape == param.array.shape:
            tensors[key] = param.tensor_of(arrays[key])
    return tensors


def arrays_in(state_dict: Mapping[str, Any], params: Iterable[TrainedParameter]) -> dict[str, Array]:
    """Local. The arrays that `tensors_of` was given, from a state dictionary with its result as "engine".

    Raises:
        StateError: there is none.
    """
    if "engine" not in state_dict:
        raise StateError(
            f"the states have no engine, only {', '.join(map(str, state_dict)) or 'nothing'}; pass the result of "
            "state_dict of the same class, and load those of an optimizer before it is wrapped"
        )
    tensors = {key: tensor.cpu() for key, tensor in state_dict["engine"].items()}
    arrays = {key: tensor.numpy() for key, tensor in tensors.items()}
    for key, param in _permuted(arrays, params):
        if tensors[key].shape == param.tensor.shape:
            arrays[key] = param.array_like(tensors[key])
    return arrays


def _permuted(keys: Iterable[str], params: Iterable[TrainedParameter]) -> list[tuple[str, TrainedParameter]]:
    """The keys of states of parameters whose dimensions have another order in memory, with these parameters."""
    named = {param.name: param for param in params if param.permuted}
    return [(key, named[name]) for key in keys if (name := key.split("/", 2)[-1]) in named]


class Rule:
    """An optimizer's update rule for the engine: its options, and its states such as momentum.

    Args:
        statistics: of the engine.
        optimizer: None where the engine does not know it.
    """

    def __init__(self, statistics: CommunicationStatistics, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._statistics, self._optimizer = statistics, optimizer

    def constants(self) -> dict[str, Any]:
        """Return the number of updates, and of all groups of parameters the size and the options, numbers and texts."""
        constants: dict[str, Any] = {"step_counter": self._statistics.steps - self._statistics.skipped}
        if self._optimizer is not None:
            constants["optimizer"] = type(self._optimizer).__name__
            for place, group in enumerate(self._optimizer.param_groups):
                for key, value in group.items():
                    name = f"{key} of group {place}" if place else key
                    if key == "params":
                        constants[f"number of {name}"] = len(value)
                    elif key != "param_names":
                        constants[name] = value.item() if isinstance(value, torch.Tensor) else value
        return constants

    def get_states(self) -> dict[str, Array]:
        """Return copies of the states in floating point."""
        return {name: tensor.cpu().numpy().copy() for name, tensor in self._tensors().items()}

    def set_states(self, states: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Replace the states, by the names that `get_states` gives."""
        for name, tensor in self._tensors().items():
            tensor.copy_(torch.from_numpy(states[name]))

    def _tensors(self) -> dict[str, torch.Tensor]:
        if self._optimizer is None:
            return {}
        params = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
        states = self._optimizer.state
        return {
            f"{key} of parameter {place}": value
            for place, param in enumerate(params)
            for key, value in states.get(param, {}).items()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        }
