"""SINGA's `initializer` module, with SINGA's older names."""

from __future__ import annotations

from math import sqrt

from ..checks import check_integer, explain_absent
from ..errors import UsageError
from ..nn.core.tensor import Tensor
from ..nn.layers import initializer as _initializer
from ..nn.layers.initializer import *  # noqa: F403 - a face of that module

__all__ = ["gaussian", "glorot", "msra", "xavier", "xavier_normal", "xavier_uniform"]
__all__ += _initializer.__all__

xavier_uniform = _initializer.glorot_uniform
xavier_normal = _initializer.glorot_normal


def gaussian(t: Tensor, fan_in: int = 0, fan_out: int = 0) -> None:
    """Normal with variance 2 over the mean of the fans that are given (He et al., arXiv 1502.01852).

    `Tensor.gaussian` takes mean and standard deviation.

    Raises:
        UsageError: no fan is given, or one is not a count.
    """
    try:
        fans = check_integer("fan_in", fan_in, 0), check_integer("fan_out", fan_out, 0)
    except UsageError as error:
        raise UsageError(f"{error}; t.gaussian(mean, std) takes mean and standard deviation") from None
    given = [fan for fan in fans if fan]
    if not given:
        raise UsageError("initializer.gaussian takes fan_in and fan_out; one of them may be 0, not both")
    t.gaussian(0.0, sqrt(2 * len(given) / sum(given)))


def xavier(t: Tensor) -> None:
    """`glorot_uniform` for a matrix; of other tensors, only the first two dimensions count as fans."""
    limit = sqrt(6 / sum(t.shape[:2]))
    t.uniform(-limit, limit)


def glorot(t: Tensor) -> None:
    """`glorot_normal` for a matrix; of other tensors, only the first two dimensions count as fans."""
    t.gaussian(0.0, sqrt(2 / sum(t.shape[:2])))


def msra(t: Tensor) -> None:
    """`he_normal` for a matrix; of other tensors, only the first dimension counts as fan_in."""
    t.gaussian(0.0, sqrt(2 / t.shape[0]))


explain_absent(globals(), __all__)
