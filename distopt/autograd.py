"""SINGA's `autograd` module, under the name that scripts import: `distopt.singa.autograd`."""

import sys
from typing import TYPE_CHECKING

from .singa import autograd

if TYPE_CHECKING:  # mypy does not follow a sum of lists in `__all__`
    from .nn.ops.broadcasting import *  # noqa: F403
    from .nn.ops.elementwise import *  # noqa: F403
    from .nn.ops.index import *  # noqa: F403
    from .nn.ops.loss import *  # noqa: F403
    from .nn.ops.matrix import *  # noqa: F403
    from .nn.ops.pooling import *  # noqa: F403
    from .nn.ops.reduction import *  # noqa: F403
    from .nn.ops.shape import *  # noqa: F403
    from .singa.autograd import *  # noqa: F403

sys.modules[__name__] = autograd
