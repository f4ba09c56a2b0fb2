"""SINGA's `layer` module."""

from __future__ import annotations

from ..checks import explain_absent
from ..nn.layers import convolution as _convolution
from ..nn.layers import linear as _linear
from ..nn.layers import normalization as _normalization
from ..nn.layers import pooling as _pooling
from ..nn.layers import without_parameters as _without_parameters
from ..nn.layers.base import Layer
from ..nn.layers.convolution import *  # noqa: F403 - a face of these modules
from ..nn.layers.linear import *  # noqa: F403
from ..nn.layers.normalization import *  # noqa: F403
from ..nn.layers.pooling import *  # noqa: F403
from ..nn.layers.without_parameters import *  # noqa: F403

__all__ = ["Layer"]
_FILES = _convolution, _linear, _normalization, _pooling, _without_parameters
__all__ += [name for file in _FILES for name in file.__all__]

_RECURRENT = "CudnnRNN", "GRU", "LSTM", "RNN", "RNN_Base"
_OF_LANGUAGE = "Attention", "Embedding", "MultiHeadAttention", "Transformer"
_REASONS = dict.fromkeys(
    (*_RECURRENT, *_OF_LANGUAGE), "distopt keeps to convolutional networks; PyTorch is the way to others"
)

explain_absent(globals(), __all__, _REASONS)
