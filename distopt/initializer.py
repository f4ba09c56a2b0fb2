"""SINGA's `initializer` module, under the name that scripts import: `distopt.singa.initializer`."""

import sys
from typing import TYPE_CHECKING

from .singa import initializer

if TYPE_CHECKING:  # mypy does not follow a sum of lists in `__all__`
    from .nn.layers.initializer import *  # noqa: F403
    from .singa.initializer import *  # noqa: F403

sys.modules[__name__] = initializer
