"""SINGA's `tensor` module, under the name that scripts import: `distopt.singa.tensor`."""

import sys
from typing import TYPE_CHECKING

from .singa import tensor

if TYPE_CHECKING:
    from .singa.tensor import *  # noqa: F403

sys.modules[__name__] = tensor
