"""SINGA's `initializer` module."""

from __future__ import annotations

from .errors import explain_absent
from .nn.layers.initializer import *  # noqa: F403 - a face of that module
from .nn.layers.initializer import __all__

explain_absent(globals(), __all__)
