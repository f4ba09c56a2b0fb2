"""SINGA's `autograd` module: the switch `training`, the backward pass, and operations as functions and as classes.

A class has the name of SINGA's, is made with the options of its function, and called with its tensors. As in SINGA, it
then returns a tuple: `ReLU()(x)[0]` is `relu(x)`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar

from ..checks import explain_absent
from ..nn.core import autograd as _autograd
from ..nn.core.autograd import gradient_order
from ..nn.core.mode import mode
from ..nn.core.operation import Operation
from ..nn.core.tensor import Tensor
from ..nn.layers.convolution import Conv2d, SeparableConv2d
from ..nn.layers.linear import Linear
from ..nn.layers.normalization import BatchNorm2d
from ..nn.layers.pooling import AvgPool1d, AvgPool2d, MaxPool1d, MaxPool2d, Pooling2d
from ..nn.ops import broadcasting as _broadcasting
from ..nn.ops import elementwise as _elementwise
from ..nn.ops import index as _index
from ..nn.ops import loss as _loss
from ..nn.ops import matrix as _matrix
from ..nn.ops import pooling as _pooling
from ..nn.ops import reduction as _reduction
from ..nn.ops import shape as _shape
from ..nn.ops.broadcasting import *  # noqa: F403 - a face of these modules
from ..nn.ops.broadcasting import logical_and as _and
from ..nn.ops.broadcasting import logical_not as _not
from ..nn.ops.broadcasting import logical_or as _or
from ..nn.ops.broadcasting import logical_xor as _xor
from ..nn.ops.elementwise import *  # noqa: F403
from ..nn.ops.elementwise import dropout as _dropout
from ..nn.ops.index import *  # noqa: F403
from ..nn.ops.loss import *  # noqa: F403
from ..nn.ops.matrix import *  # noqa: F403
from ..nn.ops.pooling import *  # noqa: F403
from ..nn.ops.reduction import *  # noqa: F403
from ..nn.ops.shape import *  # noqa: F403
from .scripted import Operator

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
_FILES = _broadcasting, _elementwise, _index, _loss, _matrix, _pooling, _reduction, _shape
__all__ += [name for file in _FILES for name in file.__all__]

training: bool  # a property of the module, see below


def backward(y: Tensor, dy: Tensor | float | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (parameter, gradient) for all parameters behind `y`; see `distopt.nn.core.autograd.backward`.

    As in SINGA, the graph can be used again, by an optimizer too, until `y` is gone or an optimizer has used it.
    """
    return _autograd.backward(y, dy, retain_graph=True)


def gradients(y: Tensor, dy: Tensor | float | None = None) -> dict[int, Tensor]:
    """The gradients of all parameters behind `y`: {id(parameter): gradient}; see `backward`."""
    return {id(p): g for p, g in backward(y, dy)}


def dropout(x: Tensor, seed: float = 0, ratio: float = 0.5) -> Tensor:  # type: ignore[no-redef]
    """In training, zero elements of x with probability `ratio` and scale the others by 1 / (1 - ratio).

    The order of arguments is SINGA's. The random numbers are the device's (`Device.SetRandSeed`), so a seed has no
    effect; but a fraction in its place, `dropout(x, 0.3)`, is the ratio.
    """
    return _dropout(x, seed if 0 < seed < 1 else ratio)


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


def _class(name: str, given: str | Callable[..., Any], options: str) -> type[_Class]:
    function: Callable[..., Any] = globals()[given] if isinstance(given, str) else given
    attributes = {"function": staticmethod(function), "options": options.split(), "__doc__": function.__doc__}
    return type(name, (_Class,), attributes)


def _concat(*xs: Tensor, axis: int = 0) -> Tensor:
    """The function `cat` of all arguments."""
    return _shape.cat(xs, axis)


def _one_hot(indices: Tensor, axis: int, depth: int, values: Any) -> Tensor:
    """The function `onehot`, with the indices as the tensor of the call."""
    return _index.onehot(axis, indices, depth, values)


# Operations without options, whose functions have their names in lower case.
_PLAIN = (
    "Abs Acos Acosh Add Asin Asinh Atan Atanh Ceil Cos Cosh CosSim Div Embedding Equal Erf Exp Floor Greater Identity "
    "Less Log Matmul Max Mean Min Mul Negative NonZero PRelu Pow ReLU Reciprocal Round Rounde Shape Sigmoid Sign Sin "
    "Sinh SoftPlus SoftSign Sqrt Sub Sum Tan Tanh"
)
_CLASSES: dict[str, tuple[str | Callable[..., Any], str]] = {  # by class: its function, and the names of its options
    **{name: (name.lower(), "") for name in _PLAIN.split()},
    "AddBias": ("add_bias", "axis"),
    "And": ("logical_and", ""),
    "BinaryCrossEntropy": ("binary_cross_entropy", "t"),
    "Cast": ("cast", "to"),
    "Clip": ("clip", "min max"),
    "Concat": (_concat, "axis"),
    "ConstantOfShape": ("constant_of_shape", "value"),
    "CrossEntropy": ("cross_entropy", "t"),
    "DepthToSpace": ("depth_to_space", "blocksize mode"),
    "Dropout": ("dropout", "seed ratio"),
    "Elu": ("elu", "alpha"),
    "Expand": ("expand", "shape"),
    "Flatten": ("flatten", "axis"),
    "Gather": ("gather", "axis indices"),
    "Gemm": ("gemm", "alpha beta transA transB"),
    "GlobalAveragePool": ("globalaveragepool", "data_format"),
    "HardSigmoid": ("hardsigmoid", "alpha gamma"),
    "LeakyRelu": ("leakyrelu", "a"),
    "MeanSquareError": ("mse_loss", "target"),
    "Not": ("logical_not", ""),
    "OneHot": (_one_hot, "axis depth values"),
    "Or": ("logical_or", ""),
    "Pad": ("pad", "mode pads constant"),
    "RankingLoss": ("ranking_loss", "M"),
    "ReduceMean": ("reduce_mean", "axes keepdims"),
    "ReduceSum": ("reduce_sum", "axes keepdims"),
    "Reshape": ("reshape", "shape"),
    "ScatterElements": ("scatter_elements", "indices updates axis"),
    "SeLU": ("selu", "alpha gamma"),
    "Slice": ("slice", "starts ends axes steps"),
    "SoftMax": ("softmax", "axis"),
    "SoftMaxCrossEntropy": ("softmax_cross_entropy", "labels"),
    "SpaceToDepth": ("space_to_depth", "blocksize mode"),
    "Split": ("split", "axis parts num_output"),
    "Squeeze": ("squeeze", "axis"),
    "Tile": ("tile", "repeats"),
    "Transpose": ("transpose", "shape"),
    "Unsqueeze": ("unsqueeze", "axis"),
    "UpSample": ("upsample", "mode scales"),
    "Where": ("where", "condition"),
    "Xor": ("logical_xor", ""),
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
