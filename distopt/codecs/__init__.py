"""What is sent: codecs, which encode and reduce flat buckets of gradients.

The package imports `comm` and `kernels`. It never knows which transport moves the bytes, nor where gradients come from.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ..errors import UsageError
from ..recorder.statistics import CommunicationStatistics, Statistics
from .base import Codec
from .chunked_top_k import ChunkedTopK
from .dense import Fp32
from .error_feedback import ErrorFeedback
from .half import BFloat16, Fp16
from .kept_arrays import Part
from .power_sgd import PowerSGD
from .quantized import Quantized
from .reduction import BadGradient, CodecState, PendingReduction, Verdict, finish_all
from .sparse import SparseCodec
from .threshold import Threshold
from .top_k import TopK
from .tree import Tree

__all__ = [
    "CODECS",
    "BFloat16",
    "BadGradient",
    "ChunkedTopK",
    "Codec",
    "CodecState",
    "CommunicationStatistics",
    "ErrorFeedback",
    "Fp16",
    "Fp32",
    "Part",
    "PendingReduction",
    "PowerSGD",
    "Quantized",
    "SparseCodec",
    "Statistics",
    "Threshold",
    "TopK",
    "Tree",
    "Verdict",
    "codec_of",
    "create",
    "finish_all",
]

# The names that options use. A new codec is one file and one line here.
CODECS: dict[str, type[Codec]] = {
    "fp32": Fp32,
    "fp16": Fp16,
    "bf16": BFloat16,
    "top-k": TopK,
    "chunked-top-k": ChunkedTopK,
    "threshold": Threshold,
    "quantized": Quantized,
    "power-sgd": PowerSGD,
}


def codec_of(codec: Codec | str) -> Codec:
    """A codec itself, or the codec of a name, with its default options.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(codec, str):
        if needs := getattr(CODECS.get(codec), "needs", {}):
            option, example = next(iter(needs.items()))
            raise UsageError(
                f"codec {codec!r} needs {_alternatives(needs)}, which its name does not give; pass "
                f"codec=distopt.codecs.create({codec!r}, {option}={example})"
            )
        return create(codec)
    if not isinstance(codec, Codec):
        raise UsageError(f"{codec!r} is not a codec; pass one, such as TopK(0.01), or a name: {', '.join(CODECS)}")
    return codec


def create(name: str, *, error_feedback: bool = False, decay: float = 1.0, **options: Any) -> Codec:
    """The codec of that name: `create("top-k", ratio=0.01, error_feedback=True)`.

    Args:
        name: a key of `CODECS`.
        error_feedback: whether it is wrapped by `ErrorFeedback`.
        decay: of its residual.
        options: arguments of the codec.

    Raises:
        UsageError: no codec has that name, or it does not take these options.
    """
    if name not in CODECS:
        raise UsageError(f"unknown codec {name!r}; choose one of {', '.join(CODECS)}")
    kind = CODECS[name]
    taken = inspect.signature(kind).parameters
    if unknown := [f"{option}=" for option in options if option not in taken]:
        raise UsageError(
            f"codec {name!r} takes no {' and no '.join(unknown)}; it takes "
            f"{', '.join(f'{option}=' for option in taken) or 'no options'}, see distopt.codecs.{kind.__name__}"
        )
    if kind.needs and not kind.needs.keys() & options.keys():
        option, example = next(iter(kind.needs.items()))
        raise UsageError(
            f"codec {name!r} needs {_alternatives(kind.needs)}: add {option}={example}, for example, after {name!r}"
        )
    if decay != 1 and not error_feedback:
        raise UsageError(f"decay={decay} is of the residual of error feedback; add error_feedback=True")
    if error_feedback and not kind.lossy:
        raise UsageError(f"codec {name!r} loses nothing that error feedback could return; leave error_feedback= out")
    codec = kind(**options)
    return ErrorFeedback(codec, decay=decay) if error_feedback else codec


def _alternatives(needs: Mapping[str, float]) -> str:
    return " or ".join(f"{option}=" for option in needs)
