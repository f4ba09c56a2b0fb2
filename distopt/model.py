"""SINGA's `model` module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import absent_name
from .nn.model import Model

__all__ = ["Model"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise absent_name(__name__, name, __all__)
