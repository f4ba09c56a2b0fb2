"""SINGA's `autograd` module: the switch `training`, the backward pass, and operations as functions and as classes.

A class has the name of SINGA's, is made with the options of its function, and called with its tensors. As in SINGA, it
then returns a tuple: `ReLU()(x)[0]` is `relu(x)`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar

from .errors import explain_absent
from .nn.core import backward as _autograd
from .nn.core.backward import gradient_order
from .nn.core.mode import mode
from .nn.core.operation import Operation
from .nn.core.tensor import Tensor
from .nn.layers.layer import (
    AvgPool1d,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Linear,
    MaxPool1d,
    MaxPool2d,
    Pooling2d,
    SeparableConv2d,
)
from .nn.ops import functions
from .nn.ops.elementwise import *  # noqa: F403 - a face of this module and of those below
from .nn.ops.functions import *  # noqa: F403
from .nn.ops.functions import logical_and as _and
from .nn.ops.functions import logical_not as _not
from .nn.ops.functions import logical_or as _or
from .nn.ops.functions import logical_xor as _xor
from .nn.ops.index import *  # noqa: F403
from .nn.ops.shape import *  # noqa: F403
from .nn.singa.scripted import Operator

__all__ = [
    "AvgPool1d",
    "AvgPool2d",
    "BatchNorm2d",
    "Conv2d",
    "Linear",
    "MaxPool1d",
    "MaxPool2d",
    "Operation",
    "Operator",
    "Pooling2d",
    "SeparableConv2d",
    "_and",
    "_not",
    "_or",
    "_xor",
    "backward",
    "dropout",
    "gradient_order",
    "gradients",
    "training",
]
__all__ += functions.__all__

training: bool  # a property of the module, see below


def backward(y: Tensor, dy: Tensor | float | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Local. Yield (parameter, gradient) for all parameters behind `y`; see `distopt.nn.core.backward.backward`.

    As in SINGA, the graph can be used again, by an optimizer too, until `y` is gone or an optimizer has used it.
    """
    return _autograd.backward(y, dy, retain_graph=True)


def gradients(y: Tensor, dy: Tensor | float | None = None) -> dict[int, Tensor]:
    """Local. The gradients of all parameters behind `y`: {id(parameter): gradient}; see `backward`."""
    return {id(p): g for p, g in backward(y, dy)}


def dropout(x: Tensor, seed: float = 0, ratio: float = 0.5) -> Tensor:  # type: ignore[no-redef]
    """In training, zero elements of x with probability `ratio` and scale the others by 1 / (1 - ratio).

    The order of arguments is SINGA's. The random numbers are the device's (`Device.SetRandSeed`), so a seed has no
    effect; but a fraction in its place, `dropout(x, 0.3)`, is the ratio.
    """
    return functions.dropout(x, seed if 0 < seed < 1 else ratio)


# -- classes -------------------------------------------------------------------------------------------------------
class _Class(Operator):
    """A class of SINGA's: made with the options of a function, and called with its other arguments."""

    function: ClassVar[Callable[..., Any]]
    options: ClassVar[tuple[str, ...]]

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__()
        if len(args) > len(self.options):
            raise TypeError(f"{self.name}({', '.join(self.options)}) got {len(args)} arguments")
        self.given = {**dict(zip(self.options, args, strict=False)), **named}

    def __call__(self, *xs: Tensor) -> tuple[Tensor, ...]:
        y = self.function(*xs, **self.given)
        return y if isinstance(y, tuple) else (y,)


def _class(name: str, function: Callable[..., Any], options: str) -> type[_Class]:
    attributes = {"function": staticmethod(function), "options": options.split(), "__doc__": function.__doc__}
    return type(name, (_Class,), attributes)


