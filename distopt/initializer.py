"""SINGA's `initializer` module."""

from __future__ import annotations

from .nn.initializer import (
    constant,
    gaussian,
    glorot_normal,
    glorot_uniform,
    he_normal,
    he_uniform,
    uniform,
    xavier_normal,
    xavier_uniform,
    zero,
)

__all__ = [
    "constant",
    "gaussian",
    "glorot_normal",
    "glorot_uniform",
    "he_normal",
    "he_uniform",
    "uniform",
    "xavier_normal",
    "xavier_uniform",
    "zero",
]
