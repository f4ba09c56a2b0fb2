"""SINGA's `tensor` module."""

from __future__ import annotations

from .nn.tensor import Tensor, float32, float64, from_numpy, int32, int64, to_numpy

__all__ = ["Tensor", "float32", "float64", "from_numpy", "int32", "int64", "to_numpy"]
