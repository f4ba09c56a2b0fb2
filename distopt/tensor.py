"""SINGA's `tensor` module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import absent_name
from .nn.tensor import Tensor, float16, float32, float64, from_numpy, from_raw_tensor, int32, int64, to_numpy

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "PlaceHolder",
    "Tensor",
    "float16",
    "float32",
    "float64",
    "from_numpy",
    "from_raw_tensor",
    "from_raw_tensors",
    "int32",
    "int64",
    "to_numpy",
]

PlaceHolder = Tensor


def from_raw_tensors(raws: Iterable[Any]) -> list[Tensor]:
    """`from_raw_tensor` of each."""
    return [from_raw_tensor(raw) for raw in raws]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise absent_name(__name__, name, __all__)
