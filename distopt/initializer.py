"""SINGA's `initializer` module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import absent_name
from .nn.initializer import *  # noqa: F403 - a face of that module
from .nn.initializer import __all__

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise absent_name(__name__, name, __all__)
