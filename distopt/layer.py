"""SINGA's `layer` module."""

from __future__ import annotations

from .errors import explain_absent
from .nn.layers.images import *  # noqa: F403 - through the module above, type checkers do not find them
from .nn.layers.layer import *  # noqa: F403 - a face of that module
from .nn.layers.layer import __all__

_RECURRENT = "CudnnRNN", "GRU", "LSTM", "RNN", "RNN_Base"
_OF_LANGUAGE = "Attention", "Embedding", "MultiHeadAttention", "Transformer"
_REASONS = dict.fromkeys(
    (*_RECURRENT, *_OF_LANGUAGE), "distopt keeps to convolutional networks; PyTorch is the way to others"
)

explain_absent(globals(), __all__, _REASONS)