# Operations without options, whose functions have their names in lower case.
_PLAIN = (
    "Abs Acos Acosh Add Asin Asinh Atan Atanh Ceil Cos Cosh CosSim Div Embedding Equal Erf Exp Floor Greater Identity "
    "Less Log Matmul Max Mean Min Mul Negative NonZero PRelu Pow ReLU Reciprocal Round Rounde Shape Sigmoid Sign Sin "
    "Sinh SoftPlus SoftSign Sqrt Sub Sum Tan Tanh"
)
_CLASSES: dict[str, tuple[Callable[..., Any], str]] = {
    **{name: (getattr(functions, name.lower()), "") for name in _PLAIN.split()},
    "AddBias": (functions.add_bias, "axis"),
    "And": (_and, ""),
    "BinaryCrossEntropy": (functions.binary_cross_entropy, "t"),
    "Cast": (functions.cast, "to"),
    "Clip": (functions.clip, "min max"),
    "Concat": (lambda *xs, axis=0: functions.cat(xs, axis), "axis"),
    "ConstantOfShape": (functions.constant_of_shape, "value"),
    "CrossEntropy": (functions.cross_entropy, "t"),
    "DepthToSpace": (functions.depth_to_space, "blocksize mode"),
    "Dropout": (dropout, "seed ratio"),
    "Elu": (functions.elu, "alpha"),
    "Expand": (functions.expand, "shape"),
    "Flatten": (functions.flatten, "axis"),
    "Gather": (functions.gather, "axis indices"),
    "Gemm": (functions.gemm, "alpha beta transA transB"),
    "GlobalAveragePool": (functions.globalaveragepool, "data_format"),
    "HardSigmoid": (functions.hardsigmoid, "alpha gamma"),
    "LeakyRelu": (functions.leakyrelu, "a"),
    "MeanSquareError": (functions.mse_loss, "target"),
    "Not": (_not, ""),
    "OneHot": (
        lambda indices, axis, depth, values: functions.onehot(axis, indices, depth, values),
        "axis depth values",
    ),
    "Or": (_or, ""),
    "Pad": (functions.pad, "mode pads constant"),
    "RankingLoss": (functions.ranking_loss, "M"),
    "ReduceMean": (functions.reduce_mean, "axes keepdims"),
    "ReduceSum": (functions.reduce_sum, "axes keepdims"),
    "Reshape": (functions.reshape, "shape"),
    "ScatterElements": (functions.scatter_elements, "indices updates axis"),
    "SeLU": (functions.selu, "alpha gamma"),
    "Slice": (functions.slice, "starts ends axes steps"),
    "SoftMax": (functions.softmax, "axis"),
    "SoftMaxCrossEntropy": (functions.softmax_cross_entropy, "labels"),
    "SpaceToDepth": (functions.space_to_depth, "blocksize mode"),
    "Split": (functions.split, "axis parts num_output"),
    "Squeeze": (functions.squeeze, "axis"),
    "Tile": (functions.tile, "repeats"),
    "Transpose": (functions.transpose, "shape"),
    "Unsqueeze": (functions.unsqueeze, "axis"),
    "UpSample": (functions.upsample, "mode scales"),
    "Where": (functions.where, "condition"),
    "Xor": (_xor, ""),
}
globals().update({name: _class(name, *row) for name, row in _CLASSES.items()})
__all__ += list(_CLASSES)

_HANDLE = "it works on a handle of SINGA's C++ interface; use"
_REASONS = {
    **dict.fromkeys(
        ("CudnnRNN", "LSTM", "RNN", "RNN_Base", "_RNN"),
        "distopt keeps to convolutional networks; PyTorch is the way to others",
    ),
    "batchnorm_2d": f"{_HANDLE} layer.BatchNorm2d",
    "conv2d": f"{_HANDLE} layer.Conv2d",
    "pooling_2d": f"{_HANDLE} layer.MaxPool2d or layer.AvgPool2d",
}

explain_absent(globals(), __all__, _REASONS)


class _Module(ModuleType):
    """This module. Scripts assign to `autograd.training`; the switch itself is below, where operations see it."""

    @property
    def training(self) -> bool:
        """Whether operations are recorded and layers behave as in training."""
        return mode.training

    @training.setter
    def training(self, value: bool) -> None:
        mode.training = bool(value)


sys.modules[__name__].__class__ = _Module
