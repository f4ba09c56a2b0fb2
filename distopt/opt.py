"""SINGA's `opt` module, under the name that scripts import: `distopt.singa.opt`."""

import sys
from typing import TYPE_CHECKING

from .singa import opt

if TYPE_CHECKING:  # mypy does not follow a sum of lists in `__all__`
    from .nn.optim.rules import *  # noqa: F403
    from .nn.optim.schedules import *  # noqa: F403
    from .singa.opt import *  # noqa: F403

sys.modules[__name__] = opt
