"""SINGA's `model` module."""

from __future__ import annotations

from .nn.model import Model

__all__ = ["Model"]
