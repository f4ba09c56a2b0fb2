"""Parameters and update rules of PyTorch as the engine sees them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch

from ...comm.base import Array
from ...compress import CommunicationStatistics
from ...errors import UsageError
from ...sync.layout import Layout
from ..tensors import array_of


class TrainedParameter:
    """A parameter of a model, for the engine.

    Its array has the order of the parameter's memory, so dimensions of a parameter in `channels_last` are permuted.

    Attributes:
        name: unique in the model.
        tensor: the parameter.
    """

    def __init__(self, name: str, tensor: torch.nn.Parameter) -> None:
        """Local.

        Raises:
            UsageError: it is not on the CPU, or of a type that codecs do not reduce, or its memory has gaps.
        """
        if not tensor.is_cpu:
            raise UsageError(
                f"parameter {name} is on {tensor.device}; codecs reduce gradients on the CPU: move the model there"
            )
        if tensor.dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"parameter {name} is of {tensor.dtype}; codecs reduce float32 and float64: keep parameters in "
                "float32, and compute in 16 bits by torch.autocast"
            )
        self.name, self.tensor = name, tensor
        self._dims = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        if not tensor.permute(self._dims).is_contiguous():
            raise UsageError(f"parameter {name} of strides {tensor.stride()} has gaps; make it contiguous()")

    @property
    def array(self) -> Array:
        """Local. Its values, a view."""
        return self.array_of(self.tensor)

    def array_of(self, tensor: torch.Tensor) -> Array:
        """Local. A tensor of the parameter's shape and strides as an array; a view."""
        row = tensor.detach().permute(self._dims)
        return array_of(row).reshape(row.shape)

    def tensor_of(self, array: Array) -> torch.Tensor:
        """Local. An array like `array` as a tensor of the parameter's shape and strides; a view."""
        return torch.from_numpy(array).permute([self._dims.index(dim) for dim in range(len(self._dims))])


def trained_parameters(named: Iterable[tuple[str, torch.nn.Parameter]]) -> list[TrainedParameter]:
    """Local. The parameters that require gradients.

    Raises:
        UsageError: see `TrainedParameter`; or there are none.
    """
    params = [TrainedParameter(name, tensor) for name, tensor in named if tensor.requires_grad]
    if not params:
        raise UsageError("no parameter requires a gradient")
    return params


def views_of(layout: Layout) -> dict[int, torch.Tensor]:
    """Local. The gradients in the buckets as tensors like their parameters, by id of the parameter."""
    views = {}
    for bucket in layout.buckets:
        for param, grad in zip(bucket.params, bucket.grads, strict=True):
            assert isinstance(param, TrainedParameter)
            views[id(param)] = param.tensor_of(grad)
    return views


def tensors_of(arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """Local. The states of an engine as tensors, which share the memory of the arrays."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def arrays_in(states: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    """Local. What `tensors_of` was given."""
    return {name: tensor.numpy() for name, tensor in states.items()}


class NoRule:
    """In place of an update rule that the engine does not know.

    Args:
        statistics: of the engine.
    """

    def __init__(self, statistics: CommunicationStatistics) -> None:
        self._statistics = statistics

    def get_states(self) -> dict[str, Array]:
        """Return no states."""
        return {}

    def set_states(self, states: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Ignore them."""

    def constants(self) -> dict[str, Any]:
        """Return the number of updates."""
        return {"step_counter": self._statistics.steps - self._statistics.skipped}


class OptimizerRule(NoRule):
    """The update rule of an optimizer of PyTorch: its options, and its states such as momentum."""

    def __init__(self, optimizer: torch.optim.Optimizer, statistics: CommunicationStatistics) -> None:
        super().__init__(statistics)
        self._optimizer = optimizer

    def constants(self) -> dict[str, Any]:
        """Return the options of all groups of parameters, numbers and texts."""
        options = {
            f"{key} of group {place}" if place else key: value.item() if isinstance(value, torch.Tensor) else value
            for place, group in enumerate(self._optimizer.param_groups)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        return {"optimizer": type(self._optimizer).__name__, **options, **super().constants()}

    def get_states(self) -> dict[str, Array]:
        """Return copies of the states in floating point."""
        return {name: tensor.cpu().numpy().copy() for name, tensor in self._tensors().items()}

    def set_states(self, states: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Replace them."""
        for name, tensor in self._tensors().items():
            tensor.copy_(torch.from_numpy(states[name]))

    def _tensors(self) -> dict[str, torch.Tensor]:
        params = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
        states = self._optimizer.state
        return {
            f"{key} of parameter {place}": value
            for place, param in enumerate(params)
            for key, value in states.get(param, {}).items()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        }
