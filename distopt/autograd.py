"""SINGA's `autograd` module: the switch `training`, the backward pass, and operations as functions."""

from __future__ import annotations

import sys
from types import ModuleType

from .nn.autograd import backward, gradient_order
from .nn.functions import (
    add,
    cat,
    div,
    dropout,
    flatten,
    matmul,
    mse_loss,
    mul,
    reduce_mean,
    reduce_sum,
    relu,
    reshape,
    sigmoid,
    softmax,
    softmax_cross_entropy,
    sub,
)
from .nn.mode import mode
from .nn.tensor import Operation

__all__ = [
    "Operation",
    "add",
    "backward",
    "cat",
    "div",
    "dropout",
    "flatten",
    "gradient_order",
    "matmul",
    "mse_loss",
    "mul",
    "reduce_mean",
    "reduce_sum",
    "relu",
    "reshape",
    "sigmoid",
    "softmax",
    "softmax_cross_entropy",
    "sub",
    "training",
]

training: bool  # a property of the module, at the end of this file


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
