"""SINGA's `autograd` module: the switch `training`, the backward pass, and operations as functions."""

from __future__ import annotations

import sys
from types import ModuleType

from .nn import functions
from .nn.autograd import backward, gradient_order
from .nn.functions import *  # noqa: F403 - a face of that module
from .nn.mode import mode
from .nn.tensor import Operation

__all__ = ["Operation", "backward", "gradient_order", "training"]
__all__ += functions.__all__

training: bool  # a property of the module, see below


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
