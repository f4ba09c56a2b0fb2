"""What is sent: codecs over flat buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ..errors import UsageError
from .base import Codec, Reducer, Reduction, Statistics, Stopwatch
from .dense import Fp32
from .error_feedback import ErrorFeedback
from .half import BFloat16, Fp16
from .sparse import SparseCodec
from .threshold import Threshold
from .top_k import TopK

__all__ = [
    "CODECS",
    "BFloat16",
    "Codec",
    "ErrorFeedback",
    "Fp16",
    "Fp32",
    "Reducer",
    "Reduction",
    "SparseCodec",
    "Statistics",
    "Stopwatch",
    "Threshold",
    "TopK",
    "create",
]

# From `spars` (ratio or threshold) and `corr` (error feedback) to a codec.
CodecFactory: TypeAlias = Callable[[float, bool], Codec]


def _corrected(codec: Codec, corr: bool) -> Codec:
    return ErrorFeedback(codec) if corr else codec


# The names that options and scripts use. A new codec is one file and one line here.
CODECS: dict[str, CodecFactory] = {
    "plain": lambda *_: Fp32(),
    "fp32": lambda *_: Fp32(),
    "half": lambda *_: Fp16(),
    "fp16": lambda *_: Fp16(),
    "bf16": lambda *_: BFloat16(),
    "sparseTopK": lambda spars, corr: _corrected(TopK(spars), corr),
    "sparseThreshold": lambda spars, corr: _corrected(Threshold(spars), corr),
}


def create(name: str, *, spars: float = 0.05, corr: bool = True) -> Codec:
    """The codec of an option string.

    Args:
        name: a key of `CODECS`.
        spars: share of the elements for sparseTopK, threshold for sparseThreshold; the others ignore it.
        corr: error feedback for the sparse ones.

    Raises:
        UsageError: no codec has that name, or `spars` cannot be used with it.
    """
    if name not in CODECS:
        raise UsageError(f"unknown codec {name!r}; choose one of {', '.join(CODECS)}")
    return CODECS[name](spars, corr)
