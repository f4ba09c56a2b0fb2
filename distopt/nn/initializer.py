"""Initial values of parameters, drawn on the host: a seed (`Device.SetRandSeed`) gives equal values on every device.

All functions overwrite a tensor. Fans: the weight [in, out] of a linear layer has fan_in = in and fan_out = out; that
of a convolution, [M, C, kh, kw], has fan_in = C * kh * kw and fan_out = M * kh * kw.
"""

from __future__ import annotations

from math import prod, sqrt
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    from .tensor import Tensor

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


def _fans(t: Tensor) -> tuple[int, int]:
    if len(t.shape) < 2:
        raise UsageError(f"a tensor of shape {t.shape} has no fans; use gaussian, uniform or constant")
    if len(t.shape) == 2:
        return t.shape[0], t.shape[1]
    field = prod(t.shape[2:])
    return t.shape[1] * field, t.shape[0] * field


def he_uniform(t: Tensor) -> None:
    """Uniform on +-sqrt(6 / fan_in) (He et al., arXiv 1502.01852)."""
    limit = sqrt(6 / _fans(t)[0])
    t.uniform(-limit, limit)


def he_normal(t: Tensor) -> None:
    """Normal with standard deviation sqrt(2 / fan_in) (He et al., arXiv 1502.01852, section 2.2)."""
    t.gaussian(0.0, sqrt(2 / _fans(t)[0]))


def glorot_uniform(t: Tensor) -> None:
    """Uniform on +-sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, AISTATS 2010, equation 16)."""
    limit = sqrt(6 / sum(_fans(t)))
    t.uniform(-limit, limit)


def glorot_normal(t: Tensor) -> None:
    """Normal with standard deviation sqrt(2 / (fan_in + fan_out)) (Glorot and Bengio, AISTATS 2010, equation 12)."""
    t.gaussian(0.0, sqrt(2 / sum(_fans(t))))


xavier_uniform = glorot_uniform
xavier_normal = glorot_normal


def gaussian(t: Tensor, mean: float = 0.0, std: float = 0.01) -> None:
    """Normal with the given mean and standard deviation."""
    t.gaussian(mean, std)


def uniform(t: Tensor, low: float = 0.0, high: float = 1.0) -> None:
    """Uniform on [low, high)."""
    t.uniform(low, high)


def constant(t: Tensor, value: float = 0.0) -> None:
    """Every element equal to `value`."""
    t.set_value(value)


def zero(t: Tensor) -> None:
    """Every element 0."""
    t.set_value(0.0)
