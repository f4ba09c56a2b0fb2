"""Initial values of parameters, drawn on the host: a seed (`Device.SetRandSeed`) gives equal values on every device.

All functions overwrite a tensor. The weight [in, out] of a linear layer has fan_in = in and fan_out = out; the weight
[M, C, kh, kw] of a convolution over 1 to 3 dimensions has fan_in = C * kh * kw and fan_out = M * kh * kw. For a tensor
of another number of dimensions, both are the square root of the number of elements.
"""

from __future__ import annotations

from math import prod, sqrt

import numpy as np

from ...errors import UsageError
from ..core.tensor import Tensor

__all__ = [
    "constant",
    "eye",
    "glorot_normal",
    "glorot_uniform",
    "he_normal",
    "he_uniform",
    "lecun_normal",
    "lecun_uniform",
    "orthogonal",
    "uniform",
    "zero",
]


def _fans(t: Tensor) -> tuple[float, float]:
    shape = t.shape
    if len(shape) == 2:
        fans: tuple[float, float] = shape[0], shape[1]
    elif 3 <= len(shape) <= 5:
        fans = prod(shape[1:]), shape[0] * prod(shape[2:])
    else:
        fans = sqrt(prod(shape)), sqrt(prod(shape))
    return max(fans[0], 1), max(fans[1], 1)


def he_uniform(t: Tensor) -> None:
    """Uniform on +-sqrt(6 / fan_in) (He et al., arXiv 1502.01852)."""
    limit = sqrt(6 / _fans(t)[0])
    t.uniform(-limit, limit)


def he_normal(t: Tensor) -> None:
    """Normal with standard deviation sqrt(2 / fan_in) (He et al., arXiv 1502.01852, section 2.2)."""
    t.gaussian(0.0, sqrt(2 / _fans(t)[0]))


def lecun_uniform(t: Tensor) -> None:
    """Uniform on +-sqrt(3 / fan_in) (LeCun et al., Efficient BackProp, 1998, section 4.6)."""
    limit = sqrt(3 / _fans(t)[0])
    t.uniform(-limit, limit)


def lecun_normal(t: Tensor) -> None:
    """Normal with standard deviation sqrt(1 / fan_in) (LeCun et al., Efficient BackProp, 1998, section 4.6)."""
    t.gaussian(0.0, sqrt(1 / _fans(t)[0]))


def glorot_uniform(t: Tensor) -> None:
    """Uniform on +-sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, AISTATS 2010, equation 16)."""
    limit = sqrt(6 / sum(_fans(t)))
    t.uniform(-limit, limit)


def glorot_normal(t: Tensor) -> None:
    """Normal with standard deviation sqrt(2 / (fan_in + fan_out)) (Glorot and Bengio, AISTATS 2010, equation 12)."""
    t.gaussian(0.0, sqrt(2 / sum(_fans(t))))


def orthogonal(t: Tensor, gain: float = 1.0) -> None:
    """A random matrix with orthonormal rows or columns, whichever are fewer, times `gain`.

    From the singular vectors of a normal matrix (Saxe et al., arXiv 1312.6120).

    Raises:
        UsageError: `t` is not a matrix.
    """
    shape = _matrix_shape("orthogonal", t)
    u, _, v = np.linalg.svd(t.device.host_rng.standard_normal(shape), full_matrices=False)
    t.copy_from_numpy(gain * (u if u.shape == shape else v))


def eye(t: Tensor) -> None:
    """1 on the diagonal of a matrix, 0 elsewhere.

    Raises:
        UsageError: `t` is not a matrix.
    """
    t.copy_from_numpy(np.eye(*_matrix_shape("eye", t)))


def _matrix_shape(name: str, t: Tensor) -> tuple[int, int]:
    if len(t.shape) != 2:
        raise UsageError(f"{name} fills matrices [n, m]; got a tensor of shape {list(t.shape)}")
    return t.shape[0], t.shape[1]


def uniform(t: Tensor, low: float = 0.0, high: float = 1.0) -> None:
    """Uniform on [low, high)."""
    t.uniform(low, high)


def constant(t: Tensor, value: float = 0.0) -> None:
    """Every element equal to `value`."""
    t.set_value(value)


def zero(t: Tensor) -> None:
    """Every element 0."""
    t.set_value(0.0)
