"""SINGA's `tensor` module, under the name that scripts import: `distopt.singa.tensor`."""

import sys

from .singa import tensor
from .singa.tensor import *  # noqa: F403 - for type checkers

sys.modules[__name__] = tensor
